# SPDX-License-Identifier: Apache-2.0
"""What the commands that speak to the local agent share."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from nicps.client import DEFAULT_SOCKET
from nicps.errors import (
    Alarm,
    EnvironmentProblem,
    JobFailed,
    NetworkProblem,
    NicpsError,
    UsageProblem,
)
from nicps.session.channel import Channel, ChannelClosed


def add_socket(parser: argparse.ArgumentParser) -> None:
    """The argument that all of them take."""
    parser.add_argument(
        "--socket", default=DEFAULT_SOCKET, metavar="ADDRESS", help="the agent's (%(default)s)"
    )


@contextlib.contextmanager
def connect(address: str) -> Iterator[Channel]:
    """A connection to the agent of this host.

    Raises:
        NetworkProblem: there is none, or it goes away.
    """
    try:
        channel = Channel.connect(address)
    except PermissionError:
        raise NetworkProblem(
            f"the agent's socket {address} may not be opened: run it as root, or as a member of its group"
        ) from None
    except OSError:
        raise NetworkProblem(
            f"no agent listens on {address}: run `nicps join --iface IFACE` first"
        ) from None
    try:
        yield channel
    except ChannelClosed:
        raise NetworkProblem(
            "the agent of this host has gone: run `nicps join --iface IFACE` again"
        ) from None
    finally:
        channel.close()


def ask(channel: Channel, message: dict[str, Any]) -> dict[str, Any]:
    """Send a message; the answer.

    Raises:
        NicpsError: the agent refused.
    """
    channel.send(message)
    answer, _ = channel.recv(timeout_s=30.0)
    return checked(answer)


def checked(message: dict[str, Any]) -> dict[str, Any]:
    """The message, unless it is an error."""
    if message["op"] != "error":
        return message
    kinds: tuple[type[NicpsError], ...]
    kinds = (UsageProblem, EnvironmentProblem, NetworkProblem, JobFailed, Alarm)
    known = {kind.exit_code: kind for kind in kinds}
    raise known.get(message["exit_code"], NicpsError)(message["message"])
