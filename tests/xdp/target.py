# SPDX-License-Identifier: Apache-2.0
"""The real XDP program as a `tests.replay.Target`: loaded once, run by BPF_PROG_TEST_RUN."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.layout import layout
from tests.model import BANKS, SLOTS_PER_BLOCK, Outcome
from tests.replay import State, bits, halves

VERDICTS = {
    bpf.XDP_PASS: "pass",
    bpf.XDP_DROP: "drop",
    bpf.XDP_TX: "tx",
    bpf.XDP_REDIRECT: "redirect",
}
HOUR_NS = 3_600_000_000_000
SEAL = bytes.fromhex("02abcdef0123")


class XdpTarget:
    """The program with maps for `blocks` accumulator blocks in a bank.

    `begin` puts everything back to the start, so that one program serves all sequences.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._loaded = loader.load("nicps.c", {"nicps_xdp": "xdp"})
        self._program = self._loaded.programs["nicps_xdp"]
        self._layout = layout()
        records = self._layout.records
        maps = self._loaded.maps
        self._config = self._view(maps["config"], records["config"])
        self._members = self._view(maps["members"], records["member"])
        self._ring = self._view(maps["ring"], records["ring"])
        self._saved = self._view(maps["bounced_frame"], records["saved"])
        self._key = self._view(maps["view_key"], records["key"])
        self._outgoing = self._view(maps["outgoing"], records["outgoing"])
        self._windows = self._view(maps["windows"], records["window"])
        self._token_windows = self._view(maps["token_windows"], records["token_window"])
        self._train = self._view(maps["train"], records["train"])
        self._limits = self._view(maps["limits"], records["limit"])
        self._progress = self._view(maps["progress"], records["progress"])
        self._counters = self._view(maps["counters"], np.dtype("u8"))
        slots, sums = BANKS * blocks * SLOTS_PER_BLOCK, BANKS * blocks
        self._slots = self._inner("slots", "slots_shape", records["slot"], slots)
        self._sums = self._inner("accumulators", "blocks_shape", records["block"], sums)

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

    def begin(self, config: Mapping[str, Any], members: Sequence[bytes], key: bytes = b"") -> None:
        """Everything empty, then this configuration, these members and this key."""
        for view in (self._ring, self._saved, self._progress, self._counters, self._slots):
            view[...] = np.zeros((), view.dtype)
        for view in (self._config, self._members, self._limits, self._sums):
            view[...] = np.zeros((), view.dtype)
        for view in (self._key, self._outgoing, self._windows, self._token_windows, self._train):
            view[...] = np.zeros((), view.dtype)
        assert config["blocks"] <= self.blocks
        self._config["seal"] = np.frombuffer(SEAL, np.uint8)
        self._members["mac"][0] = np.frombuffer(wire.SWITCH, np.uint8)
        for number, mac in enumerate(members, 1):
            self._members["mac"][number] = np.frombuffer(mac, np.uint8)
        if key:
            self._key["word"] = np.frombuffer(key, "<u8")
        self.configure(config)

    def configure(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            if name == "alive":
                until = time.monotonic_ns() + HOUR_NS if value else time.monotonic_ns() - 1
                self._config["alive_until_ns"] = until
            else:
                self._config[name] = value

    def enter(self, view: int) -> None:
        self._ring["seen"] = 0
        self.configure({"view": view})

    def run(self, frame: bytes) -> Outcome:
        before = self._counters.copy()
        self._ring["heard_ns"] = self._ring["token_ns"] = 0
        result = bpf.prog_test_run(self._program, frame)
        verdict = VERDICTS[result.verdict]
        risen = self._counters - before
        assert set(risen.tolist()) <= {0, 1}
        names = tuple(self._layout.counters[at] for at in np.flatnonzero(risen))
        heard = bool(self._ring["heard_ns"][0])
        is_token = frame[wire.ETHERNET_BYTES + 1 :][:1] == bytes([wire.FrameType.TOKEN])
        assert bool(self._ring["token_ns"][0]) is (heard and is_token), "only a token is a token"
        if verdict != "tx":
            sealed = SEAL + frame[6:] if verdict == "pass" and names else frame
            assert result.frame == sealed, "more than the destination of what goes up was changed"
            return Outcome(verdict, names, None, heard)
        saved = self._saved[0]
        assert saved["version"] % 2 == 0
        kept = saved["frame"][: saved["length"]].tobytes()
        length = int.from_bytes(result.frame[32:34], "big")
        assert kept == result.frame[wire.ETHERNET_BYTES : wire.ETHERNET_BYTES + length]
        return Outcome(verdict, names, result.frame, heard)

    def peek(self, frame: bytes) -> Outcome:
        """The program's verdict on a frame; the state is unchanged afterwards."""
        views = (self._ring, self._progress, self._counters, self._slots, self._sums)
        views += (self._windows, self._token_windows, self._limits, self._saved)
        views += (self._outgoing, self._train)
        before = [view.copy() for view in views]
        outcome = self.run(frame)
        for view, old in zip(views, before, strict=True):
            view[...] = old
        return outcome

    def agents(self) -> bytes:
        """Write the values that only the agent writes: configuration, members, key."""
        return b"".join(view.tobytes() for view in (self._config, self._members, self._key))

    def expect(self, nonce: int) -> None:
        """Count the train of that nonce."""
        self._train[0] = (nonce, 0, 0, 0, 0)

    def counted(self) -> int:
        """Frames of the train that was expected."""
        return int(self._train["count"][0])

    def state(self) -> State:
        assert not self._slots["claim"].any()
        assert not (self._progress["count"] >> np.uint64(32)).any(), "everybody has counted"
        senders, rows = wire.MAX_MEMBERS + 1, self._layout.limits["COUNTS"]
        assert not self._windows[senders:].view(np.uint64).any(), "there is one channel"
        progress = {
            (at // rows, at % rows): (*halves(int(p["tag"])), int(p["count"]))
            for at, p in enumerate(self._progress)
            if p["tag"] or p["count"]
        }
        blocks = int(self._config["blocks"][0])
        per_bank = blocks * SLOTS_PER_BLOCK
        slots = {
            (at // per_bank, at % per_bank): (*halves(int(s["tag"])), bits(int(s["seen"])))
            for at, s in enumerate(self._slots)
            if s["seen"]
        }
        used = self._sums["lane"][: BANKS * blocks].view(np.int64)
        assert not self._sums["lane"][BANKS * blocks :].any()
        ring = self._ring[0]
        return State(
            progress,
            slots,
            used.reshape(BANKS, blocks, wire.BLOCK_LANES).copy(),
            (halves(int(ring["seen"])), halves(int(ring["bounced"])), int(ring["bounces"])),
            {
                sender: (int(w["highest"]), int(t["highest"]), int(t["repeat"]))
                for sender, (w, t) in enumerate(
                    zip(self._windows[:senders], self._token_windows, strict=True)
                )
                if w["highest"] or t["highest"]
            },
        )
