# SPDX-License-Identifier: Apache-2.0
"""Stripes over the wires of a lab: contributions go to their aggregators, and the kernels' sums to all.

The tests play the agents: they send contributions, ask for missing sums, and send again what LACKING frames name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import xdp
from nicps.dataplane.interface import read_interface
from nicps.lab import Lab, LabSettings, namespaces
from nicps.lab.lab import Host
from nicps.wire import FrameType
from tests.netns.labs import until
from tests.reaper import fresh_name
from tests.stripes import (
    LANES,
    NATIVE,
    NETWORK,
    PER_BLOCK,
    bound,
    rounded,
    shifted,
    signed,
)
from tests.stripes_model import Own, StripesModel
from tests.xdp.striped import Target

HOSTS, FRAGMENTS, VIEW, UNIT = 3, 40, 1, -60
EVERYBODY = (1 << HOSTS) - 1


class Member:
    """A host with the program on its interface, and a socket in the place of its agent."""

    def __init__(self, host: Host) -> None:
        self.number, self.mac = host.number, bytes.fromhex(host.mac.replace(":", ""))
        self.target = Target(room=FRAGMENTS)
        self.asked = 0
        self.model: StripesModel
        namespaces.inside(host.netns, self._attach)

    def _attach(self) -> None:
        interface = read_interface("eth1")
        self._link, mode = xdp.attach(self.target.program, interface)
        assert mode == "native"
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(wire.ETHERTYPE))
        self.socket.bind(("eth1", wire.ETHERTYPE))
        self.socket.setblocking(False)

    def close(self) -> None:
        os.close(self._link)
        self.socket.close()
        self.target.close()


class Network:
    """Hosts in one view, all of them aggregators, with vectors of one width."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.members = {host.number: Member(host) for host in lab.hosts}

    def begin(self, width: int, seed: int) -> None:
        """Round 1; all members have lanes for it."""
        self.width = width
        rng = np.random.default_rng(seed)
        ranks = {number: number for number in self.members}
        for number, member in self.members.items():
            live = frozenset(self.members)
            member.model = StripesModel(
                number,
                live,
                (ranks, ranks),
                (width, width),
                FRAGMENTS,
                FRAGMENTS,
                VIEW,
                (1, 2),
                offered=[5, 5],
            )
            for index in range(FRAGMENTS):
                most = 1 << width - 1
                lanes = rng.integers(-most, most, LANES[width]).astype(NATIVE[width]).tobytes()
                exponent = UNIT + int(rng.integers(-4, wire.MAX_SHIFT[width] + 1))
                member.model.own[1, index] = Own(5, exponent, lanes)
            member.target.begin(member.model)
            member.target.write_own(member.model)
            for other in self.members.values():
                member.target.members["mac"][other.number] = np.frombuffer(other.mac, np.uint8)

    def aggregator(self, index: int) -> int:
        return next(
            k
            for k in self.members
            if bound(FRAGMENTS, k - 1, HOSTS) <= index < bound(FRAGMENTS, k, HOSTS)
        )

    def send(self, number: int, index: int, kind: FrameType = FrameType.CONTRIBUTION) -> None:
        """A contribution of this member, or a question, to the fragment's aggregator."""
        member = self.members[number]
        own = member.model.own[1, index]
        member.asked += kind == FrameType.ASK
        header = wire.Header(network=NETWORK, view=VIEW, round=1, sender=number)
        body = wire.Contribution(
            EVERYBODY, index, FRAGMENTS, member.asked, self.width, own.exponent, UNIT
        )
        frame = signed(number, kind, header, body, own.lanes, b"", b"")
        to = self.members[self.aggregator(index)].mac
        member.socket.send(to + member.mac + frame[6:])

    def contribute(self) -> None:
        """All members send all fragments outside their own stripes."""
        for index in range(FRAGMENTS):
            for number in self.members:
                if self.aggregator(index) != number:
                    self.send(number, index)

    def lacking(self, number: int) -> list[int]:
        """The sums that a member has not got."""
        tags = self.members[number].target.sums["tag"][FRAGMENTS:]
        return np.flatnonzero(tags != VIEW << 32 | 1).tolist()

    def repair(self) -> None:
        """All members ask, and send again what LACKING frames name."""
        for number in self.members:
            for index in self.lacking(number):
                if self.aggregator(index) != number:
                    self.send(number, index, FrameType.ASK)
        for number, member in self.members.items():
            while True:
                try:
                    frame = wire.unpack(member.socket.recv(2048)[wire.ETHERNET_BYTES :])
                except BlockingIOError:
                    break
                if frame.type == FrameType.LACKING and frame.body.members >> number - 1 & 1:
                    self.send(number, frame.body.index)

    def check(self) -> None:
        """All hosts have the same sums, equal to the reference; and the aggregators the remainders."""
        n = LANES[self.width]
        for index in range(FRAGMENTS):
            total = np.zeros(n, np.int64)
            for member in self.members.values():
                own = member.model.own[1, index]
                lanes = np.frombuffer(own.lanes, NATIVE[self.width]).astype(np.int64)
                total += shifted(lanes, own.exponent - UNIT)
            lanes, exponent, rest = rounded(total, self.width, UNIT, not_finite=False)
            for number, member in self.members.items():
                record = member.target.sums[FRAGMENTS + index]
                assert record["lane"].tobytes() == lanes.astype(NATIVE[self.width]).tobytes()
                assert int(record["exponent"]) == exponent & 0xFF
                made_here = number == self.aggregator(index)
                assert int(record["rest"]) == (VIEW << 32 | 1 if made_here else 0)
            assert (self._rest(index) == rest).all()

    def _rest(self, index: int) -> NDArray[Any]:
        aggregator = self.aggregator(index)
        local = index - bound(FRAGMENTS, aggregator - 1, HOSTS)
        block, part = divmod(local, PER_BLOCK[self.width])
        blocks = self.members[aggregator].target.blocks["lane"].view(np.int64)
        n = LANES[self.width]
        return blocks[FRAGMENTS + block, part * n : (part + 1) * n]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Lab(LabSettings(fresh_name(), hosts=HOSTS)) as lab:
        made = Network(lab)
        yield made
        for member in made.members.values():
            member.close()


@pytest.mark.parametrize("width", [8, 16, 32])
def test_everybody_has_the_same_sums(network: Network, width: int) -> None:
    network.begin(width, seed=width)
    network.contribute()
    until(lambda: not any(map(network.lacking, network.members)), "all sums", 20.0)
    network.check()


def test_losses_and_duplicates_change_nothing(network: Network) -> None:
    """A member that lacks a sum asks for it; a member that has not contributed to it does so again."""
    network.begin(16, seed=99)
    network.lab.fault("all", loss=0.1, duplicate=0.1, reorder=0.1)
    try:
        network.contribute()

        def repaired() -> bool:
            network.repair()
            return not any(map(network.lacking, network.members))

        until(repaired, "all sums", 60.0)
    finally:
        network.lab.clear()
    network.check()
    counted = [member.target.counters() for member in network.members.values()]
    assert sum(found["answered"] for found in counted) > 0
    assert sum(found["duplicate"] for found in counted) > 0
