# SPDX-License-Identifier: Apache-2.0
"""A host whose maps of the room for servers are the agent's: what `test_servers_maps.py` is about."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import Maps
from nicps.dataplane.servers import Servers
from tests.servers import signed
from tests.stripes import LANES, MACS, NATIVE, NETWORK

VIEW, ROUND, WIDTH = 7, 3, 16
#: Of the vector: push fragments, fragments of parameters; the own part is the first three.
PUSHES, ROOM, PART = 6, 11, 3


class Host:
    """Member 1 of three, a server and a worker; member 2 is the other server."""

    def __init__(self) -> None:
        self.loaded = loader.load("nicps.c", {"nicps_xdp": "xdp"})
        beside = self.beside = loader.load_beside(
            self.loaded, "nicps_servers.c", {"nicps_servers": "xdp"}
        )
        program = beside.open("nicps_servers")
        rooms = self.loaded.maps["nicps_rooms"]
        bpf.map_update(rooms, bytes(4), program.to_bytes(4, "little"))
        os.close(program)
        self.maps = Maps(self.loaded.maps)
        self.maps.config["network"] = NETWORK
        self.maps.add_servers(beside.maps)
        assert self.maps.servers is not None
        self.servers: Servers = self.maps.servers

    def begin(self) -> None:
        """A view, a phase and its first round, with fresh maps."""
        self.maps.enter_view(VIEW, 1, MACS[:3], 2)
        self.maps.stripes.set_ranks((1, 2), (1, 2))
        config = self.maps.config
        config["width"], config["staleness"] = WIDTH, 1
        config["round_high"], config["enabled"] = ROUND + 1, 1
        self.use_part(start())
        self.servers.use_store(self.servers.reserve_store(ROOM, PUSHES))
        self.servers.begin_phase()
        self.servers.open_round(ROUND, settled=False)

    def use_part(self, units: np.ndarray[Any, Any], averages: bool = True) -> None:
        self.servers.use_part(
            self.servers.reserve_part(PART, WIDTH, filled(units), averages=averages)
        )

    def give(self, body: Any, sender: int = 3, lane: int = 1, round_: int = ROUND) -> bpf.Run:
        """A frame with all lanes the same."""
        header = wire.Header(network=NETWORK, view=VIEW, round=round_, sender=sender)
        payload = np.full(LANES[body.width], lane).astype(NATIVE[body.width]).tobytes()
        if isinstance(body, wire.Taken):
            payload = b""
        frame = signed(sender, header, body, payload, MACS[0], b"")
        return bpf.prog_test_run(self.loaded.programs["nicps_xdp"], frame)

    def push(self, index: int, lane: int = 1, number: int = 1, version: int = 0) -> bpf.Run:
        return self.give(wire.Push(version, number, index, PUSHES, 0, WIDTH, -40), lane=lane)

    def contribute(self, lane: int, sender: int, round_: int = ROUND) -> None:
        for index in range(PART):
            body = wire.Contribution(0b110, index, PUSHES, 9, WIDTH, -40, 0)
            self.give(body, sender, lane, round_)

    def pull(self, index: int, round_: int = ROUND) -> wire.Push:
        run = self.give(wire.Pull(0, 1, index, ROOM, 0, 32, 0), round_=round_)
        body = wire.unpack(run.frame[wire.ETHERNET_BYTES :]).body
        assert isinstance(body, wire.Push)
        return body

    def hold(self, index: int, number: int, version: int = 0) -> None:
        self.give(wire.Held(version, number, index, ROOM, 0, 32, -20), 2)


def filled(units: np.ndarray[Any, Any]) -> Callable[[np.ndarray[Any, Any]], None]:
    """A part that begins with these parameters."""

    def fill(out: np.ndarray[Any, Any]) -> None:
        out[: len(units)] = units

    return fill


def start() -> np.ndarray[Any, Any]:
    return np.arange(PART * LANES[WIDTH], dtype=np.int64) << 20
