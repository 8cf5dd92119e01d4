# SPDX-License-Identifier: Apache-2.0
"""Frames of stripes that a member refuses, and frames of a network with a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.vectors.contributing import GROUP, UNIT, answered, bits, clocked, lacking, made, units
from tests.vectors.encode import ANSWER, CHANNEL_5, Fields
from tests.vectors.scenario import ROUND, VIEW, mac
from tests.vectors.striping import BANK, Striped

GATHERED, SUMMED, ANSWERED, STORED = "gathered", "summed", "answered", "stored"
KEY = bytes(range(16))
OTHER_KEY = bytes(range(1, 17))


def duplicates() -> Striped:
    s = Striped("duplicates", "A contribution counts once, before the sum is made and after.")
    own, two, three = (s.part(UNIT, {0: value}) for value in (1, 2, 3))
    s.convert("its lanes are converted", {0: own})
    s.contribution("member 2's", GATHERED, two)
    s.again("the same frame", "duplicate", heard=False)
    s.contribution("other lanes of the same fragment", "duplicate", three)
    total = s.total(own, two, three)
    s.contribution("member 3's", SUMMED, three, 3, out=made(total))
    s.again("the same frame", "duplicate")
    s.contribution("member 2's, sent again", "duplicate", two)
    return s.ends(sums=[(0, total, "made")], places=[(0, (1, 2, 3), total.rest)])


def differing() -> Striped:
    s = Striped(
        "contributions-that-differ",
        "List, size and unit are those of a fragment's first contribution.",
        members=4,
        aggregators=[1, 2],
        fragments=4,
        left=[4],
    )
    own, two, three = (s.part(UNIT, {0: value}) for value in (1, 2, 3))
    s.convert("its lanes are converted", {0: own, 1: own})
    s.contribution("member 2's", GATHERED, two)
    wrong: list[tuple[str, Fields]] = [
        ("another list", {"members": bits(2, 3)}),
        ("another unit", {"unit": UNIT - 1}),
        ("another size", {"fragments": 5}),
    ]
    for say, fields in wrong:
        s.contribution(say, "malformed", three, 3, heard=False, **fields)
    other: Fields = {"index": 1, "unit": UNIT - 1, "fragments": 4}
    s.contribution("another unit for another fragment", GATHERED, three, 3, **other)
    total = s.total(own, two, three)
    s.contribution("as the first one", SUMMED, three, 3, out=made(total))
    return s.ends(
        sums=[(0, total, "made")],
        places=[(0, (1, 2, 3), total.rest), (1, (3,), units(three, UNIT - 1))],
    )


def refused() -> Striped:
    s = Striped("bad-contributions", "Contributions that cannot be.", members=4, left=[4], number=2)
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("a list without the sender", "malformed", {"members": bits(2, 3)}),
        ("a list with a member that has left", "malformed", {"members": bits(1, 2, 3, 4)}),
        ("a list with a member that there is not", "malformed", {"members": bits(1, 2, 64)}),
        ("an empty list", "malformed", {"members": 0}),
        ("16 bits", "malformed", {"width": 16}),
        ("raw bytes", "malformed", {"width": 0}),
        ("24 bits", "malformed", {"width": 24}),
        ("an exponent 51 above the unit", "shift", {"exponent": UNIT + 51}),
        ("of the stripe before", "range", {"index": 0}),
        ("of the stripe behind", "range", {"index": 2}),
        ("behind the end", "range", {"index": 3}),
        ("of a vector that has no room", "range", {"index": 5, "fragments": 15}),
        ("of a vector without fragments", "range", {"fragments": 0}),
        ("to everybody", "astray", {"to": GROUP}),
        ("to another host", "astray", {"to": mac(3)}),
        ("of a round before", "round", {"header": {"round": ROUND - 1}}),
        ("of a round to come", "round", {"header": {"round": ROUND + 2}}),
        ("of the view before", "view", {"header": {"view": VIEW - 1}}),
        ("of the view to come", "view", {"header": {"view": VIEW + 1}}),
        ("of another channel", "mode", {"header": {"flags": CHANNEL_5}}),
        ("of a member that has left", "stranger", {"sender": 4, "source": mac(4)}),
        ("of a member that there is not", "stranger", {"sender": 65}),
        ("from another address", "stranger", {"source": mac(3)}),
        ("of this host's own number", "echo", {"sender": 2}),
        ("a byte too short", "truncated", {"cut": 1}),
        ("a length without the payload", "truncated", {"header": {"length": 56}}),
    ]
    sender = {"sender": 1, "index": 1}
    for say, counter, fields in wrong:
        s.contribution(say, counter, s.part(UNIT), heard=False, **{**sender, **fields})
    s.contribution("a sound one", GATHERED, s.part(UNIT + 50, {0: 1}), 3, index=1)
    place = (1, (3,), units(s.part(UNIT + 50, {0: 1})))
    return s.ends(places=[place], counts=[])


def other_rounds() -> Striped:
    s = Striped(
        "rounds-of-other-exchanges",
        "In a round that has no aggregators no frame of stripes counts.",
        aggregators_next=[],
    )
    one, of_next = s.part(UNIT), {"header": {"round": ROUND + 1}}
    s.contribution("a contribution", "mode", one, **of_next)
    s.sum_("a sum", "mode", one, **of_next)
    s.ask("a question", "mode", **of_next)
    s.lacking("an answer", "mode", **of_next)
    return s.ends(counts=[], messages=[])


def no_aggregator() -> Striped:
    s = Striped(
        "no-aggregator",
        "A host without a share of the batch has no stripe: it takes sums only.",
        aggregators=[2, 3],
        fragments=2,
    )
    one = s.part(UNIT, {0: 1})
    s.contribution("a contribution", "range", one)
    s.ask("a question", "range")
    s.sum_("a sum", STORED, one, index=0)
    return s.ends(sums=[(0, one, "taken")], messages=[])


def _keyed(name: str, why: str, **more: Any) -> Striped:
    return Striped(name, why, key=KEY, **more)


def signed() -> Striped:
    s = _keyed(
        "signed",
        "With a key frames have tags, and what the program sends has numbers of its own, in turn.",
        fragments=6,
        aggregators=[1, 2, 3],
        sent={2: 2},
    )
    own, two, three = (s.part(UNIT, {0: value}) for value in (100, 101, 102))
    s.convert("its lanes are converted", dict.fromkeys(range(6), own))
    s.contribution("member 2's", GATHERED, two)
    s.ask("member 3 is missing", ANSWERED, out=lacking(bits(3)))
    total = s.total(own, two, three)
    s.contribution("member 3's", SUMMED, three, 3, out=made(total))
    s.ask("for the sum", ANSWERED, 3, out=answered(total))
    way = {"header": {"flags": ANSWER}}
    s.sum_(
        "a sum that a program has sent", "stored clocked", two, index=3, out=clocked(2, own), **way
    )
    return s.ends(
        sums=[(0, total, "made"), (3, two, "taken")],
        places=[(0, (1, 2, 3), total.rest)],
        counts=[(ROUND, 2)],
        sent=[(BANK, 2, ROUND, 3, 0)],
        windows=[(2, 2, 5), (3, 4, 0)],
    )


def forged() -> Striped:
    s = _keyed("forged", "A frame that the view's key has not signed changes nothing.")
    one = s.part(UNIT, {0: 1})
    s.convert("its lanes are converted", {0: one})
    for kind in ("contribution", "ask", "sum", "lacking"):
        index = {"sum": 1, "lacking": 1}.get(kind, 0)
        for say, more in (
            ("no tag", {"header": {"tag": 0}}),
            ("another key's", {"key": OTHER_KEY}),
        ):
            s.give(kind, f"{kind}, {say}", "forged", one, 2, index=index, heard=False, **more)
    s.contribution("one that is cut", "truncated", one, cut=4, header={"sequence": 4000})
    s.contribution("a sound one", GATHERED, one)
    return s.ends(places=[(0, (2,), units(one))], counts=[], windows=[(2, 10, 0)])


def replayed() -> Striped:
    s = _keyed(
        "replayed",
        "A number 1024 or more behind the highest of its way is refused; each way has numbers of its own.",
    )
    one = s.part(UNIT, {0: 1})

    def comes(say: str, counters: str, number: int, sender: int = 2, **more: Any) -> None:
        flags = {"flags": more.pop("flags", 0)}
        s.contribution(say, counters, one, sender, header={"sequence": number, **flags}, **more)

    comes("number 2000", GATHERED, 2000)
    comes("977 is near enough", "duplicate", 977)
    comes("976 is not", "replayed", 976)
    comes("976 on the other way", "duplicate", 976, flags=ANSWER)
    comes(
        "a higher one that is refused for its list moves the window",
        "malformed",
        3000,
        members=bits(1, 3),
    )
    comes("2000 once more", "duplicate", 2000)
    comes("1976 no more", "replayed", 1976)
    comes("a forged one does not move it", "forged", 9000, key=OTHER_KEY)
    comes("member 3 has another window", "unready", 1, 3)
    return s.ends(places=[(0, (2,), units(one))], counts=[], windows=[(2, 3000, 976), (3, 1, 0)])


SCENARIOS: tuple[Callable[[], Striped], ...] = (
    *(duplicates, differing, refused, other_rounds, no_aggregator, signed, forged, replayed),
)
