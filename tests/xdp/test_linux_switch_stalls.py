# SPDX-License-Identifier: Apache-2.0
"""A processor of a Linux switch stalls in the middle of a frame, and goes on after others: each interleaving by itself.

What the processor was doing when the view changes is in tests/xdp/test_switch_maps.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf
from nicps.wire import FrameType
from tests.linux_switch import SwitchModel
from tests.stripes import NETWORK, signed
from tests.xdp import stall
from tests.xdp.stall import Meeting
from tests.xdp.switch_target import SwitchTarget

VIEW, LIST, UNIT = 3, 0b111, -5
#: What a later frame may belong to, as (view, round); the older one is of round 2.
LATER = {"round": (VIEW, 3), "view": (VIEW + 1, 2)}


class Stalled:
    """A switch of three members and vectors of one fragment; round 1 is made, and has left a remainder."""

    def __init__(self, target: SwitchTarget, meeting: Meeting) -> None:
        self.target = target
        self.meet = meeting.meet

    def reset(self) -> None:
        """Begin anew."""
        self.differing: list[tuple[int, int]] = []
        self.model = SwitchModel(frozenset({1, 2, 3}), 1, 32, VIEW)
        self.target.begin(self.model)
        for sender in (1, 2, 3):
            self.give(contribution(sender, round_=1, rest=None))
        assert self.model.places[0][0] is not None and self.model.places[0][0].total.any()

    def give(self, one: bytes) -> int:
        """To program and model; returns the program's verdict. `agrees` reports differences.

        An action during a stall may find that the processor has gone on too early: then all is done once more.
        """
        expected, found = VERDICT[self.model.run(one).verdict], self.target.give(one).verdict
        self.differing += [(expected, found)] * (expected != found)
        return found

    def agrees(self) -> None:
        """Program and model have done the same since `reset`."""
        assert self.differing == []
        self.target.same_state(self.model)

    def enter(self, view: int) -> None:
        self.model.view = view
        self.target.config["view"] = view


VERDICT = {"drop": bpf.XDP_DROP, "tx": bpf.XDP_TX, "redirect": bpf.XDP_REDIRECT}


@pytest.fixture(scope="module")
def program() -> Iterator[Stalled]:
    stall.need_two_processors()
    target = SwitchTarget(str(stall.SWITCH_SOURCE))
    with ThreadPoolExecutor(1) as pool:
        yield Stalled(target, Meeting(target.fds, target.give, target.counters, pool))
    target.close()


def lanes(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, 360).astype(">i4").tobytes()


def frame(
    kind: FrameType, sender: int, view: int, round_: int, seed: int = 0, **fields: int
) -> bytes:
    header = wire.Header(network=NETWORK, view=view, round=round_, sender=sender)
    values = {"number": 1, "behind": 0, "exponent": -3} | fields
    body = wire.Contribution(members=LIST, index=0, fragments=1, width=32, unit=UNIT, **values)
    return signed(sender, kind, header, body, lanes(seed), wire.SWITCH, b"")


def contribution(
    sender: int, view: int = VIEW, round_: int = 2, rest: int | None = 1, seed: int = 0
) -> bytes:
    """To a round, with the remainder of round `rest` in it."""
    fields = {"number": VIEW if rest else 0, "behind": round_ - rest if rest else 0}
    return frame(FrameType.CONTRIBUTION, sender, view, round_, seed or sender, **fields)


@pytest.mark.parametrize("later", LATER)
def test_an_older_contribution_is_not_added_to_a_newer_sum(program: Stalled, later: str) -> None:
    """It was checked in its round; then a later one was made, with the same remainder. Its own place is still there."""
    view, round_ = LATER[later]
    old = contribution(2, seed=9)

    def meanwhile() -> list[int]:
        program.enter(view)
        return [program.give(contribution(k, view, round_)) for k in (1, 2, 3)]

    met = program.meet(stall.CHECKED, old, program.reset, meanwhile)
    assert met.meanwhile == [bpf.XDP_DROP, bpf.XDP_DROP, bpf.XDP_REDIRECT]
    assert met.run.verdict == bpf.XDP_DROP
    assert met.counters == {"gathered": 2, "summed": 1, "round": 1}
    program.agrees()


def test_a_round_that_is_two_behind_overwrites_nothing(program: Stalled) -> None:
    """Both places have newer tags, one of them not whole."""

    def meanwhile() -> None:
        for k in (1, 2, 3):
            program.give(contribution(k))
        program.give(contribution(1, round_=3, rest=2))

    met = program.meet(stall.CHECKED, contribution(2, seed=9), program.reset, meanwhile)
    assert met.run.verdict == bpf.XDP_DROP
    assert met.counters == {"gathered": 3, "summed": 1, "duplicate": 1}
    met = program.meet(
        stall.CHECKED, contribution(2, round_=1, rest=None, seed=9), program.reset, meanwhile
    )
    assert met.run.verdict == bpf.XDP_DROP
    assert met.counters == {"gathered": 3, "summed": 1, "round": 1}
    program.agrees()


@pytest.mark.parametrize("place", [stall.CLAIMED, stall.COPIED])
def test_who_meets_a_claim_is_sent_again(program: Stalled, place: int) -> None:
    """Contributions and questions, of this round and of the one whose remainder is being copied."""
    first = contribution(2)
    ask = frame(FrameType.ASK, 3, VIEW, 1)
    others = [contribution(3), contribution(1, round_=3, rest=2), ask]
    met = program.meet(
        place,
        first,
        program.reset,
        lambda: [program.target.give(one).verdict for one in others],
    )
    assert met.meanwhile == [bpf.XDP_DROP] * 3
    assert met.run.verdict == bpf.XDP_DROP and met.counters == {"busy": 3, "gathered": 1}
    program.model.run(first)
    program.agrees()
    assert program.give(ask) == bpf.XDP_TX
    assert [program.give(contribution(k)) for k in (3, 1)] == [bpf.XDP_DROP, bpf.XDP_REDIRECT]
    program.agrees()


def test_a_sum_is_sent_by_whoever_made_it(program: Stalled) -> None:
    """Its processor stalls before that: questions are answered, the next round goes on, and the sum still comes."""

    def prepare() -> None:
        program.reset()
        for k in (1, 2):
            program.give(contribution(k))

    def meanwhile() -> bytes:
        answer = program.target.give(frame(FrameType.ASK, 3, VIEW, 2)).frame
        for k in (1, 2, 3):
            program.target.give(contribution(k, round_=3, rest=2))
        return answer

    met = program.meet(stall.ADDED, contribution(3), prepare, meanwhile)
    assert met.run.verdict == bpf.XDP_REDIRECT
    assert met.counters == {"answered": 1, "gathered": 2, "summed": 2}
    made, answer = (
        wire.unpack(run[wire.ETHERNET_BYTES :]) for run in (met.run.frame, met.meanwhile)
    )
    assert answer.type == made.type == FrameType.SUM
    assert made.tail == answer.tail and made.body.exponent == answer.body.exponent


def test_a_question_while_the_last_contribution_is_added(program: Stalled) -> None:
    """It waits for the claim for a while; then it is dropped, not answered with half a sum."""

    def prepare() -> None:
        program.reset()
        for k in (1, 2):
            program.give(contribution(k))

    met = program.meet(
        stall.CLAIMED,
        contribution(3),
        prepare,
        lambda: program.target.give(frame(FrameType.ASK, 1, VIEW, 2)).verdict,
    )
    assert met.meanwhile == bpf.XDP_DROP and met.counters == {"busy": 1, "summed": 1}
    assert met.run.verdict == bpf.XDP_REDIRECT
