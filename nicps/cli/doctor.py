# SPDX-License-Identifier: Apache-2.0
"""`nicps doctor`: check this host, and say how to repair what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from nicps.cli.arguments import add_socket
from nicps.errors import EnvironmentProblem, NetworkProblem
from nicps.session.commands import ask, connect
from nicps.session.fields import values
from nicps.session.messages import AskProbe, Probe

DESCRIPTION = """\
Check this host for what nicps needs and say how to mend what is wrong. With --network it is the LAN that
is checked, by the agent of this host and those that stand by on others: what they lose of its frames at
rising rates, round trips, and what to change; nothing else is looked at. With --iface a program that
passes every frame is attached to the interface for a moment, where nothing else is attached, to see
which XDP mode the driver has. Exit code: 0 when nothing failed; 3 when this host lacks
something, 4 when the LAN does."""


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps doctor`."""
    parser = subparsers.add_parser(
        "doctor", help="check this host, and say how to mend what is wrong", description=DESCRIPTION
    )
    parser.add_argument("--iface", metavar="IF", help="the interface that `nicps join` would use")
    parser.add_argument("--user", default="nobody", help="the user that would train (%(default)s)")
    parser.add_argument("--job", type=Path, metavar="DIR", help="a job that this user must read")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        default=os.environ.get("NICPS_DATA"),
        help="data that this user must read ($NICPS_DATA)",
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the network's key: whether `nicps join` would take it, and --iface can be signed at",
    )
    parser.add_argument(
        "--network", action="store_true", help="measure the LAN between the hosts that have joined"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="with --network: how long frames are sent at each rate (%(default)s)",
    )
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the rows; return 3 when one failed, 4 when the LAN has a fault."""
    if args.network:
        return _network(args)
    from nicps import doctor

    data = Path(args.data) if args.data else None
    rows = doctor.examine(args.iface, args.user, args.job, data, args.key)
    worst = doctor.worst(rows)
    if args.json:
        import orjson

        report = {"ok": worst != "fail", "checks": [dataclasses.asdict(row) for row in rows]}
        print(orjson.dumps(report).decode())
    else:
        print(doctor.table(rows))
    return EnvironmentProblem.exit_code if worst == "fail" else 0


def _network(args: argparse.Namespace) -> int:
    from nicps.doctor import network

    with connect(args.socket) as channel:
        report = values(ask(channel, AskProbe(args.seconds), Probe))
    found = network.findings(report)
    if args.json:
        import orjson

        report |= {"ok": not found, "findings": [dataclasses.asdict(item) for item in found]}
        print(orjson.dumps(report).decode())
    else:
        print(network.table(report))
    return NetworkProblem.exit_code if found else 0
