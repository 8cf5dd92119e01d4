# SPDX-License-Identifier: Apache-2.0
"""`nicps switch xdp`: a Linux box whose bridge adds (docs/linux-switch.md).

nicps switch xdp run --ports eth1,eth2,eth3      add for the hosts behind these ports, until stopped
nicps switch xdp status                          the members that it adds for, and counts of frames by outcome
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from nicps.rates import parse_size
from nicps.shutdown import ending_signals

DESCRIPTION = """\
The hosts behind a bridge's ports send their gradients to this box, which adds them in XDP and sends the sums to all
(docs/linux-switch.md). Everything else passes to the bridge. Hosts must believe it: `nicps join --trust-switch`, and in
a network with a key `--switch-key`. Needs root. Nothing stays on the ports when it ends, however it ends."""


def add_parser(kinds: Any) -> None:
    """Add `xdp`."""
    xdp = kinds.add_parser("xdp", help="a Linux box whose bridge adds", description=DESCRIPTION)
    commands = xdp.add_subparsers(metavar="COMMAND", required=True)
    text = "add for the hosts behind these ports, until stopped"
    run = commands.add_parser("run", help=text, description=DESCRIPTION)
    run.add_argument(
        "--ports", type=_names, required=True, metavar="IF,IF,...", help="ports of the bridge"
    )
    run.add_argument("--bridge", metavar="IF", help="(that of the ports)")
    run.add_argument("--network", default="nicps", metavar="NAME", help="(%(default)s)")
    run.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the switch's key (`nicps key new`), which hosts have as --switch-key; not the network's",
    )
    run.add_argument(
        "--memory",
        metavar="SIZE",
        help="the most that sums may take: 512M, 4G (half of what is free)",
    )
    run.add_argument(
        "--json", action="store_true", help="when it ends, print all counters as JSON, zeros too"
    )
    run.set_defaults(func=_run)

    text = "show for whom a switch adds, and what became of frames"
    status = commands.add_parser("status", help=text, description=text)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(func=_status)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"takes interfaces with commas, not {text!r}")
    return names


def _run(args: argparse.Namespace) -> int:
    from nicps.switch.box import Box, BoxSettings

    settings = BoxSettings(
        ports=args.ports,
        bridge=args.bridge,
        network=args.network,
        key=args.key,
        memory=parse_size(args.memory) if args.memory is not None else None,
    )
    ended: list[int] = []
    woken, waking = socket.socketpair()
    for end in (woken, waking):
        end.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    for number in ending_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: ended.append(got))
    with Box(settings, _print_line) as box:
        while not ended:
            box.step(woken)
        counters = box.counters()
    if args.json:
        print(orjson.dumps(dict(counters)).decode())
    else:
        _print_values({name: value for name, value in counters.items() if value})
    return 0


def _status(args: argparse.Namespace) -> int:
    from nicps.switch.status import read_status

    found = read_status()
    if args.json:
        print(orjson.dumps([asdict(status) for status in found]).decode())
        return 0
    for status in found:
        rows: dict[str, object] = {name: f"{mode} XDP" for name, mode in status.ports.items()}
        rows["view"] = status.view or "none"
        rows["members"] = ", ".join(map(str, status.members)) or "none"
        rows["key"] = "yes" if status.keyed else "no"
        rows["room"] = f"{status.fragments:,} fragments of {status.width} bits"
        _print_values(rows | {name: count for name, count in status.counters.items() if count})
    return 0


def _print_values(values: Mapping[str, object]) -> None:
    width = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


def _print_line(text: str) -> None:
    print(f"nicps: {text}", file=sys.stderr, flush=True)
