# SPDX-License-Identifier: Apache-2.0
"""Steps pushed to a parameter server (S2, S3): widths, staleness, versions, once each, and the limits."""

from __future__ import annotations

from collections.abc import Callable

from tests.vectors.encode import Fields
from tests.vectors.scenario import ROUND
from tests.vectors.serving import EXACT, FULL, Serving, held, taken

PUSHED, DUPLICATE, MALFORMED, RANGE = "pushed", "duplicate", "malformed", "range"
WORKER_4: Fields = {"sender": 4}
WORKER_5: Fields = {"sender": 5}
#: The largest lane of 32 bits and the smallest.
MOST, LEAST = 2**31 - 1, -(2**31)


def push_i32() -> Serving:
    start = {0: {0: 100, 1: -5, 359: 7}, 1: {0: 1}}
    s = Serving("push-i32", "32-bit lanes: a push comes back as parameters.", parameters=start)
    s.push(
        "the first fragment: the answer is of the version before",
        PUSHED,
        values={0: 20, 1: -1, 359: 2**30},
        answer=held({0: 120, 1: -6, 359: 2**30 + 7}, staleness=1),
        heard=True,
    )
    s.push(
        "the second: the push is whole",
        PUSHED,
        index=1,
        values={0: -1},
        answer=held(staleness=1),
    )
    s.push(
        "half a unit is rounded up: 1.5 and -1.5",
        PUSHED,
        number=2,
        version=1,
        exponent=EXACT - 1,
        values={0: 3, 1: -3},
        answer=held({0: 122, 1: -7, 359: 2**30 + 7}, version=1, staleness=1),
    )
    s.push(
        "nothing is left of lanes that are far too small",
        PUSHED,
        number=2,
        version=1,
        index=1,
        exponent=-128,
        values={0: MOST, 1: LEAST},
        answer=held(version=1, staleness=1),
    )
    s.push(
        "the largest exponent and the smallest lane: the answer shows 31 bits of 61",
        PUSHED,
        number=3,
        version=2,
        index=1,
        exponent=-10,
        values={5: LEAST},
        answer=held({5: LEAST}, version=2, staleness=1, exponent=-10),
    )
    return s.ends(
        parameters={0: {0: 122, 1: -7, 359: 2**30 + 7}, 1: {5: -(2**61)}},
        version=(ROUND, 2),
        numbers=[(0, 3, 2), (1, 3, 3)],
    )


def push_i16() -> Serving:
    start = {0: {0: 100, 359: 1, 360: 2, 719: 3}}
    s = Serving(
        "push-i16",
        "16-bit lanes, 720 in a fragment: a push is acknowledged by a short frame.",
        width=16,
        room=3,
        parameters=start,
    )
    values = {0: -32768, 359: 32767, 360: 5, 719: -3}
    s.push("the first", PUSHED, values=values, answer=taken(staleness=1), heard=True)
    s.push(
        "the second, the largest exponent: the push is whole",
        PUSHED,
        index=1,
        exponent=6,
        values={0: -32768, 719: 32767},
        answer=taken(staleness=1),
    )
    s.push(
        "of another worker that has pulled after that",
        PUSHED,
        version=1,
        index=1,
        values={1: 9},
        header=WORKER_4,
        answer=taken(version=1, staleness=1),
    )
    return s.ends(
        parameters={
            0: {0: -32668, 359: 32768, 360: 7, 719: 0},
            1: {0: -(2**61), 1: 9, 719: 32767 * 2**46},
        },
        version=(ROUND, 1),
        numbers=[(0, 3, 1), (1, 3, 1), (1, 4, 1)],
    )


def push_i8() -> Serving:
    s = Serving("push-i8", "8-bit lanes, 1,440 in a fragment.", width=8, room=5)
    values = {0: -128, 1: 127, 360: 1, 1439: -1}
    s.push("the first", PUSHED, values=values, answer=taken(staleness=1), heard=True)
    s.push(
        "the second, the largest exponent: the push is whole",
        PUSHED,
        index=1,
        exponent=14,
        values={0: -128, 1439: 127},
        answer=taken(staleness=1),
    )
    return s.ends(
        parameters={0: values, 1: {0: -(2**61), 1439: 127 * 2**54}},
        version=(ROUND, 1),
        numbers=[(0, 3, 1), (1, 3, 1)],
    )


def _stale(width: int, *, weighs: bool = True) -> Serving:
    """Three workers pull version 0 and push one after the other: the staleness is 1, 2 and 3."""
    most = (1 << width - 1) - 1
    s = Serving(
        f"staleness-i{width}" if weighs else "staleness-told",
        "A push counts 1 / staleness, which is the version after it less the version pulled (S2, S3)."
        if weighs
        else "Where staleness is not to divide, it is told, and steps count whole.",
        width=width,
        room=32 // width,
        staleness=int(weighs),
    )
    values = {0: 90, 1: -1, 2: 2, 3: -2, 4: 1, 5: most}
    if weighs:
        # Halves are rounded up. Thirds: 30, 0, 1, -1, 0, and the largest to the nearest.
        third = {32: 715827882, 16: 10922, 8: 42}[width]
        adds = [values, {0: 45, 2: 1, 3: -1, 4: 1, 5: 1 << width - 2}]
        adds.append({0: 30, 2: 1, 3: -1, 5: third})
    else:
        adds = [values] * 3
    parameters: dict[int, int] = {}
    shown = [values, {0: 68, 2: 2, 3: -1, 4: 1, 5: 3 * 2**29}, {0: 83, 2: 2, 3: -2, 4: 1}]
    shown[2][5] = 1968526677  # 2**31 - 1 + 2**30 + 715827882, halved and rounded up
    for at, worker in enumerate((3, 4, 5)):
        parameters = {lane: parameters.get(lane, 0) + adds[at].get(lane, 0) for lane in values}
        if width == 32:
            answer = held(shown[at], version=at, staleness=at + 1, exponent=EXACT + (at > 0))
        else:
            answer = taken(version=at, staleness=at + 1)
        say = f"worker {worker}, of version 0: staleness {at + 1}"
        s.push(say, PUSHED, values=values, header={"sender": worker}, answer=answer)
    return s.ends(
        parameters={0: parameters}, version=(ROUND, 3), numbers=[(0, k, 1) for k in (3, 4, 5)]
    )


def staleness_i32() -> Serving:
    return _stale(32)


def staleness_i16() -> Serving:
    return _stale(16)


def staleness_i8() -> Serving:
    return _stale(8)


def staleness_told() -> Serving:
    return _stale(16, weighs=False)


def again() -> Serving:
    s = Serving(
        "push-again",
        "A push that is sent again is acknowledged each time as it was at first, and added once.",
        parameters={0: {0: 7}},
        version=[ROUND, 2],
    )
    values = {0: 300, 1: -3}
    short = taken(version=2, staleness=3)
    s.push(
        "staleness 3", PUSHED, values=values, answer=held({0: 107, 1: -1}, version=2, staleness=3)
    )
    s.again("the same frame", DUPLICATE, answer=short, heard=False)
    s.again("and again", DUPLICATE, answer=short)
    s.push(
        "the same fragment with other numbers in it: they are not looked at",
        DUPLICATE,
        values={0: 1},
        answer=short,
    )
    s.push("the other fragment", PUSHED, index=1, answer=held(version=2, staleness=3))
    s.again(
        "sent again once the push is whole: its own version is not in it", DUPLICATE, answer=short
    )
    s.push(
        "the next step",
        PUSHED,
        number=2,
        version=3,
        values={0: 1},
        answer=held({0: 108, 1: -1}, version=3, staleness=1),
    )
    s.push(
        "the first one, late: what was fixed for it is gone",
        DUPLICATE,
        values=values,
        answer=taken(version=0),
    )
    return s.ends(
        parameters={0: {0: 108, 1: -1}}, version=(ROUND, 3), numbers=[(0, 3, 2), (1, 3, 1)]
    )


def out_of_order() -> Serving:
    s = Serving(
        "push-out-of-order",
        "Fragments in any order; the first one to come fixes the staleness of all.",
        room=3,
        parameters={2: {359: 5}},
    )
    s.push("the last first", PUSHED, index=2, values={359: 6}, answer=held({359: 11}, staleness=1))
    for index in (1, 2, 0):
        lanes = {359: 21} if index == 2 else {0: 10}
        say = f"worker 4's fragment {index}" + (": its push is whole" if index == 0 else "")
        s.push(
            say,
            PUSHED,
            index=index,
            values={next(iter(lanes)): 10},
            header=WORKER_4,
            answer=held(lanes, staleness=1),
        )
    s.push(
        "worker 3's first: version 1, and the staleness of its last fragment",
        PUSHED,
        values={0: 2},
        answer=held({0: 12}, version=1, staleness=1),
    )
    s.push(
        "worker 5 begins",
        PUSHED,
        index=1,
        header=WORKER_5,
        answer=held({0: 10}, version=1, staleness=2),
    )
    s.push(
        "worker 3's second: its push is whole",
        PUSHED,
        index=1,
        values={0: -4},
        answer=held({0: 6}, version=1, staleness=1),
    )
    return s.ends(
        parameters={0: {0: 12}, 1: {0: 6}, 2: {359: 21}},
        version=(ROUND, 2),
        numbers=[(0, 3, 1), (0, 4, 1), (1, 3, 1), (1, 4, 1), (1, 5, 1), (2, 3, 1), (2, 4, 1)],
    )


def version() -> Serving:
    s = Serving(
        "version",
        "The version is of whole pushes: the least of what a worker has pulled is what it pushes with.",
        parameters={0: {0: 1}, 1: {0: 2}},
    )
    s.pull("worker 3 pulls the first fragment", "pulled", answer=held({0: 1}))
    s.push(
        "half a push of worker 4",
        PUSHED,
        header=WORKER_4,
        values={0: 10},
        answer=held({0: 11}, staleness=1),
    )
    s.pull(
        "worker 5 pulls that: more than the version says",
        "pulled",
        header=WORKER_5,
        answer=held({0: 11}),
    )
    s.push(
        "the other half",
        PUSHED,
        index=1,
        header=WORKER_4,
        values={0: 10},
        answer=held({0: 12}, staleness=1),
    )
    s.pull("worker 3 pulls the second fragment", "pulled", index=1, answer=held({0: 12}, version=1))
    s.push(
        "its push names the least of both, 0",
        PUSHED,
        number=2,
        values={0: 8},
        answer=held({0: 15}, version=1, staleness=2),
    )
    s.push(
        "to all fragments",
        PUSHED,
        number=2,
        index=1,
        values={0: 8},
        answer=held({0: 16}, version=1, staleness=2),
    )
    s.push("a version to come", MALFORMED, version=3, header=WORKER_5)
    s.push(
        "the newest",
        PUSHED,
        version=2,
        values={0: 1},
        header=WORKER_5,
        answer=held({0: 16}, version=2, staleness=1),
    )
    s.agent(
        "a barrier; the version is of the round before still", round=ROUND + 1, round_high=ROUND + 2
    )
    late = {"sender": 5, "round": ROUND + 1}
    s.push("that is no version of this round", MALFORMED, number=2, version=2, header=late)
    s.pull(
        "parameters are what they were, and have version 0",
        "pulled",
        header=late,
        answer=held({0: 16}),
    )
    s.push(
        "nor does a push of this round raise that",
        PUSHED,
        number=2,
        index=1,
        values={0: 1},
        header=late,
        answer=held({0: 17}, staleness=1),
    )
    s.push("once it is whole", PUSHED, number=2, header=late, answer=held({0: 16}, staleness=1))
    return s.ends(
        parameters={0: {0: 16}, 1: {0: 17}},
        version=(ROUND, 2),
        numbers=[(0, 3, 2), (0, 4, 1), (0, 5, 2), (1, 3, 2), (1, 4, 1), (1, 5, 2)],
    )


def old_numbers() -> Serving:
    s = Serving("push-old-numbers", "A step that is older than another of its worker is not added.")
    s.push("step 5", PUSHED, number=5, values={0: 1}, answer=held({0: 1}, staleness=1))
    s.push("step 4 where 5 has been", DUPLICATE, number=4, values={0: 1}, answer=taken())
    s.push("step 4 where 5 has not been", "round", number=4, index=1, values={0: 1}, heard=False)
    s.push("number 0", MALFORMED, number=0, values={0: 1})
    s.push(
        "each worker has numbers of its own",
        PUSHED,
        number=1,
        values={0: 1},
        header=WORKER_4,
        answer=held({0: 2}, staleness=1),
    )
    last = 2**32 - 1
    s.push("the last number", PUSHED, number=last, index=1, answer=held(staleness=1))
    s.push("a step before it", "round", number=6, values={0: 1})
    return s.ends(parameters={0: {0: 2}}, numbers=[(0, 3, 5), (0, 4, 1), (1, 3, last)])


def bad_pushes() -> Serving:
    s = Serving(
        "bad-pushes",
        "Pushes that cannot be, or are not for this server.",
        servers=[2, 1],
        room=5,
    )
    wrong: list[tuple[str, str, Fields]] = [
        ("lanes of 16 bits", MALFORMED, {"width": 16}),
        ("a width of 0", MALFORMED, {"width": 0}),
        ("a width of 24", MALFORMED, {"width": 24}),
        ("fewer fragments than there are", MALFORMED, {"fragments": 4}),
        ("more fragments", MALFORMED, {"fragments": 6}),
        ("number 0", MALFORMED, {"number": 0}),
        ("a version to come", MALFORMED, {"version": 1}),
        ("an exponent that is too large", "shift", {"exponent": -9}),
        ("what is not finite", "shift", {"exponent": 127}),
        ("the other server's first", RANGE, {"index": 0}),
        ("the other server's last", RANGE, {"index": 1}),
        ("behind the end", RANGE, {"index": 5}),
        ("far behind the end", RANGE, {"index": 2**32 - 1}),
    ]
    for say, counter, fields in wrong:
        s.push(say, counter, values={0: 1}, heard=False, **{"index": 2, **fields})
    for index in (2, 3, 4):
        s.push(
            f"fragment {index} is this server's",
            PUSHED,
            index=index,
            values={0: index},
            answer=held({0: index}, staleness=1),
        )
    return s.ends(
        parameters={k: {0: k} for k in (2, 3, 4)},
        version=(ROUND, 1),
        numbers=[(k, 3, 1) for k in (2, 3, 4)],
    )


def near_the_limits() -> Serving:
    near = 2**62 - 1
    s = Serving(
        "near-the-limits",
        "A fragment with a parameter of 2**62 or more takes no more steps, so that nothing wraps.",
        room=3,
        parameters={0: {0: near}, 1: {0: -near - 1}, 2: {0: near}},
    )
    s.push(
        "one unit below, and the largest step",
        PUSHED,
        values={0: MOST},
        exponent=-10,
        answer=held({0: 3 * 2**29}, staleness=1, exponent=-8),
    )
    s.push("it is full", "full", number=2, values={0: -1}, answer=taken(reason=FULL), heard=False)
    s.contribution("for a synchronisation too", "full", values={0: 1}, answer=taken(reason=FULL))
    s.push(
        "on the other side -2**62 takes a step",
        PUSHED,
        index=1,
        values={0: LEAST},
        exponent=-10,
        answer=held({0: -3 * 2**29}, staleness=1, exponent=-8),
    )
    s.push("no other", "full", number=2, index=1, values={0: 1}, answer=taken(reason=FULL))
    s.push(
        "a step of one unit reaches 2**62",
        PUSHED,
        index=2,
        values={0: 1},
        answer=held({0: 2**30}, staleness=1, exponent=-8),
    )
    s.push(
        "that is full",
        "full",
        number=2,
        index=2,
        version=1,
        values={0: -1},
        answer=taken(version=1, reason=FULL),
    )
    s.push("the first, sent again", DUPLICATE, answer=taken(staleness=1))
    s.pull(
        "a full fragment is pulled as any other",
        "pulled",
        answer=held({0: 3 * 2**29}, version=1, exponent=-8),
    )
    return s.ends(
        parameters={
            0: {0: near + MOST * 2**30},
            1: {0: -(2**62) - 2**61},
            2: {0: 2**62},
        },
        version=(ROUND, 1),
        full=0,
        numbers=[(0, 3, 1), (1, 3, 1), (2, 3, 1)],
    )


SCENARIOS: tuple[Callable[[], Serving], ...] = (
    *(push_i32, push_i16, push_i8, staleness_i32, staleness_i16, staleness_i8, staleness_told),
    *(again, out_of_order, version, old_numbers, bad_pushes, near_the_limits),
)
