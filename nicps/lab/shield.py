# SPDX-License-Identifier: Apache-2.0
"""Signals during work that must be finished, and signals that end a command in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from nicps.shutdown import ending_signals

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def shielded() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP until the block is done; then they take effect.

    Outside the main thread, in which Python delivers signals, there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in _ENDING
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was not set by Python, and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in arrived:
            signal.raise_signal(late)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def orderly() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP unless it is ignored, unwind the program as Ctrl-C does, instead of ending it at once."""
    numbers = ending_signals(signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
