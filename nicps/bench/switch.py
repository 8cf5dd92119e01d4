# SPDX-License-Identifier: Apache-2.0
"""`nicps bench switch`: the number of fragments a second that a BMv2 adds, and whether any is lost.

The hosts of a lab send full fragments from their TX rings, all at once, each at most a window ahead of the sums that
have come. The XDP program of each takes the sums, and wakes its sender after every half a window. There is no agent and
no training: only the switch, and the hosts' part of it. In the end all sums must have come to all hosts, without a
request for one, and the sums that each XDP program has stored must equal those of the hosts' contributions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import orjson

from nicps import wire
from nicps.bench.arguments import need_memory, whole
from nicps.bench.bmv2 import CONTROLLER, Bmv2, in_place_of_the_bridge
from nicps.bench.watch import until
from nicps.dataplane import DataPlane
from nicps.dataplane.maps import I64
from nicps.errors import JobFailed, NetworkProblem
from nicps.lab import Lab, LabSettings, links, namespaces
from nicps.session.lanes import U8
from nicps.switch.runtime import Member

_NETWORK, _VIEW = wire.network_id("nicps"), 1
_TOKEN_S = 5.0
_DONE_S = 10.0
_POLL_MS = 5

DESCRIPTION = """\
Fragments a second that a BMv2 adds (adding mode), from hosts that send all at once, to all of which it sends the sums.
Needs root and simple_switch."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    hosts: int
    lane: str
    fragments: int
    seconds: float
    fragments_per_s: float
    sums: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of `nicps bench switch`."""
    parser = subparsers.add_parser(
        "switch", help="fragments a second that a P4 switch adds", description=DESCRIPTION
    )
    parser.add_argument("--hosts", type=whole(2, 16), default=4, help="2 to 16 (%(default)s)")
    parser.add_argument("--lane", choices=("i32", "i16", "i8"), default="i32")
    parser.add_argument(
        "--windows",
        type=whole(1),
        default=100,
        help=f"of {wire.QUANTUM} fragments, of each host (%(default)s)",
    )
    parser.add_argument("--repeat", type=whole(1), default=3, help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    width = int(args.lane[1:])
    lanes = args.windows * wire.QUANTUM * wire.lanes_per_fragment(width)
    need_memory(args.hosts * lanes * 2 * 8, f"--windows {args.windows:,}")  # two banks of sums
    rows = []
    with contextlib.ExitStack() as stack:
        lab = Lab(LabSettings(f"bench-{os.getpid()}", args.hosts))
        stack.callback(lab.close)
        bmv2 = stack.enter_context(in_place_of_the_bridge(lab))
        members = [Sender(lab, number, stack) for number in range(1, args.hosts + 1)]
        for round_ in range(1, args.repeat + 1):
            begin(bmv2, members, width, args.windows * wire.QUANTUM, round_)
            seconds = send_all(members, args.windows * wire.QUANTUM, round_)
            row = count(members, args.lane, args.windows * wire.QUANTUM, seconds, round_)
            banks = {m.number: m.plane.maps.accumulators[round_ & 1] for m in members}
            compare(banks, width, args.windows)
            print(
                f"{row.hosts} hosts, {row.lane}: {row.fragments:,} fragments in {row.seconds:.2f} s,"
                f" {row.fragments_per_s:,.0f} a second, {row.sums:,} sums to each, all as they should be"
            )
            rows.append(row)
        with bmv2.connect() as switch:
            counters = {name: n for name, n in switch.counters().items() if n}
    print(f"switch: {counters}", file=sys.stderr)
    if args.json:
        print(orjson.dumps({"rows": [asdict(row) for row in rows], "switch": counters}).decode())
    return 0


class Sender:
    """One host: its data plane, and how far it has sent."""

    def __init__(self, lab: Lab, number: int, stack: contextlib.ExitStack) -> None:
        self.number = number
        netns = lab.hosts[number - 1].netns
        self.plane = namespaces.inside(netns, lambda: DataPlane(links.HOST_INTERFACE, _NETWORK))
        stack.callback(self.plane.close)
        self._poll = select.poll()
        self._poll.register(self.plane.rx_fileno(), select.POLLIN)
        self._here = self._sent = (
            0  # sums that have come, and fragments that were sent, from the first on
        )

    def enter(self, macs: list[bytes], width: int, fragments: int, round_: int) -> None:
        """Take sums of that round only; nothing has been sent."""
        plane, config = self.plane, self.plane.maps.config
        blocks = -(-fragments // wire.fragments_per_block(width))
        if plane.maps.blocks != blocks:
            plane.maps.allocate(blocks)
        plane.enter_view(_VIEW, self.number, macs, self.number % len(macs) + 1)
        config["round"] = config["round_low"] = config["round_high"] = round_
        config["sums"] = config["enabled"] = 1
        self._window = wire.QUANTUM // len(macs)
        config["clock"] = max(1, self._window // 2)
        plane.doorbell.take()
        self._here = self._sent = 0
        self._lanes = _lanes(self.number)
        self._rows = _rows(self.number, width, fragments, round_)
        self._total, self._round = fragments, round_

    def advance(self) -> None:
        """Send the fragments that the sums allow: no further than a window ahead of them."""
        self.plane.doorbell.take()
        self._here, _ = self.plane.maps.reached(self._round, _VIEW, self._here, self._sent)
        end = min(self._total, self._here + self._window)
        while self._sent < end:
            window, first = divmod(self._sent, wire.QUANTUM)
            count = min(end - self._sent, wire.QUANTUM - first)
            rows = self._rows[:count]
            index = np.arange(self._sent, self._sent + count, dtype=">u4")
            rows[:, wire.HEADER_BYTES : wire.HEADER_BYTES + 4] = index.view(np.uint8).reshape(-1, 4)
            self._send(rows, _of_window(self._lanes, window)[first : first + count])
            self._sent += count

    def _send(self, rows: U8, payload: U8) -> None:
        """Send so many fragments, as fast as the ring takes them."""
        tx, done = self.plane.tx, 0

        def room() -> int | None:
            tx.flush()
            return tx.free() or None

        while done < len(rows):
            free = until(room, "room in the ring", _TOKEN_S, 0.0001)
            done += tx.push(rows[done : done + free], payload[done : done + free])
        tx.flush()

    def wait(self, round_: int) -> None:
        """Wait until the token of that round is here.

        Raises:
            NetworkProblem: it does not come.
        """
        deadline = time.monotonic() + _TOKEN_S
        while time.monotonic() < deadline:
            self._poll.poll(100)
            for _, data in self.plane.receive():
                body = wire.unpack(data).body
                if isinstance(body, wire.Token) and body.generation >= round_:
                    return
        raise NetworkProblem(f"the token did not come to host {self.number}")


def begin(bmv2: Bmv2, members: list[Sender], width: int, fragments: int, round_: int) -> None:
    """Give the switch its members only; the hosts wait for sums."""
    macs = [member.plane.mac for member in members]
    with bmv2.connect() as switch:
        switch.setup(_NETWORK, [member.number for member in members], CONTROLLER)
        switch.record({m.number: Member(m.number, m.plane.mac, m.number) for m in members})
    for member in members:
        member.enter(macs, width, fragments, round_)


def send_all(members: list[Sender], total: int, round_: int) -> float:
    """Send all fragments of all at once; return the seconds from the first fragment to the last sum at the last
    host.
    """
    poll = select.poll()
    by_bell = {member.plane.doorbell.fileno(): member for member in members}
    for bell in by_bell:
        poll.register(bell, select.POLLIN)
    members[-1].plane.send(_token(members[-1].number, len(members), round_))
    members[0].wait(round_)
    begun = moved = time.monotonic()
    for member in members:
        member.advance()
    while lacking(members, total, round_) and time.monotonic() < moved + _DONE_S:
        for bell, _ in poll.poll(_POLL_MS):
            by_bell[bell].advance()
            moved = time.monotonic()
    return time.monotonic() - begun


def lacking(members: list[Sender], total: int, round_: int) -> int:
    """Sums that have not come, of all hosts."""
    return sum(total - member.plane.maps.count(round_, _VIEW, 0) for member in members)


def _lanes(number: int) -> U8:
    """A member's payloads, uint8 (2 quanta, 1440): a window's are `_of_window`."""
    shape = 2 * wire.QUANTUM, wire.PAYLOAD_BYTES
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def _of_window(lanes: U8, window: int) -> U8:
    """Each window begins with other lanes than those before it, without a copy."""
    first = window % wire.QUANTUM
    return lanes[first : first + wire.QUANTUM]


def _rows(number: int, width: int, fragments: int, round_: int) -> U8:
    """Headers of a quantum of fragments, uint8 (quantum, 48)."""
    header = wire.Header(
        flags=wire.Flag.ADD, network=_NETWORK, view=_VIEW, round=round_, sender=number
    )
    body = wire.Fragment(0, fragments, wire.lanes_per_fragment(width), width, 0, 1)
    frame = wire.pack(header, body, tail=bytes(wire.PAYLOAD_BYTES))[: wire.FRAGMENT_HEADER_BYTES]
    return np.tile(np.frombuffer(frame, np.uint8), (wire.QUANTUM, 1)).copy()


def _token(number: int, members: int, round_: int) -> bytes:
    """The token of a closed list with all members in it: the switch needs nothing else."""
    header = wire.Header(network=_NETWORK, view=_VIEW, round=round_, sender=number)
    body = wire.Token(
        generation=round_,
        hop=1,
        owner=1,
        state=wire.TokenState.CLOSING,
        members=members,
        idle=0,
        ranges=0,
        sent=0,
        unit=0,
        unit_before=0,
        listed=(1 << members) - 1,
    )
    entry = wire.Entry(samples=1, marks=wire.Mark.CONTRIBUTED)
    return wire.pack(header, body, [entry] * members, [])


def count(members: list[Sender], lane: str, total: int, seconds: float, round_: int) -> Row:
    """The result.

    Raises:
        JobFailed: not every sum has come to every host.
    """
    sent = total * len(members)
    lost = lacking(members, total, round_)
    if lost:
        raise JobFailed(f"{lost} of {sent} sums did not come")
    return Row(len(members), lane, sent, seconds, sent / seconds, total)


def compare(banks: Mapping[int, I64], width: int, windows: int) -> None:
    """Add the payloads by NumPy, and compare the sums with the round's bank of each host, by its number.

    Raises:
        JobFailed: a sum differs. (Lanes that overflow wrap round, in the switch and here.)
    """
    kind, per_window = f"i{width // 8}", wire.QUANTUM * wire.PAYLOAD_BYTES * 8 // width
    sent = [_lanes(number).view(f">{kind}").astype(kind) for number in banks]
    sums = np.stack(sent).sum(axis=0, dtype=kind)
    for number, bank in banks.items():
        lanes = bank.reshape(-1)
        for window in range(windows):
            first = window % wire.QUANTUM
            expected = sums[first : first + wire.QUANTUM].reshape(-1)
            found = lanes[window * per_window : (window + 1) * per_window]
            wrong = int(np.count_nonzero(found != expected))
            if wrong:
                raise JobFailed(
                    f"host {number} has {wrong} wrong lanes of {per_window} in window {window + 1}"
                )
