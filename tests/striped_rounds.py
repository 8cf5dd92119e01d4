# SPDX-License-Identifier: Apache-2.0
"""What rounds of stripes, and of a Linux switch, must have come to, bit for bit, from what the members saved.

In whole vectors. Where the switch adds, it adds what rounding has left over of the round before, too, as long as it has
lost nothing meanwhile (docs/linux-switch.md, "Remainders").

Imports nothing of the product. Its numbers are those of `tests/striped_reference.py`, which has them one by one
(`tests/unit/test_striped_reference.py` compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.striped_reference import F32, LARGEST, LEAST, MOST_SHIFT, PAYLOAD_BITS

I64 = npt.NDArray[np.int64]
#: What `numpy.load` gives of an offer, or of a sum.
Saved = Mapping[str, Any]


def cut(values: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """In fragments, zeros behind the last number: (lanes,) to (fragments, lanes of one)."""
    per = PAYLOAD_BITS // width
    return np.pad(values, (0, -len(values) % per)).reshape(-1, per)


def exponents(largest: npt.NDArray[np.float64], width: int) -> I64:
    """The smallest that is allowed and under which each magnitude, (n,), fits a lane: (n,)."""
    found = np.full(len(largest), LEAST, np.int64)
    while (short := largest > LARGEST[width] * 2.0**found).any():
        found += short
    return found


@dataclass
class Sums:
    """A round's: lanes and remainders (fragments, lanes of one), in `unit` and in exponents (fragments,)."""

    lanes: I64
    exponents: I64
    rests: I64
    unit: int

    def values(self, lanes: int) -> F32:
        """As everybody reads them."""
        whole = self.lanes * 2.0 ** self.exponents[:, None]
        return whole.reshape(-1)[:lanes].astype(np.float32)


@dataclass
class Member:
    """One life of one member: what rounding has left over."""

    width: int
    residual: F32
    left: F32 = field(default_factory=lambda: np.zeros(0, np.float32))

    def convert(self, vector: F32) -> tuple[I64, I64]:
        """Lanes (fragments, lanes of one) and exponents (fragments,)."""
        values = vector + self.residual
        assert values.dtype == np.float32 and np.isfinite(values).all()
        exact = cut(values.astype(np.float64), self.width)
        found = exponents(np.abs(exact).max(axis=1), self.width)
        step = 2.0 ** found[:, None]
        lanes = np.rint(exact / step)
        self.left = (exact - lanes * step).reshape(-1)[: len(vector)].astype(np.float32)
        return lanes.astype(np.int64), found

    def counted(self) -> None:
        """The vector converted last is in a sum."""
        self.residual = self.left

    def add_rests(self, sums: Sums, rank: int, aggregators: int) -> None:
        """The remainders of the own stripe, of a sum that was applied."""
        total, (_, per) = len(sums.rests), sums.rests.shape
        first, end = total * rank // aggregators, total * (rank + 1) // aggregators
        here = slice(first * per, end * per)
        more = (sums.rests[first:end] * 2.0**sums.unit).astype(np.float32).reshape(-1)
        self.residual = self.residual.copy()
        self.residual[here] += more[: len(self.residual[here])]


def shifted_rests(before: Sums, unit: int, members: int) -> I64:
    """What is left over of a round before, in this round's unit; left out where the list has no room for it."""
    if unit >= before.unit:
        return before.rests >> min(unit - before.unit, 63)
    room = 61 if members <= 32 else 57 if members < 64 else -1
    fits = (before.exponents - unit <= room)[:, None]
    return np.where(fits, before.rests << min(before.unit - unit, 63), 0)


def add(parts: list[tuple[I64, I64]], width: int, unit: int, before: Sums | None = None) -> Sums:
    """The sums of a round, of at least two parts; or the one part as it is.

    Args:
        before: a round whose remainders are added.
    """
    if len(parts) == 1:
        lanes, found = parts[0]
        return Sums(lanes, found, np.zeros_like(lanes), unit)
    total = np.zeros_like(parts[0][0])
    if before is not None:
        total += shifted_rests(before, unit, len(parts))
    for lanes, found in parts:
        by = (found - unit)[:, None]
        assert by.max() <= MOST_SHIFT[width], "the unit is too fine"
        total += np.where(by >= 0, lanes << np.maximum(by, 0), lanes >> np.clip(-by, 0, 63))
    largest = np.bitwise_or.reduce(total ^ total >> 63, axis=1)
    bits = np.array([int(number).bit_length() for number in largest])
    shift = np.maximum(0, bits - (width - 1))[:, None]
    half = np.where(shift > 0, np.int64(1) << np.maximum(shift - 1, 0), 0)
    rounded = np.minimum((total + half) >> shift, (1 << width - 1) - 1)
    return Sums(rounded, unit + shift[:, 0], total - (rounded << shift), unit)


@dataclass
class Switch:
    """What a Linux switch has kept: the last round that it has added of several members, its view and its sums."""

    kept: tuple[int, int, Sums] | None = None


def check(
    width: int,
    rounds: Mapping[int, tuple[Mapping[int, Saved], Mapping[int, Saved]]],
    boots: Mapping[int, int] | None = None,
    lives: MutableMapping[tuple[int, str], Any] | None = None,
    switch: Switch | None = None,
) -> int:
    """Compare every member's totals with what was counted, and so what rounding has left over of the rounds before.

    Args:
        width: of a lane, in bits.
        rounds: the offers and the sums by member number, by round. All of one run and all its rounds. Of who died
            in a round, and of one that was not committed, there may be the offers only. A "life" ends where a member
            forgets what rounding has left over.
        boots: of a Linux switch, by view: in one boot it loses nothing. None: no round may be of a switch.
        lives: of members whose rounding errors go on from rounds of other exchanges; they are changed.
        switch: with what is left over of its rounds before those of another exchange; it is changed.

    Returns:
        How many gradients were counted.

    Raises:
        AssertionError: a total differs in any bit, members disagree on how it was made, or the unit is not that of the
            contributions.
    """
    members = {} if lives is None else lives

    def life(number: int, saved: Saved, lanes: int) -> Member:
        fresh = Member(width, np.zeros(lanes, np.float32))
        found: Member = members.setdefault((number, str(saved["life"])), fresh)
        return found

    gradients = 0
    switch = Switch() if switch is None else switch
    for round_, (offers, sums) in sorted(rounds.items()):
        if not sums:
            continue  # begun, and not committed
        first = next(iter(sums.values()))
        counted, aggregators = first["counted"].tolist(), first["aggregators"].tolist()
        unit, lanes = int(first["unit"]), len(first["total"])
        for number, own in sums.items():
            for name in ("counted", "aggregators", "unit", "view", "exchange"):
                assert own[name].tolist() == first[name].tolist(), (round_, number, name)
            assert str(own["exchange"]) in ("stripes", *(["linux-switch"] if boots else [])), round_
            assert int(own["n"]) == sum(samples for _, samples in counted)
        parts, largest = [], LEAST
        for number, samples in counted:
            own = offers[number]
            assert int(own["samples"]) == samples, (round_, number)
            parts.append(life(number, own, lanes).convert(own["vector"]))
            largest = max(largest, int(parts[-1][1].max()))
            gradients += 1
        if parts:
            least = max(LEAST, largest - MOST_SHIFT[width])
            # What a member has said may be too large by that of a vector in which all numbers are alike, and a bit.
            assert least <= unit <= least + math.log2(lanes) / 2 + 2, (round_, unit, least)
        switched, view = (
            str(first["exchange"]) == "linux-switch" and len(parts) > 1,
            int(first["view"]),
        )
        before = None
        if switched and switch.kept is not None and boots is not None:
            then, in_view, sums_then = switch.kept
            assert view in boots and in_view in boots, (round_, view, in_view, boots)
            if round_ - then <= 255 and boots[view] == boots[in_view]:
                before = sums_then
        made = add(parts, width, unit, before) if parts else None
        if switched and made is not None:
            assert aggregators == [0], (round_, aggregators)
            switch.kept = round_, view, made
        expected = np.zeros(lanes, np.float32) if made is None else made.values(lanes)
        for number, own in sums.items():
            differs = own["total"].view(np.uint32) != expected.view(np.uint32)
            assert not differs.any(), (round_, number, np.flatnonzero(differs)[:8], differs.sum())
        if made is None:
            continue
        listed = dict(counted)
        for number, own in sums.items():
            member = life(number, own, lanes)
            if number in listed:
                assert str(offers[number]["life"]) == str(own["life"]), (round_, number)
                member.counted()
            if len(listed) > 1 and number in aggregators:
                member.add_rests(made, aggregators.index(number), len(aggregators))
    return gradients
