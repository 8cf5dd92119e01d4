# SPDX-License-Identifier: Apache-2.0
"""A network with a key: what is signed is believed, what is forged or replayed is not."""

from __future__ import annotations

from tests.vectors.encode import BOUNCED, REPEAT
from tests.vectors.scenario import DROP, PASS, ROUND, TX, VIEW, Scenario, mac
from tests.vectors.scenarios.adding import ADDED, BANK

KEY = bytes(range(16))
OTHER = bytes(range(1, 17))
FORGED, REPLAYED, UP, STALE, DUPLICATE = "forged", "replayed", "raised", "stale", "duplicate"
WINDOW = 1024
#: Where the fields of a frame are, from its Ethernet header on.
FLAGS, VIEW_AT, SENDER, SEQUENCE, TAG, BODY = 16, 22, 30, 34, 38, 46


def flip(frame: bytes, at: int) -> bytes:
    """The frame with one bit changed."""
    return frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :]


def signed() -> Scenario:
    # Four entries of 20 bytes: a token of whole words. Where there are three, half a word is left over.
    s = Scenario("signed", "Members' frames, each with its tag and a number.", members=4, key=KEY)
    s.fragment("32-bit lanes", DROP, ADDED, values={0: 5, 359: -1}, heard=True)
    s.fragment("raw bytes", DROP, ADDED, width=0, index=8, fragments=9, values={0: 9}, heard=True)
    s.fragment("of member 3", DROP, ADDED, values={0: 1}, header={"sender": 3}, heard=True)
    s.token("for another", PASS, UP, hop=10, owner=3, sent=3, heard=True)
    ranges = [{"first": 1, "count": 1, "sender": 2}, {"first": 5, "count": 2, "sender": 3}]
    s.token("with ranges", PASS, UP, hop=11, sent=3, ranges=ranges, heard=True)
    s.token(
        "for me: handed on with my own number and tag",
        TX,
        "bounced",
        hop=12,
        sent=3,
        out={"owner": 2, "hop": 13, "idle": 1, "header_flags": BOUNCED},
        heard=True,
    )
    s.token(
        "the next of them",
        TX,
        "bounced",
        hop=14,
        sent=3,
        out={"owner": 2, "hop": 15, "idle": 1, "header_flags": BOUNCED},
        header={"sender": 3},
    )
    s.agent("the view ends", view=VIEW + 1)
    s.fragment("a signed one of the old view", DROP, "view", values={0: 1}, index=1)
    return s.ends(
        progress=[(ROUND, 2, 2), (ROUND, 3, 1)],
        slots=[(ROUND, 0, [2, 3]), (ROUND, 8, [2])],
        accumulators=[
            {"bank": BANK, "block": 0, "lane": 0, "values": [6]},
            {"bank": BANK, "block": 0, "lane": 359, "values": [-1]},
            {"bank": BANK, "block": 1, "byte": 0, "values": [9]},
        ],
        ring=(4, 15),
        bounced=(4, 15),
        bounces=2,
        windows=[(2, 2, 6, 0), (3, 3, 7, 0)],
    )


def forged() -> Scenario:
    s = Scenario("forged", "Whoever lacks the view's key changes nothing.", key=KEY)
    s.fragment("no tag", DROP, FORGED, values={0: 1}, header={"tag": 0}, heard=False)
    s.fragment("another key", DROP, FORGED, values={0: 1}, key=OTHER, heard=False)
    s.token("no tag", DROP, FORGED, hop=90, header={"tag": 0}, heard=False)
    s.token("another key", DROP, FORGED, hop=90, key=OTHER, heard=False)
    s.token("another key, a repeat", DROP, FORGED, hop=90, key=OTHER, header={"flags": REPEAT})
    high = {"sequence": 2**32 - 1, "tag": 1}
    s.fragment("the highest number, and no tag: no window moves", DROP, FORGED, header=high)
    s.token("the same for a token", DROP, FORGED, hop=90, header=high)
    s.fragment("cheaper reasons come first: a stranger", DROP, "stranger", source=mac(9))
    s.fragment("another round", DROP, "round", header={"round": ROUND + 1, "tag": 0})
    s.fragment("another view", DROP, "view", header={"view": VIEW - 1, "tag": 0})
    s.fragment("member 3, in the name of 2", DROP, "stranger", source=mac(3))
    fragment, _ = s.frame([("fragment", USUAL)], tail=bytes(range(144)) * 10)
    token, _ = s.frame([("token", TOKEN), *[("entry", {"unit": -128})] * 3])
    for say, at in (
        ("flags", FLAGS + 1),
        ("number", SEQUENCE + 3),
        ("tag, first byte", TAG),
        ("tag, last byte", TAG + 7),
        ("samples", BODY + 15),
        ("first lane", BODY + 16),
        ("a lane in the middle", BODY + 16 + 700),
        ("last lane", BODY + 16 + 1439),
    ):
        s.step(f"a bit of a fragment's {say}", flip(fragment, at), DROP, FORGED, heard=False)
    for say, at in (
        ("round", VIEW_AT + 7),
        ("flags", FLAGS),
        ("tag", TAG + 3),
        ("generation", BODY),
        ("hop", BODY + 7),
        ("sent", BODY + 19),
        ("entries", BODY + 24 + 10),
        ("last byte", len(token) - 1),
    ):
        s.step(f"a bit of a token's {say}", flip(token, at), DROP, FORGED, heard=False)
    s.step("the fragment as it was sent", fragment, DROP, ADDED, heard=True)
    s.step("the same behind padding", token + b"\xff" * 7, PASS, UP, heard=True)
    values = [int.from_bytes(bytes((4 * k + n) % 144 for n in range(4)), "big") for k in range(360)]
    values = [value - 2**32 if value >= 2**31 else value for value in values]
    return s.ends(
        progress=[(ROUND, 2, 1)],
        slots=[(ROUND, 0, [2])],
        accumulators=[{"bank": BANK, "block": 0, "lane": 0, "values": values}],
        ring=(4, 5),
        windows=[(2, 12, 13, 0)],
    )


USUAL = {"index": 0, "fragments": 2, "lanes": 360, "width": 32, "shift": 0, "samples": 32}
TOKEN = {
    "generation": 4,
    "hop": 5,
    "owner": 1,
    "members": 3,
    "sent": 9,
    "unit": -40,
    "unit_before": -40,
}


def replayed() -> Scenario:
    s = Scenario("replayed", "Frames that were good once change nothing a second time.", key=KEY)
    first, _ = s.frame([("fragment", USUAL)], tail=bytes(1440), sequence=1)
    s.step("a fragment", first, DROP, ADDED, heard=True)
    s.step("again: it is in the sum, and no sign of life", first, DROP, DUPLICATE, heard=False)
    two = {"sequence": 2}
    repair = s.frame([("fragment", USUAL)], tail=bytes(1440), sequence=2)[0]
    s.step("its repair, for somebody else: its sender lives", repair, DROP, DUPLICATE, heard=True)
    s.step("the repair again", repair, DROP, DUPLICATE, heard=False)
    old, _ = s.frame([("token", TOKEN), *[("entry", {})] * 3], sequence=3)
    s.step("a token", old, PASS, UP, heard=True)
    s.step("again", old, DROP, STALE, heard=False)
    flags = {"flags": REPEAT}
    asked, _ = s.frame([("token", TOKEN), *[("entry", {})] * 3], sequence=4, **flags)
    s.step("repeated by its sender (R16): the agent answers", asked, PASS, UP, heard=False)
    s.step("the repeat again", asked, DROP, REPLAYED, heard=False)
    s.token("another repeat", PASS, UP, hop=5, header=flags | {"sequence": 6}, heard=False)
    s.token("one from before it", DROP, REPLAYED, hop=5, header=flags | {"sequence": 5})
    s.token("member 3 counts for itself", PASS, UP, hop=5, header=flags | two | {"sender": 3})
    newer, _ = s.frame([("token", TOKEN | {"hop": 7}), *[("entry", {})] * 3], sequence=8, **flags)
    s.step("a repeat that is new here", newer, PASS, UP, heard=True)
    s.step("that again", newer, DROP, REPLAYED, heard=False)
    s.step("the first repeat, much later", asked, DROP, REPLAYED, heard=False)
    far = {"sequence": 8 + WINDOW}
    s.fragment("a number far ahead", PASS, ADDED, index=1, header=far, heard=True)
    s.step("the first fragment falls behind the window", first, DROP, REPLAYED, heard=False)
    s.step("not the token: its window is that of tokens", old, DROP, STALE, heard=False)
    late = {"sequence": 3 + WINDOW}
    s.token("a token far ahead of it", PASS, UP, hop=8, header=late, heard=True)
    s.step("then it falls behind", old, DROP, REPLAYED, heard=False)
    edge = {"sequence": 8}
    s.fragment("the last number behind it", DROP, REPLAYED, index=2, fragments=9, header=edge)
    edge = {"sequence": 9}
    s.fragment(
        "the first inside: overtaken, and lost nothing",
        DROP,
        ADDED,
        index=2,
        fragments=9,
        header=edge,
    )
    s.step("a forged one behind the window costs no hash", flip(first, TAG), DROP, REPLAYED)
    s.agent("round 8 begins", round=8, round_low=8, round_high=8)
    far = {"sequence": 20 + WINDOW}
    s.token("no token moves the window of fragments", PASS, UP, hop=9, header=far, heard=True)
    inside = {"sequence": 10}
    s.fragment("an old round, inside the window", DROP, "round", header=inside, heard=False)
    return s.ends(
        progress=[(ROUND, 2, 3)],
        slots=[(ROUND, 0, [2]), (ROUND, 1, [2]), (ROUND, 2, [2])],
        ring=(4, 9),
        windows=[(2, 8 + WINDOW, 20 + WINDOW, 8), (3, 0, 2, 2)],
    )


def last_numbers() -> Scenario:
    s = Scenario(
        "last-numbers", "The window does not come round at the end of the numbers.", key=KEY
    )
    last = 2**32 - 1
    for index, sequence in enumerate((1000, last - WINDOW, last - 1, last)):
        header = {"sequence": sequence}
        s.fragment(
            f"number {sequence}", DROP, ADDED, index=index, fragments=9, header=header, heard=True
        )
    header = {"sequence": last - WINDOW}
    s.fragment("behind the window", DROP, REPLAYED, index=4, fragments=9, header=header)
    return s.ends(
        progress=[(ROUND, 2, 4)],
        slots=[(ROUND, index, [2]) for index in range(4)],
        windows=[(2, last, 0, 0)],
    )


SCENARIOS = (signed, forged, replayed, last_numbers)
