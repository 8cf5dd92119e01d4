# SPDX-License-Identifier: Apache-2.0
"""`nicps bench switch`: how many fragments a second a BMv2 adds, and whether any is lost.

Hosts in a lab take turns: who has the token sends a quantum of full fragments from its TX ring, and hands the token on
through the switch; the XDP program of each takes the sums. There is no agent and no training: this is the switch, and
what hosts need for it. All sums must have come to all hosts in the end, without one having been asked for, and what the
XDP program of each has stored must be what the hosts have sent.
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
_POLL_S = 0.0005

DESCRIPTION = """\
Fragments a second that a BMv2 adds (adding mode), from hosts that take turns, to all of which it sends the sums. Needs
root and simple_switch."""


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
    parser.add_argument("--windows", type=whole(1), default=100, help="of each host (%(default)s)")
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
        members = [Turns(lab, number, stack) for number in range(1, args.hosts + 1)]
        for round_ in range(1, args.repeat + 1):
            begin(bmv2, members, width, args.windows * wire.QUANTUM, round_)
            seconds = take_turns(members, width, args.windows, round_)
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


class Turns:
    """One host: its data plane, and its part in the turns."""

    def __init__(self, lab: Lab, number: int, stack: contextlib.ExitStack) -> None:
        self.number = number
        netns = lab.hosts[number - 1].netns
        self.plane = namespaces.inside(netns, lambda: DataPlane(links.HOST_INTERFACE, _NETWORK))
        stack.callback(self.plane.close)
        self._poll = select.poll()
        self._poll.register(self.plane.rx_fileno(), select.POLLIN)

    def enter(self, macs: list[bytes], width: int, fragments: int, round_: int) -> None:
        """Take sums of that round, and nothing else."""
        plane, config = self.plane, self.plane.maps.config
        blocks = -(-fragments // wire.fragments_per_block(width))
        if plane.maps.blocks != blocks:
            plane.maps.allocate(blocks)
        plane.enter_view(_VIEW, self.number, macs, self.number % len(macs) + 1)
        config["round"] = config["round_low"] = config["round_high"] = round_
        config["sums"] = config["enabled"] = 1

    def send(self, rows: U8, payload: U8) -> None:
        """So many fragments, as fast as the ring takes them."""
        tx, done = self.plane.tx, 0

        def room() -> int | None:
            tx.flush()
            return tx.free() or None

        def empty() -> bool | None:
            tx.flush()
            return None if tx.unsent() else True

        while done < len(rows):
            free = until(room, "room in the ring", _TOKEN_S, 0.0001)
            done += tx.push(rows[done : done + free], payload[done : done + free])
        until(empty, "the ring is empty", _TOKEN_S, 0.0001)

    def wait(self, round_: int, hop: int) -> None:
        """Until the token of that round and hop is here.

        Raises:
            NetworkProblem: it does not come.
        """
        deadline = time.monotonic() + _TOKEN_S
        while time.monotonic() < deadline:
            self._poll.poll(100)
            for _, data in self.plane.receive():
                body = wire.unpack(data).body
                if isinstance(body, wire.Token) and (body.generation, body.hop) >= (round_, hop):
                    return
        raise NetworkProblem(f"the token did not come to host {self.number}")


def begin(bmv2: Bmv2, members: list[Turns], width: int, fragments: int, round_: int) -> None:
    """The switch knows its members and nothing else, the hosts wait for sums."""
    macs = [member.plane.mac for member in members]
    with bmv2.connect() as switch:
        switch.setup(_NETWORK, [member.number for member in members], CONTROLLER)
        switch.record({m.number: Member(m.number, m.plane.mac, m.number) for m in members})
    for member in members:
        member.enter(macs, width, fragments, round_)


def take_turns(members: list[Turns], width: int, windows: int, round_: int) -> float:
    """All windows of all; seconds from the first fragment to the last sum at the last host."""
    quantum, n = wire.QUANTUM, len(members)
    lanes = {m.number: _lanes(m.number) for m in members}
    total = windows * quantum
    templates = {m.number: _rows(m.number, width, total, round_) for m in members}
    hop = 1
    members[-1].plane.send(_token(n, 1, hop, 0, n, round_))
    members[0].wait(round_, hop)
    begun = time.monotonic()
    for window in range(windows):
        for place, member in enumerate(members):
            rows = templates[member.number]
            index = np.arange(window * quantum, (window + 1) * quantum, dtype=">u4")
            rows[:, wire.HEADER_BYTES : wire.HEADER_BYTES + 4] = index.view(np.uint8).reshape(-1, 4)
            member.send(rows, _of_window(lanes[member.number], window))
            hop += 1
            settled = quantum * (window if place == n - 1 else max(0, window - 1))
            after = members[(place + 1) % n]
            member.plane.send(_token(member.number, after.number, hop, settled, n, round_))
            after.wait(round_, hop)
    deadline = time.monotonic() + _DONE_S
    while lacking(members, total, round_) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return time.monotonic() - begun


def lacking(members: list[Turns], total: int, round_: int) -> int:
    """Sums that have not come, of all hosts."""
    return sum(total - member.plane.maps.count(round_, _VIEW, 0) for member in members)


def _lanes(number: int) -> U8:
    """What a member sends, uint8 (2 quanta, 1440): a window's are `_of_window`."""
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


def _token(number: int, owner: int, hop: int, settled: int, members: int, round_: int) -> bytes:
    header = wire.Header(network=_NETWORK, view=_VIEW, round=round_, sender=number)
    body = wire.Token(
        generation=round_,
        hop=hop,
        owner=owner,
        state=wire.TokenState.CLOSING,
        members=members,
        idle=0,
        ranges=0,
        sent=0,
        unit=0,
        unit_before=0,
        listed=(1 << members) - 1,
        settled=settled,
    )
    entry = wire.Entry(samples=1, marks=wire.Mark.CONTRIBUTED)
    return wire.pack(header, body, [entry] * members, [])


def count(members: list[Turns], lane: str, total: int, seconds: float, round_: int) -> Row:
    """What came of it.

    Raises:
        JobFailed: not every sum has come to every host.
    """
    sent = total * len(members)
    lost = lacking(members, total, round_)
    if lost:
        raise JobFailed(f"{lost} of {sent} sums did not come")
    return Row(len(members), lane, sent, seconds, sent / seconds, total)


def compare(banks: Mapping[int, I64], width: int, windows: int) -> None:
    """Add by NumPy what has been sent, and compare it with the round's bank of each host, by its number.

    Raises:
        JobFailed: a sum is another one. (Lanes that overflow wrap round, in the switch and here.)
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
