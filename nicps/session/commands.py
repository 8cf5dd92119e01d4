# SPDX-License-Identifier: Apache-2.0
"""The side of a command at the agent's socket: connect, ask, submit a job, and follow it to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from nicps.errors import NetworkProblem
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.events import Event
from nicps.session.fields import encode
from nicps.session.messages import (
    ANSWERS,
    Answer,
    Command,
    Error,
    Ok,
    Probe,
    Result,
    Status,
    Submit,
)

A = TypeVar("A", Ok, Status, Probe)
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


def ask(channel: Channel, command: Command, answer: type[A], timeout_s: float = _ANSWER_S) -> A:
    """Send a command; the answer, which must be of that class.

    Raises:
        NicpsError: the agent refused.
        TimeoutError: no answer came in time.
    """
    channel.send(encode(command))
    found = _check(ANSWERS.decode(channel.recv(timeout_s)[0]))
    if not isinstance(found, answer):
        raise NetworkProblem(f"the agent answered {command.op!r} with {found.op!r}")
    return found


def submit(channel: Channel, job: Submit) -> None:
    """Submit a job; `follow` has what comes of it."""
    channel.send(encode(job))


def follow(channel: Channel, timeout_s: float | None = None) -> Iterator[Event | Result]:
    """What comes of a submitted job: its events, and its result as the last. Events that are not known are left out.

    Args:
        timeout_s: at most so long between two of them.

    Raises:
        NicpsError: the agent refused the job, or the job failed.
        TimeoutError: nothing came in time.
    """
    while True:
        raw, _ = channel.recv(timeout_s)
        if ANSWERS.find(raw) is None:
            continue
        message = _check(ANSWERS.decode(raw))
        if isinstance(message, Ok | Status | Probe):
            raise NetworkProblem(f"the agent answered a submitted job with {message.op!r}")
        yield message
        if isinstance(message, Result):
            return


def await_result(
    channel: Channel, timeout_s: float = 300.0
) -> tuple[Mapping[str, Any], list[Event]]:
    """A submitted job's result and the events before it.

    Raises:
        NicpsError: the agent refused the job, or the job failed.
        TimeoutError: nothing came in time.
    """
    events: list[Event] = []
    for message in follow(channel, timeout_s):
        if isinstance(message, Result):
            return message.result, events
        events.append(message)
    raise AssertionError("a job ends with a result or an error")


def raise_failure(channel: Channel) -> None:
    """Read what has come of a submitted job, without waiting.

    Raises:
        NicpsError: the agent refused the job, or the job has failed.
    """
    with contextlib.suppress(ChannelClosed):
        while channel.wait(0.0):
            raw, _ = channel.recv()
            if ANSWERS.find(raw) is not None:
                _check(ANSWERS.decode(raw))


def _check(message: Answer) -> Ok | Status | Probe | Result | Event:
    """The message, unless it is an error."""
    if isinstance(message, Error):
        raise message.error
    return message
