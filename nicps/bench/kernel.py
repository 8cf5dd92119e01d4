# SPDX-License-Identifier: Apache-2.0
"""`nicps bench kernel`: the cost of adding one fragment in the kernel, without any network.

BPF_PROG_TEST_RUN repeats a program on one frame and reports the mean time of a run. A repeated fragment would be a
duplicate. So the program that runs (`ebpf/nicps_bench.c`) first makes the next distinct fragment from it, and then goes
on with the XDP program itself. The same loop without the XDP program is measured beside it and subtracted. The
difference is the program's own time, on one core, with the payload in the processor's cache as after a DMA into it.

With a key that loop also signs each fragment, and the difference includes the check of the tag.

Every run is checked afterwards: the counters must have exactly one `added` for each run.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson

from nicps import wire
from nicps.bench import kernel_servers, kernel_stripes
from nicps.bench.arguments import need_memory, whole
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import KEY_BYTES, Maps
from nicps.errors import NicpsError
from nicps.layout import layout

_ADD, _NONE, _ONE = "nicps_bench_add", "nicps_bench_none", "nicps_xdp"
_SIGN = "nicps_egress"
_NETWORK, _VIEW = 1, 1
_SENDERS = wire.MAX_MEMBERS - 1  # this host is member 1
#: Blocks of the small map: 92 kB of sums in the bank at work.
_WARM_BLOCKS = 8
_WARM_RUNS = 200_000
_LANE_BYTES = 2 * 8  # of the cold map: two banks of sums

DESCRIPTION = """\
The kernel's add of one full fragment, by BPF_PROG_TEST_RUN on one core, with all checks. warm: distinct fragments into
a small map; cold: distinct fragments over the accumulators of --params parameters, so that every slot is out of the
cache; first: the same, stored as the first of its slot; repeat: one fragment again and again (found to be a
duplicate). With a key each fragment carries a tag that is checked first; sign: the sender's side of that, the program
at the interface's egress. With --servers: a fragment of a step that a parameter server adds (push), and a fragment of
parameters that it gives (pull), with the answer; cold: over --params parameters. With --stripes: a contribution that is
added, one that makes the sum, a sum that is stored, and one that sends the next contribution (clock). The time of the
test run's own loop is measured and subtracted."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: nanoseconds a fragment, median and least of all passes, the loop's own time subtracted."""

    lane: str
    key: bool
    case: str
    ns_median: float
    ns_min: float
    loop_ns: float
    gbit_per_s: float
    fragments: int


class Kernel:
    """The benchmark's programs, and maps for one view of 64 members that share a MAC address.

    Args:
        key: of the view; None on a trusted LAN.
    """

    def __init__(self, loaded: loader.Loaded, key: bytes | None = None) -> None:
        self._programs = loaded.programs
        self._sequence, self._key = 0, key
        self._mark = layout().limits["MARK"]
        self.maps = Maps(loaded.maps)
        self.mac = bytes.fromhex("020000000001")
        config = self.maps.config
        self.maps.enter_view(_VIEW, 1, [self.mac] * wire.MAX_MEMBERS, 2, key)
        config["network"], config["round_high"], config["enabled"] = _NETWORK, 2**32 - 1, 1

    def frame(self, width: int, fragments: int, round_: int, sender: int, index: int) -> bytes:
        """A fragment of random lanes."""
        header = wire.Header(
            network=_NETWORK, view=_VIEW, round=round_, sender=sender, sequence=self._sequence
        )
        body = wire.Fragment(
            index, fragments, wire.lanes_per_fragment(width), width, wire.MAX_SHIFT[width] // 2, 64
        )
        payload = np.random.default_rng(1).bytes(wire.PAYLOAD_BYTES)
        return wire.ethernet(self.mac, wire.pack(header, body, tail=payload))

    def distinct(
        self, width: int, fragments: int, round_: int, sender: int, runs: int
    ) -> tuple[float, float]:
        """Nanoseconds of a run, and of the loop alone, for `runs` distinct fragments from the sender's first on.

        Raises:
            NicpsError: not every one of them was added.
        """
        # The program steps to the next fragment before it works, so start one before the first.
        frame = bytearray(self.frame(width, fragments, round_, sender, 0))
        at = wire.ETHERNET_BYTES + wire.HEADER_BYTES
        struct.pack_into(">I", frame, at, 2**32 - 1)
        before = self.maps.counters()["added"]
        took = bpf.prog_test_run(self._programs[_ADD], bytes(frame), runs).duration_ns
        self._sequence += runs
        added = self.maps.counters()["added"] - before
        if added != runs:
            raise NicpsError(f"{added} of {runs} fragments were added: {self.maps.counters()}")
        loop = bpf.prog_test_run(self._programs[_NONE], bytes(frame), runs).duration_ns
        return took, loop

    def repeat(self, width: int, runs: int) -> tuple[float, float]:
        """The same for one fragment again and again; all but the first are duplicates."""
        self.maps.set_key(self._key)  # the program that signs counts from 1
        unsigned = self.frame(width, 1, 1, 2, 0)
        frame = bpf.prog_test_run(self._programs[_SIGN], unsigned, mark=self._mark).frame
        took = bpf.prog_test_run(self._programs[_ONE], frame, runs).duration_ns
        # Another EtherType is passed at once: that run is the loop and the program's first two lines.
        other = frame[:12] + b"\x08\x00" + frame[14:]
        return took, bpf.prog_test_run(self._programs[_ONE], other, runs).duration_ns

    def sign(self, width: int, runs: int) -> tuple[float, float]:
        """The same for the program that signs a host's own fragments; the loop has other hosts' frames."""
        frame, program = self.frame(width, 1, 1, 2, 0), self._programs[_SIGN]
        took = bpf.prog_test_run(program, frame, runs, self._mark).duration_ns
        return took, bpf.prog_test_run(program, frame, runs, 0).duration_ns


def load() -> loader.Loaded:
    """The programs; those that make the next fragment go on with the one that is timed."""
    programs: dict[str, loader.ProgramKind] = {_ADD: "xdp", _NONE: "xdp", _ONE: "xdp"}
    loaded = loader.load("nicps_bench.c", programs | {_SIGN: "sched_cls"})
    timed = loaded.programs[_ONE].to_bytes(4, sys.byteorder)
    bpf.map_update(loaded.maps["nicps_bench_timed"], bytes(4), timed)
    return loaded


@contextmanager
def kernel(key: bytes | None = None) -> Iterator[Kernel]:
    """The programs, loaded; they are on no interface."""
    loaded = load()
    try:
        bench = Kernel(loaded, key)
        yield bench
        bench.maps.close()
    finally:
        loaded.close()


def _row(
    width: int, key: bool, case: str, passes: list[tuple[float, float]], fragments: int
) -> Row:
    loop_ns = statistics.median(loop for _, loop in passes)
    # Each with its loop measured beside it, since the processor's clock varies.
    net = [took - loop for took, loop in passes]
    median = statistics.median(net)
    rate = wire.PAYLOAD_BYTES * 8 / max(median, 1e-9)
    return Row(f"i{width}", key, case, median, min(net), loop_ns, rate, fragments)


def measure(params: int, passes: int, widths: tuple[int, ...] = (32, 16, 8)) -> list[Row]:
    """All rows: each width without a key and with one; warm, cold, first and repeat, and sign with a key.

    Args:
        params: lanes of the large map.
        passes: measurements of each, at least 1.
    """
    rows = []
    for key in (None, os.urandom(KEY_BYTES)):
        with kernel(key) as bench:
            for width in widths:
                rows += _measure(bench, key is not None, width, params, passes)
    return rows


def measure_servers(params: int, passes: int) -> list[Row]:
    """All rows of a parameter server: pushes of each width and pulls, warm and cold, without a key and with one.

    Args:
        params, passes: as `measure`.
    """
    rows: list[Row] = []
    kernel_servers.measure(params, passes, lambda *values: rows.append(_row(*values)))
    return rows


def measure_stripes(params: int, passes: int) -> list[Row]:
    """All rows of the exchange `stripes`, each warm and cold, of each width, without a key and with one.

    Args:
        params, passes: as `measure`.
    """
    rows: list[Row] = []
    kernel_stripes.measure(params, passes, lambda *values: rows.append(_row(*values)))
    return rows


def _measure(bench: Kernel, key: bool, width: int, params: int, passes: int) -> list[Row]:
    per_block = wire.BLOCK_LANES // wire.lanes_per_fragment(width)
    bench.maps.allocate(_WARM_BLOCKS)
    small = _WARM_BLOCKS * per_block
    # Whole rounds, so that each pass begins a new round: 1 in 63 is a slot's first.
    rounds = max(1, _WARM_RUNS // (small * _SENDERS))
    runs = rounds * small * _SENDERS
    warm = [bench.distinct(width, small, 1 + turn * rounds, 2, runs) for turn in range(passes + 1)][
        1:
    ]

    large = -(-params // wire.lanes_per_fragment(width))
    bench.maps.allocate(-(-large // per_block))
    first, cold = [], []
    for turn in range(passes):
        # The first pass over new memory also pays for its pages.
        first.append(bench.distinct(width, large, 1 + turn, 2, large))
        cold.append(bench.distinct(width, large, 1 + turn, 3, large))

    bench.maps.allocate(1)
    repeat = [bench.repeat(width, _WARM_RUNS) for _ in range(passes)]
    rows = [
        _row(width, key, "warm", warm, runs),
        _row(width, key, "cold", cold, large),
        _row(width, key, "first", first, large),
        _row(width, key, "repeat", repeat, 1),
    ]
    if key:
        sign = [bench.sign(width, _WARM_RUNS) for _ in range(passes)]
        rows.append(_row(width, key, "sign", sign, _WARM_RUNS))
    return rows


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser(
        "kernel", help="the kernel's add of a fragment", description=DESCRIPTION
    )
    parser.add_argument(
        "--params", type=whole(1), default=11_700_000, help="lanes of the cold map (%(default)s)"
    )
    parser.add_argument(
        "--passes", type=whole(1), default=7, help="measurements of each (%(default)s)"
    )
    apart = parser.add_mutually_exclusive_group()
    apart.add_argument(
        "--servers",
        action="store_true",
        help="a parameter server's part in place of all that: a push and a pull, warm and cold",
    )
    apart.add_argument(
        "--stripes",
        action="store_true",
        help="the exchange stripes in place of all that: contributions and sums, warm and cold",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    need_memory(args.params * _LANE_BYTES, f"--params {args.params:,}")
    measured: Callable[[int, int], list[Row]] = measure
    if args.servers or args.stripes:
        measured = measure_servers if args.servers else measure_stripes
    rows = measured(args.params, args.passes)
    out = sys.stderr if args.json else sys.stdout
    print(
        f"{'lane':<6}{'key':<5}{'case':<19}{'median':>10}{'least':>10}{'loop':>8}{'payload':>16}",
        file=out,
    )
    for row in rows:
        key = "yes" if row.key else "no"
        print(
            f"{row.lane:<6}{key:<5}{row.case:<19}{row.ns_median:>7.0f} ns{row.ns_min:>7.0f} ns{row.loop_ns:>5.0f} ns"
            f"{row.gbit_per_s:>9.1f} Gbit/s",
            file=out,
        )
    if args.json:
        print(orjson.dumps(_result(args.params, rows)).decode())
    return 0


def _result(params: int, rows: list[Row]) -> Mapping[str, Any]:
    return {
        "params": params,
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "results": [asdict(row) for row in rows],
    }
