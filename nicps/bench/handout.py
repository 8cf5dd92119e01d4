# SPDX-License-Identifier: Apache-2.0
"""`nicps bench handout`: a large file to all hosts by broadcast (R5, R6)."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from nicps.bench.arguments import host_count, need_disk, whole
from nicps.bench.barrier import peak_rss_bytes
from nicps.errors import JobFailed
from nicps.lab import Lab, LabSettings, parse_loss
from nicps.lab.agents import joined, open_folder
from nicps.rates import parse_rate
from nicps.session.commands import await_result
from nicps.session.events import HandedOut

DESCRIPTION = """\
Hand a file of random bytes out from h1 to all other hosts of a lab; every host keeps all of it, on disk, and checks
its digest. Memory is the peak of the largest agent, from its start to the job's end."""


@dataclass(frozen=True, slots=True)
class Handout:
    """The measurements."""

    hosts: int
    bytes: int
    rate_bps: int
    loss: float
    seconds: float
    share_of_line: float
    fragments_sent_again: int
    peak_rss_bytes: int


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser("handout", help="one file to all hosts", description=DESCRIPTION)
    parser.add_argument("--hosts", type=host_count(), default=4)
    parser.add_argument("--bytes", type=whole(1), default=10**9, help="of the file (1e9)")
    parser.add_argument("--rate", default="1gbit", help="of every port (%(default)s)")
    parser.add_argument(
        "--loss", default="0", help="at every port, each way, as in 2%% (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    rate_bps, loss = parse_rate(args.rate), parse_loss(args.loss)
    need_disk((args.hosts + 1) * args.bytes, f"--bytes {args.bytes:,}")
    measured = measure(args.hosts, args.bytes, rate_bps, loss)
    if args.json:
        print(orjson.dumps(asdict(measured)).decode())
    else:
        print(
            f"{measured.bytes / 1e9:.3f} GB to {measured.hosts - 1} hosts in {measured.seconds:.2f} s: "
            f"{measured.share_of_line:.1%} of the line's rate, {measured.fragments_sent_again} fragments sent again, "
            f"largest agent {measured.peak_rss_bytes / 1e6:.0f} MB"
        )
    return 0


def measure(hosts: int, size: int, rate_bps: int, loss: float) -> Handout:
    """Run one hand-out in a lab of its own.

    Raises:
        JobFailed: the file did not arrive, or not whole.
    """
    settings = LabSettings(f"handout-{os.getpid()}", hosts, rate_bps, loss=loss)
    with open_folder("nicps-bench-") as folder:
        with Lab(settings) as lab, joined(lab, lab.hosts, folder) as agents:
            channel = agents[0].submit(
                folder,
                entry="nicps.bench.handout_job",
                settings={"bytes": size, "batch": hosts, "quorum": 1.0},
            )
            result, events = await_result(channel, timeout_s=600.0)
            channel.close()
            peak = max(peak_rss_bytes(agent.process.pid) for agent in agents)
        if not result["weights_identical"]:
            raise JobFailed("not every host has the whole file")
    (seconds,) = (event.seconds for event in events if isinstance(event, HandedOut))
    share = size * 8 / seconds / rate_bps
    again = result["fragments_sent_again"]
    return Handout(hosts, size, rate_bps, loss, round(seconds, 3), round(share, 4), again, peak)
