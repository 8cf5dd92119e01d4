# SPDX-License-Identifier: Apache-2.0
"""Programs that come late into a group, or come back: between threads in place of hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nicps.collective import CallMismatch, Group, GroupClosed, MemberLost
from nicps.collective.admission import Place, Table, deal_out
from nicps.collective.rounds import Ranks
from nicps.errors import NetworkProblem
from nicps.job.under_way import UnderWay
from tests.collectives import Meeting, ThreadLink, together

pytestmark = pytest.mark.unit


def ranks(*numbers: int) -> Ranks:
    return Ranks(numbers, tuple(f"h{number}" for number in numbers))


@pytest.mark.parametrize(
    ("members", "late", "expected"),
    [
        ({1, 2, 3}, {}, (1, 2, 3)),
        ({1, 3}, {2: -1}, (1, 2, 3)),  # it comes back: its own rank, whatever else it wants
        ({1, 3}, {2: 0}, (1, 2, 3)),
        ({1, 3}, {4: -1}, (1, 4, 3)),  # a new one: the lost one's
        ({1, 2, 3}, {4: -1}, (1, 2, 3, 4)),
        ({3}, {4: 1, 5: -1}, (5, 4, 3)),  # what is wanted goes first
        ({3}, {4: -1, 5: 1}, (4, 5, 3)),
        ({3}, {4: 2, 5: 7}, (4, 5, 3)),  # wanted and not free
        ({1}, {2: -1, 4: 1, 5: -1}, (1, 2, 4, 5)),  # one that comes back leaves its rank to nobody
    ],
)
def test_ranks_are_dealt_out(
    members: set[int], late: dict[int, int], expected: tuple[int, ...]
) -> None:
    places = {number: Place(True, rank, f"h{number}") for number, rank in late.items()}
    assert deal_out(ranks(1, 2, 3), frozenset(members), places) == ranks(*expected)


def test_a_table_travels() -> None:
    numbers = tuple(range(1, 65))
    table = Table(Ranks(numbers, tuple("h" * 14 for _ in numbers)), 60)
    assert Table.unpack(table.pack()) == table


def test_a_group_under_way_is_named() -> None:
    for name in ("torch", "a (size 3, members 2)", "two words"):
        group = UnderWay(name, 3, 4)
        assert UnderWay.read(str(group)) == group
        assert group.is_for(name, 3) and group.is_for(name, 4) and group.is_for(name, 0)
        assert not group.is_for(name, 2) and not group.is_for("other", 3)
    assert UnderWay.read("20260101-120000-group-torch-ab12") is None


def digest(group: Group) -> tuple[Any, ...]:
    """What all members must agree on, and that they add up."""
    total = group.all_reduce(np.array([10**group.rank])).result(10)
    return group.size, group.names, group.lost, group.world, int(total[0])


def test_one_comes_late() -> None:
    """Before `admit` its calls are its own; after it, it has a rank and the others' sums have its vector."""

    def program(group: Group) -> Any:
        if group.late:
            assert group.all_reduce(np.array([5, 6])).result(10).tolist() == [5, 6]
            assert group.broadcast(np.array([7]), 0).result(10).tolist() == [7]
            assert group.all_gather(np.array([8])).result(10).tolist() == [[8], [8]]
            group.barrier().result(10)
        admission = group.admit().result(20)
        assert not group.late and group.changes == 1
        return admission.ranks, admission.sources, admission.late, *digest(group)

    found = together(Meeting(2, expects=1), program, late=1)
    same = ((2,), (0, 1))
    rest = (3, ("h1", "h2", "h3"), (), 2, 111)
    assert found == [(*same, False, *rest), (*same, False, *rest), (*same, True, *rest)]


def test_a_lost_rank_goes_to_a_new_host() -> None:
    def program(group: Group) -> Any:
        if not group.late:
            group.barrier().result(10)
        admission = group.admit().result(20)
        return admission.ranks, group.rank, *digest(group)

    # Rounds: the ranks, the barrier, and so on; h2 is lost before the barrier.
    found = together(Meeting(3, loses={2: 2}, expects=1), program, late=1)
    rest = (3, ("h1", "h4", "h3"), (), 3, 111)
    assert isinstance(found[1], GroupClosed)
    assert [found[0], found[2], found[3]] == [((1,), rank, *rest) for rank in (0, 2, 1)]


def test_two_come_at_once_and_one_that_comes_back() -> None:
    """h2 is put out of the group, and comes back through its next `admit`, beside two that are new."""

    def program(group: Group) -> Any:
        if not group.late:
            try:
                group.barrier().result(10)
            except GroupClosed:
                assert group.rank == 1
        admission = group.admit().result(20)
        return admission.ranks, group.rank, *digest(group)

    found = together(Meeting(3, loses={2: 2}, expects=3), program, late=2)
    rest = (5, ("h1", "h2", "h3", "h4", "h5"), (), 3, 11111)
    assert found == [((1, 3, 4), rank, *rest) for rank in range(5)]


def test_nobody_waits() -> None:
    """Two rounds."""
    meeting = Meeting(3)

    def program(group: Group) -> Any:
        before = group.all_reduce(np.zeros(1)).result(10) is not None and meeting.rounds
        admission = group.admit().result(20)
        group.barrier().result(10)
        assert group.changes == 0
        return admission.ranks, admission.sources, meeting.rounds - before

    assert {tuple(each) for each in together(meeting, program)} == {((), (0, 1, 2), 3)}


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("who", [1, 3])
def test_one_is_lost_in_the_middle(who: int, at: int) -> None:
    """The lowest member, which tells the ranks, or the late one: in any round of it the others come to the same."""

    def program(group: Group) -> Any:
        admission = group.admit().result(20)
        return admission.sources, group.names, digest(group)

    meeting = Meeting(2, loses={who: at}, expects=1)  # the ranks are round 1, `admit` begins with 2
    found = together(meeting, program, late=1)
    left = [each for number, each in enumerate(found, 1) if number != who]
    assert isinstance(found[who - 1], GroupClosed)
    assert not any(isinstance(each, BaseException) for each in left), left
    assert left[0] == left[1]
    if who == 1:  # lost before it has said its rank, the late one takes that
        assert left[0][0] == ((1,) if at < 5 else (0, 1))
        assert left[0][1] == (("h3", "h2") if at == 3 else ("h1", "h2", "h3"))


def test_nobody_is_left_who_has_the_state() -> None:
    def program(group: Group) -> Any:
        return group.admit().result(20)

    found = together(Meeting(1, loses={1: 4}, expects=1), program, late=1)
    assert isinstance(found[1], MemberLost) and "it has no state" in str(found[1])


def test_another_call_at_one_member_admits_nobody() -> None:
    """All members are told, and the one that waits comes in at the next `admit`."""

    def program(group: Group) -> Any:
        if not group.late:
            with pytest.raises(CallMismatch, match=r"h1 \(rank 0\): admit; h2 \(rank 1\): barrier"):
                (group.admit() if group.rank == 0 else group.barrier()).result(20)
        admission = group.admit().result(20)
        return admission.ranks, digest(group)

    assert {each[0] for each in together(Meeting(2, expects=1), program, late=1)} == {(2,)}


def test_a_late_program_that_gives_up() -> None:
    """It closes, or its script fails, before it has come in: nobody hears of it."""
    group = Group(None, None, 1.0, lambda: pytest.fail("it must not come in"), 3)
    assert (group.rank, group.size, group.late) == (2, 3, True)
    group.close()
    failing = Group(None, 1, 1.0, None, 3)
    failing.__exit__(ZeroDivisionError)
    with pytest.raises(GroupClosed):
        failing.barrier()


def test_a_member_that_does_not_come_back_stays_out() -> None:
    """Its calls are not answered as those of a program that has not come in yet: its sums would be its own vectors."""
    tries = iter([NetworkProblem("not under way"), GroupClosed("put out again")])

    def come_in() -> Any:
        raise next(tries)

    link: Any = ThreadLink(Meeting(1), 1)
    group = Group(link, None, 1.0, come_in)
    link.close("the others have gone on without it")
    for error in (NetworkProblem, GroupClosed):
        with pytest.raises(error):
            group.admit().result(10)
        assert group.out and not group.late
    group.__exit__(ZeroDivisionError)
