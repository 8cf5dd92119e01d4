# SPDX-License-Identifier: Apache-2.0
"""A switch and a host behind it get the same frames: what both count, and that the switch's sums are the host's.

Whatever only the switch refuses the host is asked about, and does not get. So its sums are of what the switch has
added.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests import replay
from tests.differences import ADD, KEPT, OTHER, PASSED, TAKEN, TOKEN, Row, difference, kind_of
from tests.p4.model import FRAGMENT, ModelSwitch
from tests.replay import State, Target
from tests.vectors import encode

PORTS = (1, 2, 3)
NETWORK = 0x0A0B0C0D
CONTROLLER = 64
VIEW, ROUND = 3, 7
HOST = 4  # of the random frames: it listens, and nobody sends in its name
MACS = [bytes([2, 0, 0, 0, 0, number]) for number in range(1, HOST + 1)]
CONFIG: dict[str, Any] = {
    "enabled": 1,
    "network": NETWORK,
    "view": VIEW,
    "round_low": ROUND,
    "round_high": ROUND,
    "number": HOST,
    "members": HOST,
    "live": HOST,
    "next": 1,
    "bounce": 0,
    "round": ROUND,
    "sent_seen": 0,
    "own_sent": 0,
    "blocks": 4,
    "keyed": 0,
    "sums": 0,
    "sums_next": 0,
    "alive": True,
}
PER_BLOCK = {0: 8, 8: 1, 16: 2, 32: 4}
BODY_AT = 14 + 32
PAYLOAD_AT = BODY_AT + 16

Recorded = frozenset[tuple[int, bytes, int]]


def port_of(number: int) -> int:
    """Where member k is: several can be behind one port."""
    return (number - 1) % len(PORTS) + 1


def recorded(macs: Sequence[bytes]) -> Recorded:
    """Number, MAC address and port of all; that of member 1 first, zeros for who has left."""
    return frozenset((k, mac, port_of(k)) for k, mac in enumerate(macs, 1) if any(mac))


@dataclass
class Bench:
    """A switch and its model, or the model alone.

    Attributes:
        exchange: frames come in at a port; what comes out at each.
        record: these are the members from now on.
        forget: the newest token, and all sums.
    """

    model: ModelSwitch
    exchange: Callable[..., Mapping[int, Sequence[bytes]]]
    record: Callable[[Recorded], None]
    forget: Callable[[], None]


def model_bench() -> Bench:
    """Of the model alone; nobody is recorded."""
    model = ModelSwitch(NETWORK, PORTS, CONTROLLER, frozenset())

    def exchange(port: int, *frames: bytes) -> dict[int, list[bytes]]:
        heard: dict[int, list[bytes]] = {}
        for frame in frames:
            for to, out in model.take(port, frame.ljust(60, b"\0")).items():
                heard.setdefault(to, []).append(out)
        return heard

    return Bench(model, exchange, lambda members: setattr(model, "members", members), model.forget)


def token(
    bench: Bench, by: int, owner: int, members: int, view: int, round_: int, listed: int
) -> bytes:
    """The next one, from a member."""
    position = bench.model.position + 1
    fields = {"generation": position >> 32, "hop": position & 0xFFFFFFFF, "owner": owner}
    fields |= {"members": members, "listed": listed}
    header = {"network": NETWORK, "view": view, "round": round_, "sender": by}
    data = encode.frame(header, ("token", fields), *[("entry", {})] * members)
    (source,) = (mac for number, mac, _ in bench.model.members if number == by)
    return encode.ethernet(source.hex(":"), data)


class Behind:
    """A host behind a switch.

    Attributes:
        met: how often they differed in which way, of `tests.differences.ROWS`.
        sums: how many of the switch's were compared; `whole`: who was listed was in it.
    """

    def __init__(self, bench: Bench, host: Target, members: int) -> None:
        self.bench, self.host, self.members = bench, host, members
        self.met: Counter[Row] = Counter()
        self.sums = self.whole = 0
        #: Of a round's fragments, by (view, round, index): lanes' widths; what the switch alone has refused; and of
        #: which it has, or the host has, what the other one lacks.
        self.widths: dict[tuple[int, int, int], set[int]] = {}
        self.refused: set[tuple[int, int, int]] = set()
        self.apart: set[tuple[int, int, int]] = set()

    def take(self, port: int, frame: bytes, sent: bytes, expected: str | None = None) -> str:
        """A frame, which the switch gets as `sent`; what it counts.

        Args:
            expected: what a host counts that gets all.
        """
        self.bench.exchange(port, sent)
        reason, kind = self.bench.model.reason, kind_of(sent)
        hears = self.host.run if reason in PASSED else self.host.peek
        would = (hears(frame).counters or ("",))[0]
        met = difference(kind, would if expected is None else expected, reason)
        if met is not None:
            self.met[met] += 1
        if kind not in (TOKEN, OTHER) and len(frame) >= PAYLOAD_AT:
            self._note(kind, frame, would, reason)
        return reason

    def _note(self, kind: str, frame: bytes, would: str, reason: str) -> None:
        view, round_ = struct.unpack_from(">II", frame, 14 + 8)
        index, _, _, width = struct.unpack_from(">IIHB", frame, BODY_AT)
        at = view, round_, index
        switch = kind == ADD and reason in ("added", "summed")
        host = would == "added" and reason in KEPT
        anew = switch and self.bench.model.seen(index).bit_count() == 1 and at in self.widths
        if switch or host:
            self.widths.setdefault(at, set()).add(width)
        if switch != host or anew:  # a switch has one bank: it has forgotten the others'
            self.apart.add(at)
        elif would in TAKEN and reason not in KEPT:
            self.refused.add(at)

    def compare(self, end: State | None = None) -> None:
        """The switch's sums of this round, whole or not: it is asked, under a list of those who are in one.

        Args:
            end: what a host has in the end that gets all.
        """
        model, state = self.bench.model, self.host.state()
        open_, listed, asker = (model.view, model.round), model.listed, min(model.members)[0]
        for _, found in sorted(model.sums.items()):
            view, round_, index = found.tag
            if (view, round_) != open_ or found.tag in self.apart or self._overlaps(found.tag):
                continue
            (width,) = self.widths[found.tag]
            lanes = np.frombuffer(self._ask(asker, found.tag, found.seen, width), f">i{width // 8}")
            for of in (state, end) if end and found.tag not in self.refused else (state,):
                # A host's lanes have 64 bits, a switch's as many as they came with.
                host = of.accumulators[round_ & 1].reshape(-1)[self._place(index, width)]
                assert (host.astype(lanes.dtype) == lanes).all(), found.tag
                assert of.slots[round_ & 1, index] == (view, round_, replay.bits(found.seen))
            self.sums += 1
            self.whole += found.seen == listed

    def reached(self) -> Counter[str]:
        """What the switch's model has counted, and the sums that were compared."""
        sums = {"sums compared": self.sums, "whole sums compared": self.whole}
        return self.bench.model.counters + Counter(sums)

    def _ask(self, asker: int, tag: tuple[int, int, int], seen: int, width: int) -> bytes:
        view, round_, index = tag
        header = {"network": NETWORK, "view": view, "round": round_, "sender": asker}
        fields = {"index": index, "fragments": index + 1, "width": width}
        (source,) = (mac for number, mac, _ in self.bench.model.members if number == asker)
        asks = encode.frame(header | {"flags": encode.ADD}, ("fragment", fields), tail=bytes(1440))
        hands = token(self.bench, asker, asker, self.members, view, round_, seen)
        port = port_of(asker)
        out = self.bench.exchange(port, hands, encode.ethernet(source.hex(":"), asks))
        assert self.bench.model.reason == "answered", tag
        (answer,) = (frame for frame in out[port] if frame[15] == FRAGMENT)
        return answer[PAYLOAD_AT:]

    def _place(self, index: int, width: int) -> slice:
        size = 1440 // PER_BLOCK[width]
        return slice(index * size, (index + 1) * size)

    def _overlaps(self, tag: tuple[int, int, int]) -> bool:
        """A contribution has lanes of one width; fragments of several share accumulators at a host."""
        mine, *more = self.widths[tag]
        place = self._place(tag[2], mine)
        others = (
            self._place(at[2], width)
            for at, widths in self.widths.items()
            for width in widths
            if at != tag and at[:2] == tag[:2]
        )
        return bool(more) or any(place.start < o.stop and o.start < place.stop for o in others)


def sequence_agrees(
    sequence: Mapping[str, Any], adding: bool, bench: Bench, host: Target
) -> Behind:
    """A sequence of `tests/vectors/`, which says what a host counts and adds.

    Each frame comes in at the port of the member whose MAC address it has, strangers' at port 1. Before each fragment
    its sender gets the token, so that the switch comes to look at the fragment itself; if it is to be `adding`, the
    fragments say so, and the token's list is closed, with everybody but the host in it.

    Args:
        host: empty, as the sequence begins.
    """
    macs, config = replay.member_macs(sequence), dict(sequence["config"])
    behind = Behind(bench, host, len(macs))
    bench.record(recorded(macs))
    for number, step in enumerate(sequence["steps"], 1):
        if "config" in step:
            config |= step["config"]
            host.configure(step["config"])
            bench.record(recorded(macs[: config["members"]]))
            continue
        frame = encode.from_text(step["frame"])[:1514]
        if len(frame) < 14:
            continue  # no interface sends it
        port = port_of(macs.index(frame[6:12]) + 1) if frame[6:12] in macs else 1
        sent = frame
        if kind_of(frame) not in (TOKEN, OTHER) and len(frame) >= BODY_AT:
            if adding:
                sent = frame[:17] + bytes([frame[17] | encode.ADD]) + frame[18:]
            _hand_to(struct.unpack_from(">IH", frame, 14 + 12), adding, config, behind)
        expected = step["counters"][0] if step["counters"] else ""
        try:
            behind.take(port, frame, sent, expected)
        except AssertionError as error:
            error.add_note(f"{sequence['name']}, step {number}: {step['say']}")
            raise
        if bench.model.view > config["view"]:
            bench.forget()  # that view is not for this host: it stays in its own
    if adding and bench.model.members:
        behind.compare(replay.expected_state(sequence))
    return behind


def _hand_to(
    fragment: tuple[int, int], adding: bool, config: Mapping[str, Any], behind: Behind
) -> None:
    """The sender of a fragment (round, sender) gets the token, in that round if it is open at the host."""
    round_, sender = fragment
    numbers = {number for number, _, _ in behind.bench.model.members}
    if sender not in numbers:
        return
    if not config["round_low"] <= round_ <= config["round_high"]:
        round_ = config["round"]
    listed = sum(1 << k - 1 for k in numbers if k != config["number"]) if adding else 0
    view, bench = config["view"], behind.bench
    hands = token(bench, sender, sender, behind.members, view, round_, listed)
    bench.exchange(port_of(sender), hands)
    assert (bench.model.owner, bench.model.round) == (sender, round_)


def frames_agree(frames: Sequence[tuple[int, bytes]], bench: Bench, host: Target) -> Behind:
    """Frames (port, as on the wire) of a network of `CONFIG`; the host is told of each view and round.

    Args:
        host: empty, in `CONFIG`.
    """
    behind, model = Behind(bench, host, HOST), bench.model
    for port, frame in frames:
        view, round_ = model.view, model.round
        behind.take(port, encode.untagged(frame), frame)
        if model.round != round_:
            host.configure(dict.fromkeys(("round", "round_low", "round_high"), model.round))
        if model.view != view:
            host.enter(model.view)
            host.run(encode.untagged(frame))  # by this it was told
    behind.compare()
    return behind
