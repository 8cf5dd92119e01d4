# SPDX-License-Identifier: Apache-2.0
"""A parameter server and a worker at the ends of a wire: steps, and a synchronisation. The tests play the agents.

Host 1 serves 20 push fragments of 16-bit lanes, which are 40 of parameters; host 2 trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import DataPlane
from nicps.dataplane.servers import Servers
from tests.netns.planes import until
from tests.netns.wires import veth_pair
from tests.stripes import LANES

NETWORK, VIEW, KEY, ROUND = wire.network_id("test"), 1, bytes(range(16)), 1
PUSHES, ROOM, WIDTH, EXACT = 20, 40, 16, -40
U8 = NDArray[np.uint8]


class Member:
    """One of the two hosts."""

    def __init__(self, number: int, plane: DataPlane, other: DataPlane) -> None:
        self.number, self.plane, self.maps = number, plane, plane.maps
        self.other = np.frombuffer(other.mac, np.uint8)
        macs = [plane.mac, other.mac] if number == 1 else [other.mac, plane.mac]
        plane.enter_view(VIEW, number, macs, 3 - number, KEY if plane.keyed else None)
        plane.open_servers()
        assert plane.maps.servers is not None
        self.servers: Servers = plane.maps.servers
        self.maps.stripes.set_ranks((1,), (1,))
        config = self.maps.config
        config["width"], config["staleness"], config["clock"] = WIDTH, 1, 8
        config["round_low"], config["round_high"] = ROUND, ROUND + 1
        if number == 1:
            units = start().reshape(-1)
            part = self.servers.reserve_part(
                PUSHES, WIDTH, lambda out: np.copyto(out, units), averages=True
            )
            self.servers.use_part(part)
            config["room"] = ROOM
        else:
            self.servers.use_store(self.servers.reserve_store(ROOM, PUSHES))
        self.servers.begin_phase()
        self.servers.open_round(ROUND, settled=False)
        config["enabled"] = 1

    def send(self, bodies: list[wire.Push | wire.Contribution], lanes: U8) -> None:
        """A frame for each body, to the other host."""
        header = wire.Header(network=NETWORK, view=VIEW, round=self.round, sender=self.number)
        payload = bytes(wire.PAYLOAD_BYTES)
        frames = [wire.pack(header, b, tail=payload)[: wire.PUSH_HEADER_BYTES] for b in bodies]
        rows = np.frombuffer(b"".join(frames), np.uint8).reshape(-1, wire.PUSH_HEADER_BYTES)
        assert self.plane.tx.push(rows, lanes, self.other) == len(bodies)
        self.plane.tx.flush()

    @property
    def round(self) -> int:
        return int(self.maps.config["round"])

    def push(self, number: int, version: int, lane: int) -> None:
        """A whole step, acknowledged."""
        bodies = [wire.Push(version, number, k, PUSHES, 0, WIDTH, EXACT) for k in range(PUSHES)]
        self.send([*bodies], steps(lane))
        until(lambda: self.servers.acknowledged(number) == PUSHES, "the step is whole")

    def contribute(self, number: int, lane: int) -> None:
        """The same for the synchronisation."""
        bodies = [
            wire.Contribution(0b10, k, PUSHES, number, WIDTH, EXACT, 0) for k in range(PUSHES)
        ]
        self.send([*bodies], steps(lane))
        until(lambda: self.servers.acknowledged(number) == PUSHES, "all of it is there")

    def pull(self, number: int) -> NDArray[np.float64]:
        """All parameters."""
        bodies = [wire.Pull(0, number, k, ROOM, 0, 32, 0) for k in range(ROOM)]
        self.send([*bodies], np.zeros((ROOM, wire.PAYLOAD_BYTES), np.uint8))
        until(lambda: self.servers.pulled(number) == ROOM, "the pull is whole")
        assert self.servers.missing_parameters(number, 0, ROOM, 4) == []
        records = self.servers.sums
        lanes = np.ascontiguousarray(records["lane"]).view(">i4").astype(np.float64)
        found: NDArray[np.float64] = lanes * 2.0 ** records["exponent"].view(np.int8)[:, None]
        return found.reshape(-1)


def start() -> NDArray[np.int64]:
    """(fragments, lanes)"""
    return np.arange(PUSHES * LANES[WIDTH], dtype=np.int64).reshape(PUSHES, -1) << 8


def steps(lane: int) -> U8:
    return np.full((PUSHES, LANES[WIDTH]), lane, ">i2").view(np.uint8)


@pytest.fixture(params=[False, True], ids=["trusted", "keyed"])
def members(request: pytest.FixtureRequest) -> Iterator[tuple[Member, Member]]:
    with veth_pair() as names, ExitStack() as stack:
        left, right = (
            stack.enter_context(DataPlane(name, NETWORK, keyed=request.param)) for name in names
        )
        yield Member(1, left, right), Member(2, right, left)


def test_steps_parameters_and_a_synchronisation(members: tuple[Member, Member]) -> None:
    """The server's parameters and those that the worker has pulled are the same numbers, and no process has added
    them.
    """
    server, worker = members
    unit = 2.0**EXACT
    assert (worker.pull(1) == start().reshape(-1) * unit).all()
    worker.push(2, 0, 100)
    assert server.servers.version == (ROUND, 1)
    assert worker.servers.answered(1) == (2, 1, ROUND, 0)
    worker.push(3, 0, 100)  # it has not pulled since
    assert worker.servers.answered(1) == (3, 2, ROUND, 1)
    assert (worker.pull(4) == (start().reshape(-1) + 150) * unit).all()
    assert worker.servers.least_version(0, ROOM) == (ROUND, 2)
    worker.contribute(5, -50)
    for member in members:
        member.servers.open_round(ROUND + 1, settled=True)
    assert (worker.pull(6) == (start().reshape(-1) + 100) * unit).all()
    assert (server.servers.parameters() == start() + 100).all()
    counters = server.maps.counters()
    assert (counters["pushed"], counters["pulled"]) == (2 * PUSHES, 3 * ROOM)
    assert (counters["summed"], counters["refused"]) == (PUSHES, 0)
    bells = worker.plane.doorbell.take()
    assert (6, ROOM) in [(bell.tag, bell.count) for bell in bells], "the last is told"


def test_a_round_that_the_server_has_not_begun(members: tuple[Member, Member]) -> None:
    """The worker is refused, and hears of it at once."""
    server, worker = members
    worker.servers.open_round(ROUND + 1, settled=False)
    bodies = [wire.Pull(0, 1, 0, ROOM, 0, 32, 0)]
    worker.send([*bodies], np.zeros((1, wire.PAYLOAD_BYTES), np.uint8))
    until(lambda: worker.maps.counters()["refused"] == 1, "it is told")
    assert [(bell.tag, bell.fragments) for bell in worker.plane.doorbell.take()] == [(1, 0)]
    server.servers.open_round(ROUND + 1, settled=False)
    assert worker.pull(2).any()


def test_the_exchanges_take_turns(members: tuple[Member, Member]) -> None:
    """A job with servers, then one with stripes, then servers again: of either only its own frames are taken."""
    server, worker = members
    worker.push(1, 0, 1)
    server.plane.open_stripes()
    channel = server.maps.stripes.areas.words[0]
    for name in ("round_low", "round", "round_high"):
        channel[name] = ROUND
    before = server.maps.counters()
    bodies = [wire.Pull(0, 2, 0, ROOM, 0, 32, 0)]
    worker.send([*bodies], np.zeros((1, wire.PAYLOAD_BYTES), np.uint8))
    until(lambda: server.maps.counters()["type"] == before["type"] + 1, "it is dropped")
    server.plane.open_servers()
    worker.push(3, 1, 1)
    assert server.servers.version == (ROUND, 2)
    for member in members:
        member.plane.close()
        member.plane.open_servers()
        member.plane.open_stripes()
