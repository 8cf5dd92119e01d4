# SPDX-License-Identifier: Apache-2.0
"""The real XDP program with its room for stripes, run by BPF_PROG_TEST_RUN, beside `tests.stripes_model`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.doorbell import Doorbell
from nicps.layout import layout
from tests.model import BANKS, Outcome
from tests.stripes import GROUP, LANES, NETWORK, PER_BLOCK, mac_of
from tests.stripes_model import StripesModel
from tests.xdp.counted import Counted
from tests.xdp.target import SEAL

ROOM = 10


class Target(Counted):
    """The program and its room for stripes, with maps for a few fragments."""

    def __init__(self, source: str = "nicps.c", room: int = ROOM) -> None:
        self._loaded = loader.load(source, {"nicps_xdp": "xdp", "nicps_stripes": "xdp"})
        maps, programs = self._loaded.maps, self._loaded.programs
        super().__init__(programs["nicps_xdp"], maps)
        bpf.map_update(
            maps["nicps_rooms"], bytes(4), programs["nicps_stripes"].to_bytes(4, "little")
        )
        records = layout().records
        self.config = self._view(maps["config"], records["config"])
        self.members = self._view(maps["members"], records["member"])
        self.key = self._view(maps["view_key"], records["key"])
        self.outgoing = self._view(maps["outgoing"], records["outgoing"])
        self.windows = self._view(maps["windows"], records["window"])
        self.progress = self._view(maps["progress"], records["progress"])
        self.ring = self._view(maps["ring"], records["ring"])
        self.sent = self._view(maps["sent"], np.dtype("u8"))
        self.doorbell = Doorbell(maps["doorbell"])
        self.limits = self._view(maps["limits"], records["limit"])
        self.own = self._inner("own", "own_shape", records["own"], BANKS * room)
        self.sums = self._inner("sums", "sums_shape", records["stored"], BANKS * room)
        places = BANKS * room * layout().limits["BLOCK_SLOTS"]
        self.gathers = self._inner("gathers", "gathers_shape", records["gather"], places)
        self.blocks = self._inner("gather_blocks", "blocks_shape", records["block"], BANKS * room)

    def _view(self, fd: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(bpf.map_memory(fd), dtype, bpf.map_info(fd).entries)

    def _inner(self, outer: str, shape: str, dtype: np.dtype[Any], entries: int) -> NDArray[Any]:
        fd = bpf.map_like(self._loaded.maps[shape], entries, "test")
        bpf.map_update(self._loaded.maps[outer], bytes(4), fd.to_bytes(4, "little"))
        view = self._view(fd, dtype)
        os.close(fd)
        return view

    def close(self) -> None:
        """Unload."""
        self._loaded.close()

    def begin(self, model: StripesModel) -> None:
        """Empty maps, and the model's configuration."""
        self.doorbell.take()
        for view in (self.config, self.members, self.key, self.outgoing, self.windows, self.limits):
            view[...] = np.zeros((), view.dtype)
        for view in (self.progress, self.ring, self.own, self.sums, self.gathers, self.blocks):
            view[...] = np.zeros((), view.dtype)
        self.sent[...] = 0
        self.config["network"], self.config["enabled"] = NETWORK, 1
        self.config["number"], self.config["members"] = model.number, max(model.live)
        self.config["live_members"] = sum(1 << number - 1 for number in model.live)
        self.config["room"], self.config["gather_blocks"] = model.room, model.blocks
        self.config["clock"], self.config["keyed"] = model.clock, int(bool(model.key))
        self.config["seal"], self.config["everybody"] = (
            np.frombuffer(mac, np.uint8) for mac in (SEAL, GROUP)
        )
        for number in (*model.live, *([0] if model.switch else [])):
            self.members["mac"][number] = np.frombuffer(mac_of(number), np.uint8)
        if model.key:
            self.key["word"] = np.frombuffer(model.key, "<u8")
        self.enter(model)

    def enter(self, model: StripesModel) -> None:
        """The model's view and rounds, and the values that belong to them."""
        first, last = model.rounds
        self.config["view"], self.config["round"] = model.view, first
        self.config["round_low"], self.config["round_high"] = first, last
        for name, at in (("", first), ("_next", first + 1)):
            self.config[f"rank{name}"] = model.ranks_in(at).get(model.number, 0)
            self.config[f"aggregators{name}"] = model.aggregators(at)
        self.config["width"], self.config["width_next"] = model.width
        self.config["rest_view"], self.config["rest_behind"] = zip(*model.rest, strict=True)
        for number in (0, *model.live):
            self.members["rank"][number] = [ranks.get(number, 0) for ranks in model.ranks]

    def write_own(self, model: StripesModel) -> None:
        """The lanes that the training program has converted, and the conversion that was offered."""
        for (bank, index), own in model.own.items():
            record = self.own[bank * model.room + index]
            record["exponent"], record["conversion"] = own.exponent & 0xFF, own.conversion
            record["lane"] = np.frombuffer(own.lanes, np.uint8)
        self.config["offered"] = model.offered
        for (bank, number), (round_, index) in model.sent.items():
            self.sent[bank * (wire.MAX_MEMBERS + 1) + number] = round_ << 32 | index

    def run(self, frame: bytes) -> Outcome:
        """One frame, and all its effects."""
        self.ring["heard_ns"] = 0
        verdict, names, after = self.count(frame)
        if verdict == "pass":
            assert after == SEAL + frame[6:]
        elif verdict == "drop":
            assert after == frame
        out = after if verdict == "tx" else None
        return Outcome(verdict, names, out, bool(self.ring["heard_ns"][0]))

    def same_state(self, model: StripesModel) -> None:
        """The maps and the messages to the agent equal the model's, and have nothing else."""
        assert self.doorbell.take() == model.bells
        model.bells.clear()
        assert not self.sums["claim"].any() and not self.gathers["claim"].any()
        for bank in range(BANKS):
            tag, count = model.count.get(bank, (0, 0))
            progress = self.progress[bank * (wire.MAX_MEMBERS + 1)]
            assert (int(progress["tag"]), int(progress["count"])) == (tag, count)
        for at, record in enumerate(self.sums[: BANKS * model.room]):
            stored = model.sums.get(divmod(at, model.room))
            if stored is None:
                assert not record["tag"]
                continue
            assert (int(record["tag"]), int(record["rest"])) == (stored.tag, stored.rest)
            assert int(record["exponent"]) == stored.exponent & 0xFF
            assert record["lane"].tobytes() == stored.lanes
        each = layout().limits["BLOCK_SLOTS"]
        newest = {
            bank: max(p.tag for (b, _), p in model.gathers.items() if b == bank)
            for bank, _ in model.gathers
        }
        for (bank, local), place in model.gathers.items():
            record = self.gathers[bank * model.blocks * each + local]
            assert (int(record["tag"]), int(record["seen"])) == (place.tag, place.seen)
            if place.tag != newest[bank]:
                continue  # lanes of another width may lie over it
            block, part = divmod(local, PER_BLOCK[place.width])
            lanes = self.blocks["lane"].view(np.int64)[bank * model.blocks + block]
            n = LANES[place.width]
            assert (lanes[part * n : (part + 1) * n] == place.total).all()
        assert np.count_nonzero(self.gathers["tag"]) == len(model.gathers)
        for number, window in model.windows.items():
            record = self.windows[number]
            assert int(record["highest"]) == window.highest
            assert int(record["answers"]) == window.answers
        for (bank, number), (round_, index) in model.sent.items():
            found = int(self.sent[bank * (wire.MAX_MEMBERS + 1) + number])
            assert found == round_ << 32 | index
        assert int(self.outgoing["answers"][0]) == model.answers
