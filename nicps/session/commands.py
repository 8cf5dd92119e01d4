# SPDX-License-Identifier: Apache-2.0
"""The side of a command at the agent's socket: connect, ask, submit a job, and follow it to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from nicps.errors import (
    Alarm,
    EnvironmentProblem,
    JobFailed,
    NetworkProblem,
    NicpsError,
    UsageProblem,
)
from nicps.session.channel import Channel, ChannelClosed

_ANSWER_S = 30.0


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


def ask(channel: Channel, message: dict[str, Any], timeout_s: float = _ANSWER_S) -> dict[str, Any]:
    """Send a message; the answer.

    Raises:
        NicpsError: the agent refused.
    """
    channel.send(message)
    answer, _ = channel.recv(timeout_s)
    return check_answer(answer)


def check_answer(message: dict[str, Any]) -> dict[str, Any]:
    """The message, unless it is an error.

    Raises:
        NicpsError: it is one.
    """
    if message["op"] != "error":
        return message
    kinds: tuple[type[NicpsError], ...]
    kinds = (UsageProblem, EnvironmentProblem, NetworkProblem, JobFailed, Alarm)
    known = {kind.exit_code: kind for kind in kinds}
    raise known.get(message["exit_code"], NicpsError)(message["message"])


def follow(channel: Channel, timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
    """What comes of a submitted job: its events, and its result as the last.

    Args:
        timeout_s: at most so long between two of them.

    Raises:
        JobFailed: the job failed.
        TimeoutError: nothing came in time.
    """
    while True:
        message = check_answer(channel.recv(timeout_s)[0])
        yield message
        if message["op"] == "result":
            return


def await_result(
    channel: Channel, timeout_s: float = 300.0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A submitted job's result and the events before it.

    Raises:
        JobFailed: the job failed.
        TimeoutError: nothing came in time.
    """
    *events, last = follow(channel, timeout_s)
    return last["result"], events


def raise_failure(channel: Channel) -> None:
    """Read what has come of a submitted job, without waiting.

    Raises:
        JobFailed: the job has failed.
    """
    with contextlib.suppress(ChannelClosed):
        while channel.wait(0.0):
            check_answer(channel.recv()[0])
