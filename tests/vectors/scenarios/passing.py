# SPDX-License-Identifier: Apache-2.0
"""The token (R9, R10): filtered, handed up, bounced in the kernel, refused when stale."""

from __future__ import annotations

from tests.vectors.encode import BOUNCED, CLOSING, PARKED, REPEAT
from tests.vectors.scenario import DROP, PASS, ROUND, TX, Scenario
from tests.vectors.scenarios.adding import ADDED, BANK

OTHERS, UP, STALE, BOUNCE = "heard", "raised", "stale", "bounced"


def not_mine() -> Scenario:
    s = Scenario(
        "token-not-mine", "Another's token is noted and dropped, unless the agent must see it."
    )
    s.token("for member 3, nothing new", DROP, OTHERS, hop=10, owner=3)
    s.token("the same again: stale", DROP, STALE, hop=10, owner=3)
    s.token(
        "the same, marked as a repeat: the agent answers it (R16)",
        PASS,
        UP,
        hop=10,
        owner=3,
        header={"flags": REPEAT},
    )
    s.token("an older one, marked as a repeat", PASS, UP, hop=9, owner=3, header={"flags": REPEAT})
    s.token("a new one, marked as a repeat", PASS, UP, hop=11, owner=3, header={"flags": REPEAT})
    s.token("that one again: it had been seen", DROP, STALE, hop=11, owner=3)
    s.token("parked", PASS, UP, hop=12, owner=2, header={"flags": PARKED})
    s.token("of another round", PASS, UP, hop=13, owner=3, header={"round": ROUND + 1})
    s.token("more was sent than the agent knows", PASS, UP, hop=14, owner=3, sent=1)
    s.token("closing", PASS, UP, hop=15, owner=3, state=CLOSING)
    s.token("bounced by another's kernel", DROP, OTHERS, hop=16, owner=3, header={"flags": BOUNCED})
    s.token("hops may be left out", DROP, OTHERS, hop=99, owner=3)
    s.token("a new generation starts its hops anew", DROP, OTHERS, generation=5, hop=0, owner=3)
    s.token("the old generation is over", DROP, STALE, generation=4, hop=100, owner=3)
    return s.ends(ring=(5, 0))


def sent() -> Scenario:
    s = Scenario("token-sent", "What the agent has sent itself is the newest, as what was seen is.")
    s.token("for member 3", DROP, OTHERS, hop=10, owner=3)
    s.agent("has sent hop 12", position=4 << 32 | 12)
    s.token("its own hop, as if from another", DROP, STALE, hop=12, owner=3)
    s.token("an older one for itself", DROP, STALE, hop=11)
    s.token("that one as a repeat: the agent answers", PASS, UP, hop=11, header={"flags": REPEAT})
    s.token("the next one", DROP, OTHERS, hop=13, owner=3)
    s.token("the one before: seen", DROP, STALE, hop=13, owner=3)
    return s.ends(ring=(4, 13))


def bounced() -> Scenario:
    s = Scenario(
        "token-bounced",
        "A member that lacks nothing and has nothing has its kernel forward the token (XDP_TX).",
        number=2,
    )
    out = {"owner": 3, "header_flags": BOUNCED}
    s.token(
        "for me, from member 1",
        TX,
        BOUNCE,
        hop=10,
        owner=2,
        header={"sender": 1},
        out=out | {"hop": 11, "idle": 1},
    )
    s.token(
        "my own hop comes back as if from another: seen",
        DROP,
        STALE,
        hop=11,
        owner=2,
        header={"sender": 1},
    )
    s.token(
        "a round later, nearly idle",
        TX,
        BOUNCE,
        hop=13,
        owner=2,
        idle=1,
        header={"sender": 1, "flags": BOUNCED},
        out=out | {"hop": 14, "idle": 2},
    )
    s.token(
        "a repeat that is new here: what goes on is a new hop, no repeat",
        TX,
        BOUNCE,
        hop=17,
        owner=2,
        header={"sender": 1, "flags": REPEAT | BOUNCED},
        out=out | {"hop": 18, "idle": 1},
    )
    s.token("the stale one again", DROP, STALE, hop=13, owner=2, header={"sender": 1})
    s.token(
        "all the rest of the frame stays as it was",
        TX,
        BOUNCE,
        generation=6,
        hop=2**32 - 2,
        owner=2,
        unit=-128,
        unit_before=127,
        stripe=0xABCD,
        listed=2**63 + 5,
        settled=0x1234567,
        reserved=9,
        header={"sender": 3},
        out=out | {"hop": 2**32 - 1, "idle": 1},
    )
    return s.ends(ring=(6, 2**32 - 1), bounced=(6, 2**32 - 1), bounces=4)


def bounced_by_the_last() -> Scenario:
    s = Scenario("token-bounced-by-the-last", "After the last member comes the first.", number=3)
    s.token(
        "for member 3 of 3",
        TX,
        BOUNCE,
        hop=1,
        owner=3,
        out={"owner": 1, "hop": 2, "idle": 1, "header_flags": BOUNCED},
    )
    return s.ends(ring=(4, 2), bounced=(4, 2), bounces=1)


def bounced_with_gradients() -> Scenario:
    s = Scenario(
        "token-bounced-with-gradients",
        "Lacking nothing: fragments taken plus own ones are as many as the token says were sent.",
        own_sent=2,
        sent_seen=4,
    )
    s.fragment("one of two of member 2", DROP, ADDED, values={0: 1})
    s.token("the token says four: one is missing here", PASS, UP, hop=10, sent=4)
    s.fragment("the other", PASS, ADDED, values={0: 2}, index=1)
    s.token(
        "two and two: bounced",
        TX,
        BOUNCE,
        hop=13,
        sent=4,
        out={"owner": 2, "hop": 14, "idle": 1, "header_flags": BOUNCED},
    )
    s.token("the token says three: the agent must look", PASS, UP, hop=16, sent=3)
    s.agent("round 8 begins", round=8, round_low=8, round_high=8, own_sent=0, sent_seen=0)
    s.token(
        "round 7's fragments count no more",
        TX,
        BOUNCE,
        hop=19,
        header={"round": 8},
        out={"owner": 2, "hop": 20, "idle": 1, "header_flags": BOUNCED},
    )
    s.agent("round 9 begins: the bank of round 7", round=9, round_low=9, round_high=9)
    s.token(
        "its old count does not stand for round 9", PASS, UP, hop=22, sent=2, header={"round": 9}
    )
    return s.ends(
        progress=[(ROUND, 2, 2)],
        slots=[(ROUND, 0, [2]), (ROUND, 1, [2])],
        accumulators=[
            {"bank": BANK, "block": 0, "lane": 0, "values": [1]},
            {"bank": BANK, "block": 0, "lane": 360, "values": [2]},
        ],
        ring=(4, 22),
        bounced=(4, 20),
        bounces=2,
    )


def not_bounced() -> Scenario:
    s = Scenario(
        "token-not-bounced", "Each reason to hand my token up to the agent instead.", sent_seen=5
    )
    s.token(
        "missing ranges: I may owe a repair",
        PASS,
        UP,
        hop=1,
        ranges=[{"first": 3, "count": 2, "sender": 1}],
    )
    s.token("closing", PASS, UP, hop=2, state=CLOSING)
    s.token("idle for a turn less one: I am to park it", PASS, UP, hop=3, idle=2)
    s.token("idle beyond a turn", PASS, UP, hop=4, idle=65535)
    s.token(
        "parked: a flag that the kernel leaves to the agent",
        PASS,
        UP,
        hop=5,
        header={"flags": PARKED},
    )
    s.token("another round", PASS, UP, hop=6, header={"round": ROUND + 1})
    s.token("an older round", PASS, UP, hop=7, header={"round": ROUND - 1})
    s.token("I lack a fragment", PASS, UP, hop=8, sent=1)
    s.agent("the agent has work of its own", bounce=0)
    s.token("bouncing is off", PASS, UP, hop=9)
    s.agent("the agent has stopped", bounce=1, alive=False)
    s.token("the heartbeat is old", PASS, UP, hop=10)
    s.agent("and lives again", alive=True, sent_seen=0)
    s.token(
        "nothing is in the way: bounced",
        TX,
        BOUNCE,
        hop=20,
        out={"owner": 2, "hop": 21, "idle": 1, "header_flags": BOUNCED},
    )
    s.token("mine, seen before, marked as a repeat", PASS, UP, hop=20, header={"flags": REPEAT})
    s.token("the last hop of a generation: there is no next", PASS, UP, hop=2**32 - 1)
    return s.ends(ring=(4, 2**32 - 1), bounced=(4, 21), bounces=1)


def two_members() -> Scenario:
    s = Scenario(
        "token-of-two",
        "Of two members each bounces a token at most once before it is parked.",
        members=2,
    )
    s.token(
        "idle 0", TX, BOUNCE, hop=1, out={"owner": 2, "hop": 2, "idle": 1, "header_flags": BOUNCED}
    )
    s.token("idle 1 of 2", PASS, UP, hop=3, idle=1)
    return s.ends(ring=(4, 3), bounced=(4, 2), bounces=1)


def largest_token() -> Scenario:
    s = Scenario(
        "token-of-64", "A token of 64 members, the longest that is bounced.", members=64, number=64
    )
    s.token(
        "for member 64",
        TX,
        BOUNCE,
        hop=7,
        owner=64,
        idle=62,
        header={"sender": 63},
        out={"owner": 1, "hop": 8, "idle": 63, "header_flags": BOUNCED},
    )
    s.token(
        "with 18 ranges, the longest of all",
        PASS,
        UP,
        hop=9,
        owner=64,
        header={"sender": 63},
        ranges=[{"first": 7 * k, "count": 1, "sender": 64} for k in range(18)],
    )
    return s.ends(ring=(4, 9), bounced=(4, 8), bounces=1)


SCENARIOS = (
    not_mine,
    sent,
    bounced,
    bounced_by_the_last,
    bounced_with_gradients,
    not_bounced,
    two_members,
    largest_token,
)
