# SPDX-License-Identifier: Apache-2.0
"""Frames of parameter servers that change nothing: strangers, other views and rounds; and networks with a key."""

from __future__ import annotations

from collections.abc import Callable

from tests.vectors.encode import ANSWER, Fields
from tests.vectors.scenario import ROUND, VIEW, mac
from tests.vectors.scenarios.signing import KEY, OTHER, SENDER, SEQUENCE, TAG, VIEW_AT, flip
from tests.vectors.serving import EXACT, NOT_YET, ON_URGENT, Serving, held, taken

PUSHED, PULLED, FORGED, REPLAYED = "pushed", "pulled", "forged", "replayed"
#: Where a step's lanes begin, from the frame's Ethernet header on.
BODY, LANES = 46, 70


def of_a_worker(s: Serving, say: str, counter: str, header: Fields) -> None:
    """Whatever a worker sends to a server; nobody is heard by it."""
    s.push(f"a push, {say}", counter, values={0: 1}, heard=False, header=header)
    s.pull(f"a pull, {say}", counter, heard=False, header=header)
    s.contribution(f"a contribution, {say}", counter, values={0: 1}, heard=False, header=header)


def strangers() -> Serving:
    s = Serving(
        "strangers",
        "R4: a frame is ignored if its sender is not the member that it names.",
        left=[5],
    )
    cases: list[tuple[str, str, Fields]] = [
        ("an unknown MAC", "stranger", {"source": mac(0x99)}),
        ("member 4 says it is 3", "stranger", {"source": mac(4)}),
        ("number 0", "stranger", {"sender": 0, "source": mac(3)}),
        ("a member that has left", "stranger", {"sender": 5}),
        ("number 6 of 5", "stranger", {"sender": 6}),
        ("number 65", "stranger", {"sender": 65}),
        ("number 65535", "stranger", {"sender": 65535, "source": mac(3)}),
        ("this host's own frame, come back", "echo", {"sender": 1}),
        ("to everybody", "astray", {"to": "ff:ff:ff:ff:ff:ff"}),
        ("to another member", "astray", {"to": mac(2)}),
    ]
    for say, counter, header in cases:
        of_a_worker(s, say, counter, header)
    s.push("the member itself", PUSHED, values={0: 1}, answer=held({0: 1}, staleness=1))
    return s.ends(parameters={0: {0: 1}}, numbers=[(0, 3, 1)])


def elsewhere() -> Serving:
    s = Serving(
        "elsewhere", "Other views, rounds that are over or to come, and lengths that are wrong."
    )
    for view in (VIEW - 1, VIEW + 1):
        s.push(f"view {view} of {VIEW}", "view", values={0: 1}, heard=False, header={"view": view})
        s.pull(f"a pull in view {view}", "view", heard=False, header={"view": view})
    for round_ in (0, ROUND - 1, ROUND + 2, 2**32 - 1):
        s.push(
            f"round {round_} of {ROUND}",
            "round",
            values={0: 1},
            heard=False,
            header={"round": round_},
        )
        s.pull(f"a pull in round {round_}", "round", heard=False, header={"round": round_})
    later: Fields = {"round": ROUND + 1}
    wait = taken(reason=NOT_YET)
    s.push(
        "the next round: not yet",
        "refused",
        number=8,
        index=1,
        header=later,
        answer=wait,
        heard=False,
    )
    s.pull("a pull", "refused", number=8, index=1, header=later, answer=wait, heard=False)
    s.contribution(
        "a contribution", "refused", number=8, index=1, header=later, answer=wait, heard=False
    )
    for length in (55, 56, 1495, 1497):
        s.push(
            f"a length of {length}",
            "truncated",
            values={0: 1},
            heard=False,
            header={"length": length},
        )
    s.taken("an acknowledgement that says it has lanes", "truncated", header={"length": 1496})
    s.commit("the round is over", ROUND)
    s.push("a push of it", "round", values={0: 1})
    s.pull("the round that is open now", PULLED, header=later, answer=held())
    return s.ends(version=(ROUND + 1, 0))


def nobody_serves() -> Serving:
    s = Serving("no-servers", "In a phase without servers nothing of theirs is taken.", servers=[])
    s.push("a push", "mode", values={0: 1})
    s.pull("a pull", "mode")
    s.contribution("a contribution", "mode", values={0: 1})
    s.held("parameters", "mode")
    s.taken("an acknowledgement", "mode")
    return s.ends()


def other_types() -> Serving:
    s = Serving("other-types", "Frames of stripes are not taken where there are servers.")
    body: Fields = {"members": 0b111, "fragments": 2, "number": 1, "width": 32, "exponent": EXACT}
    for kind in ("sum", "ask", "lacking"):
        s.step(f"a {kind}", s.frame(kind, body, bytes(1440)), "type", of=kind, heard=False)
    return s.ends()


def signed() -> Serving:
    s = Serving(
        "signed",
        "Frames with their tags; answers have the server's own numbers, one count for all workers.",
        key=KEY,
        store=1,
        servers=[1, 2],
        parameters={0: {0: 1}},
    )
    s.push("a push", PUSHED, values={0: 5}, answer=held({0: 6}, staleness=1), heard=True)
    s.pull(
        "a pull of another",
        PULLED,
        header={"sender": 4},
        answer=held({0: 6}, version=1),
        heard=True,
    )
    s.push(
        "sent again, with a number of its own",
        "duplicate",
        values={0: 5},
        answer=taken(staleness=1),
    )
    s.contribution("a contribution", "gathered", values={0: 1}, answer=taken(version=1), heard=True)
    s.held("what has come of server 2", "stored", index=1, values={0: 3}, heard=True)
    s.taken("and its acknowledgement", "acknowledged", index=1, number=2, version=4, heard=True)
    s.push("the next round", "refused", header={"round": ROUND + 1}, answer=taken(reason=NOT_YET))
    return s.ends(
        parameters={0: {0: 6}},
        version=(ROUND, 1),
        numbers=[(0, 3, 1)],
        store=[(1, 1, ROUND, 0, EXACT, {0: 3})],
        taken=[(1, 2)],
        answered=[(2, 2, 1, ROUND, 4)],
        windows=[(2, 0, 6), (3, 7, 0), (4, 2, 0)],
    )


def forged() -> Serving:
    s = Serving("forged", "Whoever lacks the view's key changes nothing.", key=KEY)
    high: Fields = {"sequence": 2**32 - 1, "tag": 1}
    doubted: list[tuple[str, Fields]] = [
        ("no tag", {"tag": 0}),
        ("another key", {"key": OTHER}),
        ("the highest number, and no tag: no window moves", high),
    ]
    for say, header in doubted:
        of_a_worker(s, say, FORGED, header)
        s.held(f"parameters, {say}", FORGED, heard=False, header=header)
        s.taken(f"an acknowledgement, {say}", FORGED, heard=False, header=header)
    s.push(
        "cheaper reasons come first: a stranger", "stranger", header={"source": mac(9), "tag": 0}
    )
    s.push("another round", "round", header={"round": ROUND - 1, "tag": 0})
    s.push(
        "the next round: a forged one is not refused", FORGED, header={"round": ROUND + 1, "tag": 0}
    )
    s.push("another way: to everybody", "astray", header={"to": "ff:ff:ff:ff:ff:ff", "tag": 0})
    body: Fields = {"number": 1, "index": 0, "fragments": 2, "width": 32, "exponent": EXACT}
    push = s.frame("push", body, bytes([0, 0, 0, 5]) + bytes(1436), sequence=40)
    of = "the push below"
    for say, at in (
        ("round", VIEW_AT + 7),
        ("number", SEQUENCE + 3),
        ("tag, first byte", TAG),
        ("tag, last byte", TAG + 7),
        ("version", BODY + 3),
        ("step's number", BODY + 7),
        ("staleness", BODY + 19),
        ("reserved byte", BODY + 23),
        ("first lane", LANES + 3),
        ("last lane", LANES + 1439),
    ):
        counter = "round" if at == VIEW_AT + 7 else FORGED
        s.step(f"a bit of a push's {say}", flip(push, at), counter, of=of, heard=False)
    s.step("a bit of its sender", flip(push, SENDER + 1), "stranger", of=of, heard=False)
    s.again("the push as it was sent", PUSHED, answer=held({0: 5}, staleness=1), heard=True)
    return s.ends(parameters={0: {0: 5}}, numbers=[(0, 3, 1)], windows=[(3, 40, 0)])


def replayed() -> Serving:
    s = Serving(
        "replayed",
        "A recorded frame changes nothing; a pull is answered once for each number of its frame.",
        key=KEY,
        room=1,
        parameters={0: {0: 1}},
    )
    s.push(
        "a push", PUSHED, values={0: 2}, header={"sequence": 2000}, answer=held({0: 3}, staleness=1)
    )
    s.again(
        "the same frame: within the window, and it is in", "duplicate", answer=taken(staleness=1)
    )
    s.push(
        "1,023 numbers before",
        PUSHED,
        number=2,
        version=1,
        header={"sequence": 977},
        answer=held({0: 3}, version=1, staleness=1),
    )
    s.push(
        "1,024 numbers before", REPLAYED, number=3, version=2, header={"sequence": 976}, heard=False
    )
    pulled = held({0: 3}, version=2)
    s.pull("a pull", PULLED, header={"sequence": 2001}, answer=pulled)
    s.again("the same frame", REPLAYED, heard=False)
    s.pull("32 numbers before", PULLED, header={"sequence": 1969}, answer=pulled)
    s.again("that one again", REPLAYED, heard=False)
    s.pull(
        "33 numbers before: too far back to be known",
        REPLAYED,
        header={"sequence": 1968},
        heard=False,
    )
    early: Fields = {"sequence": 2001, "round": ROUND + 1}
    wait = taken(version=0, reason=NOT_YET)
    s.pull("a pull of the next round", "refused", header=early, answer=wait, heard=False)
    s.again("that one again: it is refused again", "refused", answer=wait, heard=False)
    s.pull(
        "the other way out has numbers of its own",
        PULLED,
        header={"sequence": 1, "flags": ANSWER},
        answer=pulled,
    )
    s.again("each once", REPLAYED, heard=False)
    s.pull("another worker has, too", PULLED, header={"sequence": 1, "sender": 4}, answer=pulled)
    s.contribution("a contribution", "gathered", header={"sequence": 2002}, answer=taken(version=2))
    s.again("the same frame", "duplicate", answer=taken(version=2), heard=False)
    return s.ends(
        parameters={0: {0: 3}},
        version=(ROUND, 2),
        numbers=[(0, 3, 2)],
        windows=[(3, 2002, 1), (4, 1, 0)],
    )


def overtaken() -> Serving:
    s = Serving(
        "overtaken",
        "Urgent frames overtake others in queues: each channel has numbers of its own, and parameters in common.",
        key=KEY,
        room=1,
        parameters={0: {0: 1}},
    )
    s.pull(
        "urgent, and 5,000 numbers ahead",
        PULLED,
        header={"sequence": 5001, **ON_URGENT},
        answer=held({0: 1}),
    )
    s.again("the same frame", REPLAYED, heard=False)
    s.push(
        "a push of channel 0 that was numbered before",
        PUSHED,
        values={0: 2},
        header={"sequence": 1},
        answer=held({0: 3}, staleness=1),
    )
    s.push(
        "that step again, on the other channel: it was added",
        "duplicate",
        header={"sequence": 5002, **ON_URGENT},
        answer=taken(staleness=1),
    )
    s.pull(
        "too old for its channel",
        REPLAYED,
        header={"sequence": 2, **ON_URGENT},
        heard=False,
    )
    s.pull("as old, on channel 0", PULLED, header={"sequence": 2}, answer=held({0: 3}, version=1))
    return s.ends(
        parameters={0: {0: 3}},
        version=(ROUND, 1),
        numbers=[(0, 3, 1)],
        windows=[(3, 2, 0)],
        urgent=[(3, 5002, 0)],
    )


SCENARIOS: tuple[Callable[[], Serving], ...] = (
    *(strangers, elsewhere, nobody_serves, other_types, signed, forged, replayed, overtaken),
)
