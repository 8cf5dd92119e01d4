# SPDX-License-Identifier: Apache-2.0
"""`nicps bench kernel --stripes`: the time of a member's kernel for a contribution and a sum.

As `nicps.bench.kernel`, with the programs of `ebpf/nicps_bench_stripes.c`: each run makes the next frame out of the
last one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import KEY_BYTES, Maps
from nicps.errors import NicpsError
from nicps.wire import FrameType

_XDP, _STRIPES = "nicps_xdp", "nicps_stripes"
_STEP, _NONE = "nicps_bench_stripe", "nicps_bench_stripe_none"
_NETWORK, _VIEW, _UNIT, _CONVERSION = 1, 1, -20, 1
_NEXT = ("type", "first", "last", "sender", "round", "index", "fragments", "sequence", "unit")
#: Type, members that send, list, and the counter of each case. This host is member 1, and the only aggregator of
#: contributions; member 2 is that of sums.
_CASES = {
    "contribution": (FrameType.CONTRIBUTION, (2, 63), (1 << 64) - 2, "gathered"),
    "sum": (FrameType.CONTRIBUTION, (2, 2), 0b10, "summed"),
    "store": (FrameType.SUM, (2, 2), 0b100, "stored"),
    "clock": (FrameType.SUM, (2, 2), 0b101, "clocked"),
}
_BODIES = {FrameType.CONTRIBUTION: wire.Contribution, FrameType.SUM: wire.Sum}
#: Blocks of the small room, 92 kB of sums in the bank at work.
_WARM_BLOCKS = 8
_WARM_RUNS = 20_000

#: Nanoseconds of a run, and of the loop alone.
Took = tuple[float, float]


class StripingKernel:
    """The benchmark's programs, and maps for one view of 64 members that share a MAC address.

    Args:
        key: of the view; None on a trusted LAN.
    """

    def __init__(self, loaded: loader.Loaded, key: bytes | None = None) -> None:
        self._programs = loaded.programs
        for array, name in (("nicps_bench_timed", _XDP), ("nicps_rooms", _STRIPES)):
            program = loaded.programs[name].to_bytes(4, sys.byteorder)
            bpf.map_update(loaded.maps[array], bytes(4), program)
        memory = bpf.map_memory(loaded.maps["nicps_bench_next"])
        record = np.dtype([(name, np.uint32) for name in _NEXT])
        self._next = np.frombuffer(memory, record, 1)
        self.maps = Maps(loaded.maps)
        self.mac = bytes.fromhex("020000000001")
        self.maps.enter_view(_VIEW, 1, [self.mac] * wire.MAX_MEMBERS, 2, key)
        config = self.maps.config
        config["network"], config["everybody"] = _NETWORK, np.frombuffer(self.mac, np.uint8)
        self._channel = self.maps.stripes.areas.words[0]
        self._channel["offered"], self._channel["round_high"] = _CONVERSION, 2**32 - 1
        config["enabled"] = 1
        self._width = self._round = 0

    def begin(self, fragments: int, width: int) -> None:
        """Empty maps for a vector of so many fragments, all of which this host aggregates."""
        stripes = self.maps.stripes
        blocks = -(-fragments // wire.fragments_per_block(width))
        stripes.use(stripes.reserve(fragments), stripes.reserve_places(blocks))
        stripes.own["conversion"], stripes.own["exponent"] = _CONVERSION, _UNIT & 0xFF
        self._channel["width"] = self._channel["width_next"] = width
        self._width, self._round = width, 0

    def distinct(self, case: str, fragments: int, runs: int) -> Took:
        """`runs` frames for as many distinct fragments, which begin with a new round.

        Raises:
            NicpsError: not all of them came to what they are for.
        """
        kind, senders, members, counter = _CASES[case]
        self._round += 1
        order = (1,) if kind is FrameType.CONTRIBUTION else (2,)
        self.maps.stripes.set_ranks(order, order)
        self._channel["round_low"] = self._round
        if case == "clock":
            self.maps.stripes.forget_sent()
            self.maps.stripes.set_sent(self._round, 2, 1)
        header = wire.Header(network=_NETWORK, view=_VIEW, round=self._round, sender=2)
        body = _BODIES[kind](members, 0, fragments, 0, self._width, _UNIT, _UNIT, 0)
        payload = np.random.default_rng(1).bytes(wire.PAYLOAD_BYTES)
        frame = wire.ethernet(self.mac, wire.pack(header, body, tail=payload), self.mac)
        took = []
        before = self.maps.counters()[counter]
        for program in (_STEP, _NONE):
            first = (kind, *senders, senders[0], self._round, 0, fragments)
            sequence = int(self._next["sequence"][0])
            self._next[0] = (*first, sequence, _UNIT & 0xFF)
            took.append(bpf.prog_test_run(self._programs[program], frame, runs).duration_ns)
            if program == _STEP:
                self._round = int(self._next["round"][0])
        done = self.maps.counters()[counter] - before
        if done != runs:
            raise NicpsError(f"{done} of {runs} were {counter}: {self.maps.counters()}")
        return took[0], took[1]


@contextmanager
def striping_kernel(key: bytes | None = None) -> Iterator[StripingKernel]:
    """The programs, loaded; they are on no interface."""
    programs: dict[str, loader.ProgramKind] = dict.fromkeys((_XDP, _STRIPES, _STEP, _NONE), "xdp")
    loaded = loader.load("nicps_bench_stripes.c", programs)
    try:
        bench = StripingKernel(loaded, key)
        yield bench
        bench.maps.close()
    finally:
        loaded.close()


def measure(
    params: int, passes: int, row: Callable[[int, bool, str, list[Took], int], None]
) -> None:
    """A row for each width, without a key and with one: contributions, sums that are made and stored, and those that
    send a contribution; of a small vector and of a large one.

    Args:
        params: lanes of the large vector.
        passes: measurements of each, at least 1.
        row: takes width, whether there is a key, the case, the measurements, and the number of fragments of each.
    """
    for key in (None, os.urandom(KEY_BYTES)):
        with striping_kernel(key) as bench:
            for width in (32, 16, 8):
                small = _WARM_BLOCKS * wire.fragments_per_block(width)
                large = -(-params // wire.lanes_per_fragment(width))
                for room, fragments in (("warm", small), ("cold", large)):
                    bench.begin(fragments, width)
                    for case in _CASES:
                        runs = fragments if room == "cold" else _WARM_RUNS // fragments * fragments
                        if case == "clock":  # once in a round; the last sum finds nothing to send
                            if room == "warm":
                                continue
                            runs = fragments - 1
                        bench.distinct(case, fragments, runs)
                        found = [bench.distinct(case, fragments, runs) for _ in range(passes)]
                        row(width, key is not None, f"{case} {room}", found, runs)
