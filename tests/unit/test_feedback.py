# SPDX-License-Identifier: Apache-2.0
"""Means in narrow lanes with error feedback: nothing is lost, whoever is lost, and all members have the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nicps.collective import CallMismatch, Group, GroupClosed
from nicps.collective.feedback import Compressed
from nicps.errors import UsageProblem
from nicps.session import loops
from nicps.session.lanes import F32, LaneFormat
from tests import striped_reference as reference
from tests.averages import checked, gradients
from tests.collectives import Meeting
from tests.conversions import conversion  # noqa: F401

_ROOM = 16  # fragments of 32 bits in a round: 4, 8 and 16 of each width


@pytest.mark.parametrize("lane", ["i8", "i16", "i32"])
@pytest.mark.parametrize("length", [1, 1441, 13_000])
def test_sums_and_residuals_come_to_what_was_given(lane: str, length: int) -> None:
    """Over 20 steps, in several rounds a vector: only the rounding of float32 itself is left."""
    size, steps = 3, 20

    def program(group: Group) -> tuple[list[bytes], Any, F32]:
        residual, total, seen = np.zeros(length, np.float32), np.zeros(length), []
        for vector in gradients(group.rank, steps, length):
            assert group.average(vector, residual, lane=lane).result(20) is vector
            seen.append(vector.tobytes())
            total += vector.astype(np.float64) * size
        return seen, total, residual

    found = checked(Meeting(size, _ROOM), program)
    assert all(seen == found[0][0] for seen, _, _ in found)
    given = sum(np.sum(gradients(rank, steps, length), axis=0, dtype=float) for rank in range(3))
    kept = sum(residual.astype(np.float64) for _, _, residual in found)
    largest = np.max([np.abs(gradients(rank, steps, length)) for rank in range(3)])
    np.testing.assert_allclose(found[0][1] + kept, given, rtol=1e-5, atol=largest * 1e-5)
    if lane == "i8" and length > 1:  # without the residuals, much is missing
        assert np.abs(found[0][1] - given).max() > largest * 1e-3


@pytest.mark.parametrize("width", [8, 16, 32])
def test_means_and_residuals_are_those_of_the_reference(
    width: int,
    conversion: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, over steps: what each member keeps, and what the aggregator keeps of the sum.

    Loops that a program has compiled serve here, too, and nothing is compiled for short vectors.
    """
    compiled = loops.loops_for(LaneFormat(1, width)) if conversion == "compiled" else None
    monkeypatch.setattr(loops, "_made", {} if compiled is None else {width: compiled})
    monkeypatch.setattr(loops, "Loops", None)
    assert loops.loops_for(LaneFormat(1, width)) is compiled
    length = 11_520 // width - 20
    members = [reference.Member(width, np.zeros(length, np.float32)) for _ in range(2)]

    def program(group: Group) -> list[tuple[bytes, bytes]]:
        residual, seen = np.zeros(length, np.float32), []
        for vector in gradients(group.rank, 5, length):
            group.average(vector, residual, lane=f"i{width}").result(20)
            seen.append((vector.tobytes(), residual.tobytes()))
        return seen

    found = checked(Meeting(2, _ROOM), program)
    given = [gradients(rank, 5, length) for rank in range(2)]
    for step in range(5):
        vectors = [given[rank][step] for rank in range(2)]
        sums = reference_round(members, vectors, width)
        for rank in range(2):
            assert found[rank][step][0] == (sums / np.float32(2)).tobytes()
            assert found[rank][step][1] == members[rank].residual.tobytes()


def reference_round(members: list[reference.Member], vectors: list[F32], width: int) -> F32:
    """One fragment, whose aggregator is the second member of two."""
    bounds = [
        Compressed(vector, member.residual.copy(), width).bound()
        for vector, member in zip(vectors, members, strict=True)
    ]
    unit = reference.unit_of(bounds, width)
    pieces = [m.convert(vector)[0] for m, vector in zip(members, vectors, strict=True)]
    total = reference.add(pieces, width, unit)
    for member in members:
        member.counted([total])
    members[1].add_rest(0, total, unit)
    return total.values()


def test_after_a_loss_means_are_over_those_that_are_left() -> None:
    """Also in the middle of a vector: each part over those counted in its round, and nothing begins again."""
    length = 13_000  # 3 rounds a vector with lanes of 8 bits

    def program(group: Group) -> Any:
        residual = np.zeros(length, np.float32)
        vector = np.full(length, float(group.rank + 1), np.float32)
        group.average(vector, residual, lane="i8").result(20)
        first = vector.copy()
        vector[:] = group.rank + 1
        group.average(vector, residual, lane="i8").result(20)
        return first, vector, group.lost

    # One round in which ranks are agreed on, three of the first vector, one of the second.
    found = checked(Meeting(3, _ROOM, loses={3: 6}), program)
    assert isinstance(found[2], GroupClosed)
    (first, second, lost), (_, other, _) = found[:2]
    assert lost == (2,) and second.tobytes() == other.tobytes()
    np.testing.assert_allclose(first, 2.0, rtol=0.02)
    per_round = 4 * 1440
    np.testing.assert_allclose(second[:per_round], 2.0, rtol=0.03)
    np.testing.assert_allclose(second[per_round:], 1.5, rtol=0.03)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4028235e38])
def test_what_is_not_finite_at_one_member_is_at_none(bad: float) -> None:
    """The whole fragment is NaN at all, and keeps its residual; the others are not touched."""
    length = 3 * 1440

    def program(group: Group) -> tuple[F32, F32, F32]:
        residual = np.zeros(length, np.float32)
        vector = gradients(group.rank, 1, length)[0]
        group.average(vector, residual, lane="i8").result(20)
        before, vector = residual.copy(), gradients(group.rank, 2, length)[1]
        if group.rank == 1:
            vector[1500] = bad
        group.average(vector, residual, lane="i8").result(20)
        return vector, before, residual

    for vector, before, after in checked(Meeting(3, _ROOM), program):
        lost = np.zeros(length, np.bool_)
        lost[1440:2880] = True
        assert (np.isnan(vector) == lost).all()
        assert (after[lost] == before[lost]).all() and np.isfinite(after).all()
        assert (after[~lost] != before[~lost]).any()


def test_a_member_that_is_left_alone_goes_on() -> None:
    def program(group: Group) -> Any:
        residual, vector = np.zeros(2000, np.float32), gradients(group.rank, 1, 2000)[0]
        given = vector.copy()
        group.average(vector, residual).result(20)
        return given, vector + residual

    found = checked(Meeting(2, _ROOM, loses={2: 2}), program)
    given, kept = found[0]
    np.testing.assert_allclose(kept, given, rtol=1e-6, atol=1e-9)


def test_members_of_different_lanes_are_told() -> None:
    def program(group: Group) -> str:
        vector, residual = np.ones(5, np.float32), np.zeros(5, np.float32)
        with pytest.raises(CallMismatch) as told:
            group.average(vector, residual, lane="i8" if group.rank else "i16").result(20)
        return str(told.value)

    for text in checked(Meeting(2, _ROOM), program):
        assert "average of 5 float32 in lanes of 8 bits" in text
        assert "average of 5 float32 in lanes of 16 bits" in text


@pytest.mark.parametrize(("lane", "least"), [("i8", 4), ("i16", 2)])
def test_a_channel_without_room_for_such_lanes(lane: str, least: int) -> None:
    """All members are told, and the group goes on."""

    def program(group: Group) -> Any:
        vector, residual = np.ones(5, np.float32), np.zeros(5, np.float32)
        future = group.average(vector, residual, lane=lane)
        if room < least:
            with pytest.raises(UsageProblem, match=r"room for [0-9,]+ numbers, and this one has"):
                future.result(20)
        else:
            future.result(20)
        return group.all_reduce(vector).result(20).tolist()

    for room in (least - 1, least):
        assert checked(Meeting(2, room), program) == [[2.0] * 5] * 2


def test_what_cannot_be_averaged() -> None:
    def program(group: Group) -> None:
        right = np.zeros(4, np.float32)
        with pytest.raises(UsageProblem, match="lane must be one of i8, i16, i32, not 'i4'"):
            group.average(right, right.copy(), lane="i4")
        for wrong in (np.zeros(4), np.zeros(5, np.float32), np.zeros(8, np.float32)[::2]):
            with pytest.raises(UsageProblem, match=r"average: the residual must be .* float32 \(4"):
                group.average(right, wrong)

    checked(Meeting(1, _ROOM), program)
