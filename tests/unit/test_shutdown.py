# SPDX-License-Identifier: Apache-2.0
"""Signals that were ignored when a command was started stay ignored; SIGTERM never does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nicps.lab.shield import orderly

ROOT = Path(__file__).resolve().parents[2]
WAITS = """
import sys
from nicps.lab.shield import orderly
with orderly():
    print("up", flush=True)
    for line in sys.stdin:
        print(line, end="", flush=True)
"""


def started(ignored: str) -> subprocess.Popen[str]:
    """A command that unwinds in order, by a shell that ignores this signal; it is up."""
    argv = ["sh", "-c", f"trap '' {ignored}; exec \"$@\"", "sh", sys.executable, "-c", WAITS]
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_does_not_end_a_command(number: signal.Signals) -> None:
    with started(number.name.removeprefix("SIG")) as process:
        assert process.stdin is not None and process.stdout is not None
        process.send_signal(number)
        process.stdin.write("still there\n")
        process.stdin.flush()
        assert process.stdout.readline() == "still there\n"
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM


def test_sigterm_ends_a_command_that_was_started_with_it_ignored() -> None:
    with started("TERM") as process:
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM


def test_otherwise_a_hang_up_unwinds() -> None:
    with pytest.raises(SystemExit) as raised, orderly():
        signal.raise_signal(signal.SIGHUP)
    assert raised.value.code == 128 + signal.SIGHUP
