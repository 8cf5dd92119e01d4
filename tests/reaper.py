# SPDX-License-Identifier: Apache-2.0
"""What a killed test process leaves: its labs, and its folders below the temporary one.

    python -m tests.reaper PID ..... waits until that process has ended, and then takes down what is left of it

A test process starts its reaper as it names its first lab or folder. All of these names have the process's number in
them. The reaper is in a session of its own, so an interrupt or a hang-up of the tests does not reach it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_numbers = itertools.count(1)


def fresh_name() -> str:
    """A lab's name that no other test uses."""
    _start_reaper()
    return f"test-{os.getpid()}-{next(_numbers)}"


def fresh_folder() -> Path:
    """An empty folder that every user may enter; the caller removes it."""
    _start_reaper()
    path = Path(tempfile.mkdtemp(prefix=_folders(os.getpid())))
    path.chmod(0o755)
    return path


def _folders(pid: int) -> str:
    return f"nicps-test-{pid}-"


@functools.cache
def _start_reaper() -> None:
    """It holds no stream of ours open: whoever reads them need not wait for it."""
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid())],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _await_end(pid: int) -> None:
    """Return once the process has ended; its number may then be another's."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([ended], [], [])


def _take_down(pid: int) -> None:
    from nicps.lab import down, standing

    for name in standing():
        if name.startswith(f"test-{pid}-"):
            down(name)
    for folder in Path(tempfile.gettempdir()).glob(f"{_folders(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _await_end(int(sys.argv[1]))
    _take_down(int(sys.argv[1]))
