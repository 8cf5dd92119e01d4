# SPDX-License-Identifier: Apache-2.0
"""Rounds of several training programs that exchange stripes: every sum and residual is what the reference says, and
nothing is lost. The programs of the kernel are a model (`tests/striped_memory.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.session import stripes
from nicps.session.arena import Handover
from nicps.session.lanes import LaneFormat
from tests.conversions import conversion  # noqa: F401
from tests.striped_members import PER, VIEW, WIDTHS, Members, gradient, never


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


LISTS = ([1, 2, 3], [1, 3], [2], [1, 2, 3], [], [2, 3], [3], [1, 2], [1, 2, 3])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lanes", [1, 4 * 1440, 8 * 1440 + 77])
def test_nothing_is_lost(stack: ExitStack, width: int, lanes: int) -> None:
    """All sums and what is left over are all the gradients that were counted, but for less than a unit each.

    With the compiled loops residuals are computed as sums come, in every other round; it makes no difference.
    """
    members = Members(stack, 3, lanes, width)
    given, applied = np.zeros(lanes), np.zeros(lanes)
    units, added = 0.0, 0
    for round_ in range(1, 28):
        listed = LISTS[round_ % len(LISTS)]
        vectors = {number: gradient(100 * round_ + number, lanes) for number in (1, 2, 3)}
        for number, vector in vectors.items():
            members.programs[number].offer(round_, vector)
        before = {number: members.programs[number].residual.kept.copy() for number in vectors}
        commit = members.commit(round_, listed)
        if listed:
            members.gather(round_, listed)
        for number in listed if round_ % 2 else ():
            members.programs[number].expect(round_)
        applied += members.settle(commit).astype(np.float64)
        given += sum((vectors[number].astype(np.float64) for number in listed), np.zeros(lanes))
        units += len(listed) * 2.0**commit.unit
        for number in {1, 2, 3} - set(listed):
            changed = (members.programs[number].residual.kept != before[number]).any()
            added += changed
            assert not (changed and len(listed) < 2)
    kept = sum(
        program.residual.kept[:lanes].astype(np.float64) for program in members.programs.values()
    )
    differ = np.abs(given - applied - kept).max()
    assert differ <= units + 1e-5, "float32 rounds a residual, and a sum of 32 bits"
    if width < 32 and lanes > 1:
        assert np.abs(kept).max() > 10 * (units + 1e-5), "the test would see it"
        assert added, "an aggregator that was not counted keeps remainders too"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_member_without_a_share(stack: ExitStack, width: int) -> None:
    """It has no stripe and reads all sums; and it offers nothing."""
    members = Members(stack, 4, 5 * 1440 + 1, width, idle=2)
    assert members.aggregators == (1, 3, 4)
    for round_ in range(1, 5):
        for number in (1, 3, 4):
            members.programs[number].offer(round_, gradient(number * round_, members.lanes))
        members.gather(round_, [1, 3, 4])
        members.settle(members.commit(round_, [1, 3, 4]))
    assert not members.programs[2].residual.kept.any()
    assert members.programs[3].residual.kept.any()
    with pytest.raises(JobFailed, match="round 9: this member has no share"):
        members.programs[2].begin(9, gradient(1, members.lanes))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_not_finite(stack: ExitStack, width: int) -> None:
    """All have NaN in that fragment, and go on from the residuals of before; the next round is as ever."""
    members = Members(stack, 3, 6 * 1440, width)
    per = PER[width]
    for round_ in range(1, 8):
        for number, program in members.programs.items():
            vector = gradient(7 * round_ + number, members.lanes)
            if round_ % 2 == 0 and number != 2:
                vector[[number * per, -1]] = np.nan, np.inf
            program.offer(round_, vector)
        before = {k: program.residual.kept.copy() for k, program in members.programs.items()}
        members.gather(round_, [1, 2, 3])
        total = members.settle(members.commit(round_, [1, 2, 3]))
        lost = np.isnan(total).reshape(-1, per).all(axis=1)
        assert (np.isnan(total).reshape(-1, per).any(axis=1) == lost).all()
        expected = [1, 3, members.fragments - 1] if round_ % 2 == 0 else []
        assert np.flatnonzero(lost).tolist() == expected
        for number, program in members.programs.items():
            after = program.residual.kept.reshape(-1, per)
            same = (before[number].reshape(-1, per) == after).all(axis=1)
            assert same[lost].all() and (width == 32 or not same[~lost].any())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_that_float32_cannot_hold(stack: ExitStack, width: int) -> None:
    """It is NaN, not infinity, and leaves nothing over: the next round is as if there had been none like it."""
    members, per = Members(stack, 3, 4 * 1440, width), PER[width]
    for round_ in (1, 2, 3):
        for number, program in members.programs.items():
            vector = gradient(7 * round_ + number, members.lanes)
            if round_ == 2:
                vector[per] = 3e38
            program.offer(round_, vector)
        unit = members.unit([1, 2, 3])
        before = {k: program.residual.kept.copy() for k, program in members.programs.items()}
        members.gather(round_, [1, 2, 3])
        total = members.settle(members.commit(round_, [1, 2, 3])).reshape(-1, per)
        lost = np.isnan(total).all(axis=1)
        assert np.flatnonzero(lost).tolist() == ([1] if round_ == 2 else [])
        assert np.isfinite(total[~lost]).all()
        for number, program in members.programs.items():
            same = program.residual.kept.reshape(-1, per) == before[number].reshape(-1, per)
            assert same[lost].all()
            assert round_ == 2 or program.residual.largest() < 0.1
        assert round_ == 2 or unit < 0, "what was lost does not make the next unit large"


def test_alone_and_not_finite(stack: ExitStack) -> None:
    """The sum of one member's part alone: it has no remainder, and NaN is its own."""
    members = Members(stack, 2, 3 * 1440, 8)
    for round_ in (1, 2, 3):
        for number, program in members.programs.items():
            vector = gradient(round_ * 5 + number, members.lanes)
            vector[1440 if number == 2 else 0] = np.nan
            program.offer(round_, vector)
        listed = [1, 2] if round_ == 1 else [2]
        members.gather(round_, listed)
        total = members.settle(members.commit(round_, listed))
        lost = np.isnan(total).reshape(-1, 1440).all(axis=1)
        assert lost.tolist() == [round_ == 1, True, False]


# ---- views


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("early", [False, True])
def test_a_round_is_run_again_in_another_view(stack: ExitStack, width: int, early: bool) -> None:
    """From the same lanes, with another list, another unit and fewer aggregators; old remainders are of no use."""
    members = Members(stack, 4, 9 * 1440 + 5, width)
    for round_ in (1, 2):
        for number, program in members.programs.items():
            vector = gradient(round_ * 9 + number, members.lanes)
            program.offer(round_, vector * np.float32(64 if number == 4 else 1))
        come = range(members.fragments if round_ == 1 else members.fragments // 2)
        members.gather(round_, [1, 2, 3, 4], only=come)
        if round_ == 1:
            members.settle(members.commit(1, [1, 2, 3, 4]))
    out = np.full(members.lanes, 7, np.float32)
    reducer = members.programs[1].reducer
    old = members.unit([1, 2, 3, 4])
    if early:
        assert reducer.expect(2, out)
        reducer.ahead(never)
        assert (out[:100] != 7).all(), "a sum of the old view"
    members.enter(VIEW + 1, (1, 2, 3))
    members.gather(2, [1, 2, 3])
    commit = members.commit(2, [1, 2, 3])
    assert commit.unit < old and len(commit.aggregators) == 3
    reducer.sum(commit, out)
    total = members.settle(commit)
    assert (out.view(np.uint32) == total.view(np.uint32)).all()


def test_a_round_is_committed_in_the_view_before(stack: ExitStack) -> None:
    """All had all sums when the view changed: the remainders are in the places before."""
    members = Members(stack, 3, 9 * 1440, 8)
    for number, program in members.programs.items():
        program.offer(1, gradient(number, members.lanes))
    members.gather(1, [1, 2, 3])
    commit = members.commit(1, [1, 2, 3])
    members.enter(VIEW + 1, (1, 2))
    members.enter(VIEW + 2, (1, 2))
    assert commit.view == VIEW
    members.settle(commit)
    for number in (1, 2):
        members.programs[number].offer(2, gradient(9 + number, members.lanes))
    members.gather(2, [1, 2])
    members.settle(members.commit(2, [1, 2]))


def test_a_remainder_of_another_round_or_view_is_none_of_this_one(stack: ExitStack) -> None:
    """What counts is the record's word for it; and once a round."""
    members = Members(stack, 2, 4 * 1440, 8)
    for number, program in members.programs.items():
        program.offer(1, gradient(number, members.lanes))
    members.gather(1, [1, 2])
    commit = members.commit(1, [1, 2])
    program = members.programs[2]
    rests = program.host.sums.array["rest"]
    assert rests[1, 2] == rests[1, 3] == VIEW << 32 | 1
    rests[1, 2] = (VIEW - 1) << 32 | 1
    program.reducer.finish(commit)
    left = program.residual.kept.reshape(4, 1440).copy()
    kept = program.member.left.reshape(4, 1440)
    assert (left[[0, 1, 2]] == kept[[0, 1, 2]]).all() and (left[3] != kept[3]).any()
    program.reducer.finish(commit)
    assert (program.residual.kept.reshape(4, 1440) == left).all()


def test_a_round_comes_once_more_after_a_state(stack: ExitStack) -> None:
    """Of two hosts that went on alone, one takes the other's state, from before a round that it has finished."""
    members = Members(stack, 2, 4 * 1440, 8)
    for view in (VIEW, VIEW + 1):
        members.enter(view, (1, 2))
        for number, program in members.programs.items():
            program.residual.forget()
            program.reducer.forget()
            program.member.residual[:] = 0
            program.offer(1, gradient(view + number, members.lanes))
        members.gather(1, [1, 2])
        members.settle(members.commit(1, [1, 2]))


# ---- what the agent and the kernel see


@pytest.mark.parametrize("width", WIDTHS)
def test_the_own_stripe_is_converted_first(
    stack: ExitStack, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a batch of each other in turn. When the doorbell rings a batch is whole, and has its conversion last."""
    members = Members(stack, 3, 300_001, width)
    program, fragments = members.programs[2], members.fragments
    own, batch = program.host.own.array, LaneFormat(members.lanes, width).batch
    stripes = [slice(fragments * r // 3, fragments * (r + 1) // 3) for r in (1, 2, 0)]
    program.offer(3, gradient(1, members.lanes))
    former = program.host.offered[1]
    lanes = program.reducer.rounds.own(3, program.reducer.vector).lanes
    expected = lanes.copy()
    own["lane"][1] = 0
    seen = []
    write = os.eventfd_write

    def look(fd: int, value: int) -> None:
        ready = own["conversion"][1] == number
        mine, *others = ([int(ready[part].sum()), part] for part in stripes)
        for count, part in (mine, *others):
            assert ready[part][:count].all()
        assert mine[0] == len(range(*mine[1].indices(fragments))) or not others[0][0]
        assert 0 <= others[0][0] - others[1][0] <= batch
        done = int(ready[:fragments].sum())
        assert done == program.arena.converted(3)
        assert (lanes[ready[:fragments]] == expected[ready[:fragments]]).all()
        seen.append(done)
        write(fd, value)

    number = program.begin(3, gradient(1, members.lanes))
    assert number not in (0, former) and program.arena.converted(3) == 0
    monkeypatch.setattr(os, "eventfd_write", look)
    program.reducer.convert(3, gradient(1, members.lanes))
    assert seen == sorted(seen) and seen[-1] == fragments and len(seen) >= 4
    assert not own["conversion"][1, fragments:].any()
    assert (own["conversion"][0] != number).all()


def test_the_agent_is_told_more_and_more_rarely(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its program has the own stripe, the next batch, and then ever more. A switch is sent the own stripe, too."""
    monkeypatch.setattr(stripes, "_MOST_PARTS", 2)
    batch = LaneFormat(1, 8).batch
    members = Members(stack, 2, 14 * batch * 1440, 8)
    program, told = members.programs[1], list[int]()
    monkeypatch.setattr(Handover, "show", lambda self, round_, done: told.append(done))
    program.offer(1, gradient(1, members.lanes))
    assert told == [batch * k for k in (7, 8, 9, 11, 13, 14)]
    told.clear()
    program.reducer.enter(0, 0, Exchange.LINUX_SWITCH)
    program.offer(3, gradient(1, members.lanes))
    assert told == [batch * k for k in (1, 2, 4, 6, 8, 10, 12, 14)]


def test_no_record_has_the_number_of_a_new_conversion(stack: ExitStack) -> None:
    """Also where the memory is another program's; and after the last number comes 1."""
    members = Members(stack, 2, 3 * 1440, 8)
    program, vector = members.programs[1], gradient(1, members.lanes)
    program.host.own.array["conversion"][0, 1] = 41
    program.map()
    assert program.begin(1, vector) == 42 and program.begin(2, vector) == 43
    program.host.own.array["conversion"][0, 1] = (1 << 32) - 2
    program.map()
    numbers = [program.begin(3, vector), program.begin(4, vector)]
    assert numbers == [(1 << 32) - 1, 1]


def test_sums_are_read_early_stripe_by_stripe(stack: ExitStack) -> None:
    """A stripe whose first sum is lacking holds up no other; each is read once."""
    width, batch = 8, LaneFormat(1, 8).batch
    members = Members(stack, 2, 6 * batch * 1440 - 9, width)
    for number, program in members.programs.items():
        program.offer(1, gradient(number, members.lanes))
    half = 3 * batch
    there = [*range(1, half), *range(half, half + 2 * batch + 5)]
    members.gather(1, [1, 2], only=there)
    program = members.programs[1]
    out = np.full(members.lanes, 7, np.float32)
    assert program.reducer.expect(1, out)
    program.reducer.ahead(lambda: True)
    assert (out == 7).all(), "there is a message"
    program.reducer.ahead(never)
    read = (out != 7).reshape(-1)[: (members.fragments - 1) * 1440].reshape(-1, 1440).any(axis=1)
    assert np.flatnonzero(read).tolist() == list(range(half, half + 2 * batch))
    members.gather(1, [1, 2], only=[k for k in range(members.fragments) if k not in there])
    commit = members.commit(1, [1, 2])
    program.host.sums.array["lane"][1, half] = 99  # it was read already
    program.reducer.sum(commit, out)
    other = members.programs[2].read(commit)
    assert (out.view(np.uint32) == other.view(np.uint32)).all()
    assert not (program.read(commit) == other).all(), "read anew it is the other"
