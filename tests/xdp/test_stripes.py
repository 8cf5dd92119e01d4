# SPDX-License-Identifier: Apache-2.0
"""Stripes in the real XDP program against the model (tests/stripes_model.py): every sum and remainder.

The sequences are those of `tests/vectors/stripes`, and random ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps import wire
from nicps.wire import FrameType
from tests import striped_replay
from tests.model import DROP, PASS, TX, Outcome
from tests.replay import load
from tests.stripes import GROUP, MACS, NETWORK, signed
from tests.stripes_model import Own, StripesModel
from tests.stripes_scene import Scene
from tests.xdp.sequences import compared
from tests.xdp.striped import Target

SEEDS, CHUNK = 400, 100


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


@pytest.mark.parametrize("path", striped_replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences(target: Target, path: Path) -> None:
    """Each step as the sequence says; the model ends as it says, and the program's maps are the model's."""
    sequence = load(path)
    model = striped_replay.model_of(sequence)
    target.begin(model)
    striped_replay.replay(sequence, model, target)
    target.same_state(model)


@pytest.mark.short("0", "100")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_sequences(target: Target, first: int) -> None:
    """Each frame is treated as the model says; every sum, and every remainder, is the same bit for bit."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        for frame, counters in compared(target, Scene(seed), seed, phases=5):
            reached.update(counters)
            if frame[6:12] == wire.SWITCH:  # of number 0, mostly
                reached.update(f"switch {name}" for name in counters)
    least = {
        "summed": 100,
        "gathered": 100,
        "stored": 100,
        "clocked": 20,
        "answered": 100,
        "unready": 10,
    }
    least |= {
        "duplicate": 10,
        "round": 10,
        "malformed": 10,
        "shift": 10,
        "range": 10,
        "astray": 5,
        "mode": 5,
    }
    least |= {"forged": 1, "replayed": 1, "stranger": 1, "view": 1, "control": 10}
    least |= {"switch stored": 20, "switch clocked": 5, "switch control": 3, "switch stranger": 5}
    assert {name: reached[name] for name in least if reached[name] < least[name]} == {}, reached


@pytest.mark.parametrize("kind", [FrameType.SUM, FrameType.LACKING])
@pytest.mark.parametrize("why", ["no switch", "no aggregator", "another address", ""])
def test_a_switch_is_believed_as_an_aggregator_only(
    target: Target, kind: FrameType, why: str
) -> None:
    """And what the program sends it by itself names the round whose remainders belong to the open one."""
    ranks = {1: 1} if why == "no aggregator" else {0: 1, 1: 0}
    model = StripesModel(
        1, frozenset({1, 2}), (ranks, ranks), (8, 8), 3, 3, 5, (7, 8), offered=[4, 4]
    )
    model.switch = why != "no switch"
    model.rest = [(9, 9), (4, 2)]
    model.own = {(1, at): Own(4, -7, bytes([at]) * wire.PAYLOAD_BYTES) for at in range(3)}
    model.sent = {(1, 0): (7, 2)}
    target.begin(model)
    target.write_own(model)
    header = wire.Header(network=NETWORK, view=5, round=7, sender=0)
    body = wire.Contribution(0b11, 1, 3, 0, 8, -5, -9)
    to = GROUP if kind == FrameType.SUM else MACS[0]
    frame = signed(0, kind, header, body, bytes(wire.PAYLOAD_BYTES), to, b"")
    if why == "another address":
        frame = frame[:6] + MACS[1] + frame[12:]
    found = target.run(frame)
    assert found == model.run(frame)
    target.same_state(model)
    if why:
        assert found == Outcome(DROP, ("stranger",))
    elif kind == FrameType.LACKING:
        assert found == Outcome(PASS, ("control",))
    else:
        assert (found.verdict, found.counters) == (TX, ("stored", "clocked"))
        assert found.out is not None and found.out[:12] == wire.SWITCH + MACS[0]
        sent = wire.unpack(found.out[wire.ETHERNET_BYTES :])
        assert sent.type == FrameType.CONTRIBUTION and sent.header.sender == 1
        assert sent.body == wire.Contribution(0b11, 2, 3, 4, 8, -7, -9, behind=2)
        assert sent.tail == b"\2" * wire.PAYLOAD_BYTES


def test_nobody_sends_a_sum_of_an_empty_list(target: Target) -> None:
    """A switch is in no list: so it is not alone in one."""
    ranks = {0: 1, 1: 0}
    model = StripesModel(1, frozenset({1, 2}), (ranks, ranks), (8, 8), 3, 3, 5, (7, 8))
    target.begin(model)
    header = wire.Header(network=NETWORK, view=5, round=7, sender=0)
    body = wire.Contribution(0, 3, 3, 0, 8, -5, -9)
    frame = signed(0, FrameType.SUM, header, body, bytes(wire.PAYLOAD_BYTES), GROUP, b"")
    assert target.run(frame) == model.run(frame) == Outcome(DROP, ("range",))
