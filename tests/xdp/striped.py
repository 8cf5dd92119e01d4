# SPDX-License-Identifier: Apache-2.0
"""The real XDP program with its room for stripes, run by BPF_PROG_TEST_RUN, beside `tests.stripes_model`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.doorbell import Doorbell
from nicps.layout import layout
from tests.model import BANKS, Outcome
from tests.stripes import GROUP, LANES, NETWORK, PER_BLOCK, mac_of
from tests.stripes_model import ChannelsModel, StripesModel
from tests.xdp.counted import Counted
from tests.xdp.target import SEAL

ROOM = 24


class Target(Counted):
    """The program and its room for stripes, with maps for a few fragments."""

    def __init__(self, source: str = "nicps.c", room: int = ROOM) -> None:
        self._loaded = loader.load(source, {"nicps_xdp": "xdp", "nicps_stripes": "xdp"})
        maps, programs = self._loaded.maps, self._loaded.programs
        super().__init__(programs["nicps_xdp"], maps)
        self.room = room
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
        self.channels = self._view(maps["channels"], records["channel"])
        sent = self._view(maps["sent"], records["sent"])
        self.sent = sent.reshape(wire.MAX_CHANNELS, BANKS, wire.MAX_MEMBERS + 1)
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

    def begin(self, model: StripesModel | ChannelsModel) -> None:
        """Empty maps, and the model's configuration."""
        self.doorbell.take()
        for view in (self.config, self.members, self.key, self.outgoing, self.windows, self.limits):
            view[...] = np.zeros((), view.dtype)
        for view in (self.progress, self.ring, self.own, self.sums, self.gathers, self.blocks):
            view[...] = np.zeros((), view.dtype)
        for view in (self.sent, self.channels):
            view[...] = np.zeros((), view.dtype)
        models = channels_of(model)
        first = models[0]
        self.config["network"], self.config["enabled"] = NETWORK, 1
        self.config["number"], self.config["members"] = first.number, max(first.live)
        self.config["live_members"] = sum(1 << number - 1 for number in first.live)
        self.config["keyed"] = int(bool(first.key))
        self.config["seal"], self.config["everybody"] = (
            np.frombuffer(mac, np.uint8) for mac in (SEAL, GROUP)
        )
        for number in (*first.live, *([0] if first.switch else [])):
            self.members["mac"][number] = np.frombuffer(mac_of(number), np.uint8)
        if first.key:
            self.key["word"] = np.frombuffer(first.key, "<u8")
        self.lay_out(models)
        self.enter(model)

    def lay_out(self, models: Sequence[StripesModel]) -> None:
        """An area for each channel, one behind the other."""
        room = blocks = 0
        for words, each in zip(self.channels, models, strict=False):
            words["first"], words["room"] = room, each.room
            words["first_block"], words["blocks"] = blocks, each.blocks
            room, blocks = room + each.room, blocks + each.blocks
        assert room <= self.room and blocks <= self.room
        self.config["room"], self.config["gather_blocks"] = room, blocks
        self.config["channels"] = len(models)

    def enter(self, model: StripesModel | ChannelsModel) -> None:
        """The model's view and rounds, and the values that belong to them."""
        models = channels_of(model)
        first = models[0]
        self.config["view"] = first.view
        for words, each in zip(self.channels, models, strict=False):
            words["round"] = words["round_low"] = each.rounds[0]
            words["round_high"], words["clock"] = each.rounds[1], each.clock
            words["width"], words["width_next"] = each.width
        open_ = first.rounds[0]
        for name, at in (("", open_), ("_next", open_ + 1)):
            self.config[f"rank{name}"] = first.ranks_in(at).get(first.number, 0)
            self.config[f"aggregators{name}"] = first.aggregators(at)
        self.config["rest_view"], self.config["rest_behind"] = zip(*first.rest, strict=True)
        for number in (0, *first.live):
            self.members["rank"][number] = [ranks.get(number, 0) for ranks in first.ranks]

    def write_own(self, model: StripesModel | ChannelsModel) -> None:
        """The lanes that the training program has converted, and the conversion that was offered."""
        for each in channels_of(model):
            for (bank, index), own in each.own.items():
                record = self.own[self._place(each, bank, index)]
                record["exponent"], record["conversion"] = own.exponent & 0xFF, own.conversion
                record["lane"] = np.frombuffer(own.lanes, np.uint8)
            self.channels[each.channel]["offered"] = each.offered
            for (bank, number), (round_, index) in each.sent.items():
                self.sent["next"][each.channel, bank, number] = round_ << 32 | index
            for (bank, number), sums in each.swallow.items():
                self.sent["swallow"][each.channel, bank, number] = sums

    def _place(self, model: StripesModel, bank: int, index: int) -> int:
        words = self.channels[model.channel]
        return bank * int(self.config["room"][0]) + int(words["first"]) + index

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

    def same_state(self, model: StripesModel | ChannelsModel) -> None:
        """The maps and the messages to the agent equal the model's, and have nothing else."""
        models = channels_of(model)
        assert self.doorbell.take() == models[0].bells
        models[0].bells.clear()
        assert not self.sums["claim"].any() and not self.gathers["claim"].any()
        rows = [0, *range(wire.MAX_MEMBERS + 1, wire.MAX_MEMBERS + wire.MAX_CHANNELS)]
        progress = self.progress.reshape(BANKS, -1)
        for bank in range(BANKS):
            expected = dict(
                zip(rows, (each.count.get(bank, (0, 0)) for each in models), strict=False)
            )
            found = {row: (int(p["tag"]), int(p["count"])) for row, p in enumerate(progress[bank])}
            assert {row: both for row, both in found.items() if any(both)} == {
                row: both for row, both in expected.items() if any(both)
            }
        stored = sum(self._same_sums(each) for each in models)
        assert np.count_nonzero(self.sums["tag"]) == stored
        gathered = sum(self._same_places(each) for each in models)
        assert np.count_nonzero(self.gathers["tag"]) == gathered
        windows = self.windows.reshape(-1, wire.MAX_MEMBERS + 1)
        for each in models:
            for number, window in each.windows.items():
                record = windows[each.channel, number]
                assert int(record["highest"]) == window.highest
                assert int(record["answers"]) == window.answers
            for (bank, number), (round_, index) in each.sent.items():
                found_next = int(self.sent["next"][each.channel, bank, number])
                assert found_next == round_ << 32 | index
            for (bank, number), sums in each.swallow.items():
                assert int(self.sent["swallow"][each.channel, bank, number]) == sums
        announced = [tag for each in models for tag in each.announced]
        assert self.ring["announced"][0, : len(announced)].tolist() == announced
        assert int(self.outgoing["answers"][0]) == models[0].answers

    def _same_sums(self, model: StripesModel) -> int:
        """How many there are."""
        for (bank, index), stored in model.sums.items():
            record = self.sums[self._place(model, bank, index)]
            assert (int(record["tag"]), int(record["rest"])) == (stored.tag, stored.rest)
            assert int(record["exponent"]) == stored.exponent & 0xFF
            assert record["lane"].tobytes() == stored.lanes
        return len(model.sums)

    def _same_places(self, model: StripesModel) -> int:
        """How many there are."""
        each, words = layout().limits["BLOCK_SLOTS"], self.channels[model.channel]
        newest = {
            bank: max(p.tag for (b, _), p in model.gathers.items() if b == bank)
            for bank, _ in model.gathers
        }
        for (bank, local), place in model.gathers.items():
            first = bank * int(self.config["gather_blocks"][0]) + int(words["first_block"])
            record = self.gathers[first * each + local]
            assert (int(record["tag"]), int(record["seen"])) == (place.tag, place.seen)
            if place.tag != newest[bank]:
                continue  # lanes of another width may lie over it
            block, part = divmod(local, PER_BLOCK[place.width])
            lanes = self.blocks["lane"].view(np.int64)[first + block]
            n = LANES[place.width]
            assert (lanes[part * n : (part + 1) * n] == place.total).all()
        return len(model.gathers)


def channels_of(model: StripesModel | ChannelsModel) -> Sequence[StripesModel]:
    """The models of its channels."""
    return model.channels if isinstance(model, ChannelsModel) else (model,)
