# SPDX-License-Identifier: Apache-2.0
"""`nicps bench idle`: the cost of a network that trains nothing, and the time in which it wakes."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from nicps.bench.arguments import duration, host_count, whole
from nicps.bench.barrier import BarrierServer, median
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import joined, open_folder
from nicps.protocol.phase import Timings
from nicps.session.commands import await_result, raise_failure

DESCRIPTION = """\
A formed network whose training programs have nothing to send: frames per second of all hosts together and each
agent's processor time, over --seconds. Then single gradients become ready in the idle ring, on every host in turn:
milliseconds from the offer until the first fragment is with the kernel."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The measurements; wake-ups in milliseconds over all hosts in turn, the token's holder among them."""

    hosts: int
    frames_per_second: float
    cpu_share_per_host: float
    wake_ms_median: float
    wake_ms_worst: float
    wakes: int


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser("idle", help="an idle network", description=DESCRIPTION)
    parser.add_argument("--hosts", type=host_count(), default=4)
    parser.add_argument("--seconds", type=duration, default=5.0)
    parser.add_argument("--wakes", type=whole(1), default=40, help="single gradients (%(default)s)")
    parser.add_argument(
        "--silence",
        type=duration,
        default=Timings().silence_s,
        help="the agents', in seconds: more on a machine that is busy with other work (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    measured = measure(args.hosts, args.seconds, args.wakes, args.silence)
    if args.json:
        print(orjson.dumps(asdict(measured)).decode())
    else:
        print(
            f"{measured.hosts} hosts idle: {measured.frames_per_second:.1f} frames/s in all, "
            f"{measured.cpu_share_per_host:.2%} of a core per host; a gradient starts to go out after "
            f"{measured.wake_ms_median:.2f} ms (median), {measured.wake_ms_worst:.2f} ms (worst of {measured.wakes})"
        )
    return 0


def measure(hosts: int, seconds: float, wakes: int, silence_s: float) -> Idle:
    """Run it in a lab of its own."""
    with open_folder("nicps-bench-") as folder:
        server = BarrierServer(folder / "barrier.sock", hosts)
        shape = LabSettings(f"idle-{os.getpid()}", hosts)
        silence = "--silence", f"{silence_s:g}"
        with Lab(shape) as lab, joined(lab, lab.hosts, folder, *silence) as agents:
            try:
                settings = {
                    "batch": hosts,
                    "quorum": 1.0 / hosts,  # one gradient closes a round
                    "lane": "i32",
                    "wakes": wakes,
                    "barrier": str(server.path),
                }
                channel = agents[0].submit(folder, entry="nicps.bench.idle_job", settings=settings)
                server.accept(60.0, lambda: raise_failure(channel))
                server.gather()
                time.sleep(1.0)  # the token parks
                pids = [agent.process.pid for agent in agents]
                ticks, frames, began = _ticks(pids), _frames(lab), time.monotonic()
                time.sleep(seconds)
                took = time.monotonic() - began
                ticks, frames = _ticks(pids) - ticks, _frames(lab) - frames
                server.start()
                waits = [m["wakes"] for m in server.gather()]
                await_result(channel)
                channel.close()
            finally:
                server.close()
    every = sorted(wait for host in waits for wait in host)
    share = ticks / os.sysconf("SC_CLK_TCK") / took / hosts
    return Idle(
        hosts,
        round(frames / took, 2),
        round(share, 5),
        round(median(every) * 1e3, 3),
        round(every[-1] * 1e3, 3),
        len(every),
    )


def _ticks(pids: list[int]) -> int:
    """User and system ticks of these processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


def _frames(lab: Lab) -> int:
    """Frames that the switch has received from all hosts."""
    return sum(port.link.rx_packets for port in lab.counters().values())
