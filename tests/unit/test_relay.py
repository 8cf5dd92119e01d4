# SPDX-License-Identifier: Apache-2.0
"""What a script prints, over a network that loses, doubles and reorders (`nicps.agent.relay`)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nicps import wire
from nicps.agent.relay import INTERVAL_S, PIECE_BYTES, WINDOW, OutputReceiver, OutputSender
from nicps.wire import ScriptStep

pytestmark = pytest.mark.unit
REPORT = b'{"code":3}'


def frame(step: ScriptStep, at: int) -> wire.Script:
    return wire.Script(1, at, step, 0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6 * PIECE_BYTES), max_size=5),
    loss=st.floats(0, 0.4),
    seed=st.integers(0, 1000),
)
def test_all_of_it_comes_once_and_in_order(sizes: list[int], loss: float, seed: int) -> None:
    draw = random.Random(seed)
    output = b"".join(bytes([65 + k]) * size for k, size in enumerate(sizes))
    sender, receiver, got, reports = OutputSender(0.0), OutputReceiver(0.0), b"", []
    way: list[tuple[wire.Script, bytes]] = []
    now, printed = 0.0, 0
    while not sender.done:
        now += INTERVAL_S
        assert now < 60 and not sender.given_up
        if sizes:
            printed += sizes.pop(0)
        sender.note_output(printed, ended=printed == len(output))
        for piece in sender.due(now):
            end = piece.step == ScriptStep.END
            tail = REPORT if end else output[piece.at : piece.at + piece.length]
            copies = 0 if draw.random() < loss else draw.choice((1, 1, 2))
            way += [(frame(piece.step, piece.at), tail)] * copies
        draw.shuffle(way)
        for sent, tail in way:
            new = receiver.take(now, sent, tail)
            if new is not None and sent.step == ScriptStep.END:
                reports.append(new)
            elif new is not None:
                got += new
            if draw.random() >= loss:
                sender.acknowledge(now, receiver.seen)
        way = []
    assert got == output and reports == [REPORT] and receiver.ended


def test_a_window_is_the_most_that_is_under_way() -> None:
    sender = OutputSender(0.0)
    sender.note_output(100 * PIECE_BYTES, ended=False)
    assert [piece.at for piece in sender.due(1.0)] == [k * PIECE_BYTES for k in range(WINDOW)]
    assert sender.due(1.0 + INTERVAL_S) == []
    sender.acknowledge(1.03, PIECE_BYTES)
    assert [piece.at for piece in sender.due(1.05)] == [WINDOW * PIECE_BYTES]


def test_signs_of_life_and_their_lack() -> None:
    sender, receiver = OutputSender(0.0), OutputReceiver(0.0)
    (alive,) = sender.due(0.1)
    assert (alive.step, alive.length) == (ScriptStep.OUTPUT, 0)
    assert receiver.take(0.1, frame(alive.step, alive.at), b"") is None
    assert not receiver.is_lost(5.0) and receiver.is_lost(5.2)
    assert sender.due(0.2) == [] and len(sender.due(0.7)) == 1
    assert sender.due(11.0) == [] and sender.given_up


def test_an_acknowledgement_from_elsewhere_changes_nothing() -> None:
    sender = OutputSender(0.0)
    sender.note_output(100, ended=True)
    sender.acknowledge(0.1, 5000)
    assert [piece.at for piece in sender.due(0.2)] == [0]
    sender.acknowledge(0.3, 102)
    assert not sender.done
    sender.acknowledge(0.3, 101)
    assert sender.done


def test_who_does_not_end_is_told_again_and_again() -> None:
    receiver = OutputReceiver(0.0)
    assert [receiver.kills(0.1 * k) for k in range(5)] == [True, False, True, False, True]
    receiver.take(1.0, frame(ScriptStep.END, 0), REPORT)
    assert not receiver.kills(9.0)


def test_output_that_is_taken_back() -> None:
    """A script can shorten its log: what is gone is not waited for."""
    sender = OutputSender(0.0)
    sender.note_output(5 * PIECE_BYTES, ended=False)
    assert len(sender.due(1.0)) == WINDOW
    sender.acknowledge(1.01, PIECE_BYTES)
    sender.cut(PIECE_BYTES)
    sender.note_output(5 * PIECE_BYTES, ended=True)
    (end,) = sender.due(2.0)
    assert (end.step, end.at) == (ScriptStep.END, PIECE_BYTES)
    sender.acknowledge(2.1, PIECE_BYTES + 1)
    assert sender.done
