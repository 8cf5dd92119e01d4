# SPDX-License-Identifier: Apache-2.0
"""A process that starts and ends quickly: imports without collections, and an end that takes nothing apart.

Modules stay until their process ends. To look for garbage among them during imports takes a fifth of an agent's start,
and the interpreter's own end, which clears them one by one, as long again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def permanent() -> Iterator[None]:
    """What is imported or made meanwhile stays: nothing is collected, and later collections pass over it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave(code: int) -> NoReturn:
    """End the process with this exit code, as `sys.exit` does, without taking the modules apart one by one.

    What was registered with `atexit` is called, and what was printed is written out; threads are not waited for.
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # neither is there where it was closed
        with contextlib.suppress(OSError, ValueError):  # a full disk, or closed: the code has to do
            stream.flush()
    os._exit(code)
