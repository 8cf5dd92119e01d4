# SPDX-License-Identifier: Apache-2.0
"""The agent's loop goes on, whatever its terminal, its disk or a job's code does; signals end it in order."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from nicps.agent.driver import log
from nicps.agent.loop import Loop

pytestmark = pytest.mark.unit


class Full:
    """A standard error on a full disk, or of a terminal that is closed."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


@pytest.fixture
def failures() -> list[Exception]:
    return []


@pytest.fixture
def loop(failures: list[Exception]) -> Iterator[Loop]:
    before = {number: signal.getsignal(number) for number in ENDING}
    made = Loop(failures.append)
    yield made
    made.drain()
    made.close()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def test_a_line_that_nobody_takes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    log("the checkpoint could not be written")


def test_what_follows_from_an_end_may_fail(loop: Loop, failures: list[Exception]) -> None:
    loop.guard(lambda: os.statvfs("/no/such/folder") and None)
    (failure,) = failures
    assert isinstance(failure, FileNotFoundError)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_taken_once(loop: Loop, number: signal.Signals) -> None:
    """A terminal that is closed ends the agent as Ctrl-C does; the loop does not spin while it leaves."""
    for other in ENDING:
        signal.signal(other, signal.SIG_DFL)
    taken: list[int] = []
    loop.on_signals(lambda: taken.append(1))
    os.kill(os.getpid(), number)
    loop.handle(loop.wait(5.0))
    assert taken == [1]
    assert not loop.wait(0.0)
