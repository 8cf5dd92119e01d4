# SPDX-License-Identifier: Apache-2.0
"""`nicps leave`: take this host out of the network."""

from __future__ import annotations

import argparse
from typing import Any

from nicps.cli.arguments import add_socket
from nicps.session.commands import ask, connect
from nicps.session.messages import Leave, Ok


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps leave`."""
    parser = subparsers.add_parser(
        "leave",
        help="take this host out of the network",
        description="Stop the local agent; its XDP program leaves the interface. The others go on with a job under way;"
        " it is stopped for all where they cannot: before everybody has it whole, or where they are no majority.",
    )
    add_socket(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Send the request, and wait until the agent has gone."""
    from nicps.session.channel import ChannelClosed

    with connect(args.socket) as channel:
        ask(channel, Leave(), Ok)
        try:
            while True:
                channel.recv(timeout_s=20.0)
        except ChannelClosed:
            return 0
