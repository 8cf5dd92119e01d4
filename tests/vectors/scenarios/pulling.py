# SPDX-License-Identifier: Apache-2.0
"""Parameters on their way (S1, B3): at their server, at a worker, and at a partner that has them."""

from __future__ import annotations

from collections.abc import Callable

from tests.vectors.encode import Fields
from tests.vectors.scenario import ROUND
from tests.vectors.serving import ABSENT, EXACT, FULL, NOT_YET, SYNCHRONISING, Serving, held, taken

PULLED, STORED, ACKNOWLEDGED = "pulled", "stored", "acknowledged"
DUPLICATE, MALFORMED, RANGE, STRANGER = "duplicate", "malformed", "range", "stranger"
SERVER_4: Fields = {"sender": 4}


def pull_i32() -> Serving:
    start = {
        0: {0: 1, 359: -(2**31)},
        1: {7: 2**31 - 1, 8: 1},
        2: {0: 2**40, 1: 2**9 - 1, 2: -(2**9)},
    }
    s = Serving(
        "pull-i32",
        "A pull is answered with the parameters and the version, and changes neither.",
        room=3,
        version=[ROUND, 6],
        parameters=start,
    )
    s.pull("31 bits and the sign: exact", PULLED, answer=held(start[0], version=6), heard=True)
    s.again(
        "the same question: without a key it is answered each time",
        PULLED,
        answer=held(start[0], version=6),
    )
    s.pull("of any number", PULLED, number=2**32 - 1, index=1, answer=held(start[1], version=6))
    s.pull(
        "41 bits: in units of 1024, half of that is rounded up",
        PULLED,
        index=2,
        header={"sender": 5},
        answer=held({0: 2**30}, version=6, exponent=EXACT + 10),
    )
    return s.ends(version=(ROUND, 6))


def _narrow(width: int) -> Serving:
    """Each piece of the only push fragment, but for the last one, which is behind the end."""
    pieces = 32 // width
    start = {
        0: {lane: lane + 1 for piece in range(pieces) for lane in (360 * piece, 360 * piece + 359)}
    }
    s = Serving(
        f"pull-i{width}",
        f"With {width}-bit steps a push fragment has {pieces} fragments of parameters.",
        width=width,
        room=pieces - 1,
        parameters=start,
    )
    for piece in range(pieces - 1):
        lanes = {0: 360 * piece + 1, 359: 360 * piece + 360}
        s.pull(f"fragment {piece}", PULLED, index=piece, answer=held(lanes))
    s.pull("behind the end", RANGE, index=pieces - 1, heard=False)
    return s.ends()


def pull_i16() -> Serving:
    return _narrow(16)


def pull_i8() -> Serving:
    return _narrow(8)


def bad_pulls() -> Serving:
    s = Serving(
        "bad-pulls",
        "Pulls that cannot be, and of a part that is another server's.",
        servers=[2, 1],
        room=5,
        parameters={2: {0: 9}},
    )
    wrong: list[tuple[str, str, Fields]] = [
        ("16 bits", MALFORMED, {"width": 16}),
        ("no width", MALFORMED, {"width": 0}),
        ("fewer fragments than there are", MALFORMED, {"fragments": 4}),
        ("number 0", MALFORMED, {"number": 0}),
        ("the other server's first", RANGE, {"index": 0}),
        ("the other server's last", RANGE, {"index": 1}),
        ("behind the end", RANGE, {"index": 5}),
        ("far behind the end", RANGE, {"index": 2**32 - 1}),
    ]
    for say, counter, fields in wrong:
        s.pull(say, counter, heard=False, **{"index": 2, **fields})
    s.pull("this server's first", PULLED, index=2, answer=held({0: 9}))
    s.pull("this server's last", PULLED, index=4, answer=held())
    return s.ends()


def partner() -> Serving:
    s = Serving(
        "partner",
        "A worker passes on what it has pulled in this round (B3).",
        servers=[2, 4],
        store=1,
    )
    absent = taken(reason=ABSENT)
    s.pull("nothing yet", "refused", number=7, answer=absent, heard=False)
    s.held("it comes, of version 9", STORED, number=3, version=9, values={0: -6}, exponent=-20)
    s.pull(
        "now it is passed on",
        "passed_on",
        number=7,
        answer=held({0: -6}, version=9, exponent=-20),
        heard=False,
    )
    s.pull("the other fragment", "refused", number=7, index=1, answer=absent)
    s.commit("the round is over", ROUND)
    later = {"sender": 3, "round": ROUND + 1}
    s.pull("what it has is of the round before", "refused", number=8, header=later, answer=absent)
    return s.ends(
        version=(ROUND + 1, 0),
        store=[(0, 3, ROUND, 9, -20, {0: -6})],
    )


def stored() -> Serving:
    s = Serving(
        "stored",
        "At a worker: each fragment of a pull once, from the server that has it, with its version.",
        servers=[2, 4],
        room=4,
        passes=[5],
        store=1,
    )
    s.held(
        "the second, of version 3", STORED, index=1, number=6, version=3, values={0: 1}, heard=True
    )
    s.again("the same frame", DUPLICATE, heard=False)
    s.held("the third: not server 2's", STRANGER, index=2, number=6)
    s.held("nor member 3's", STRANGER, index=2, number=6, header={"sender": 3})
    s.held("server 4's, of version 5", STORED, index=2, number=6, version=5, header=SERVER_4)
    s.held("a partner has all", STORED, index=3, number=6, version=4, header={"sender": 5})
    s.held("the first, of an earlier pull", "round", number=5)
    s.held("the second, of an earlier pull", DUPLICATE, index=1, number=5)
    partners: Fields = {"sender": 5}
    for say, counter, number, index in (
        ("has come by now: sent again", DUPLICATE, 6, 1),
        ("of an earlier pull", DUPLICATE, 5, 1),
        ("of the next one", "refused", 7, 1),
        ("has not come", "refused", 6, 0),
        ("behind the end", "refused", 6, 4),
    ):
        of: Fields = {"number": number, "index": index, "reason": ABSENT}
        s.taken(f"a refusal, {say}", counter, header=partners, **of)
    s.held("number 0", MALFORMED, number=0)
    s.held("16 bits", MALFORMED, number=6, width=16)
    s.held("another count of fragments", MALFORMED, number=6, fragments=3)
    s.held("a fragment that nobody has", STRANGER, number=6, index=4, header=SERVER_4)
    s.held("behind the end, from a partner", RANGE, number=6, index=4, header={"sender": 5})
    for round_ in (ROUND - 1, ROUND + 1, ROUND + 2):
        s.held(f"of round {round_}", "round", number=6, header={"round": round_})
    s.held(
        "the first: the least version of all is 3",
        STORED,
        number=6,
        version=7,
        exponent=-3,
        values={0: -(2**31), 359: 2**31 - 1},
    )
    s.held("the next pull", STORED, number=7, index=1, version=8, values={0: 2})
    return s.ends(
        store=[
            (0, 6, ROUND, 7, -3, {0: -(2**31), 359: 2**31 - 1}),
            (1, 7, ROUND, 8, EXACT, {0: 2}),
            (2, 6, ROUND, 5, EXACT, {}),
            (3, 6, ROUND, 4, EXACT, {}),
        ],
    )


def acknowledged() -> Serving:
    s = Serving(
        "acknowledged",
        "At a worker: each fragment of its step is acknowledged once, by the server that has it.",
        servers=[2, 4],
        width=16,
        room=5,
        store=1,
    )
    s.taken("the first", ACKNOWLEDGED, number=3, version=7, heard=True)
    s.again("the same frame", DUPLICATE, heard=True)
    s.taken("the second: not server 2's", STRANGER, index=1, number=3, heard=False)
    s.taken("member 5 is no server", STRANGER, number=3, header={"sender": 5})
    s.taken("server 4's", ACKNOWLEDGED, index=1, number=3, version=9, staleness=2, header=SERVER_4)
    s.taken("of an earlier step", DUPLICATE, number=2, version=6)
    s.taken("where that has not come", "round", index=2, number=2, header=SERVER_4)
    s.taken("number 0", MALFORMED, number=0)
    s.taken("another count of fragments", MALFORMED, number=3, fragments=2)
    for round_ in (ROUND - 1, ROUND + 1):
        s.taken(f"of round {round_}", "round", number=3, header={"round": round_})
    for reason in (SYNCHRONISING, NOT_YET, ABSENT, FULL):
        why: Fields = {"number": 3, "reason": reason}
        s.taken(f"refused, reason {reason}", "refused", index=2, heard=True, **why)
        s.taken("what is added by now: sent again", DUPLICATE, heard=False, **why)
        s.taken("a pull's fragment of that number", "refused", fragments=5, **why)
        s.taken("of an earlier step", DUPLICATE, reason=reason, number=2)
        s.taken("of a later one", "refused", reason=reason, number=4)
    s.taken(
        "a refusal of one that is asked nothing", STRANGER, number=3, reason=1, header={"sender": 5}
    )
    s.taken(
        "the third: all are",
        ACKNOWLEDGED,
        index=2,
        number=3,
        version=8,
        staleness=2,
        header=SERVER_4,
    )
    return s.ends(
        taken=[(0, 3), (1, 3), (2, 3)],
        answered=[(2, 3, 1, ROUND, 7), (4, 3, 2, ROUND, 9)],
    )


def comes_back() -> Serving:
    s = Serving(
        "push-comes-back",
        "At a worker: the parameters that answer a push acknowledge it, and have its step in them.",
        servers=[2],
        store=1,
    )
    s.held(
        "an answer to a push: one version more",
        STORED,
        ACKNOWLEDGED,
        number=3,
        version=4,
        staleness=2,
    )
    s.again("the same frame", DUPLICATE, heard=False)
    s.held("an answer to a pull acknowledges nothing", STORED, index=1, number=3, version=4)
    s.taken(
        "the step's short answer: as it was sent again",
        ACKNOWLEDGED,
        index=1,
        number=3,
        version=4,
        staleness=2,
    )
    return s.ends(
        store=[(0, 3, ROUND, 5, EXACT, {}), (1, 3, ROUND, 4, EXACT, {})],
        taken=[(0, 3), (1, 3)],
        answered=[(2, 3, 2, ROUND, 4)],
    )


SCENARIOS: tuple[Callable[[], Serving], ...] = (
    *(pull_i32, pull_i16, pull_i8, bad_pulls, partner, stored, acknowledged, comes_back),
)
