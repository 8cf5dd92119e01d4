# SPDX-License-Identifier: Apache-2.0
"""A processor stalls in the middle of a frame of stripes, and goes on after others: each interleaving by itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf
from nicps.layout import layout
from nicps.wire import FrameType
from tests.stripes import GROUP, MACS, NETWORK, signed
from tests.stripes_model import Own, StripesModel
from tests.xdp import stall
from tests.xdp.stall import Meeting
from tests.xdp.striped import Target

VIEW, LIST = 3, 0b111
RANKS = {1: 1, 2: 0, 3: 0}
#: What a later frame may belong to, as (view, round); the older one is of round 1. Both are in one bank.
LATER = {"round": (VIEW, 3), "view": (VIEW + 1, 1)}


class Striped:
    """This host is member 1 of three, and aggregates the only fragment."""

    def __init__(self, target: Target, meeting: Meeting) -> None:
        self.target, self._meeting = target, meeting
        self.meet = meeting.meet

    def reset(self) -> None:
        """Empty maps; own lanes are offered in both banks."""
        self.model = StripesModel(
            1, frozenset({1, 2, 3}), (RANKS, RANKS), (32, 32), 1, 1, VIEW, (1, 3), offered=[7, 7]
        )
        self.model.own = {(bank, 0): Own(7, -3, lanes(bank)) for bank in range(2)}
        self.target.begin(self.model)
        self.target.write_own(self.model)

    def enter(self, view: int) -> None:
        self.model.view = view
        self.target.config["view"] = view


@pytest.fixture(scope="module")
def program() -> Iterator[Striped]:
    stall.need_two_processors()
    target = Target(str(stall.SOURCE))
    with ThreadPoolExecutor(1) as pool:
        yield Striped(target, Meeting(target.fds, target.give, target.counters, pool))
    target.close()


def lanes(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(-9999, 9999, 360).astype(">i4").tobytes()


def frame(
    kind: FrameType, sender: int, seed: int = 0, view: int = VIEW, round_: int = 1, number: int = 1
) -> bytes:
    header = wire.Header(network=NETWORK, view=view, round=round_, sender=sender)
    body = wire.Contribution(LIST, 0, 1, number, 32, -3, -5)
    to = GROUP if kind == FrameType.SUM else MACS[0]
    return signed(sender, kind, header, body, lanes(seed), to, b"")


@pytest.mark.parametrize("later", LATER)
def test_an_older_contribution_is_not_added_to_a_newer_sum(program: Striped, later: str) -> None:
    """Its round was open when it was checked; then the same place was made whole in another."""
    view, round_ = LATER[later]

    def meanwhile() -> list[int]:
        program.enter(view)
        newer = [frame(FrameType.CONTRIBUTION, k, k, view=view, round_=round_) for k in (2, 3)]
        for one in newer:
            program.model.run(one)
        return [program.target.give(one).verdict for one in newer]

    old = frame(FrameType.CONTRIBUTION, 2, 9)
    met = program.meet(stall.CHECKED, old, program.reset, meanwhile)
    assert met.run.verdict == bpf.XDP_DROP and met.meanwhile == [bpf.XDP_DROP, bpf.XDP_TX]
    assert met.counters == {"gathered": 1, "summed": 1, "round": 1}
    program.target.same_state(program.model)


def test_who_meets_a_claim_is_sent_again(program: Striped) -> None:
    """Nothing of it is added meanwhile; afterwards the sum is made."""
    other = frame(FrameType.CONTRIBUTION, 3, 3)
    first = frame(FrameType.CONTRIBUTION, 2, 2)
    met = program.meet(
        stall.CLAIMED, first, program.reset, lambda: program.target.give(other).verdict
    )
    assert met.meanwhile == bpf.XDP_DROP and met.counters == {"busy": 1, "gathered": 1}
    for one in (first, other):
        program.model.run(one)
    assert program.target.give(other).verdict == bpf.XDP_TX
    program.target.same_state(program.model)


@pytest.mark.parametrize("later", LATER)
def test_a_sum_counts_for_its_own_round(program: Striped, later: str) -> None:
    """It is made, and neither counted nor sent, when its processor stalls: questions are answered, no other counts."""
    view, round_ = LATER[later]
    first, last = (frame(FrameType.CONTRIBUTION, k, k) for k in (2, 3))
    newer = [frame(FrameType.CONTRIBUTION, k, k, view=view, round_=round_) for k in (2, 3)]

    def prepare() -> None:
        program.reset()
        program.target.give(first)

    def meanwhile() -> bytes:
        answer = program.target.give(frame(FrameType.ASK, 3)).frame
        program.enter(view)
        for one in newer:
            program.target.give(one)
        return answer

    met = program.meet(stall.ADDED, last, prepare, meanwhile)
    assert met.counters == {"summed": 1, "answered": 1, "gathered": 1, "busy": 1}
    made, answer = (
        wire.unpack(run[wire.ETHERNET_BYTES :]) for run in (met.run.frame, met.meanwhile)
    )
    assert met.run.verdict == bpf.XDP_TX and made.tail == answer.tail
    assert answer.type == made.type == FrameType.SUM
    progress = program.target.progress[layout().limits["COUNTS"]]
    assert (int(progress["tag"]), int(progress["count"])) == (VIEW << 32 | 1, 1)
    assert program.target.give(newer[1]).verdict == bpf.XDP_TX
    assert (int(progress["tag"]), int(progress["count"])) == (view << 32 | round_, 1)


def test_a_question_while_the_last_contribution_is_added(program: Striped) -> None:
    """The sum is not there yet: members that have not contributed are named."""
    first, last = (frame(FrameType.CONTRIBUTION, k, k) for k in (2, 3))

    def prepare() -> None:
        program.reset()
        program.target.give(first)

    met = program.meet(
        stall.CLAIMED, last, prepare, lambda: program.target.give(frame(FrameType.ASK, 2)).frame
    )
    answer = wire.unpack(met.meanwhile[wire.ETHERNET_BYTES :])
    assert answer.type == FrameType.LACKING and answer.body.members == 0b100
    assert met.run.verdict == bpf.XDP_TX
