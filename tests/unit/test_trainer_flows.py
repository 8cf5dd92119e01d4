# SPDX-License-Identifier: Apache-2.0
"""A job's parts on several channels: which they are, and when they go out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nicps.client import Phase
from nicps.errors import NonFinite
from nicps.session.shared_form import PhaseChannel
from nicps.steps import StepEnded
from trainer import flows
from trainer.errors import JobError
from trainer.flows import InFlows, Parts

LAYOUT: list[dict[str, Any]] = [
    {"name": "a", "kind": "parameter", "shape": [100]},
    {"name": "b", "kind": "parameter", "shape": [3000]},
    {"name": "c", "kind": "parameter", "shape": [1400]},
    {"name": "d", "kind": "parameter", "shape": [1500]},
    {"name": "mean", "kind": "buffer", "shape": [7]},
]
LANES = 6007
PHASE = Phase("train", 5, 1, (4, 4), channels=(PhaseChannel(0, (1,), 5), PhaseChannel(1, (1,), 7)))


def test_shares_are_equal_and_the_front_is_the_most_urgent() -> None:
    parts = Parts(LAYOUT, 2, "i8", 8 * 1500 / 2**20)
    ends = [(p.channel, p.here.start, p.here.stop) for p in parts.pieces]
    assert ends == [
        (0, 4500, 6000),
        (0, 3100, 4500),
        (1, 1440, 3100),
        (1, 0, 1440),
        (1, 6000, 6007),
    ]
    assert [len(channel) for channel in parts.channels] == [2, 3]
    assert [len(pieces) for pieces in parts.pieces_of] == [1, 2, 1, 1]
    assert (parts.width, len(parts.residual)) == (8, LANES)


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 7, 8])
def test_a_plan_has_at_most_32_rounds_and_misses_nothing(channels: int) -> None:
    parts = Parts(LAYOUT, channels, "i32", 1e-6)
    assert channels <= len(parts.pieces) <= 32 and len(parts.channels) == channels
    covered = sorted((p.here.start, p.here.stop) for p in parts.pieces)
    assert [first for first, _ in covered] == [0, *(stop for _, stop in covered[:-1])]
    assert covered[-1][1] == LANES


class Offers:
    """In place of `nicps.flows.Flows`: notes what goes out; its sums are sevens."""

    ends = False

    def __init__(
        self, session: object, parts: Sequence[Sequence[Any]], width: int, *, together: bool
    ) -> None:
        self.parts, self.offered, self.begun = parts, list[tuple[int, int]](), list[list[int]]()

    def begin(self, phase: Phase, rounds: Sequence[int], *, together: bool = True) -> None:
        self.begun.append(list(rounds))

    def offer(self, channel: int, samples: int) -> None:
        self.offered.append((channel, samples))

    def finish(self) -> Any:
        if self.ends:
            raise StepEnded
        for channel in self.parts:
            for part in channel:
                part.vector[:] = 7.0
        return SimpleNamespace(round=5)


class Member:
    """One whose gradients come as the test says."""

    def __init__(self, *, together: bool = True, closed: bool = False) -> None:
        self.vector = np.ones(LANES, np.float32)
        self.note: Callable[[int], None] = lambda parameter: None
        session: Any = SimpleNamespace(
            number=1, ready=lambda *a, **k: None, closed=lambda round_: closed
        )
        self.parts = Parts(LAYOUT, 2, "i8", 8 * 1500 / 2**20)
        finish = lambda samples: self.vector  # noqa: E731
        self.exchanger = InFlows(session, self, self.parts, finish, together=together)  # type: ignore[arg-type]
        self.exchanger.ready("digest")
        self.out = np.zeros(LANES, np.float32)

    def on_gradient(self, note: Callable[[int], None]) -> None:
        self.note = note

    @property
    def sent(self) -> Offers:
        made: Any = self.exchanger._flows
        return made  # type: ignore[no-any-return]

    def exchange(self, samples: int) -> Any:
        return self.exchanger.exchange(PHASE, 5, samples, self.out)


@pytest.fixture(autouse=True)
def offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "Flows", Offers)


def test_a_part_goes_out_as_soon_as_it_is_whole_and_in_its_channels_turn() -> None:
    member = Member()
    member.exchanger.begin(PHASE, 5)
    assert member.exchanger.busy
    member.note(2)
    assert member.sent.offered == [], "the rear one comes first"
    member.note(3)
    assert member.sent.offered == [(0, 4), (0, 4)]
    member.note(1)
    assert member.sent.offered == [(0, 4), (0, 4), (1, 4)]
    member.note(0)
    assert member.sent.offered[3:] == [(1, 4)], "buffers are not whole yet"
    done = member.exchange(4)
    assert member.sent.offered[4:] == [(1, 4)] and (member.out == 7.0).all()
    assert done.own == 4 and done.divided and not member.exchanger.busy


def test_channels_do_not_wait_for_one_another() -> None:
    for together, sent in ((True, [(1, 4)]), (False, [])):
        member = Member(together=together)
        member.exchanger.begin(PHASE, 5)
        member.note(2)  # the rear one is not whole
        member.note(1)
        assert member.sent.offered == sent
        for last in (3, 0):
            member.note(last)
        member.exchange(4)
        assert sorted(member.sent.offered) == [(0, 4)] * 2 + [(1, 4)] * 3


def test_each_step_has_the_next_rounds_and_a_phase_says_where_it_begins() -> None:
    member = Member()
    for _ in range(2):
        member.exchanger.begin(PHASE, 5)
        member.exchange(4)
    member.sent.ends = True
    assert member.exchange(4) is None
    assert member.sent.begun == [[5, 7], [7, 10], [9, 13]]
    later = Phase("train", 20, 2, (4, 4), channels=(PhaseChannel(0, (1,), 20),) * 2)
    member.exchanger.begin(later, 20)
    assert member.sent.begun[-1] == [20, 20]


def test_a_member_without_a_part_in_the_step_only_reads() -> None:
    for member, samples in ((Member(), 0), (Member(closed=True), 3)):
        done = member.exchange(samples)
        assert sorted(member.sent.offered) == [(0, 0)] * 2 + [(1, 0)] * 3 and done.own == 0
    partly = Member()
    assert partly.exchange(3).own == 3 and set(partly.sent.offered) == {(0, 3), (1, 3)}


def test_what_is_not_finite_does_not_go_out() -> None:
    member = Member()
    member.vector[3200] = np.nan
    member.exchanger.begin(PHASE, 5)
    member.note(3)
    member.note(2)
    assert member.sent.offered == [(0, 4)]
    with pytest.raises(NonFinite) as error:
        member.exchange(4)
    assert error.value.index == 3200 and member.sent.offered == [(0, 4)]


def test_a_gradient_in_several_parts_is_refused() -> None:
    member = Member()
    member.exchanger.begin(PHASE, 5)
    member.note(3)
    with pytest.raises(JobError, match=r"'d' gets its gradient in several parts.*priorities"):
        member.note(3)


def test_cuts_by_hand() -> None:
    """With so many parameters before it, a less urgent channel begins."""
    parts = Parts(LAYOUT, 4, "i8", 8 * 1500 / 2**20, (1, 3))
    found = [(p.channel, p.here.start, p.here.stop) for p in reversed(parts.pieces[:-1])]
    assert [channel for channel, _, _ in found] == sorted([c for c, _, _ in found], reverse=True)
    firsts = {channel: first for channel, first, _ in reversed(found)}
    assert firsts == {2: 0, 1: 100, 0: 4500}
    assert [(p.channel, p.here) for p in parts.pieces[-1:]] == [(2, slice(6000, 6007))]


@pytest.mark.parametrize("cuts", [(0, 2), (2, 2), (2, 4)])
def test_cuts_that_leave_a_channel_empty(cuts: tuple[int, ...]) -> None:
    with pytest.raises(JobError, match="its numbers must rise between 0 and 4, the number"):
        Parts(LAYOUT, 4, "i8", None, cuts)


def test_a_phase_begins_with_its_own_rounds_whatever_its_number_is() -> None:
    """Where each of two hosts has gone on alone, the one that takes the other's state may meet its number again."""
    member = Member()

    def phase(first: int) -> Phase:
        channels = tuple(
            PhaseChannel(urgency, tuple(each), first + urgency)
            for urgency, each in enumerate(member.parts.fragments)
        )
        return Phase("train", first, 1, (4, 4), channels=channels)

    for first in (5, 50):
        member.exchanger.enter(phase(first))
        member.exchanger.begin(phase(first), first)
    assert member.sent.begun == [[5, 6], [50, 51]]
