# SPDX-License-Identifier: Apache-2.0
"""The real XDP program of a Linux switch, run by BPF_PROG_TEST_RUN, beside the model of `tests.linux_switch`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import bpf, loader, xdp
from nicps.dataplane.doorbell import Ring
from nicps.dataplane.switch import SOURCE, Message, read_message
from nicps.layout import layout
from tests.linux_switch import SwitchModel
from tests.model import Outcome
from tests.stripes import GROUP, LANES, MACS, NETWORK, PER_BLOCK
from tests.xdp.counted import Counted

ROOM = 10
PLACES = layout().limits["PLACES"]


class SwitchTarget(Counted):
    """The program, with maps for a few fragments."""

    def __init__(self, source: str = SOURCE, room: int = ROOM) -> None:
        self._loaded = loader.load(source, {xdp.SWITCH_PROGRAM: "xdp"})
        maps = self._loaded.maps
        super().__init__(self._loaded.programs[xdp.SWITCH_PROGRAM], maps)
        records = layout().records
        self.config = self._view(maps["config"], records["switch_config"])
        self.members = self._view(maps["members"], records["member"])
        self.key = self._view(maps["view_key"], records["key"])
        self.outgoing = self._view(maps["outgoing"], records["outgoing"])
        self.windows = self._view(maps["windows"], records["window"])
        self.told = self._view(maps["told"], records["told"])
        self.doorbell = Ring(maps["doorbell"], records["message"])
        self.places = self._inner("places", "places_shape", records["place"], PLACES * room)
        self.blocks = self._inner("blocks", "blocks_shape", records["block"], PLACES * room)
        self.sums = self._inner("sums", "sums_shape", records["lanes"], PLACES * room)

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

    def begin(self, model: SwitchModel) -> None:
        """Empty maps, and the model's configuration."""
        self.doorbell.read()
        for view in (self.config, self.members, self.key, self.outgoing, self.windows, self.told):
            view[...] = np.zeros((), view.dtype)
        for view in (self.places, self.blocks, self.sums):
            view[...] = np.zeros((), view.dtype)
        self.config["network"], self.config["enabled"] = NETWORK, model.enabled
        self.config["live_members"] = sum(1 << number - 1 for number in model.live)
        self.config["room"], self.config["width"] = model.room, model.width
        self.config["view"], self.config["keyed"] = model.view, int(bool(model.key))
        self.config["everybody"] = np.frombuffer(GROUP, np.uint8)
        self.members["mac"][0] = np.frombuffer(wire.SWITCH, np.uint8)
        for number in model.live:
            self.members["mac"][number] = np.frombuffer(MACS[number - 1], np.uint8)
        if model.key:
            self.key["word"] = np.frombuffer(model.key, "<u8")

    def enter(self, model: SwitchModel) -> None:
        """The model's view."""
        self.config["view"] = model.view

    def run(self, frame: bytes) -> Outcome:
        """One frame, and all its effects."""
        self.told["due_ns"] = 0  # no rate: the model knows no time
        verdict, names, after = self.count(frame)
        sent = verdict in ("tx", "redirect")
        assert sent or after == frame, "what is not answered stays as it was"
        return Outcome(verdict, names, after if sent else None)

    def messages(self) -> list[Message]:
        """The messages to the control process."""
        return [read_message(record) for record in self.doorbell.read()]

    def total(self, model: SwitchModel, index: int, at: int) -> NDArray[np.int64]:
        """The accumulators of a place, or the remainders in them."""
        block, part = divmod(index, PER_BLOCK[model.width])
        n = LANES[model.width]
        lanes: NDArray[np.int64] = self.blocks["lane"].view(np.int64)[block * PLACES + at]
        return lanes[part * n : (part + 1) * n]

    def same_state(self, model: SwitchModel) -> None:
        """The maps and the messages equal the model's, and have nothing else."""
        assert self.messages() == model.messages
        model.messages.clear()
        assert not self.places["claim"].any()
        kept = 0
        for index, pair in model.places.items():
            for at, place in enumerate(pair):
                record = self.places[index * PLACES + at]
                if place is None:
                    assert not record["tag"]
                    continue
                kept += 1
                found = [int(record[name]) for name in ("tag", "seen", "members", "fragments")]
                assert found == [place.tag, place.seen, place.members, place.fragments]
                assert [int(record[name]) for name in ("number", "behind", "not_finite")] == [
                    place.view,
                    place.behind,
                    place.not_finite,
                ]
                assert int(record["unit"]) == place.unit & 0xFF
                assert (self.total(model, index, at) == place.total).all(), (index, at)
                if place.whole:
                    assert int(record["exponent"]) == place.exponent & 0xFF
                    assert self.sums["lane"][index * PLACES + at].tobytes() == place.lanes
        assert np.count_nonzero(self.places["tag"]) == kept
        for number, window in model.windows.items():
            record = self.windows[number]
            assert int(record["highest"]) == window.highest
            assert int(record["answers"]) == window.answers
        assert int(self.outgoing["answers"][0]) == model.answers
