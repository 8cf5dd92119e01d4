# SPDX-License-Identifier: Apache-2.0
"""What a Linux switch adds, the sums that it makes, and what it carries from one sum to a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.striped_reference import NOT_FINITE, carry
from tests.vectors.contributing import (
    UNIT,
    answered,
    bits,
    lacking,
    plus,
    units,
)
from tests.vectors.encode import Fields
from tests.vectors.scenario import ROUND, VIEW
from tests.vectors.switching import Switching, sum_made

GATHERED, SUMMED, ANSWERED = "gathered", "summed", "answered"
LEFT_OUT = "gathered left_out"


def _of(round_: int, view: int = VIEW) -> dict[str, Any]:
    return {"header": {"round": round_, "view": view}}


def _sum(width: int) -> Switching:
    s = Switching(
        f"sum-i{width}",
        "Three members' lanes under three exponents; the sum goes to all ports.",
        width=width,
    )
    most, last = 2 ** (width - 1) - 1, 11520 // width - 1
    one, two = s.part(UNIT, {0: 1, 2: most, last: -1}), s.part(UNIT + 3, {0: 5, last: -most - 1})
    three = s.part(UNIT - 1, {0: -7, 1: 1})
    total = s.total(one, two, three)
    s.contribution("member 2's: times 8", GATHERED, two)
    s.contribution("member 1's", GATHERED, one, 1)
    s.contribution("member 3's: halves, rounded down", SUMMED, three, 3, out=sum_made(total))
    return s.ends(places=[s.place((1, 2, 3), total.rest, total)])


def sum_i8() -> Switching:
    return _sum(8)


def sum_i16() -> Switching:
    return _sum(16)


def sum_i32() -> Switching:
    return _sum(32)


def _carried(width: int) -> Switching:
    s = Switching(
        f"remainders-i{width}",
        "Three rounds, each with what the one before has left over: of lanes of any size, under units that differ.",
        members=2,
        width=width,
        fragments=4,
    )
    former, before, seed = None, UNIT, 1
    places = []
    for round_, unit in ((ROUND, UNIT), (ROUND + 1, UNIT - 2), (ROUND + 2, UNIT + 1)):
        one, two = s.dense(unit + 9, seed), s.dense(unit + 1, seed + 1)
        rest: dict[str, Any] = {"index": 3, "unit": unit}
        carried = None
        if former is not None:
            rest |= {"number": VIEW, "behind": 1}
            carried = carry(former, before, unit, 2)
        total = s.total(one, two, unit=unit, carried=carried)
        s.contribution(f"round {round_}", GATHERED, one, 1, **rest, **_of(round_))
        s.contribution("its sum", SUMMED, two, **rest, **_of(round_), out=sum_made(total))
        places.append(s.place((1, 2), total.rest, total, round=round_, **rest))
        former, before, seed = total, unit, seed + 2
    return s.ends(places=places[1:])


def carried_i8() -> Switching:
    return _carried(8)


def carried_i16() -> Switching:
    return _carried(16)


def carried_i32() -> Switching:
    return _carried(32)


def by_hand() -> Switching:
    s = Switching(
        "remainders-by-hand",
        "A remainder comes into the next sum in that sum's units: doubled, or halved and rounded down.",
        members=2,
    )
    full = s.part(UNIT, {0: 127, 1: 127, 2: -2})
    s.contribution("member 1's", GATHERED, full, 1)
    #            254, 127, -3: by two, halves up
    first = s.part(UNIT + 1, {0: 127, 1: 64, 2: -1})
    s.contribution(
        "member 2's leaves -1 over in lanes 1 and 2",
        SUMMED,
        s.part(UNIT, {0: 127, 2: -1}),
        out=sum_made(first),
    )
    finer = {"unit": UNIT - 1, "number": VIEW, "behind": 1, **_of(ROUND + 1)}
    s.contribution("finer by one bit", GATHERED, s.part(UNIT - 1, {1: 100}), 1, **finer)
    #             98, -2, 3
    second = s.part(UNIT - 1, {1: 98, 2: -2, 3: 3})
    s.contribution(
        "-1 has become -2", SUMMED, s.part(UNIT - 1, {3: 3}), out=sum_made(second), **finer
    )
    coarser = {"unit": UNIT + 1, "number": VIEW, "behind": 2, **_of(ROUND + 2)}
    s.contribution("coarser by one bit, two rounds on", GATHERED, s.part(UNIT + 1), 1, **coarser)
    third = s.part(UNIT + 1, {1: -1, 2: -1})
    s.contribution("half of -1 is -1", SUMMED, s.part(UNIT + 1), out=sum_made(third), **coarser)
    left = s.part(0, {1: -1, 2: -1}).lanes
    return s.ends(
        places=[
            s.place((1, 2), left, first),
            s.place((1, 2), [], third, round=ROUND + 2, unit=UNIT + 1, number=VIEW, behind=2),
        ]
    )


def left_out() -> Switching:
    s = Switching(
        "remainders-left-out",
        "A remainder is left out where it is not there, or where the list has no room for it.",
        members=64,
        listed=bits(1, 2),
        fragments=9,
    )
    s.usual["fragments"] = 8
    far, near = s.part(UNIT + 50, {0: 127}), s.part(UNIT, {1: 3})
    total = s.total(far, near)
    for index in range(6):
        s.contribution(f"fragment {index}, member 1's", GATHERED, far, 1, index=index)
        s.contribution("member 2's leaves 3 over", SUMMED, near, index=index, out=sum_made(total))
    s.contribution("of fragment 6 there is no sum", GATHERED, far, 1, index=6)
    places = [s.place((1, 2), total.rest, total, index=index) for index in range(6)]
    places.append(s.place((1,), units(far), index=6))
    many = bits(*range(1, 34))
    lists: list[tuple[str, str, int, int]] = [
        ("61 below the sum's exponent: carried", GATHERED, bits(1, 2), total.exponent - 61),
        ("62 below: no room", LEFT_OUT, bits(1, 2), total.exponent - 62),
        ("32 members, 61 below: carried", GATHERED, bits(*range(1, 33)), total.exponent - 61),
        ("33 members, 57 below: carried", GATHERED, many, total.exponent - 57),
        ("33 members, 58 below: no room", LEFT_OUT, many, total.exponent - 58),
        ("64 members: no room in any case", LEFT_OUT, bits(*range(1, 65)), UNIT),
        ("of a round that was not finished", LEFT_OUT, bits(1, 2), UNIT),
        ("of a round of which nothing came", LEFT_OUT, bits(1, 2), UNIT),
    ]
    for index, (say, counters, members, unit) in enumerate(lists):
        one = s.part(unit, {5: 1})
        fields: Fields = {"index": index, "members": members, "unit": unit}
        fields |= {"number": VIEW, "behind": 1}
        s.contribution(say, counters, one, 1, **fields, **_of(ROUND + 1))
        came = units(one, unit)
        if counters == GATHERED:
            carried = carry(total, UNIT, unit, members.bit_count())
            assert carried is not None and carried[1] == 3 << UNIT - unit
            came = plus(came, carried)
        places.append(s.place((1,), came, round=ROUND + 1, **fields))
    other: Fields = {"index": 3, "fragments": 9, "number": VIEW, "behind": 2}
    s.contribution("of another size", LEFT_OUT, near, 1, **other, **_of(ROUND + 2))
    places = [row for row in places if (row["index"], row["round"]) != (3, ROUND + 1)]
    return s.ends(places=[*places, s.place((1,), units(near), round=ROUND + 2, **other)])


def run_again() -> Switching:
    s = Switching(
        "run-again",
        "A round that another view runs again takes the same remainder, and nothing of what it was before.",
        members=2,
    )
    one, two = s.part(UNIT, {0: 127}), s.part(UNIT, {0: 126, 1: 1})
    first = s.total(one, two)
    s.contribution("member 1's", GATHERED, one, 1)
    s.contribution("member 2's", SUMMED, two, out=sum_made(first))
    rest: Fields = {"number": VIEW, "behind": 1}
    s.contribution("the next round", GATHERED, one, 1, **rest, **_of(ROUND + 1))
    s.agent("the next view", view=VIEW + 1)
    s.contribution("of the view before", "view", two, **rest, **_of(ROUND + 1))
    again = _of(ROUND + 1, VIEW + 1)
    s.contribution("the round once more", GATHERED, two, **rest, **again)
    second = s.total(one, two, carried=carry(first, UNIT, UNIT, 2))
    s.contribution("its sum", SUMMED, one, 1, **rest, **again, out=sum_made(second))
    unit: Fields = {"unit": UNIT - 3}
    rest_of_new: Fields = {"number": VIEW + 1, "behind": 1} | unit
    third = s.total(one, two, carried=carry(second, UNIT, UNIT - 3, 2), **unit)
    later = _of(ROUND + 2, VIEW + 1)
    s.contribution("the round after it", GATHERED, one, 1, **rest_of_new, **later)
    s.contribution("its sum", SUMMED, two, **rest_of_new, **later, out=sum_made(third))
    old = _of(ROUND, VIEW + 1)
    s.contribution("of a round older than both places", "round", one, 1, **old)
    s.ask("a question for it", "round", **old)
    between = {"number": VIEW + 1, "behind": 1}
    s.contribution(
        "the place of the round before the last is never taken for its own successor",
        GATHERED,
        two,
        **between,
        **_of(ROUND + 3, VIEW + 1),
    )
    fourth = plus(units(two), carry(third, UNIT - 3, UNIT, 2) or [])
    view = {"view": VIEW + 1}
    return s.ends(
        places=[
            s.place((1, 2), third.rest, third, round=ROUND + 2, **view, **rest_of_new),
            s.place((2,), fourth, round=ROUND + 3, **view, **between),
        ],
        messages=[{"kind": "view", "view": VIEW}],
    )


def dropped() -> Switching:
    s = Switching(
        "dropped-rounds",
        "A round that is dropped takes the place of the older one, and never that whose remainder it carries.",
        members=2,
    )
    one, two = s.part(UNIT, {0: 127}), s.part(UNIT, {0: 126})
    first = s.total(one, two)
    s.contribution("member 1's", GATHERED, one, 1)
    s.contribution("member 2's", SUMMED, two, out=sum_made(first))
    for behind in (1, 2, 3):
        fields = {"number": VIEW, "behind": behind, **_of(ROUND + behind)}
        s.contribution(f"{behind} rounds on, member 1's", GATHERED, one, 1, **fields)
    s.contribution(
        "of a round that was dropped", "round", two, number=VIEW, behind=2, **_of(ROUND + 2)
    )
    last = s.total(one, two, carried=carry(first, UNIT, UNIT, 2))
    s.contribution("the sum of the last one", SUMMED, two, out=sum_made(last), **fields)
    return s.ends(
        places=[
            s.place((1, 2), first.rest, first),
            s.place((1, 2), last.rest, last, round=ROUND + 3, number=VIEW, behind=3),
        ]
    )


def without() -> Switching:
    s = Switching(
        "without-remainders",
        "Each round takes the older place. A round that names one that is not there gets no remainder.",
        members=2,
    )
    one, two = s.part(UNIT, {0: 127}), s.part(UNIT, {0: 127, 1: 1})
    total = s.total(one, two)
    for at in (0, 1, 2):
        s.contribution(f"round {ROUND + at}, member 1's", GATHERED, one, 1, **_of(ROUND + at))
        s.contribution("its sum", SUMMED, two, **_of(ROUND + at), out=sum_made(total))
    s.ask("for the first round's sum", "round", **_of(ROUND))
    s.ask("for the second one's", ANSWERED, **_of(ROUND + 1), out=answered(total))
    rest: Fields = {"number": VIEW, "behind": 3}
    s.contribution("names the first round", LEFT_OUT, one, 1, **rest, **_of(ROUND + 3))
    return s.ends(
        places=[
            s.place((1, 2), total.rest, total, round=ROUND + 2),
            s.place((1,), units(one), round=ROUND + 3, **rest),
        ]
    )


def not_finite() -> Switching:
    s = Switching(
        "not-finite",
        "A sum that is not finite leaves nothing over, and is the end of a remainder that it was given.",
        members=2,
        fragments=2,
    )
    one, two, nan = s.part(UNIT, {0: 127}), s.part(UNIT, {0: 126}), s.part(NOT_FINITE)
    first, bad = s.total(one, two), s.total(one, nan)
    much, far = s.part(120, {0: 127}), {"unit": 70, "index": 1}
    too_much = s.total(much, much, unit=70)
    s.contribution("member 1's", GATHERED, one, 1)
    s.contribution("member 2's", SUMMED, two, out=sum_made(first))
    s.contribution("a sum", GATHERED, much, 1, **far)
    s.contribution(
        "that would need an exponent of 121", SUMMED, much, **far, out=sum_made(too_much)
    )
    rest: Fields = {"number": VIEW, "behind": 1}
    s.contribution("not finite", GATHERED, nan, 1, **rest, **_of(ROUND + 1))
    s.contribution("nor is the sum", SUMMED, one, **rest, **_of(ROUND + 1), out=sum_made(bad))
    s.contribution("after it: nothing is carried", GATHERED, one, 1, **rest, **_of(ROUND + 2))
    third = s.total(one, two, carried=carry(bad, UNIT, UNIT, 2))
    s.contribution("the sum", SUMMED, two, **rest, **_of(ROUND + 2), out=sum_made(third))
    return s.ends(
        places=[
            s.place((1, 2), [], bad, round=ROUND + 1, **rest),
            s.place((1, 2), third.rest, third, round=ROUND + 2, **rest),
            s.place((1, 2), [], too_much, **far),
        ]
    )


def asked() -> Switching:
    s = Switching(
        "asks",
        "A question is answered with the sum, or with the members that are missing.",
        fragments=2,
    )
    one, two, three = (s.part(UNIT, {0: value}) for value in (100, 20, 30))
    s.ask("nothing has come", ANSWERED, out=lacking(bits(1, 2, 3), behind=0))
    s.again("the same question", "replayed")
    s.contribution("member 3's", GATHERED, three, 3)
    s.ask("all but member 3", ANSWERED, 1, out=lacking(bits(1, 2), behind=0), behind=7)
    s.contribution("member 2's", GATHERED, two)
    total = s.total(one, two, three)
    s.contribution("member 1's", SUMMED, one, 1, out=sum_made(total))
    s.ask("for the sum", ANSWERED, out=answered(total))
    s.ask("for the other fragment", ANSWERED, 3, index=1, out=lacking(bits(1, 2, 3)))
    s.ask("of another list", "malformed", members=bits(1, 2))
    s.ask("of another unit", "malformed", unit=UNIT - 1)
    s.ask("of another size", "malformed", fragments=1)
    s.ask("of an empty list", "malformed", members=0)
    s.ask("of a list with a member that there is not", "malformed", members=bits(1, 4))
    s.ask("of another width", "malformed", width=16)
    s.ask("behind the end", "range", index=2)
    s.ask("with a number far ahead", ANSWERED, number=500, out=answered(total))
    s.ask("with one that it has overtaken", ANSWERED, number=468, out=answered(total))
    s.ask("with one too far behind", "replayed", number=467)
    s.ask("of a round to come", ANSWERED, 1, out=lacking(bits(1, 2, 3)), **_of(ROUND + 9))
    return s.ends(places=[s.place((1, 2, 3), total.rest, total)])


SCENARIOS: tuple[Callable[[], Switching], ...] = (
    *(sum_i8, sum_i16, sum_i32, carried_i8, carried_i16, carried_i32, by_hand),
    *(left_out, run_again, dropped, without, not_finite, asked),
)
