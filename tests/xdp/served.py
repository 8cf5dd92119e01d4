# SPDX-License-Identifier: Apache-2.0
"""The real XDP program with its room for servers, run by BPF_PROG_TEST_RUN, beside `tests.servers_model`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps.dataplane import bpf, loader
from nicps.dataplane.doorbell import Bell, Doorbell
from nicps.layout import layout
from tests.model import Outcome
from tests.servers_model import ServersModel
from tests.stripes import GROUP, LANES, NETWORK, PER_BLOCK, mac_of
from tests.xdp.counted import Counted
from tests.xdp.target import SEAL

ROOM = 12
COUNTS = layout().limits["COUNTS"]  # rows of a bank
SENDERS = layout().limits["SENDERS"]  # windows of a channel


class Target(Counted):
    """The program and its room for servers, with maps for a few fragments."""

    def __init__(self, source: str = "nicps_servers.c") -> None:
        self._loaded = loader.load("nicps.c", {"nicps_xdp": "xdp"})
        self._beside = loader.load_beside(self._loaded, source, {"nicps_servers": "xdp"})
        fds = self._loaded.maps | self._beside.maps
        super().__init__(self._loaded.programs["nicps_xdp"], fds)
        self._inners: dict[str, int] = {}
        room = self._beside.open("nicps_servers")
        bpf.map_update(self.fds["nicps_rooms"], bytes(4), room.to_bytes(4, "little"))
        os.close(room)
        records = layout().records
        self.config = self._view("config", records["config"])
        self.members = self._view("members", records["member"])
        self.key = self._view("view_key", records["key"])
        self.outgoing = self._view("outgoing", records["outgoing"])
        self.windows = self._view("windows", records["window"])
        self.progress = self._view("progress", records["progress"])
        self.ring = self._view("ring", records["ring"])
        self.pushers = self._view("pushers", records["pusher"])
        self.answered = self._view("answered", records["answered"])
        self.doorbell = Doorbell(self.fds["doorbell"])
        self.homes = self._inner("homes", "homes_shape", records["home"], ROOM)
        self.make_room(1)
        self.store = self._inner("sums", "sums_shape", records["stored"], ROOM)
        self.taken = self._inner("taken", "taken_shape", np.dtype("u8"), ROOM)

    def _view(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        fd = self.fds[name]
        return np.frombuffer(bpf.map_memory(fd), dtype, bpf.map_info(fd).entries)

    def _inner(self, outer: str, shape: str, dtype: np.dtype[Any], entries: int) -> NDArray[Any]:
        fd = bpf.map_like(self.fds[shape], entries, "test")
        self.put(outer, fd)
        if outer in self._inners:
            os.close(self._inners[outer])
        self._inners[outer] = fd
        return np.frombuffer(bpf.map_memory(fd), dtype, entries)

    def put(self, outer: str, fd: int) -> None:
        """Give the program that map."""
        bpf.map_update(self.fds[outer], bytes(4), fd.to_bytes(4, "little"))

    def close(self) -> None:
        """Unload."""
        for fd in self._inners.values():
            os.close(fd)
        self._beside.close()
        self._loaded.close()

    def begin(self, model: ServersModel) -> None:
        """Empty maps, and the model's state."""
        self.doorbell.take()
        for view in (self.config, self.members, self.key, self.outgoing, self.windows):
            view[...] = np.zeros((), view.dtype)
        for view in (self.progress, self.ring, self.pushers, self.answered, self.homes):
            view[...] = np.zeros((), view.dtype)
        for view in (self.store, self.taken):
            view[...] = np.zeros((), view.dtype)
        self.config["network"], self.config["enabled"] = NETWORK, 1
        self.config["number"], self.config["members"] = model.number, max(model.live)
        self.config["live_members"] = sum(1 << number - 1 for number in model.live)
        self.config["seal"], self.config["everybody"] = (
            np.frombuffer(mac, np.uint8) for mac in (SEAL, GROUP)
        )
        for number in model.live:
            self.members["mac"][number] = np.frombuffer(mac_of(number), np.uint8)
        for rank, number in enumerate(model.servers, 1):
            self.members["rank"][number] = rank, rank
        self.config["rank"] = self.members["rank"][model.number][0]
        self.config["aggregators"] = len(model.servers)
        self.config["width"], self.config["room"] = model.width, model.room
        self.config["staleness"] = int(model.by_staleness)
        self.config["passes"] = sum(1 << number - 1 for number in model.passes)
        self.config["clock"], self.config["keyed"] = model.clock, int(bool(model.key))
        if model.key:
            self.key["word"] = np.frombuffer(model.key, "<u8")
        blocks = self.config["gather_blocks"] = self._blocks(model)
        self.make_room(2 * blocks if model.averages else blocks)
        for local, home in model.homes.items():
            self.lanes(model, local)[:] = home.parameters
        for outer, there in (("sums", bool(model.store)), ("taken", bool(model.taken))):
            if there:
                self.put(outer, self._inners[outer])
            else:
                bpf.map_delete(self.fds[outer], bytes(4))
        self.enter(model)

    def make_room(self, blocks: int) -> None:
        """The program has so many blocks of parameters and accumulators, all zero."""
        block = layout().records["block"]
        self.blocks = self._inner("parameters", "blocks_shape", block, max(blocks, 1))

    def _blocks(self, model: ServersModel) -> int:
        return -(-len(model.part(model.number)) // PER_BLOCK[model.width])

    def lanes(self, model: ServersModel, local: int, second: bool = False) -> NDArray[np.int64]:
        """The parameters of a home, or its accumulators."""
        block, part = divmod(local, PER_BLOCK[model.width])
        every = self.blocks["lane"].view(np.int64)[block + second * self._blocks(model)]
        n = LANES[model.width]
        found: NDArray[np.int64] = every[part * n : (part + 1) * n]
        return found

    def enter(self, model: ServersModel) -> None:
        """The model's view and rounds, as an agent begins them."""
        first, last = model.rounds
        self.ring["version"] = model.version[0] << 32 | model.version[1]
        self.config["settled"] = model.settled
        self.config["view"], self.config["round"] = model.view, first
        self.config["round_low"], self.config["round_high"] = first, last
        if not model.windows:
            self.windows[...] = np.zeros((), self.windows.dtype)
            self.outgoing["answers"] = model.answers

    def begin_phase(self, model: ServersModel) -> None:
        """Nothing of the phase before counts any more."""
        self.pushers[...] = np.zeros((), self.pushers.dtype)
        self.progress[...] = np.zeros((), self.progress.dtype)
        self.homes["last"] = 0
        for local, home in model.homes.items():
            self.homes[local]["due"] = home.due

    def run(self, frame: bytes) -> Outcome:
        """One frame, and all its effects."""
        self.ring["heard_ns"] = 0
        verdict, names, after = self.count(frame)
        assert verdict in ("drop", "tx"), "nothing of servers goes up"
        if verdict == "drop":
            assert after == frame
        out = after if verdict == "tx" else None
        return Outcome(verdict, names, out, bool(self.ring["heard_ns"][0]))

    def take_bells(self) -> list[Bell]:
        """The messages to the agent since, except refusals: of these there is one message in a tick of the clock."""
        return [bell for bell in self.doorbell.take() if bell.fragments]

    def same_state(self, model: ServersModel) -> None:
        """The maps and the messages to the agent equal the model's, and have nothing else."""
        assert self.take_bells() == model.bells
        model.bells.clear()
        for records in (self.homes, self.store, self.pushers):
            assert not records["claim"].any()
        for local, home in model.homes.items():
            record = self.homes[local]
            assert (int(record["tag"]), int(record["seen"])) == (home.tag, home.seen)
            assert int(record["members"]) == home.members
            assert (bool(record["due"]), bool(record["full"])) == (home.due, home.full)
            last = {k: int(n) for k, n in enumerate(record["last"], 1) if n}
            assert last == home.last
            assert (self.lanes(model, local) == home.parameters).all()
            if home.tag:
                assert (self.lanes(model, local, second=True) == home.sums).all()
        assert not self.homes[len(model.homes) :].view(np.uint8).any()
        pushers = {w: p for w, p in model.pushers.items() if p.number}
        assert np.flatnonzero(self.pushers["number"]).tolist() == sorted(pushers)
        for worker, pusher in pushers.items():
            record = self.pushers[worker]
            found = tuple(int(record[name]) for name in ("number", "weight", "staleness"))
            assert found == (pusher.number, pusher.weight, pusher.staleness)
        for place, stored in model.store.items():
            record = self.store[place]
            assert (int(record["tag"]), int(record["rest"])) == (stored.tag, stored.rest)
            assert int(record["exponent"]) == stored.exponent & 0xFF
            assert record["lane"].tobytes() == stored.lanes
        for index, number in model.taken.items():
            assert int(self.taken[index]) == number
        counts = {
            divmod(at, COUNTS): (int(p["tag"]), int(p["count"]))
            for at, p in enumerate(self.progress)
            if p["tag"] or p["count"]
        }
        assert counts == model.counts
        words = {
            k: (int(a["staleness"]), int(a["version"]))
            for k, a in enumerate(self.answered)
            if a["staleness"] or a["version"]
        }
        assert words == {k: both for k, both in model.answered.items() if any(both)}
        windows = {
            divmod(at, SENDERS): (int(window["highest"]), int(window["answers"]))
            for at, window in enumerate(self.windows)
            if window["highest"] or window["answers"]
        }
        assert windows == model.believed
        assert int(self.outgoing["answers"][0]) == model.answers
        ring = self.ring[0]
        assert int(ring["version"]) == model.version[0] << 32 | model.version[1]
        assert int(ring["full"]) == model.full
        assert ring["announced"].tolist() == [*model.announced, *[0] * 14]
