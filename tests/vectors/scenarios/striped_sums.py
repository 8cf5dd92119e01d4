# SPDX-License-Identifier: Apache-2.0
"""What an aggregator of stripes adds, and the sums that it makes: lanes, exponents, and what rounding has left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.striped_reference import NOT_FINITE
from tests.vectors.contributing import UNIT, bits, lacking, made, units
from tests.vectors.scenario import ROUND, VIEW
from tests.vectors.striping import Striped

GATHERED, SUMMED = "gathered", "summed"
#: The largest shift of lanes of so many bits.
TOP = {8: 50, 16: 42, 32: 26}


def _sum(width: int) -> Striped:
    s = Striped(
        f"sum-i{width}",
        "Three members' lanes under three exponents; with the last contribution the own lanes come in.",
        width=width,
    )
    most, last = 2 ** (width - 1) - 1, 11520 // width - 1
    own = s.part(UNIT, {0: 1, 2: most, last: -1})
    two, three = s.part(UNIT + 3, {0: 5, last: -most - 1}), s.part(UNIT - 1, {0: -7, 1: 1})
    s.convert("its lanes are converted", {0: own})
    s.contribution("member 2's: times 8", GATHERED, two, heard=True)
    total = s.total(two, three, own)
    s.contribution(
        "member 3's: halves, rounded down", SUMMED, three, 3, out=made(total), heard=True
    )
    return s.ends(sums=[(0, total, "made")], places=[(0, (1, 2, 3), total.rest)])


def sum_i8() -> Striped:
    return _sum(8)


def sum_i16() -> Striped:
    return _sum(16)


def sum_i32() -> Striped:
    return _sum(32)


def rounding() -> Striped:
    s = Striped("rounding", "How a sum of eight bits is cut down to seven and a sign, by hand.")
    own = s.part(UNIT, {5: 1})
    two = s.part(UNIT, {0: 127, 1: 127, 2: -128, 3: 1, 4: -1, 5: 127, 6: -1, 7: 2})
    three = s.part(UNIT, {0: 127, 2: -128, 5: 127, 6: -2})
    s.convert("its lanes are converted", {0: own})
    s.contribution("member 2's", GATHERED, two)
    #        254, 127, -256, 1, -1, 255, -3, 2 in units; by two, halves up, 127 at the most
    lanes = {0: 127, 1: 64, 2: -128, 3: 1, 4: 0, 5: 127, 6: -1, 7: 1}
    left = {1: -1, 3: -1, 4: -1, 5: 1, 6: -1}
    total = s.part(UNIT + 1, lanes)
    s.contribution("member 3's: every lane is halved", SUMMED, three, 3, out=made(total))
    return s.ends(sums=[(0, total, "made")], places=[(0, (1, 2, 3), s.part(0, left).lanes)])


def exact() -> Striped:
    s = Striped(
        "no-rounding", "A sum that fits its lanes has the unit's exponent, and leaves nothing over."
    )
    two, three = s.part(UNIT, {0: 100, 1: -100}), s.part(UNIT, {0: 26, 1: -28})
    own = s.part(UNIT, {0: 1})
    s.convert("its lanes are converted", {0: own})
    s.contribution("member 3's", GATHERED, three, 3)
    total = s.part(UNIT, {0: 127, 1: -128})
    s.contribution("member 2's", SUMMED, two, out=made(total))
    return s.ends(sums=[(0, total, "made")], places=[(0, (1, 2, 3), [])])


def _dense(width: int) -> Striped:
    s = Striped(
        f"sum-of-five-i{width}",
        "Five members' lanes of any size, from the largest shift down to exponents far below the unit.",
        members=5,
        width=width,
        fragments=4,
        number=3,
        aggregators=[1, 3],
    )
    top = TOP[width]
    exponents = {1: UNIT + top, 2: UNIT + 1, 4: UNIT - width, 5: UNIT - 64}
    own = s.dense(UNIT + top - 3, 3)
    parts = {sender: s.dense(exponent, sender) for sender, exponent in exponents.items()}
    s.convert("its lanes are converted", {3: own})
    for sender in (4, 1, 5):
        s.contribution(f"member {sender}'s", GATHERED, parts[sender], sender, index=3)
    total = s.total(*parts.values(), own)
    s.contribution("member 2's: the sum is made", SUMMED, parts[2], 2, index=3, out=made(total))
    return s.ends(sums=[(3, total, "made")], places=[(3, range(1, 6), total.rest)])


def dense_i8() -> Striped:
    return _dense(8)


def dense_i16() -> Striped:
    return _dense(16)


def dense_i32() -> Striped:
    return _dense(32)


def not_finite() -> Striped:
    s = Striped(
        "not-finite",
        "One contribution that is not finite, or a sum too large, makes the fragment so, and leaves nothing over.",
        fragments=5,
        aggregators=[1],
    )
    own, nan = s.part(UNIT, {0: 3}), s.part(NOT_FINITE)
    much, none = s.part(120, {0: 127, 1: -128}), s.part(120)
    s.convert("its lanes are converted", {0: own, 1: nan, 2: none, 3: none, 4: nan})
    two, three = s.part(UNIT + 9, {0: 127, 1: -1}), s.part(UNIT, {0: 1})
    bad = s.total(nan, two)
    s.contribution("member 2's is not finite", GATHERED, nan)
    s.contribution("so the sum is not", SUMMED, three, 3, out=made(bad))
    s.contribution("two that are finite", GATHERED, two, index=1)
    s.contribution("and the own lanes are not", SUMMED, three, 3, index=1, out=made(bad))
    far: dict[str, Any] = {"unit": 120 - TOP[8]}
    s.contribution("near the end of the exponents", GATHERED, much, index=2, **far)
    s.contribution("two large ones would need 121", SUMMED, much, 3, index=2, out=made(bad), **far)
    largest = s.total(much, none, none, **far)
    assert largest.exponent == 120 and not any(largest.rest)
    s.contribution("one large one", GATHERED, much, index=3, **far)
    s.contribution("has room", SUMMED, none, 3, index=3, out=made(largest), **far)
    s.contribution("nothing is finite", GATHERED, nan, index=4)
    s.contribution("at any member", SUMMED, nan, 3, index=4, out=made(bad))
    all_ = (1, 2, 3)
    return s.ends(
        sums=[(at, largest if at == 3 else bad, "made") for at in range(5)],
        places=[(at, all_, []) for at in range(5)],
        counts=[(ROUND, 5)],
        messages=[s.told(), s.counted(5)],
    )


def not_listed() -> Striped:
    s = Striped(
        "aggregator-not-listed",
        "An aggregator that is not on the list adds the others' contributions, and none of its own.",
        listed=bits(2, 3),
    )
    s.convert("its lanes are converted", {0: s.part(UNIT, {0: 99})})
    two, three = s.part(UNIT + 1, {0: 90, 9: -1}), s.part(UNIT, {0: 33})
    total = s.total(two, three)
    s.contribution("member 3's", GATHERED, three, 3)
    s.contribution("member 2's: the list is complete", SUMMED, two, out=made(total))
    return s.ends(sums=[(0, total, "made")], places=[(0, (2, 3), total.rest)])


def _places(width: int) -> Striped:
    s = Striped(
        f"places-i{width}",
        f"Fragments of lanes of {width} bits lie side by side in a block, from the stripe's first on.",
        members=2,
        width=width,
        fragments=11,
        number=2,
        blocks={8: 5, 16: 2, 32: 1}[width],
    )
    own = {index: s.part(UNIT, {0: index}) for index in (5, 6, 8)}
    s.convert("its lanes are converted", own)
    sums, places = [], []
    for index, values in ((6, {1: 60}), (8, {0: 127, 2: 127}), (5, {3: 50})):
        one = s.part(UNIT + 25, values)
        total = s.total(one, own[index])
        s.contribution(f"of fragment {index}", SUMMED, one, 1, index=index, out=made(total))
        sums.append((index, total, "made"))
        places.append((index, (1, 2), total.rest))
    s.contribution("there is no block for the last one", "range", s.part(UNIT), 1, index=10)
    return s.ends(sums=sums, places=places, counts=[(ROUND, 3)])


def places_i8() -> Striped:
    return _places(8)


def places_i16() -> Striped:
    return _places(16)


def places_i32() -> Striped:
    return _places(32)


def rounds() -> Striped:
    s = Striped(
        "rounds",
        "Two rounds are taken, each in its bank; a later one takes the place of the one two before.",
        aggregators=[1],
        listed=bits(2, 3),
    )
    two, three = s.part(UNIT, {0: 7}), s.part(UNIT, {0: 70, 1: -3})
    total = s.total(two, three)
    s.contribution("of the round before", "round", two, header={"round": ROUND - 1})
    s.contribution("of the round after the next", "round", two, header={"round": ROUND + 2})
    s.contribution("member 3's", GATHERED, three, 3)
    of_next: dict[str, Any] = {"unit": UNIT - 2, "header": {"round": ROUND + 1}}
    s.contribution("of the next round, with another unit", GATHERED, two, **of_next)
    s.contribution("member 2's: the sum", SUMMED, two, out=made(total))
    s.agent("the round is committed", round=ROUND + 1, round_high=ROUND + 2)
    s.contribution("one of the round before", "round", two)
    later: dict[str, Any] = {"members": bits(1, 3), "header": {"round": ROUND + 2}}
    s.contribution("of the round after it, with another list", "unready", three, 3, **later)
    s.ask("a question for its sum", "answered", **later, out=lacking(bits(1, 3)))
    s.convert("the own lanes for that round", {0: two})
    s.contribution(
        "again: it takes the place of the sum before", SUMMED, three, 3, out=made(total), **later
    )
    next_sum = s.total(two, three, unit=UNIT - 2)
    s.contribution("the next round's other one", SUMMED, three, 3, out=made(next_sum), **of_next)
    return s.ends(
        sums=[(0, total, "made", ROUND + 2), (0, next_sum, "made", ROUND + 1)],
        places=[
            (0, (1, 3), total.rest, ROUND + 2),
            (0, (2, 3), next_sum.rest, ROUND + 1),
        ],
        counts=[(ROUND + 1, 1), (ROUND + 2, 1)],
        messages=[
            s.told(),
            s.told(unit=UNIT - 2) | {"round": ROUND + 1},
            s.told(members=bits(1, 3)) | {"round": ROUND + 2},
        ],
    )


def views() -> Striped:
    s = Striped(
        "views",
        "A round that another view runs again begins anew; what came in the view before is written over.",
        aggregators=[1],
    )
    own, two, three = (s.part(UNIT, {0: value}) for value in (1, 20, 30))
    s.convert("its lanes are converted", {0: own, 1: own})
    s.contribution("member 2's", GATHERED, two)
    s.contribution("member 3's of the second fragment", GATHERED, three, 3, index=1)
    old = s.total(two, three, own)
    s.contribution("member 2's: its sum", SUMMED, two, index=1, out=made(old))
    again: dict[str, Any] = {"header": {"view": VIEW + 1}}
    s.contribution("of a view to come", "view", two, **again)
    s.agent("the next view", view=VIEW + 1)
    s.contribution("of the view before", "view", three, 3)
    total, without_two = s.total(three, own), bits(1, 3)
    s.contribution(
        "member 3's, of a list without member 2",
        SUMMED,
        three,
        3,
        members=without_two,
        out=made(total),
        **again,
    )
    s.contribution("the second fragment's, of a list with it", GATHERED, three, 3, index=1, **again)
    return s.ends(
        sums=[(0, total, "made", ROUND, VIEW + 1), (1, old, "made")],
        places=[
            (0, (1, 3), total.rest, ROUND, VIEW + 1),
            (1, (3,), units(three), ROUND, VIEW + 1),
        ],
        counts=[(ROUND, 1, VIEW + 1)],
        messages=[s.told(), s.told(members=without_two) | {"view": VIEW + 1}],
    )


def widths() -> Striped:
    s = Striped(
        "another-width",
        "The next round has lanes of another width: each round takes its own.",
        aggregators=[1],
        listed=bits(2, 3),
        width_next=16,
    )
    of_next: dict[str, Any] = {"header": {"round": ROUND + 1}}
    narrow = s.part(UNIT, {0: 100})
    s.contribution("8 bits", GATHERED, narrow)
    s.contribution("8 bits in the next round", "malformed", narrow, **of_next)
    s.usual["width"] = 16
    wide, more = s.part(UNIT, {0: 1000, 719: -1}), s.part(UNIT + 5, {0: 1000, 719: 2})
    s.contribution("16 bits", "malformed", wide)
    s.contribution("16 bits in the next round", GATHERED, wide, **of_next)
    total = s.total(wide, more)
    s.contribution("and the sum", SUMMED, more, 3, out=made(total), **of_next)
    return s.ends(
        sums=[(0, total, "made", ROUND + 1)],
        places=[(0, (2,), units(narrow)), (0, (2, 3), total.rest, ROUND + 1)],
        counts=[(ROUND + 1, 1)],
        messages=[s.told(), s.told() | {"round": ROUND + 1}],
    )


SCENARIOS: tuple[Callable[[], Striped], ...] = (
    *(sum_i8, sum_i16, sum_i32, rounding, exact, dense_i8, dense_i16, dense_i32),
    *(not_finite, not_listed, places_i8, places_i16, places_i32, rounds, views, widths),
)
