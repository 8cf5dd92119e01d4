# SPDX-License-Identifier: Apache-2.0
"""`nicps bench kernel --servers`: the time of a parameter server's kernel for a push fragment and a pull.

As `nicps.bench.kernel`, with the programs of `ebpf/nicps_bench_servers.c`: each run makes the next push or pull out of
the answer to the last. One worker pushes to one server, which holds the whole vector.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import KEY_BYTES, Maps
from nicps.dataplane.servers import Servers
from nicps.errors import NicpsError

_XDP, _SERVERS = "nicps_xdp", "nicps_servers"
_NETWORK, _VIEW, _ROUND = 1, 1, 1
_WORKER = 2  # NICPS_BENCH_WORKER
_COUNTERS = {"push": "pushed", "pull": "pulled"}
_KINDS = {"push": wire.Push, "pull": wire.Pull}
#: Push fragments of the small part.
_WARM = 16
_WARM_RUNS = 100_000

#: Nanoseconds of a run, and of the loop alone.
Took = tuple[float, float]


class ServingKernel:
    """The benchmark's programs, at a server with a part for one worker.

    Args:
        key: of the view; None on a trusted LAN.
    """

    def __init__(
        self, loaded: loader.Loaded, beside: loader.Loaded, key: bytes | None = None
    ) -> None:
        self._programs = {
            name: beside.open(name) for name in tuple(beside.later) if name != _SERVERS
        }
        _put(beside.maps["nicps_bench_timed"], loaded.programs[_XDP])
        room = beside.open(_SERVERS)
        _put(loaded.maps["nicps_rooms"], room)
        os.close(room)
        self._number, self._key = 0, key
        self.maps = Maps(loaded.maps)
        self.maps.add_servers(beside.maps)
        assert self.maps.servers is not None
        self.servers: Servers = self.maps.servers
        self.mac = bytes.fromhex("020000000001")
        self.maps.enter_view(_VIEW, 1, [self.mac] * wire.MAX_MEMBERS, 2, key)
        self.maps.stripes.set_ranks((1,), (1,))
        config = self.maps.config
        config["network"], config["round_high"], config["staleness"] = _NETWORK, _ROUND, 1
        config["enabled"] = 1

    def serve(self, fragments: int, width: int) -> None:
        """All of a vector of so many push fragments, whose parameters are random."""
        lanes = fragments * wire.lanes_per_fragment(width)
        units = np.random.default_rng(1).integers(-(2**40), 2**40, lanes)
        part = self.servers.reserve_part(
            fragments, width, lambda out: np.copyto(out, units), averages=False
        )
        self.servers.use_part(part)
        config = self.maps.config
        config["width"], config["room"] = width, fragments * (32 // width)
        self._number = 0
        self.maps.set_key(self._key)  # its frames' numbers begin anew, too
        self.servers.begin_phase()
        self.servers.open_round(_ROUND, settled=False)

    def distinct(self, kind: str, runs: int) -> Took:
        """`runs` pushes or pulls of fragments in turn, each of them answered.

        Raises:
            NicpsError: not all of them were answered.
        """
        frame, before = self._frame(kind, runs), self._count(kind)
        took = bpf.prog_test_run(self._programs[f"nicps_bench_{kind}"], frame, runs).duration_ns
        done = self._count(kind) - before
        if done != runs:
            raise NicpsError(f"{done} of {runs} were {_COUNTERS[kind]}: {self.maps.counters()}")
        loop = self._programs[f"nicps_bench_{kind}_none"]
        return took, bpf.prog_test_run(loop, frame, runs).duration_ns

    def _count(self, kind: str) -> int:
        return self.maps.counters()[_COUNTERS[kind]]

    def _frame(self, kind: str, runs: int) -> bytes:
        """The fragment before the first of so many: the program steps to the next before it works."""
        config = self.maps.config
        width, room = int(config["width"]), int(config["room"])
        fragments = room if kind == "pull" else room * width // 32
        header = wire.Header(network=_NETWORK, view=_VIEW, round=_ROUND, sender=_WORKER)
        body = _KINDS[kind](0, self._number + 1, 0, fragments, 0, width, 0)
        payload = np.random.default_rng(1).bytes(wire.PAYLOAD_BYTES)
        frame = bytearray(wire.ethernet(self.mac, wire.pack(header, body, tail=payload), self.mac))
        at = wire.ETHERNET_BYTES + wire.HEADER_BYTES + 8
        struct.pack_into(">I", frame, at, 2**32 - 1)
        self._number += -(-runs // fragments)
        return bytes(frame)

    def close(self) -> None:
        """Unload the programs."""
        self.maps.close()
        for program in self._programs.values():
            os.close(program)
        self._programs.clear()


def _put(array: int, program: int) -> None:
    bpf.map_update(array, bytes(4), program.to_bytes(4, sys.byteorder))


@contextmanager
def serving_kernel(key: bytes | None = None) -> Iterator[ServingKernel]:
    """The programs, loaded; they are on no interface."""
    names = [f"nicps_bench_{kind}{end}" for kind in _KINDS for end in ("", "_none")]
    later: dict[str, loader.ProgramKind] = dict.fromkeys([*names, _SERVERS], "xdp")
    loaded = loader.load("nicps.c", {_XDP: "xdp"})
    try:
        beside = loader.load_beside(loaded, "nicps_bench_servers.c", later)
        try:
            bench = ServingKernel(loaded, beside, key)
            yield bench
            bench.close()
        finally:
            beside.close()
    finally:
        loaded.close()


def measure(
    params: int, passes: int, row: Callable[[int, bool, str, list[Took], int], None]
) -> None:
    """A row for each width, without a key and with one: a push and a pull, of a small part and of a large one.

    Args:
        params: parameters of the large part.
        passes: measurements of each, at least 1.
        row: takes width, whether there is a key, the case, the measurements, and the number of fragments of each.
    """
    for key in (None, os.urandom(KEY_BYTES)):
        with serving_kernel(key) as bench:
            for width in (32, 16, 8):
                large = -(-params // wire.lanes_per_fragment(width))
                for case, fragments in (("warm", _WARM), ("cold", large)):
                    bench.serve(fragments, width)
                    for kind in ("push", "pull") if width == 32 else ("push",):
                        runs = _WARM_RUNS // fragments * fragments if case == "warm" else fragments
                        bench.distinct(kind, runs)
                        found = [bench.distinct(kind, runs) for _ in range(passes)]
                        row(width, key is not None, f"{kind} {case}", found, runs)
