# SPDX-License-Identifier: Apache-2.0
"""The XDP program and its maps without any interface, for the tests of the data plane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.bench.kernel import load as load_bench
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import Maps

NETWORK, VIEW = 0x6E696370, 7
MACS = [bytes([2, 0, 0, 0, 0, number]) for number in range(1, wire.MAX_MEMBERS + 1)]
NATIVE = {8: ">i1", 16: ">i2", 32: ">i4"}
LANES = {8: 1440, 16: 720, 32: 360}


class Kernel:
    """This host is member 1 of 64, in view 7, with rounds 1 to 9 open.

    Attributes: `fds`, the maps' descriptors by name.
    """

    def __init__(self, loaded: loader.Loaded, program: str = "nicps_xdp") -> None:
        self.program = loaded.programs[program]
        self.fds = loaded.maps
        self.maps = Maps(loaded.maps)
        self.reset()

    def reset(self, blocks: int = 2) -> None:
        """Empty maps, with that many blocks in a bank."""
        config = self.maps.config
        self.maps.enter_view(VIEW, 1, MACS, 2)
        config["round_low"], config["round_high"], config["round"] = 1, 9, 1
        config["sent_seen"] = config["own_sent"] = config["sums"] = config["sums_next"] = 0
        config["network"], config["enabled"] = NETWORK, 1
        self.maps.allocate(blocks)

    def run(self, frame: bytes) -> bpf.Run:
        """Give the program one frame, from the Ethernet header on."""
        return bpf.prog_test_run(self.program, frame)


@contextmanager
def kernel(source: str = "nicps.c") -> Iterator[Kernel]:
    """The program, loaded."""
    loaded = loader.load(source, {"nicps_xdp": "xdp"})
    try:
        yield Kernel(loaded)
    finally:
        loaded.close()


@contextmanager
def stepping_kernel() -> Iterator[Kernel]:
    """The benchmark's program: it makes the next fragment out of the last, and goes on with the program."""
    loaded = load_bench()
    try:
        yield Kernel(loaded, "nicps_bench_add")
    finally:
        loaded.close()


def fragment(
    payload: bytes,
    *,
    width: int,
    shift: int = 0,
    sender: int = 2,
    index: int = 0,
    fragments: int = 8,
    round_: int = 1,
    view: int = VIEW,
) -> bytes:
    """An Ethernet frame with a fragment in it; of sender 0, a switch's sum."""
    flags = 0 if sender else wire.Flag.ADD
    header = wire.Header(network=NETWORK, view=view, round=round_, sender=sender, flags=flags)
    body = wire.Fragment(index, fragments, LANES.get(width, 1440), width, shift, 1)
    source = MACS[sender - 1] if sender else wire.SWITCH
    return wire.ethernet(source, wire.pack(header, body, tail=payload))


def token(generation: int, hop: int, owner: int, **fields: int) -> bytes:
    """A token that member 64 sends, as Ethernet frame."""
    view = fields.get("view", VIEW)
    header = wire.Header(network=NETWORK, view=view, round=1, sender=64)
    body = wire.Token(generation, hop, owner, 0, 64, fields.get("idle", 0), 0, 0, -9, 5)
    entries = [wire.Entry(number, 2, 3, 4, 5, 1, -5) for number in range(64)]
    return wire.ethernet(MACS[63], wire.pack(header, body, entries))


def lanes(width: int, seed: int) -> NDArray[np.int64]:
    """Random lanes with the extremes among them, int64 (lanes,)."""
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    values = np.random.default_rng(seed).integers(low, high, LANES[width], endpoint=True)
    values[:6] = low, high, -1, 0, 1, low
    return values


def payload_of(values: NDArray[np.int64], width: int) -> bytes:
    """Lanes as they lie on the wire."""
    return values.astype(NATIVE[width]).tobytes()
