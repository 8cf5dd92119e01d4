# SPDX-License-Identifier: Apache-2.0
"""A process that starts and ends quickly, and loses no interrupt meanwhile; each in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nicps.agent
from nicps import cli
from nicps.shutdown import noted_interrupts

LEFT = """
import atexit
from nicps.startup import leave
atexit.register(print, "the end")
leave(7)
"""
COLLECTED = """
import gc
from nicps.startup import permanent
with permanent():
    print(gc.isenabled())
    kept = [[] for _ in range(1000)]
print(gc.isenabled(), gc.get_freeze_count() > 1000, kept in gc.get_objects())
"""


def said(checkout: Path, *arguments: str, code: int = 0) -> list[str]:
    """What a Python program prints that ends with this code."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def test_who_leaves_keeps_its_code_and_its_last_words(checkout: Path) -> None:
    assert said(checkout, "-c", LEFT, code=7) == ["the end"]


def test_what_stays_is_passed_over(checkout: Path) -> None:
    assert said(checkout, "-c", COLLECTED) == ["False", "True True False"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("--version",), 0), (("submit",), 2), (("no-such",), 2), (("wire", "dump", "no-such"), 2)],
)
def test_the_command_ends_with_its_code(
    checkout: Path, arguments: tuple[str, ...], code: int
) -> None:
    printed = said(checkout, "-m", "nicps", *arguments, code=code)
    assert bool(printed) is (code == 0)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.sigpending()  # the handler runs before the next instruction of Python at the latest


def lose(what: str) -> None:
    """An interrupt whose exception goes astray in a finalizer."""

    class Lost:
        def __del__(self) -> None:
            interrupt()

    del what
    Lost()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_noted() -> None:
    with noted_interrupts() as noted:
        lose("it")
        assert noted == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), noted_interrupts() as noted:
        interrupt()


def test_ignored_interrupts_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with noted_interrupts() as noted:
            interrupt()
        assert noted == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_agent_whose_start_drops_an_interrupt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Dropping:
        """An agent that is interrupted while it is put together, and hears nothing of it."""

        def __init__(self, settings: Any) -> None:
            self.children = self
            lose(settings)

        def __enter__(self) -> Dropping:
            return self

        def __exit__(self, *_: object) -> None:
            ran.append("closed")

        def adopt(self) -> None:
            ran.append("adopted")

        announce = adopt

        def run(self) -> None:
            ran.append("run")

    monkeypatch.setattr(nicps.agent, "Agent", Dropping)
    assert cli.main(["join", "--iface", "eth1"]) == cli.EXIT_INTERRUPTED
    assert ran == ["adopted", "adopted", "closed"]
