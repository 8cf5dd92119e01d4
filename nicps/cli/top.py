# SPDX-License-Identifier: Apache-2.0
"""`nicps top`: a live view of the network, the job and the traffic, from this host's agent."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from nicps.cli.arguments import add_socket
from nicps.cli.topframe import Looks, frame
from nicps.errors import NetworkProblem, UsageProblem
from nicps.session.channel import Channel
from nicps.session.commands import ask, connect
from nicps.session.messages import AskStatus, Status
from nicps.shutdown import ending_signals

if TYPE_CHECKING:
    from rich.console import RenderableType

DESCRIPTION = """\
Show the network, its members, the job, the token, the traffic and the losses, as this host's agent sees them, and whom
the round waits for. `q` or Ctrl-C ends it. docs/monitoring.md says what the columns mean."""
_LEAST_S, _MOST_S = 0.1, 60.0
_ONCE_LOOKS = 10  # in the interval of --once, to see which members are waited for
_WINDOW_S = 5.0  # the time over which rates are taken
_WIDTH = 100  # if the output is no terminal
_HEIGHT = 200


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps top`."""
    parser = subparsers.add_parser(
        "top", help="show a live view of the network and the job", description=DESCRIPTION
    )
    add_socket(parser)
    parser.add_argument(
        "--interval",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="between two frames (%(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame, of one interval, and end"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Show frames until the user ends it."""
    import rich  # noqa: F401  before anything else: if it is missing, one line reports that

    if not (math.isfinite(args.interval) and _LEAST_S <= args.interval <= _MOST_S):
        raise UsageProblem(
            f"--interval takes {_LEAST_S:g} to {_MOST_S:g} seconds, not {args.interval:g}"
        )
    with connect(args.socket) as channel:
        if args.once:
            looks = [_ask_status(channel)]
            for _ in range(_ONCE_LOOKS):
                time.sleep(args.interval / _ONCE_LOOKS)
                looks.append(_ask_status(channel))
            _print(looks)
        elif sys.stdout.isatty():
            _show(channel, args.interval)
        else:
            statuses = _statuses(channel, args.interval)
            for looks in statuses:
                _print(looks)
                time.sleep(args.interval)
    return 0


def _ask_status(channel: Channel) -> Status:
    return ask(channel, AskStatus(), Status)


def _statuses(channel: Channel, interval: float) -> Iterator[list[Status]]:
    """The statuses of the last seconds, each time with a new one."""
    looks: deque[Status] = deque(maxlen=2 + int(_WINDOW_S / interval))
    while True:
        looks.append(_ask_status(channel))
        yield list(looks)


def _frame(looks: list[Status], height: int, note: str = "") -> RenderableType:
    try:
        return frame(Looks(looks), height, note)
    except ValueError:
        raise NetworkProblem(
            "the agent is of an older nicps than this command: run `nicps leave`, and `nicps join` again"
        ) from None


def _print(looks: list[Status]) -> None:
    """As text; in colours only on a terminal, and where NO_COLOR does not forbid it."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else _WIDTH, highlight=False)
    console.print(_frame(looks, _HEIGHT))
    sys.stdout.flush()


def _show(channel: Channel, interval: float) -> None:
    """On the whole terminal, which is restored at the end."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with (
        _ended_by_signals(),
        Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live,
        _keys() as keys,
    ):
        for looks in _statuses(channel, interval):
            live.update(_frame(looks, console.height, "  q ends"), refresh=True)
            if keys is None:
                time.sleep(interval)
            elif _is_ended(keys, interval):
                return


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise an exception, so that the terminal is restored before this process ends."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in ending_signals(signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The keyboard's descriptor, which gives each key at once; None if there is none."""
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _is_ended(keys: int, seconds: float) -> bool:
    """Wait so long; return whether the user has pressed `q`, or the terminal has gone."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0]:
            pressed = os.read(keys, 64)
            if not pressed or b"q" in pressed.lower():
                return True
    return False
