# SPDX-License-Identifier: Apache-2.0
"""Fragments that are added up (R11): widths, shifts, places, once each, two banks."""

from __future__ import annotations

from tests.vectors.scenario import DROP, PASS, ROUND, Scenario

ADDED, DUPLICATE = "added", "duplicate"
BANK = ROUND & 1


def add_i32() -> Scenario:
    s = Scenario("add-i32", "Two members' 32-bit lanes are added into 64 bits; both complete.")
    s.fragment("first of its slot: stored", DROP, ADDED, values={0: 1, 1: -1, 359: 7}, index=0)
    s.fragment(
        "another member, shifted by 3: added",
        DROP,
        ADDED,
        values={0: 5, 1: -2, 2: 2**31 - 1},
        shift=3,
        header={"sender": 3},
    )
    s.fragment("member 2's second: complete", PASS, ADDED, values={0: -(2**31)}, index=1)
    s.fragment(
        "member 3's second: complete",
        PASS,
        ADDED,
        values={0: -(2**31), 359: 9},
        index=1,
        header={"sender": 3},
    )
    return s.ends(
        progress=[(ROUND, 0, 4), (ROUND, 2, 2), (ROUND, 3, 2)],
        slots=[(ROUND, 0, [2, 3]), (ROUND, 1, [2, 3])],
        accumulators=[
            # 1 + 5*8, -1 - 2*8, 8 * (2^31 - 1)
            {"bank": BANK, "block": 0, "lane": 0, "values": [41, -17, 17179869176]},
            {"bank": BANK, "block": 0, "lane": 359, "values": [7, -4294967296]},
            {"bank": BANK, "block": 0, "lane": 719, "values": [9]},
        ],
    )


def add_i16() -> Scenario:
    s = Scenario("add-i16", "16-bit lanes: 720 in a frame, two frames in a block.")
    s.fragment("first half", DROP, ADDED, width=16, values={0: -32768, 1: 32767, 719: -1}, index=0)
    s.fragment(
        "first half of another",
        DROP,
        ADDED,
        width=16,
        shift=10,
        values={0: -32768, 1: 32767, 719: 1},
        index=0,
        header={"sender": 3},
    )
    s.fragment("second half: complete", PASS, ADDED, width=16, values={0: 3}, index=1)
    return s.ends(
        progress=[(ROUND, 0, 3), (ROUND, 2, 2), (ROUND, 3, 1)],
        slots=[(ROUND, 0, [2, 3]), (ROUND, 1, [2])],
        accumulators=[
            # -32768 * 1025, 32767 * 1025
            {"bank": BANK, "block": 0, "lane": 0, "values": [-33587200, 33586175]},
            {"bank": BANK, "block": 0, "lane": 719, "values": [1023, 3]},
        ],
    )


def add_i8() -> Scenario:
    s = Scenario("add-i8", "8-bit lanes: 1440 in a frame, which is a whole block.")
    for sender, shift in ((2, 0), (3, 7)):
        s.fragment(
            f"member {sender}, shift {shift}, into the third block",
            DROP,
            ADDED,
            width=8,
            shift=shift,
            fragments=3,
            index=2,
            values={0: -128, 1: 127, 2: -1, 1439: 1},
            header={"sender": sender},
        )
    return s.ends(
        progress=[(ROUND, 0, 2), (ROUND, 2, 1), (ROUND, 3, 1)],
        slots=[(ROUND, 2, [2, 3])],
        accumulators=[
            # times 1 + 128
            {"bank": BANK, "block": 2, "lane": 0, "values": [-16512, 16383, -129]},
            {"bank": BANK, "block": 2, "lane": 1439, "values": [129]},
        ],
    )


def add_raw() -> Scenario:
    s = Scenario("add-raw", "Raw bytes are copied: eight frames in a block of 11520 bytes.")
    for index in (0, 7, 8):
        s.fragment(
            f"bytes of fragment {index}",
            DROP,
            ADDED,
            width=0,
            fragments=9,
            index=index,
            values={0: 0x80 + index, 1: 0xFF, 1439: index + 1},
        )
    s.fragment("a repeat of the first", DROP, DUPLICATE, width=0, fragments=9, values={0: 0xEE})
    return s.ends(
        progress=[(ROUND, 0, 3), (ROUND, 2, 3)],
        slots=[(ROUND, 0, [2]), (ROUND, 7, [2]), (ROUND, 8, [2])],
        accumulators=[
            {"bank": BANK, "block": 0, "byte": 0, "values": [0x80, 0xFF]},
            {"bank": BANK, "block": 0, "byte": 1439, "values": [1]},
            {"bank": BANK, "block": 0, "byte": 7 * 1440, "values": [0x87, 0xFF]},
            {"bank": BANK, "block": 0, "byte": 8 * 1440 - 1, "values": [8]},
            {"bank": BANK, "block": 1, "byte": 0, "values": [0x88, 0xFF]},
            {"bank": BANK, "block": 1, "byte": 1439, "values": [9]},
        ],
    )


def largest_shifts() -> Scenario:
    s = Scenario("largest-shifts", "The largest lane at the largest shift of each width, twice.")
    most = ((32, 26, 31, 0), (16, 42, 15, 2), (8, 50, 7, 2))
    for width, shift, bits, index in most:
        for sender in (2, 3):
            s.fragment(
                f"member {sender}: {width} bits, shift {shift}",
                DROP,
                ADDED,
                width=width,
                shift=shift,
                fragments=4,
                index=index + (width == 8),
                values={0: -(2**bits), 1: 2**bits - 1, 2: -1},
                header={"sender": sender},
            )
    return s.ends(
        progress=[(ROUND, 0, 6), (ROUND, 2, 3), (ROUND, 3, 3)],
        slots=[(ROUND, 0, [2, 3]), (ROUND, 2, [2, 3]), (ROUND, 3, [2, 3])],
        accumulators=[
            # each at most 2^57; two of them 2^58: 64 fit into 63 bits
            {"bank": BANK, "block": 0, "lane": 0, "values": [-(2**58), 2**58 - 2**27, -(2**27)]},
            {"bank": BANK, "block": 1, "lane": 0, "values": [-(2**58), 2**58 - 2**43, -(2**43)]},
            {"bank": BANK, "block": 3, "lane": 0, "values": [-(2**58), 2**58 - 2**51, -(2**51)]},
        ],
    )


def places() -> Scenario:
    s = Scenario("places", "Where a fragment of each width lies in the blocks.")
    for width, index in ((32, 0), (32, 2), (32, 7), (16, 5), (8, 3)):
        s.fragment(
            f"{width} bits, fragment {index}",
            DROP,
            ADDED,
            width=width,
            fragments=16,
            index=index,
            values={0: width + index},
        )
    s.fragment(
        "32 bits, the last fragment that four blocks hold",
        DROP,
        ADDED,
        fragments=16,
        index=15,
        header={"sender": 3},
        values={359: -5},
    )
    return s.ends(
        progress=[(ROUND, 0, 6), (ROUND, 2, 5), (ROUND, 3, 1)],
        slots=[(ROUND, index, [2]) for index in (0, 2, 3, 5, 7)] + [(ROUND, 15, [3])],
        accumulators=[
            {"bank": BANK, "block": 0, "lane": 0, "values": [32]},
            {"bank": BANK, "block": 0, "lane": 720, "values": [34]},
            {"bank": BANK, "block": 1, "lane": 1080, "values": [39]},
            {"bank": BANK, "block": 2, "lane": 720, "values": [21]},
            # fragment 15 of 32 bits would lie where fragment 3 of 8 bits does: it is stored over it
            {"bank": BANK, "block": 3, "lane": 0, "values": [11]},
            {"bank": BANK, "block": 3, "lane": 1439, "values": [-5]},
        ],
    )


def duplicates() -> Scenario:
    s = Scenario("duplicates", "A fragment counts once, however often it comes (exactly once).")
    s.fragment("the first", DROP, ADDED, values={0: 100, 359: -100})
    s.fragment("the same again", DROP, DUPLICATE, values={0: 100, 359: -100})
    s.fragment("as a repair", DROP, DUPLICATE, values={0: 100}, header={"flags": 8})
    s.fragment("as a repeat, with other lanes", DROP, DUPLICATE, values={0: 1}, header={"flags": 1})
    s.fragment(
        "a repair of one that never came",
        PASS,
        ADDED,
        values={0: 1},
        index=1,
        header={"flags": 8},
    )
    s.fragment(
        "again after completion: not passed up a second time",
        DROP,
        DUPLICATE,
        values={0: 1},
        index=1,
    )
    s.fragment(
        "the same fragment of another member", DROP, ADDED, values={0: 11}, header={"sender": 3}
    )
    return s.ends(
        progress=[(ROUND, 0, 3), (ROUND, 2, 2), (ROUND, 3, 1)],
        slots=[(ROUND, 0, [2, 3]), (ROUND, 1, [2])],
        accumulators=[
            {"bank": BANK, "block": 0, "lane": 0, "values": [111]},
            {"bank": BANK, "block": 0, "lane": 359, "values": [-100, 1]},
        ],
    )


def two_banks() -> Scenario:
    s = Scenario(
        "two-banks",
        "Complete in round 7, a member takes round 8 beside it, in the other bank.",
        round_low=7,
        round_high=8,
    )
    s.fragment("round 7", PASS, ADDED, fragments=1, values={0: 70})
    s.fragment("round 8", PASS, ADDED, fragments=1, values={0: 80}, header={"round": 8})
    s.fragment(
        "round 7 of another",
        PASS,
        ADDED,
        fragments=1,
        values={0: 7},
        header={"sender": 3},
    )
    s.fragment("round 8 again", DROP, DUPLICATE, fragments=1, values={0: 80}, header={"round": 8})
    return s.ends(
        progress=[(7, 0, 2), (7, 2, 1), (7, 3, 1), (8, 0, 1), (8, 2, 1)],
        slots=[(7, 0, [2, 3]), (8, 0, [2])],
        accumulators=[
            {"bank": 1, "block": 0, "lane": 0, "values": [77]},
            {"bank": 0, "block": 0, "lane": 0, "values": [80]},
        ],
    )


def next_round_overwrites() -> Scenario:
    s = Scenario(
        "next-round-overwrites",
        "The first fragment of a new round in a bank is stored over the old sum.",
    )
    s.fragment("round 7", DROP, ADDED, values={0: 1, 1: 2, 359: 3})
    s.fragment("round 7, the other", PASS, ADDED, values={0: 4}, index=1)
    s.agent("round 7 has been read out", round_low=9, round_high=9, round=9)
    s.fragment("round 9: stored", DROP, ADDED, values={0: 10}, header={"round": 9})
    s.fragment(
        "round 9 of another: added", DROP, ADDED, values={0: 5}, header={"round": 9, "sender": 3}
    )
    return s.ends(
        # member 2's count of round 7 is gone; the untouched slot keeps round 7's tag and sum
        progress=[(9, 0, 2), (9, 2, 1), (9, 3, 1)],
        slots=[(9, 0, [2, 3]), (7, 1, [2])],
        accumulators=[
            {"bank": 1, "block": 0, "lane": 0, "values": [15]},
            {"bank": 1, "block": 0, "lane": 360, "values": [4]},
        ],
    )


def next_view_overwrites() -> Scenario:
    s = Scenario(
        "next-view-overwrites",
        "The same round in a new view starts anew (the survivors run it again).",
    )
    s.fragment("view 3", DROP, ADDED, values={0: 1, 5: 9})
    s.fragment("view 3, another", DROP, ADDED, values={0: 2}, header={"sender": 3})
    s.agent("view 4 is installed", view=4)
    s.fragment("view 4, fragment 0", DROP, ADDED, values={0: 100}, header={"view": 4})
    return s.ends(
        # member 3's count still has view 3's tag, which is as good as none
        progress=[(ROUND, 0, 1), (ROUND, 2, 1), (ROUND, 3, 1, 3)],
        view=4,
        slots=[(ROUND, 0, [2])],
        accumulators=[{"bank": BANK, "block": 0, "lane": 0, "values": [100]}],
    )


SCENARIOS = (
    add_i32,
    add_i16,
    add_i8,
    add_raw,
    largest_shifts,
    places,
    duplicates,
    two_banks,
    next_round_overwrites,
    next_view_overwrites,
)
