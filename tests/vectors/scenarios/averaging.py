# SPDX-License-Identifier: Apache-2.0
"""Synchronisations at a parameter server (S4): contributions, what waits for them, and what a commit does."""

from __future__ import annotations

from collections.abc import Callable

from tests.vectors.encode import Fields
from tests.vectors.scenario import ROUND, VIEW
from tests.vectors.serving import SYNCHRONISING, Serving, held, taken

GATHERED, SUMMED, PULLED, PUSHED, REFUSED = "gathered", "summed", "pulled", "pushed", "refused"
WORKER_4: Fields = {"sender": 4}
WORKER_5: Fields = {"sender": 5}
NEXT: Fields = {"round": ROUND + 1}
WAIT = taken(reason=SYNCHRONISING)


def synchronisation() -> Serving:
    s = Serving(
        "synchronisation",
        "The plain average of the list's steps; it is added at the first touch after the commit.",
        parameters={0: {0: 100, 1: -1}, 1: {0: 50}},
    )
    s.contribution("worker 3's", GATHERED, values={0: 10, 1: -3}, answer=taken(), heard=True)
    s.again("the same frame", "duplicate", answer=taken(), heard=False)
    s.pull("a pull must wait", REFUSED, answer=WAIT, heard=False)
    s.push("so must a push", REFUSED, values={0: 1}, header=WORKER_5, answer=WAIT, heard=False)
    s.pull("of this fragment only", PULLED, index=1, answer=held({0: 50}))
    s.contribution(
        "worker 4's: the sum is made",
        SUMMED,
        values={0: 21, 1: -3},
        header=WORKER_4,
        answer=taken(),
    )
    s.pull("until the commit", REFUSED, answer=WAIT)
    for sender in (3, 4):
        last = sender == 4
        s.contribution(
            f"the second fragment, worker {sender}'s",
            SUMMED if last else GATHERED,
            index=1,
            values={0: sender},
            header={"sender": sender},
            answer=taken(),
        )
    s.commit("the round is committed", ROUND)
    s.pull(
        "the first touch: 10 / 2 and 21 / 2, each rounded; -3 / 2 is -1",
        PULLED,
        header=NEXT,
        answer=held({0: 116, 1: -3}),
    )
    s.pull("it is added once", PULLED, header={**NEXT, **WORKER_5}, answer=held({0: 116, 1: -3}))
    s.push(
        "a push is the second fragment's first touch: 2 and 2, and its own 5",
        PUSHED,
        index=1,
        values={0: 5},
        number=10,
        header=NEXT,
        answer=held({0: 59}, staleness=1),
    )
    s.contribution("one of the round before", "round", values={0: 1}, header=WORKER_5)
    return s.ends(
        parameters={0: {0: 116, 1: -3}, 1: {0: 59}},
        version=(ROUND + 1, 0),
        numbers=[(1, 3, 10)],
    )


def _thirds(width: int) -> Serving:
    """Three contributions in narrow lanes."""
    least = -(1 << width - 1)
    s = Serving(
        f"synchronisation-i{width}",
        f"Three workers' {width}-bit lanes: a third of each is rounded by itself.",
        width=width,
        room=32 // width,
        parameters={0: {0: 1000}},
    )
    last = 32 // width * 360 - 1
    third = {16: -10923, 8: -43}[width]  # of the smallest lane: -10922.67, -42.67
    for sender, counter in ((5, GATHERED), (3, GATHERED), (4, SUMMED)):
        s.contribution(
            f"worker {sender}'s",
            counter,
            members=0b11100,
            values={0: 100, 1: 1, 2: 2, last: least},
            header={"sender": sender},
            answer=taken(),
        )
    s.commit("the round is committed", ROUND)
    s.pull("three times 33, 0 and 1", PULLED, header=NEXT, answer=held({0: 1099, 2: 3}))
    return s.ends(
        parameters={0: {0: 1099, 2: 3, last: 3 * third}},
        version=(ROUND + 1, 0),
    )


def synchronisation_i16() -> Serving:
    return _thirds(16)


def synchronisation_i8() -> Serving:
    return _thirds(8)


def after_pushes() -> Serving:
    s = Serving(
        "synchronisation-after-pushes",
        "The version stays while a round is averaged, and begins again at 0 with the next one.",
        room=1,
    )
    s.push("a push", PUSHED, values={0: 8}, answer=held({0: 8}, staleness=1))
    s.contribution(
        "worker 3's: the answer has the version",
        GATHERED,
        number=2,
        values={0: 4},
        answer=taken(version=1),
    )
    s.push("the push, late: it is in", "duplicate", values={0: 8}, answer=taken(staleness=1))
    s.pull("a pull waits", REFUSED, header=WORKER_4, answer=taken(version=1, reason=SYNCHRONISING))
    s.contribution(
        "worker 4's", SUMMED, number=2, values={0: 2}, header=WORKER_4, answer=taken(version=1)
    )
    s.commit("the round is committed", ROUND)
    s.push(
        "staleness is of this round",
        PUSHED,
        number=3,
        values={0: 1},
        header=NEXT,
        answer=held({0: 12}, staleness=1),
    )
    return s.ends(parameters={0: {0: 12}}, version=(ROUND + 1, 1), numbers=[(0, 3, 3)])


def dropped() -> Serving:
    s = Serving(
        "synchronisation-dropped",
        "A round that another view runs again: what had come before is written over.",
        room=1,
    )
    s.contribution("all of the list", SUMMED, members=0b100, values={0: 100}, answer=taken())
    s.agent("the next view", view=VIEW + 1)
    view: Fields = {"view": VIEW + 1}
    s.pull("nothing of this view has come", PULLED, header=view, answer=held())
    lists: Fields = {"members": 0b11000}
    s.contribution(
        "worker 4's", GATHERED, values={0: 8}, header={**view, **WORKER_4}, answer=taken(), **lists
    )
    s.contribution(
        "worker 5's", SUMMED, values={0: 4}, header={**view, **WORKER_5}, answer=taken(), **lists
    )
    s.contribution("one of the view before", "view", values={0: 1}, **lists)
    s.commit("the round is committed", ROUND)
    s.pull("4 and 2", PULLED, header={**view, **NEXT}, answer=held({0: 6}))
    return s.ends(parameters={0: {0: 6}}, version=(ROUND + 1, 0))


def barrier() -> Serving:
    s = Serving(
        "synchronisation-not-committed",
        "A round that ends without a list adds nothing, whatever had come.",
        room=1,
        parameters={0: {0: 3}},
    )
    s.contribution("all of the list", SUMMED, members=0b100, values={0: 100}, answer=taken())
    s.commit("the round ends without it", ROUND, listed=False)
    s.pull("the parameters are as before", PULLED, header=NEXT, answer=held({0: 3}))
    return s.ends(version=(ROUND + 1, 0))


def refused() -> Serving:
    s = Serving("bad-contributions", "Contributions that cannot be.", room=1, left=[2])
    wrong: list[tuple[str, str, Fields]] = [
        ("a list without the sender", "malformed", {"members": 0b1000}),
        ("a list with a member that there is not", "malformed", {"members": 0b101100}),
        ("a list with a member that has left", "malformed", {"members": 0b1110}),
        ("an empty list", "malformed", {"members": 0}),
        ("number 0", "malformed", {"number": 0}),
        ("16 bits", "malformed", {"width": 16}),
        ("more fragments than there are", "malformed", {"fragments": 2}),
        ("behind the end", "range", {"index": 1}),
        ("an exponent that is too large", "shift", {"exponent": -9}),
    ]
    for say, counter, fields in wrong:
        s.contribution(say, counter, values={0: 1}, heard=False, **fields)
    s.contribution("worker 4's", GATHERED, values={0: 8}, header=WORKER_4, answer=taken())
    other = "another list than the first had"
    s.contribution(other, "malformed", members=0b11100, values={0: 1}, heard=False)
    s.contribution("worker 3's", SUMMED, values={0: 2}, answer=taken())
    s.commit("the round is committed", ROUND)
    s.pull("4 and 1", PULLED, header=NEXT, answer=held({0: 5}))
    return s.ends(parameters={0: {0: 5}}, version=(ROUND + 1, 0))


def no_room() -> Serving:
    s = Serving(
        "no-synchronisations",
        "A job that never has one has no room for contributions.",
        room=1,
        averages=0,
    )
    s.contribution("a contribution", "range", values={0: 1})
    s.push("a push", PUSHED, values={0: 1}, answer=held({0: 1}, staleness=1))
    return s.ends(parameters={0: {0: 1}}, version=(ROUND, 1), numbers=[(0, 3, 1)])


SCENARIOS: tuple[Callable[[], Serving], ...] = (
    *(synchronisation, synchronisation_i16, synchronisation_i8, after_pushes),
    *(dropped, barrier, refused, no_room),
)
