# SPDX-License-Identifier: Apache-2.0
"""Frames that a Linux switch refuses, or leaves to the bridge, and frames of a network with a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.vectors.contributing import GROUP, UNIT, answered, bits, lacking, units
from tests.vectors.encode import ANSWER, CHANNEL_5, Fields
from tests.vectors.scenario import NETWORK, ROUND, VIEW, mac
from tests.vectors.switching import Switching, sum_made

GATHERED, SUMMED, ANSWERED = "gathered", "summed", "answered"
KEY = bytes(range(16))
OTHER_KEY = bytes(range(1, 17))


def duplicates() -> Switching:
    s = Switching("duplicates", "A contribution counts once, before the sum is made and after.")
    one, two, three = (s.part(UNIT, {0: value}) for value in (1, 2, 3))
    s.contribution("member 2's", GATHERED, two)
    s.again("the same frame", "duplicate")
    s.contribution("other lanes of the same fragment", "duplicate", three)
    s.contribution("member 1's", GATHERED, one, 1)
    total = s.total(one, two, three)
    s.contribution("member 3's", SUMMED, three, 3, out=sum_made(total))
    s.again("the same frame", "duplicate")
    s.contribution("member 2's, of another unit", "duplicate", two, unit=UNIT - 1)
    return s.ends(places=[s.place((1, 2, 3), total.rest, total)])


def differing() -> Switching:
    s = Switching(
        "contributions-that-differ",
        "List, size, unit and the round of the remainder are those of a fragment's first contribution.",
        fragments=2,
    )
    s.usual["fragments"] = 1
    one, two, three = (s.part(UNIT, {0: value}) for value in (1, 2, 3))
    rest: Fields = {"number": VIEW - 1, "behind": 3}
    s.contribution("member 2's", "gathered left_out", two, **rest)
    wrong: list[tuple[str, Fields]] = [
        ("another list", {"members": bits(2, 3)}),
        ("another unit", {"unit": UNIT - 1}),
        ("another size", {"fragments": 2}),
        ("another view of the remainder's round", {"number": VIEW}),
        ("another round", {"behind": 2}),
        ("no remainder", {"number": 0, "behind": 0}),
    ]
    for say, fields in wrong:
        s.contribution(say, "malformed", three, 3, **rest | fields)
    total = s.total(one, two, three)
    s.contribution("as the first one", GATHERED, three, 3, **rest)
    s.contribution("member 1's", SUMMED, one, 1, **rest, out=sum_made(total))
    said = {"members": bits(1, 2, 3), "fragments": 1, "unit": UNIT, **rest}
    who = {"view": VIEW, "round": ROUND, "index": 0, "sender": 3}
    differs = {"kind": "differs", **who, "first": said, "refused": said | {"members": bits(2, 3)}}
    return s.ends(places=[s.place((1, 2, 3), total.rest, total, **rest)], messages=[differs])


def refused() -> Switching:
    s = Switching(
        "bad-contributions", "Contributions that cannot be.", members=4, left=[4], fragments=3
    )
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("a list without the sender", "malformed", {"members": bits(1, 3)}),
        ("a list with a member that has left", "malformed", {"members": bits(1, 2, 3, 4)}),
        ("a list with a member that there is not", "malformed", {"members": bits(1, 2, 64)}),
        ("an empty list", "malformed", {"members": 0}),
        ("16 bits", "malformed", {"width": 16}),
        ("raw bytes", "malformed", {"width": 0}),
        ("a remainder of a round before all", "malformed", {"number": 1, "behind": ROUND}),
        ("a remainder of a view to come", "malformed", {"number": VIEW + 1, "behind": 1}),
        ("an exponent 51 above the unit", "shift", {"exponent": UNIT + 51}),
        ("behind the end", "range", {"index": 3}),
        ("of a vector of 4 fragments", "range", {"fragments": 4}),
        ("of one of 9", "range", {"fragments": 9}),
        ("of one of 5: that is not told", "range", {"fragments": 5}),
        ("of the view before", "view", {"header": {"view": VIEW - 1}}),
        ("and once more: told once", "view", {"header": {"view": VIEW - 1}}),
        ("of the view to come", "view", {"header": {"view": VIEW + 1}}),
        ("of a channel", "mode", {"header": {"flags": CHANNEL_5}}),
        ("of a member that has left", "stranger", {"sender": 4, "source": mac(4)}),
        ("of a member that there is not", "stranger", {"sender": 65}),
        ("of the switch itself", "stranger", {"sender": 0}),
        ("from another address", "stranger", {"source": mac(3)}),
        ("a byte too short", "truncated", {"cut": 1}),
        ("a length without the payload", "truncated", {"header": {"length": 56}}),
    ]
    for say, counter, fields in wrong:
        s.contribution(say, counter, s.part(UNIT), **{"sender": 2, **fields})
    s.contribution("a sound one", GATHERED, s.part(UNIT + 50, {0: 1}), 3, index=2)
    place = s.place((3,), units(s.part(UNIT + 50, {0: 1})), index=2)
    messages: list[dict[str, Any]] = [
        *({"kind": "size", "fragments": fragments} for fragments in (4, 9)),
        *({"kind": "view", "view": view} for view in (VIEW - 1, VIEW + 1)),
    ]
    return s.ends(places=[place], messages=messages)


def passed() -> Switching:
    s = Switching("other-frames", "What is not for the switch passes to the bridge, uncounted.")
    one = s.part(UNIT)
    for say, more in (
        ("to a member", {"to": mac(1)}),
        ("to everybody", {"to": GROUP}),
        ("of another network", {"header": {"network": NETWORK + 1}}),
        ("of another version", {"header": {"version": 2}}),
    ):
        fields: dict[str, Any] = more
        s.contribution(f"a contribution {say}", "", one, verdict="pass", **fields)
    to: dict[str, Any] = {"to": s.address, "verdict": "pass"}
    s.give("sum", "a sum to the switch", "", one, 2, **to)
    s.give("lacking", "the answer that there is none", "", one, 2, **to)
    return s.ends()


def disabled() -> Switching:
    s = Switching("no-view", "Before a view is in force nothing is added.", enabled=0)
    s.contribution("a contribution", "disabled", s.part(UNIT))
    s.ask("a question", "disabled")
    to: dict[str, Any] = {"to": mac(1), "verdict": "pass"}
    s.contribution("to a member", "", s.part(UNIT), **to)
    return s.ends(messages=[{"kind": "view", "view": VIEW}])


def signed() -> Switching:
    s = Switching(
        "signed",
        "With a key frames have tags, and what the switch sends has numbers of its own, in turn.",
        members=2,
        key=KEY,
    )
    one, two = s.part(UNIT, {0: 100}), s.part(UNIT, {0: 101})
    s.contribution("member 2's", GATHERED, two)
    s.ask("member 1 is missing", ANSWERED, out=lacking(bits(1)))
    total = s.total(one, two)
    way = {"header": {"flags": ANSWER}}
    s.contribution("member 1's, by its program", SUMMED, one, 1, out=sum_made(total), **way)
    s.ask("for the sum", ANSWERED, 1, out=answered(total))
    return s.ends(places=[s.place((1, 2), total.rest, total)], windows=[(1, 4, 3), (2, 2, 0)])


def forged() -> Switching:
    s = Switching("forged", "A frame that the view's key has not signed changes nothing.", key=KEY)
    one = s.part(UNIT, {0: 1})
    for kind in ("contribution", "ask"):
        for say, more in (
            ("no tag", {"header": {"tag": 0}}),
            ("another key's", {"key": OTHER_KEY}),
        ):
            fields: dict[str, Any] = more
            s.give(kind, f"{kind}, {say}", "forged", one, 2, **fields)
    s.contribution("a sound one", GATHERED, one)
    return s.ends(places=[s.place((2,), units(one))], windows=[(2, 5, 0)])


def replayed() -> Switching:
    s = Switching(
        "replayed",
        "A number 1024 or more behind the highest of its way is refused; each way has numbers of its own.",
        key=KEY,
    )
    one = s.part(UNIT, {0: 1})
    for say, counters, number, flags in (
        ("number 2000", GATHERED, 2000, 0),
        ("977 is near enough", "duplicate", 977, 0),
        ("976 is not", "replayed", 976, 0),
        ("976 on the other way", "duplicate", 976, ANSWER),
    ):
        s.contribution(say, counters, one, header={"sequence": number, "flags": flags})
    s.contribution(
        "a forged one does not move it", "forged", one, header={"sequence": 9000}, key=OTHER_KEY
    )
    s.contribution("member 3 has another window", GATHERED, one, 3, header={"sequence": 1})
    return s.ends(
        places=[s.place((2, 3), units(s.part(UNIT, {0: 2})))], windows=[(2, 2000, 976), (3, 1, 0)]
    )


SCENARIOS: tuple[Callable[[], Switching], ...] = (
    *(duplicates, differing, refused, passed, disabled, signed, forged, replayed),
)
