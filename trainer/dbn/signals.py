# SPDX-License-Identifier: Apache-2.0
"""The signals that end a run in order: Ctrl-C, SIGTERM, and SIGHUP unless it is ignored.

They are noted. A call of Spark that is interrupted may raise another error in the end (pyspark closes in `finally` what
it has not opened yet), and Python drops what is raised in a finalizer.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from nicps.shutdown import ending_signals

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []  # by this process, as signals are


class Stopped(KeyboardInterrupt):
    """A signal ends the run; libraries take each of them for Ctrl-C.

    Attributes: `exit_code`, the command's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def raise_received() -> None:
    """Raise the signal that has come, if any.

    Raises:
        Stopped: one has come.
    """
    if _received:
        raise Stopped(_received[0])


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise Stopped(number)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Meanwhile these signals raise `Stopped`. So does the end of the block, if it fails after one has come."""
    numbers = ending_signals(*_ENDING)
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    except BaseException:
        raise_received()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _received.clear()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold them back until the block is done, which may not be left half done; then they raise `Stopped`."""
    numbers = [number for number in _ENDING if signal.getsignal(number) is _stop]
    for number in numbers:
        signal.signal(number, lambda number, _: _received.append(number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, _stop)
    raise_received()
