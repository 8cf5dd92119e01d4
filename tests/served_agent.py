# SPDX-License-Identifier: Apache-2.0
"""An agent's end of the socket where servers hold the parameters, and what its kernel has, for tests of sessions."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np

from nicps.client import Served, Session
from nicps.layout import layout
from nicps.session.arena import Arena
from nicps.session.channel import Channel
from nicps.session.shared_form import Member, Welcome
from tests import served_reference as reference
from tests.served_reference import F32, PULLED
from tests.striped_memory import Mapped

WIDTHS = (8, 16, 32)
#: No multiple of any fragment, and more than a batch of them.
LANES = 93_967
NATIVE = {8: ">i1", 16: ">i2", 32: ">i4"}
ROUND = 7


def same(found: F32, expected: F32) -> bool:
    """Whether all bits are the same."""
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())


def parameters(seed: int, lanes: int = LANES, size: float = 1.0) -> list[int]:
    """In units, fragments of very different sizes."""
    random = np.random.default_rng(seed)
    scales = np.exp2(random.integers(-30, 10, -(-lanes // PULLED)))
    values = random.standard_normal(lanes) * np.repeat(scales, PULLED)[:lanes] * size
    return [int(value) for value in np.rint(values * 2.0**40)]


class Agent:
    """The agent's end for member 2 of three, and what its kernel has. Member 1 serves."""

    def __init__(self, width: int, workdir: Path | str = "/nowhere", lanes: int = LANES) -> None:
        self.width, self.lanes = width, lanes
        self.pushes = -(-lanes // (reference.PAYLOAD_BITS // width))
        self.room = self.pushes * (32 // width)
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        members = tuple(Member(n, f"h{n}") for n in (1, 2, 3))
        settings = {"lane": f"i{width}"}
        welcome = Welcome(2, members, "h2", 1, settings, str(workdir), 5)
        self.session = Session(Channel(theirs), welcome)
        self._arena, self._doorbell = Arena.create(1), os.eventfd(0)
        self.channel.send({"op": "arena", "fragments": 1}, (self._arena.fd, self._doorbell))
        records = layout().records
        self.own = Mapped(records["own"], (self.pushes,))
        self.sums = Mapped(records["stored"], (self.room,))
        self.number = self._phases = 0
        self.session.ready(lanes, "d")
        assert self.take()["op"] == "ready"

    @property
    def served(self) -> Served:
        served = self.session.served
        assert served is not None
        return served

    def take(self) -> dict[str, Any]:
        return self.channel.recv(10.0)[0]

    def tell(self, op: str, fds: tuple[int, ...] = (), **values: Any) -> None:
        self.channel.send({"op": op, **values}, fds)
        for fd in fds:
            os.close(fd)

    def serves(self, every: int = 64, *, new: bool = True, **more: Any) -> None:
        fds = more.pop("fds", ())
        if new:
            more |= {"room": self.room, "pushes": self.pushes}
            fds = (self.own.fd, self.sums.reading_fd, *fds)
        self.tell("serves", fds, servers=[1], every=every, **more)

    def phase(self, kind: str = "train", first: int = ROUND) -> None:
        self._phases += 1
        message = {"kind": kind, "first_round": first, "number": self._phases, "unit": -40}
        message |= {"exchange": "servers" if kind == "train" else "broadcast", "shares": [0, 4, 4]}
        self.tell("phase", **message, view=5, live=[1, 2, 3], lead=1)

    def enter(self, kind: str = "train", first: int = ROUND) -> None:
        """A phase that the session takes."""
        self.phase(kind, first)
        assert self.session.next_phase().kind == kind
        assert self.take() == {"op": "prepared", "number": self._phases}

    def begin(self, every: int = 64) -> None:
        self.serves(every)
        self.enter()

    def hold(self, index: int, units: list[int], round_: int = ROUND, version: int = 0) -> F32:
        """The server's answer has come, under the newest number; what everybody reads of it."""
        exponent, lanes = reference.held(units)
        record = self.sums.array[index : index + 1]
        record["lane"] = np.frombuffer(np.array(lanes, ">i4").tobytes(), np.uint8)
        record["exponent"] = exponent & 0xFF
        record["rest"] = round_ << 32 | version
        record["tag"] = self.number
        return reference.read(exponent, lanes)

    def pulled(self, units: list[int], round_: int = ROUND, version: int = 0) -> F32:
        """All of a pull has come; what it is. What is behind the end of the vector is 0."""
        self.number += 1
        assert len(units) == self.lanes
        units = units + [0] * (self.room * PULLED - self.lanes)
        parts = [
            self.hold(index, units[index * PULLED : (index + 1) * PULLED], round_, version)
            for index in range(self.room)
        ]
        return np.concatenate(parts)[: self.lanes]

    def pull(self, units: list[int], round_: int = ROUND, version: int = 0) -> F32:
        """The session pulls, and reads it."""
        self.served.pull(round_)
        assert self.take() == {"op": "pull", "round": round_}
        expected = self.pulled(units, round_, version)
        self.tell("pulled", round=round_, number=self.number)
        assert self.served.wait_pulled(round_)
        out = np.full(self.lanes, 5, np.float32)
        self.served.read(out)
        assert same(out, expected)
        return out

    def sent(self, pieces: list[reference.Piece], round_: int = ROUND) -> None:
        """What the session has said of a step, and what lies in its own records."""
        assert self.take() == {"op": "step", "round": round_, "samples": 4}
        for record, piece in zip(self.own.array, pieces, strict=True):
            lanes = np.frombuffer(record["lane"].tobytes(), NATIVE[self.width])
            assert lanes[: len(piece.lanes)].tolist() == piece.lanes
            assert not lanes[len(piece.lanes) :].any()
            assert record["exponent"].astype(np.int8) == piece.exponent

    def stepped(self, round_: int = ROUND, version: int = 1) -> None:
        self.number += 1
        about = {"number": self.number, "version": version, "staleness": [1]}
        self.tell("stepped", round=round_, **about)

    def committed(self, round_: int = ROUND, *counted: int) -> None:
        message = {"round": round_, "counted": dict.fromkeys(counted, 4), "unit": -40}
        message |= {"next_unit": -40, "exchange": "servers", "seconds_waited": 0.5}
        self.tell("committed", **message)

    def close(self) -> None:
        self.session.close()
        self.channel.close()
        self._arena.close()
        os.close(self._doorbell)
        self.own.close()
        self.sums.close()
