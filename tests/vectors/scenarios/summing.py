# SPDX-License-Identifier: Apache-2.0
"""Sums that a switch has made: taken once, and nothing else is, in the rounds that a switch adds."""

from __future__ import annotations

from typing import Any

from tests.vectors.encode import ADD
from tests.vectors.scenario import DROP, PASS, ROUND, Scenario
from tests.vectors.scenarios.adding import ADDED, BANK, DUPLICATE

SWITCH = "02:6e:69:63:70:73"
SUM: dict[str, Any] = {"source": SWITCH, "header": {"sender": 0, "flags": ADD}}
ALL = tuple(range(1, 65))


def sums() -> Scenario:
    s = Scenario(
        "sums", "A switch's sums are stored, each once; the last one goes up.", sums=1, sums_next=1
    )
    s.fragment("of fragment 1", DROP, ADDED, index=1, values={0: 5, 359: -7}, heard=True, **SUM)
    s.fragment("once more", DROP, DUPLICATE, index=1, values={0: 5, 359: -7}, **SUM)
    s.fragment("of fragment 0: whole", PASS, ADDED, values={0: -(2**31), 1: 2**31 - 1}, **SUM)
    s.fragment(
        "of the next round",
        DROP,
        "round",
        **SUM | {"header": {"sender": 0, "flags": ADD, "round": ROUND + 1}},
    )
    return s.ends(
        progress=[(ROUND, 0, 2)],
        slots=[(ROUND, 0, ALL), (ROUND, 1, ALL)],
        accumulators=[
            {"bank": BANK, "block": 0, "lane": 0, "values": [-(2**31), 2**31 - 1]},
            {"bank": BANK, "block": 0, "lane": 360, "values": [5]},
            {"bank": BANK, "block": 0, "lane": 719, "values": [-7]},
        ],
    )


def sums_of_narrow_lanes() -> Scenario:
    s = Scenario("sums-narrow", "Sums of 16 and of 8 bits.", sums=1)
    narrow = SUM | {"fragments": 3}
    s.fragment("16 bits", DROP, ADDED, width=16, index=1, values={0: -32768, 719: 9}, **narrow)
    s.fragment("8 bits", DROP, ADDED, width=8, index=2, values={0: -128, 1439: 127}, **narrow)
    return s.ends(
        progress=[(ROUND, 0, 2)],
        slots=[(ROUND, 1, ALL), (ROUND, 2, ALL)],
        accumulators=[
            {"bank": BANK, "block": 0, "lane": 720, "values": [-32768]},
            {"bank": BANK, "block": 0, "lane": 1439, "values": [9]},
            {"bank": BANK, "block": 2, "lane": 0, "values": [-128]},
            {"bank": BANK, "block": 2, "lane": 1439, "values": [127]},
        ],
    )


def sums_refused() -> Scenario:
    s = Scenario(
        "sums-refused",
        "What is no sum where sums are due, and sums where none are.",
        sums=1,
        round_high=ROUND + 1,
    )
    one = {"values": {0: 1}, "fragments": 3}
    s.fragment("a member's fragment", DROP, "mode", **one)
    s.fragment("a member's, for the switch", DROP, "mode", header={"flags": ADD}, **one)
    s.fragment(
        "from another MAC address",
        DROP,
        "stranger",
        **one,
        header=SUM["header"],
        source="02:6e:69:63:70:74",
    )
    s.fragment(
        "of sender 0, but not added", DROP, "stranger", **one, header={"sender": 0}, source=SWITCH
    )
    s.fragment("shifted", DROP, "shift", shift=1, **one, **SUM)
    s.fragment("of raw bytes", DROP, "malformed", width=0, **one, **SUM)
    s.fragment(
        "the next round, which no switch adds",
        DROP,
        "mode",
        **one,
        source=SWITCH,
        header=SUM["header"] | {"round": ROUND + 1},
    )
    s.fragment("a member's of that round", DROP, ADDED, index=1, **one, header={"round": ROUND + 1})
    s.agent("the next round is added by a switch too", sums_next=1)
    s.fragment(
        "a sum of that round",
        DROP,
        ADDED,
        **one,
        source=SWITCH,
        header=SUM["header"] | {"round": ROUND + 1},
    )
    s.fragment("a member's of that round", DROP, "mode", **one, header={"round": ROUND + 1})
    s.agent("no switch adds in the open round", sums=0)
    s.fragment("a sum", DROP, "mode", **one, **SUM)
    return s.ends(
        progress=[(ROUND + 1, 0, 2), (ROUND + 1, 2, 1)],
        slots=[(ROUND + 1, 0, ALL), (ROUND + 1, 1, [2])],
        accumulators=[
            {"bank": 1 - BANK, "block": 0, "lane": 0, "values": [1]},
            {"bank": 1 - BANK, "block": 0, "lane": 360, "values": [1]},
        ],
    )


def sums_keyed() -> Scenario:
    s = Scenario(
        "sums-keyed",
        "A switch has no key: its sums carry no tag, and members' numbers are not touched.",
        sums=1,
        key=bytes(range(16)),
    )
    s.fragment(
        "a sum without a tag",
        DROP,
        ADDED,
        values={0: 3},
        source=SWITCH,
        header=SUM["header"] | {"tag": 0},
    )
    return s.ends(
        progress=[(ROUND, 0, 1)],
        slots=[(ROUND, 0, ALL)],
        accumulators=[{"bank": BANK, "block": 0, "lane": 0, "values": [3]}],
    )


SCENARIOS = (sums, sums_of_narrow_lanes, sums_refused, sums_keyed)
