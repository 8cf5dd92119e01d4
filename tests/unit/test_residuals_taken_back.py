# SPDX-License-Identifier: Apache-2.0
"""Residuals that were computed as sums came in are taken back if the round ends in another way (docs/stripes.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from nicps.session import loops
from tests.conversions import conversion  # noqa: F401
from tests.striped_members import (
    F32,
    PER,
    VIEW,
    WIDTHS,
    Members,
    Program,
    gradient,
)
from tests.unit.test_striped_rounds import stack  # noqa: F401


def open_round(members: Members, vectors: dict[int, F32], listed: Sequence[int]) -> list[F32]:
    """Round 1 is over, and member 1 has computed residuals of the sums that have come of round 2; those of round 1."""
    for round_, all_listed in ((1, (1, 2, 3)), (2, listed)):
        for number, vector in vectors.items():
            members.programs[number].offer(round_, vector)
        come = range(members.fragments if round_ == 1 else members.fragments // 2)
        members.gather(round_, all_listed, only=come)
        if round_ == 1:
            members.settle(members.commit(1, all_listed))
    before = [program.residual.kept.copy() for program in members.programs.values()]
    members.programs[1].expect(2)
    changed = (members.programs[1].residual.kept != before[0]).any()
    assert members.width == 32 or changed == (loops.LEAST_NUMBERS == 0)
    return before


def taken_back(program: Program, before: F32, vector: F32) -> None:
    """The residual is that of before but for the rounding of one sum, and what the reference goes on with."""
    kept, lanes = program.residual.kept, program.format.lanes
    assert not kept[lanes:].any() and np.abs(kept).max() <= program.residual.largest()
    differ = np.abs(kept - before)[:lanes]
    assert (differ <= np.spacing(np.abs(before[:lanes]) + np.abs(vector))).all()
    program.member.residual[:] = kept[:lanes]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_residual_is_taken_back_if_the_round_is_dropped(stack: ExitStack, width: int) -> None:  # noqa: F811
    """And the round that is run in its place goes on from there."""
    members = Members(stack, 3, 9 * 1440 + 5, width)
    vectors = {number: gradient(number, members.lanes) for number in (1, 2, 3)}
    before = open_round(members, vectors, [1, 2, 3])
    program = members.programs[1]
    for _ in range(2):
        program.reducer.drop()
        taken_back(program, before[0], vectors[1])
    if loops.LEAST_NUMBERS == 0:
        assert math.isinf(program.residual.next_limit), "it may be rounded to another one now"
    for number, each in members.programs.items():
        each.offer(2, vectors[number])
    members.enter(VIEW + 1, (1, 2, 3))
    members.gather(2, [1, 2, 3])
    program.expect(2)
    members.settle(members.commit(2, [1, 2, 3]))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("listed", [[2, 3], []])
def test_a_residual_is_taken_back_if_another_list_is_committed(
    stack: ExitStack,  # noqa: F811
    width: int,
    listed: list[int],
) -> None:
    members = Members(stack, 3, 9 * 1440 + 5, width)
    vectors = {number: gradient(number, members.lanes) for number in (1, 2, 3)}
    before = open_round(members, vectors, [1, 2, 3])
    members.enter(VIEW + 1, (1, 2, 3))
    if listed:
        members.gather(2, listed)
    program, commit = members.programs[1], members.commit(2, listed)
    program.host.sums.array["rest"][:] = 0  # what is left over of the sums comes on top
    if listed:
        program.read(commit)
    else:
        program.reducer.finish(commit)
    taken_back(program, before[0], vectors[1])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_residual_is_taken_back_where_the_sum_is_not_finite(stack: ExitStack, width: int) -> None:  # noqa: F811
    """A member that was not on the first list has NaN in some fragments, one of which had a sum before."""
    members = Members(stack, 3, 9 * 1440 + 5, width)
    vectors = {number: gradient(number, members.lanes) for number in (1, 2, 3)}
    per, bad = PER[width], [1, members.fragments - 1]
    vectors[3][[per, -1]] = np.nan
    before = open_round(members, vectors, [1, 2])
    members.enter(VIEW + 1, (1, 2, 3))
    members.gather(2, [1, 2, 3])
    program = members.programs[1]
    program.host.sums.array["rest"][:] = 0
    program.read(members.commit(2, [1, 2, 3]))
    rows = program.residual.kept.reshape(-1, per)
    former = before[0].reshape(-1, per)
    given = np.resize(np.append(vectors[1], np.zeros(per, np.float32)), rows.shape)
    for fragment in bad:
        room = np.spacing(np.abs(former[fragment]) + np.abs(given[fragment]))
        assert (np.abs(rows[fragment] - former[fragment]) <= room).all()
    others = np.delete(np.arange(len(rows)), bad)
    exact = program.member  # the reference: a vector that is counted
    exact.counted(members.expected([1, 2], members.unit([1, 2])))
    same = exact.residual.view(np.uint32)
    for fragment in others[:-1]:
        here = slice(fragment * per, (fragment + 1) * per)
        assert (rows[fragment].view(np.uint32) == same[here]).all()
