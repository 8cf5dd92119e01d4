# SPDX-License-Identifier: Apache-2.0
"""Which signals end a command, and that none of them is lost.

`nohup` starts a command with SIGHUP ignored, a shell without job control starts background commands with SIGINT
ignored: whoever started it does not want it to end by them. SIGTERM always ends a command.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


def ending_signals(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those to set a handler for: all but those, SIGTERM excepted, that are ignored."""
    return [
        number
        for number in numbers
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextlib.contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Meanwhile a SIGINT that raises KeyboardInterrupt is noted in the list, too.

    Python drops an exception that is raised in a finalizer, or in the callback of a weak reference.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
