# SPDX-License-Identifier: Apache-2.0
"""The reference in whole vectors against the one that has its numbers one by one; and that it sees what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import striped_reference, striped_rounds

WIDTHS = (32, 16, 8)
LANES = 3 * 1440 + 77
LISTS = ([1, 2, 3], [2, 3], [2], [1, 3], [], [1, 2, 3])
Rounds = dict[int, tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]]


def saved_rounds(width: int) -> Rounds:
    """Rounds of three members, as the slow reference has them. Member 1 forgets its residual behind the third."""
    rng = np.random.default_rng(width)
    members = {k: striped_reference.Member(width, np.zeros(LANES, np.float32)) for k in (1, 2, 3)}
    rounds: Rounds = {}
    for round_, listed in enumerate(LISTS, 1):
        if round_ == 4:
            members[1] = striped_reference.Member(width, np.zeros(LANES, np.float32))
        offers: dict[int, dict[str, Any]] = {}
        pieces = {}
        for k, member in members.items():
            size = 2.0 ** rng.uniform(-60 if k == 2 else -9, 3, -(-LANES // 360))
            vector = rng.standard_normal(LANES) * size.repeat(360)[:LANES]
            vector = vector.astype(np.float32)
            life = "b" if k == 1 and round_ > 3 else "a"
            offers[k] = {"number": k, "life": life, "samples": 4, "vector": vector}
            pieces[k] = member.convert(vector)
        largest = [max(piece.exponent for piece in pieces[k]) for k in listed]
        unit = striped_reference.unit_of(largest or [0], width)
        sums = [
            striped_reference.add(list(of), width, unit)
            for of in zip(*(pieces[k] for k in listed), strict=True)
        ]
        total = np.zeros(LANES, np.float32)
        if sums:
            total = np.concatenate([piece.values() for piece in sums])
        own = {
            "counted": np.array([(k, 4) for k in listed], np.int64).reshape(-1, 2),
            "n": np.array(4 * len(listed)),
            "unit": np.array(unit),
            "view": np.array(1),
            "exchange": np.array("stripes"),
            "aggregators": np.array([1, 2, 3]),
            "total": total,
        }
        rounds[round_] = offers, {k: own | {"life": offers[k]["life"]} for k in members}
        for k, member in members.items():
            if k in listed:
                member.counted(sums)
            if len(listed) > 1:
                for index in range(len(sums) * (k - 1) // 3, len(sums) * k // 3):
                    member.add_rest(index, sums[index], unit)
    return rounds


@pytest.mark.parametrize("unit", [-100, -80, -71, -70, -69, -40, 0, 20])
@pytest.mark.parametrize("members", [3, 40, 64])
def test_a_switch_adds_what_it_has_left_over(members: int, unit: int) -> None:
    """In whole numbers of any size: the sum's lanes and remainder are the contributions and the remainder before."""
    rng = np.random.default_rng(unit + 200)
    before = striped_rounds.Sums(
        np.zeros((5, 360), np.int64),
        -70 + np.array([0, 1, 30, 35, 50]),
        rng.integers(-(1 << 20), 1 << 20, (5, 360)),
        -70,
    )
    parts = [
        (rng.integers(-(1 << 31), 1 << 31, (5, 360)), np.full(5, unit)) for _ in range(members)
    ]
    made = striped_rounds.add(parts, 32, unit, before)
    room = 61 if members <= 32 else 57
    for fragment in range(5):
        short = int(before.exponents[fragment]) - unit > room or members == 64
        for lane in range(0, 360, 40):
            rest = int(before.rests[fragment, lane])
            by = unit - before.unit
            added = rest >> by if by >= 0 else 0 if short else rest << -by
            due = sum(int(lanes[fragment, lane]) for lanes, _ in parts) + added
            shift = int(made.exponents[fragment]) - unit
            got = (int(made.lanes[fragment, lane]) << shift) + int(made.rests[fragment, lane])
            assert got == due, (fragment, lane)


@pytest.mark.parametrize("width", WIDTHS)
def test_both_have_the_same_sums(width: int) -> None:
    assert striped_rounds.check(width, saved_rounds(width)) == sum(map(len, LISTS))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("what", ["life", "aggregators", "unit", "total", "view", "samples"])
def test_what_is_wrong_is_seen(width: int, what: str) -> None:
    rounds = saved_rounds(width)
    for round_, (offers, sums) in rounds.items():
        if what == "life":  # as if nothing had been forgotten
            offers[1]["life"] = sums[1]["life"] = "a"
        elif what == "samples":
            offers[2]["samples"] = 5
        elif what == "aggregators":  # remainders that went to somebody else
            for own in sums.values():
                own["aggregators"] = np.array([2, 1, 3])
        elif what == "unit":
            for own in sums.values():
                own["unit"] = own["unit"] - 1
        elif what == "view":
            sums[3]["view"] = np.array(2)
        elif round_ == 4:
            sums[3]["total"] = sums[3]["total"].copy()
            sums[3]["total"].view(np.uint32)[5] ^= 1
    with pytest.raises(AssertionError):
        striped_rounds.check(width, rounds)
