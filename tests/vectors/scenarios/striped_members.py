# SPDX-License-Identifier: Apache-2.0
"""Sums that come to a member of stripes, what they send by themselves, and questions for sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.striped_reference import NOT_FINITE
from tests.vectors.contributing import (
    GROUP,
    UNIT,
    answered,
    bits,
    clocked,
    lacking,
    made,
)
from tests.vectors.scenario import ROUND, VIEW
from tests.vectors.striping import BANK, OFFER, Striped, next_ones

STORED, CLOCKED = "stored", "stored clocked"
GATHERED, SUMMED, ANSWERED = "gathered", "summed", "answered"


def taken() -> Striped:
    s = Striped(
        "sums-taken",
        "Sums of the other stripes are stored, each once; the last one of all is told.",
        fragments=6,
        aggregators=[1, 2, 3],
    )
    one, two = s.part(UNIT + 4, {0: 5, 1439: -128}), s.part(UNIT + 1, {3: -1})
    nan, own, other = s.part(NOT_FINITE), s.part(UNIT, {0: 1}), s.part(UNIT, {0: 2})
    s.convert("its lanes are converted", {0: own, 1: own})
    s.sum_("of fragment 3", STORED, one, index=3, heard=True)
    s.again("the same sum", "duplicate")
    s.sum_("of fragment 5, member 3's", STORED, two, 3, index=5)
    s.sum_("to this host alone, as an answer is", STORED, nan, index=2, to=s.address)
    s.sum_("of member 3's stripe, by member 2", "range", one, index=4)
    s.sum_("of this host's stripe, by member 2", "range", one, index=1)
    s.sum_("behind the end", "range", one, index=6)
    s.sum_("of the next round", STORED, two, index=2, header={"round": ROUND + 1})
    s.sum_("of the round before", "round", two, index=2, header={"round": ROUND - 1})
    s.sum_("of fragment 4", STORED, two, 3, index=4)
    total = s.total(own, other, other)
    for index in (0, 1):
        s.contribution(f"to fragment {index}", GATHERED, other, index=index)
        s.contribution("its sum", SUMMED, other, 3, index=index, out=made(total))
    s.sum_("of a stripe that is whole", "duplicate", one, 3, index=4)
    return s.ends(
        sums=[
            *((0, total, "made"), (1, total, "made"), (2, nan, "taken"), (3, one, "taken")),
            *((4, two, "taken"), (5, two, "taken"), (2, two, "taken", ROUND + 1)),
        ],
        places=[(at, (1, 2, 3), total.rest) for at in (0, 1)],
        counts=[(ROUND, 6), (ROUND + 1, 1)],
        messages=[s.told(), s.counted(6)],
    )


def alone() -> Striped:
    s = Striped(
        "alone-on-the-list",
        "A contributor that is alone sends its lanes as sums of all stripes, and the others take them.",
        listed=bits(2),
    )
    one = s.part(UNIT, {0: 5})
    s.sum_("of this host's stripe", STORED, one, index=0)
    s.sum_("of member 3's", STORED, one, index=2)
    s.sum_("by another member", "range", one, 3, index=1)
    s.sum_("of a list with two", "range", one, index=0, members=bits(2, 3))
    s.sum_("behind the end", "range", one, index=2, fragments=2)
    s.sum_("behind the room for vectors", "range", one, index=3, fragments=4)
    s.sum_("the last one", STORED, one, index=1)
    return s.ends(
        sums=[(at, one, "taken") for at in range(3)],
        counts=[(ROUND, 3)],
        messages=[s.counted(3)],
    )


def alone_here() -> Striped:
    s = Striped(
        "alone-here",
        "A contributor that is alone is asked for all stripes, and answers from its own lanes.",
        listed=bits(1),
    )
    own = s.part(UNIT + 9, {0: 5, 7: -5})
    s.ask("before they are converted", ANSWERED, index=2, out=lacking(bits(1)))
    s.convert("of fragments 1 and 2", {1: own, 2: own})
    s.ask("for one of another's stripe", ANSWERED, index=2, out=answered(own))
    s.ask("for one that is not converted", ANSWERED, 3, index=0, out=lacking(bits(1)))
    s.ask("behind the end", "range", index=3)
    s.ask("of a list that is not this host's alone", "range", index=2, members=bits(2))
    return s.ends(counts=[], messages=[])


def asked() -> Striped:
    s = Striped(
        "asks",
        "An aggregator answers a question for its stripe: with the sum, or with the members that are missing.",
        fragments=6,
        aggregators=[1, 2, 3],
    )
    own, two, three = (s.part(UNIT, {0: value}) for value in (100, 20, 30))
    s.ask("nothing has come", ANSWERED, out=lacking(bits(1, 2, 3)), heard=False)
    s.again("the same question", "replayed")
    s.convert("its lanes are converted", {0: own})
    s.ask("the own lanes are there", ANSWERED, out=lacking(bits(2, 3)))
    s.contribution("member 3's", GATHERED, three, 3)
    s.ask("member 2 is missing", ANSWERED, 3, out=lacking(bits(2)))
    s.ask("of the other fragment all are", ANSWERED, 3, index=1, out=lacking(bits(1, 2, 3)))
    total = s.total(own, two, three)
    s.contribution("member 2's", SUMMED, two, out=made(total))
    s.ask("for the sum", ANSWERED, out=answered(total))
    s.ask("and again, by another one", ANSWERED, 3, out=answered(total))
    s.ask("with a number that has been", "replayed", number=1)
    s.ask("with a number far ahead", ANSWERED, number=500, out=answered(total))
    s.ask("with one that it has overtaken", ANSWERED, number=468, out=answered(total))
    s.ask("with one too far behind", "replayed", number=467)
    s.ask("with none", "replayed", number=0)
    s.ask("of another's stripe", "range", index=2)
    s.ask("behind the end", "range", index=6)
    of_next = {"header": {"round": ROUND + 1}}
    nobody = lacking(bits(1, 2, 3))
    s.ask("of the next round", ANSWERED, number=501, out=nobody, **of_next)
    s.ask("of the round before", "round", header={"round": ROUND - 1})
    s.ask("to everybody", "astray", number=502, to=GROUP)
    return s.ends(sums=[(0, total, "made")], places=[(0, (1, 2, 3), total.rest)])


def lacking_() -> Striped:
    s = Striped(
        "lacking", "The answer that there is no sum goes up to the agent, if it is for this host."
    )
    s.lacking("for this host", "control", members=bits(1), index=1, verdict="pass")
    s.lacking("for another one", "astray", members=bits(1), index=1, to=GROUP)
    s.lacking("of an old round", "round", index=1, header={"round": ROUND - 1})
    return s.ends(counts=[], messages=[])


def unready() -> Striped:
    s = Striped(
        "own-lanes-not-ready",
        "The last contribution is refused, and changes nothing, until the own lanes can be added.",
    )
    two, three, own = s.part(UNIT, {0: 2}), s.part(UNIT, {0: 3}), s.part(UNIT + 1, {0: 4})
    s.contribution("member 2's", GATHERED, two)
    s.contribution("member 3's: nothing is converted", "unready", three, 3, heard=False)
    s.convert("lanes of another conversion", {0: own}, conversion=OFFER + 1)
    s.again("member 3's once more", "unready")
    s.convert("an exponent too far above the unit", {0: s.part(UNIT + 51, {0: 1})})
    s.again("member 3's once more", "unready")
    s.ask("all but the own lanes and member 3's", ANSWERED, out=lacking(bits(1, 3)))
    s.convert("the lanes that were offered", {0: own})
    total = s.total(two, three, own)
    s.contribution("now it is added", SUMMED, three, 3, out=made(total))
    return s.ends(sums=[(0, total, "made")], places=[(0, (1, 2, 3), total.rest)])


def clock() -> Striped:
    s = Striped(
        "self-clocked",
        "A sum that comes becomes the next own contribution to its stripe.",
        fragments=9,
        aggregators=[1, 2, 3],
        sent={2: 4, 3: 8},
        rest=[[0, 0], [VIEW, 2]],
    )
    sums = {at: s.part(UNIT + at, {at: at}) for at in range(9)}
    own = {at: s.part(UNIT - at, {0: at, 1439: -at}) for at in range(3, 9)}
    s.convert("its lanes are converted", own)
    s.sum_("of fragment 3", CLOCKED, sums[3], index=3, out=clocked(4, own[4]), heard=True)
    s.again("the same sum sends nothing", "duplicate")
    s.sum_("of fragment 5, before that of 4", CLOCKED, sums[5], index=5, out=clocked(5, own[5]))
    s.sum_("the stripe ends", STORED, sums[4], index=4)
    s.sum_("of member 3's stripe", CLOCKED, sums[6], 3, index=6, out=clocked(8, own[8]))
    s.sum_("that one ends, too", STORED, sums[7], 3, index=7)
    return s.ends(
        sums=[(at, sums[at], "taken") for at in range(3, 8)],
        counts=[(ROUND, 5)],
        sent=[(BANK, 2, ROUND, 6, 0), (BANK, 3, ROUND, 9, 0)],
        messages=[],
    )


def not_clocked() -> Striped:
    s = Striped(
        "not-self-clocked",
        "What keeps a sum from becoming a contribution: the agent sends that one.",
        fragments=20,
        aggregators=[1, 2],
        sent={2: 11},
    )
    index = iter(range(10, 20))

    def comes(say: str, counters: str = STORED, **more: Any) -> None:
        s.sum_(say, counters, s.part(UNIT), index=next(index), **more)

    own = s.part(UNIT, {0: 9})
    comes("the next fragment is not converted")
    s.convert("lanes of another conversion", {11: own}, conversion=OFFER + 1)
    comes("nor by what was offered")
    s.convert("the lanes that were offered", {11: own, 12: s.part(UNIT + 51), 13: own})
    comes("this host is not on the list", members=bits(2, 3))
    s.agent("two sums are to send nothing", sent=next_ones({2: 11}, swallow=2))
    comes("the first")
    comes("the second")
    comes("the third", CLOCKED, out=clocked(11, own))
    comes("an exponent too far above the unit: nothing goes out, and the fragment is passed")
    s.agent("the word is of another round", sent=next_ones({2: 13}, ROUND + 2))
    comes("of this round")
    return s.ends(
        sums=[(at, s.part(UNIT), "taken") for at in range(10, 18)],
        counts=[(ROUND, 8)],
        sent=[(BANK, 2, ROUND + 2, 13, 0)],
        messages=[],
    )


def tells() -> Striped:
    s = Striped(
        "counts",
        "With a clock of 8 the agent is told after eight sums, and near the end after four.",
        fragments=14,
        aggregators=[2],
        clock=8,
    )
    one = s.part(UNIT, {0: 1})
    for index in range(14):
        s.sum_(f"of fragment {index}", STORED, one, index=index)
    return s.ends(
        sums=[(at, one, "taken") for at in range(14)],
        counts=[(ROUND, 14)],
        messages=[s.counted(8), s.counted(12), s.counted(14)],
    )


def of_a_switch() -> Striped:
    s = Striped(
        "a-switch-adds",
        "Number 0 aggregates all; a contribution names the round whose remainders the switch adds.",
        fragments=3,
        aggregators=[0],
        aggregators_next=[1, 2, 3],
        switch=1,
        sent={0: 1},
        rest=[[0, 0], [VIEW - 1, 4]],
    )
    own, one = {at: s.part(UNIT, {0: at}) for at in range(3)}, s.part(UNIT, {5: 5})
    s.convert("its lanes are converted", own)
    said = {"number": VIEW - 1, "behind": 4}
    s.sum_("of fragment 2", CLOCKED, one, 0, index=2, out=clocked(1, own[1], **said))
    s.sum_("of fragment 0", CLOCKED, one, 0, index=0, out=clocked(2, own[2], **said))
    s.sum_("a member's", "range", one, index=1)
    s.contribution("a member's contribution to this host", "range", one)
    s.sum_("from a member's address", "stranger", one, 0, index=1, source="02:00:00:00:00:02")
    s.lacking("of the switch", "control", 0, index=1, members=bits(1), verdict="pass")
    s.sum_("of fragment 1", STORED, one, 0, index=1)
    next_: dict[str, Any] = {"header": {"round": ROUND + 1}}
    s.sum_("of a round that it does not add", "stranger", one, 0, index=1, **next_)
    return s.ends(
        sums=[(at, one, "taken") for at in range(3)],
        counts=[(ROUND, 3)],
        sent=[(BANK, 0, ROUND, 3, 0)],
        messages=[s.counted(3)],
    )


def no_switch() -> Striped:
    s = Striped(
        "no-switch",
        "A host that was not told to believe a switch takes nothing of number 0.",
        aggregators=[0],
    )
    s.sum_("a sum", "stranger", s.part(UNIT), 0, index=0)
    s.lacking("an answer", "stranger", 0, index=0)
    return s.ends(counts=[], messages=[])


SCENARIOS: tuple[Callable[[], Striped], ...] = (
    *(taken, alone, alone_here, asked, lacking_, unready),
    *(clock, not_clocked, tells, of_a_switch, no_switch),
)
