# SPDX-License-Identifier: Apache-2.0
"""`nicps leave`: take this host out of the network."""

from __future__ import annotations

import argparse
from typing import Any

from nicps.cli.arguments import add_socket
from nicps.errors import MessageError
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.commands import ask, connect
from nicps.session.messages import AskStatus, Leave, Ok, Status


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
    """Send the request, wait until the agent has gone, and say what this host has left."""
    with connect(args.socket) as channel:
        before = _status(channel)
        ask(channel, Leave(), Ok)
        try:
            while True:
                channel.recv(timeout_s=20.0)
        except ChannelClosed:
            print(outcome(before))
            return 0


def _status(channel: Channel) -> Status | None:
    """None: the agent is one that this command does not understand, and can leave all the same."""
    try:
        return ask(channel, AskStatus(), Status)
    except MessageError:
        return None


def outcome(before: Status | None) -> str:
    """A line about what this host has left, by its status before."""
    if before is None:
        return "this host has left the network"
    middle = f", in the middle of {before.job}" if before.job else ""
    return f"{before.name} has left network {before.network} on {before.iface}{middle}"
