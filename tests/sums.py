# SPDX-License-Identifier: Apache-2.0
"""The same gradients summed in three ways: by hosts, by a switch that adds, and by its model.

Members 1 to 3 send fragments all at once, after tokens that say whose are to be added, whoever has these. A host,
member 4, hears them on a plain LAN and adds; another one hears what a switch makes of them. What becomes of every frame
must be the same, or differ as `FAULTS` says, and all sums must be the same, whole or not. In the end everybody sends
what is missing.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.drawn import between, one_of
from tests.p4.model import FRAGMENT, ModelSwitch
from tests.replay import ModelTarget, Target
from tests.switched import CONFIG, MACS, NETWORK, ROUND, VIEW, recorded
from tests.vectors import encode

SENDERS = (1, 2, 3)
MEMBERS = recorded(MACS[: len(SENDERS)])  # sender k is at port k
FRAGMENTS = 4
STRANGER = "02:00:00:00:00:09"
HEARS = 2  # the port at which another host listens
ALL = 0b111
TAKEN = {"added", "duplicate"}
#: What can be wrong: what the switch counts, and what a host counts, which on a plain LAN would take what is not wrong
#: there: it knows no ports, adds shifted lanes and raw bytes, and has no list.
FAULTS: dict[str, tuple[str, set[str]]] = {
    "another MAC address": ("stranger", {"stranger"}),
    "another member's number": ("stranger", {"stranger"}),
    "another port": ("stranger", TAKEN),
    "another view": ("view", {"view"}),
    "another round": ("round", {"round"}),
    "an open list": ("round", TAKEN),
    "shifted": ("shift", TAKEN),
    "shifted too far": ("shift", {"shift"}),
    "cut": ("truncated", {"truncated"}),
    "an unknown width": ("malformed", {"malformed"}),
    "raw bytes": ("malformed", TAKEN),
    "an index that cannot be": ("malformed", {"malformed"}),
    "a sum that all have": ("window", TAKEN),
}
#: Tokens that the switch does not follow: what they say of the list does not count.
IDLE = ("", "", "", "stale", "repeated", "a stranger's")
LARGEST_SHIFT = {32: 26, 16: 42, 8: 50}
FLAGS_AT = 14 + 2
PAYLOAD_AT = 14 + 32 + 16

Exchange = Callable[..., Mapping[int, Sequence[bytes]]]


@dataclass(frozen=True)
class Step:
    """Tokens and a fragment of a member that come in at a port, from the Ethernet header on."""

    sender: int
    port: int
    tokens: tuple[bytes, ...]
    frame: bytes
    fault: str = ""


@dataclass(frozen=True)
class Gradients:
    """Lanes of `width` bits: `lanes[k][index]` is what member k sends; the round's list; what happens."""

    width: int
    listed: int
    lanes: Mapping[int, NDArray[np.int64]]
    steps: tuple[Step, ...]


def token(
    owner: int,
    hop: int,
    *,
    by: int = 1,
    listed: int = ALL,
    settled: int = 0,
    flags: int = 0,
    source: str | None = None,
) -> bytes:
    """Member `by` hands the token to `owner`; `listed` is a bit for each member in the closed list, 0 if it is open."""
    fields = {"generation": 1, "hop": hop, "owner": owner, "members": len(MACS), "state": 1}
    fields |= {"listed": listed, "settled": settled}
    entries = [("entry", {"samples": 1, "marks": 1})] * len(MACS)
    header = {"network": NETWORK, "view": VIEW, "round": ROUND, "sender": by, "sequence": hop}
    data = encode.frame(header | {"flags": flags}, ("token", fields), *entries)
    return encode.ethernet(source or MACS[by - 1].hex(":"), data)


def fragment(
    sender: int,
    index: int,
    width: int,
    lanes: NDArray[np.int64],
    *,
    source: str | None = None,
    header: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> bytes:
    """For the switch to add, lanes of `width` bits; `header` and `fields` are what differs."""
    usual = {
        "network": NETWORK,
        "view": VIEW,
        "round": ROUND,
        "sender": sender,
        "flags": encode.ADD,
    }
    body = {"index": index, "fragments": 5000, "width": width, "shift": 0, "samples": 1}
    data = encode.frame(
        usual | dict(header or {}),
        ("fragment", body | dict(fields or {})),
        tail=lanes.astype(f">i{width // 8}").tobytes(),
    )
    return encode.ethernet(source or MACS[sender - 1].hex(":"), data)


@st.composite
def sequences(draw: st.DrawFn) -> Gradients:
    """Fragments of all three in turns, sound and repeated ones; about one in four has a fault."""
    width = draw(one_of(32, 16, 8))
    listed = draw(one_of(ALL, ALL, ALL, 0b011, 0b101, 0b110, 0b010))
    largest = (2 ** (width - 1) - 1) // len(SENDERS)
    rng = np.random.default_rng(draw(between(0, 2**32)))
    shape = FRAGMENTS, 1440 * 8 // width
    lanes = {k: rng.integers(-largest, largest, shape, endpoint=True) for k in SENDERS}
    steps = []
    for number in range(1, draw(between(4, 14)) + 1):
        sender, index = draw(one_of(*SENDERS)), draw(between(0, FRAGMENTS - 1))
        fault = draw(one_of(*FAULTS)) if draw(between(0, 3)) == 3 else ""
        other = draw(one_of(*(k for k in SENDERS if k != sender)))
        far, owner = draw(one_of(0, 1, 2)), draw(one_of(*SENDERS))
        idle = draw(one_of(*IDLE))
        steps.append(
            Step(
                sender,
                port := other if fault == "another port" else sender,
                (
                    *_tokens(fault, owner, port, 3 * number, listed, index),
                    *_idle(idle, port, 3 * number),
                ),
                _fragment(fault, sender, other, far, index, width, lanes[sender][index]),
                fault,
            )
        )
    return Gradients(width, listed, lanes, tuple(steps))


def _tokens(
    fault: str, owner: int, by: int, hop: int, listed: int, index: int
) -> tuple[bytes, ...]:
    """What comes before a fragment."""
    match fault:
        case "an open list":
            return (token(owner, hop, by=by, listed=0),)
        case "a sum that all have":
            return (token(owner, hop, by=by, listed=listed, settled=index + 1),)
    return (token(owner, hop, by=by, listed=listed),)


def _idle(which: str, by: int, hop: int) -> tuple[bytes, ...]:
    """A token that would open the list."""
    match which:
        case "stale":
            return (token(by, hop - 1, by=by, listed=0),)
        case "repeated":
            return (token(by, hop - 1, by=by, listed=0, flags=encode.REPEAT),)
        case "a stranger's":
            return (token(by, hop + 1, by=by, listed=0, source=STRANGER),)
    return ()


def _fragment(
    fault: str,
    sender: int,
    other: int,
    far: int,
    index: int,
    width: int,
    lanes: NDArray[np.int64],
) -> bytes:
    most = LARGEST_SHIFT[width]
    header: dict[str, Any] = {
        "another member's number": {"sender": other},
        "another view": {"view": (0, VIEW - 1, VIEW + 1)[far]},
        "another round": {"round": (0, ROUND - 1, ROUND + 1)[far]},
    }.get(fault, {})
    fields: dict[str, Any] = {
        "shifted": {"shift": (1, 3, most)[far]},
        "shifted too far": {"shift": (most + 1, 63, 255)[far]},
        "an unknown width": {"width": (33, 24, 255)[far]},
        "raw bytes": {"width": 0},
        "an index that cannot be": {"index": 5000},
    }.get(fault, {})
    source = STRANGER if fault == "another MAC address" else None
    frame = fragment(sender, index, width, lanes, source=source, header=header, fields=fields)
    return frame[: -(1, 3, 1300)[far]] if fault == "cut" else frame


def for_hosts(frame: bytes) -> bytes:
    """The same fragment as it would be on a plain LAN."""
    flags = struct.pack(">H", 0)
    return frame[:FLAGS_AT] + flags + frame[FLAGS_AT + 2 :]


class _Way:
    """One sequence through a switch and through hosts; the switch is asked by `exchange`, as tests have it."""

    def __init__(self, sequence: Gradients, model: ModelSwitch, exchange: Exchange) -> None:
        self.sequence, self.model, self._exchange = sequence, model, exchange
        self._hop = 1000
        self.sums: list[bytes] = []  # what the listener hears

    def send(self, port: int, *frames: bytes) -> list[bytes]:
        """Tokens and fragments come in at a port; the fragments that come out there."""
        out = self._exchange(port, *frames)
        self.sums += _fragments(out.get(HEARS, ()))
        return _fragments(out.get(port, ()))

    def hand(self, owner: int, listed: int) -> bytes:
        """The token of all, at its port."""
        self._hop += 1
        return token(owner, self._hop, by=owner, listed=listed)

    def as_in_sums(self, index: int) -> slice:
        """Where a fragment lies in the accumulators of a bank, all in a row."""
        per_fragment = 1440 * 8 // self.sequence.width
        return slice(index * per_fragment, (index + 1) * per_fragment)

    def read(self) -> dict[int, NDArray[np.int64]]:
        """The switch's sums as they are, whole or not: under a list of those who are in one it is whole."""
        before = len(self.sums)
        indices = [index for index in range(FRAGMENTS) if self.model.seen(index)]
        nothing = np.zeros(1440 * 8 // self.sequence.width, np.int64)
        frames = []
        for index in indices:
            frames.append(self.hand(1, self.model.seen(index)))
            frames.append(fragment(1, index, self.sequence.width, nothing))
        answers = self.send(1, *frames)
        assert len(answers) == len(indices) and len(self.sums) == before
        found = {}
        for index, answer in zip(indices, answers, strict=True):
            assert struct.unpack_from(">I", answer, 14 + 32) == (index,)
            kind = f">i{self.sequence.width // 8}"
            found[index] = np.frombuffer(answer[PAYLOAD_AT:], kind).astype(np.int64)
        return found

    def missing(self) -> dict[int, list[int]]:
        """Fragments that sums lack, by the listed member that has not sent them."""
        listed = [k for k in SENDERS if self.sequence.listed >> k - 1 & 1]
        lacks = {
            k: [at for at in range(FRAGMENTS) if not self.model.seen(at) >> k - 1 & 1]
            for k in listed
        }
        return {k: indices for k, indices in lacks.items() if indices}


def _fragments(frames: Sequence[bytes]) -> list[bytes]:
    return [frame for frame in frames if frame[15] == FRAGMENT]


def expected(step: Step, reason: str, listed: int) -> tuple[set[str], set[str]]:
    """What a switch may count for a step's fragment, and what a host counts where the switch counts `reason`."""
    if step.fault:
        switch, host = FAULTS[step.fault]
        return {switch}, host
    if not listed >> step.sender - 1 & 1:
        return {"unlisted", "answered"}, TAKEN
    if reason in ("added", "summed"):
        return {reason}, {"added"}
    return {"duplicate", "answered"}, {"duplicate"}


def sums_agree(
    sequence: Gradients,
    begin: Callable[[Mapping[str, Any]], Target],
    model: ModelSwitch,
    exchange: Exchange,
) -> Counter[str]:
    """Run a sequence through hosts and switch.

    Args:
        begin: the XDP program, empty, in a configuration.
        exchange: gives the switch frames at a port; what comes out at each.

    Returns:
        what the switch's model has counted, each fault, sums that were read before they were `whole`, and those.
    """
    way = _Way(sequence, model, exchange)
    hosts = [begin(CONFIG), ModelTarget(CONFIG, MACS)]
    reached: Counter[str] = Counter()
    for step in sequence.steps:
        way.send(step.port, *step.tokens, step.frame)
        switch, host = expected(step, model.reason, sequence.listed)
        assert model.reason in switch, step
        taken = model.reason in ("added", "summed", "duplicate", "answered")
        theirs = host == TAKEN and (not taken or not sequence.listed >> step.sender - 1 & 1)
        for adds in hosts:  # what only the switch refuses they would take, but are not to
            found = (adds.peek if theirs else adds.run)(for_hosts(step.frame)).counters
            assert len(found) == 1 and set(found) <= host, step
        reached[step.fault] += 1
    for index, lanes in way.read().items():
        reached["partial"] += model.seen(index) != sequence.listed
        for adds in hosts:
            assert (_bank(adds)[way.as_in_sums(index)] == lanes).all(), (index, sequence)
    for sender, indices in way.missing().items():
        lacking = [
            fragment(sender, index, sequence.width, sequence.lanes[sender][index])
            for index in indices
        ]
        way.send(sender, way.hand(sender, sequence.listed), *lacking)
        for adds in hosts:
            assert {adds.run(for_hosts(frame)).counters for frame in lacking} == {("added",)}
    added = [_bank(adds).copy() for adds in hosts]
    for takes in (begin(CONFIG | {"sums": 1}), ModelTarget(CONFIG | {"sums": 1}, MACS)):
        assert {takes.run(frame).counters for frame in way.sums} <= {("added",), ("duplicate",)}
        assert len(takes.state().slots) == FRAGMENTS
        for bank in added:
            assert (_bank(takes) == bank).all(), sequence
    reached["whole"] += FRAGMENTS
    return reached + model.counters


def _bank(host: Target) -> NDArray[np.int64]:
    return host.state().accumulators[ROUND & 1].reshape(-1)


def all_send(width: int = 32) -> Gradients:
    """Everything twice, a fragment of all after the other: all sums become whole, and are asked for once more."""
    shape = FRAGMENTS, 1440 * 8 // width
    lanes = {k: np.arange(shape[1]) % 20 - 10 * k - np.arange(FRAGMENTS)[:, None] for k in SENDERS}
    steps = [
        Step(
            sender,
            sender,
            () if number % 5 else (token(SENDERS[number % 3], number + 1, by=sender),),
            fragment(sender, index, width, lanes[sender][index]),
        )
        for number, (_, index, sender) in enumerate(product(range(2), range(FRAGMENTS), SENDERS))
    ]
    return Gradients(width, ALL, lanes, tuple(steps))


#: How often a thousand random sequences must come to what, at the least; about half of what was seen.
LEAST = dict.fromkeys(FAULTS, 30) | {
    "": 3000,
    "partial": 1000,
    "whole": 4000,
    "added": 2500,
    "summed": 2000,
    "answered": 1500,
    "duplicate": 500,
    "unlisted": 700,
    "stale": 500,
    "stranger": 500,
}


def reached_enough(reached: Mapping[str, int], least: Mapping[str, int]) -> None:
    """A thousand random sequences have come to everything that there is."""
    rare = {what: reached.get(what, 0) for what, n in least.items() if reached.get(what, 0) < n}
    assert not rare, f"hardly reached: {rare} of {dict(reached)}"
