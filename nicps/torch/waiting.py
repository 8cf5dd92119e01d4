# SPDX-License-Identifier: Apache-2.0
"""A script that waits for those on other hosts says so once: a wait without a word looks like a hang."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def print_if_slow(text: str, after_s: float) -> Iterator[None]:
    """Print `text` on stderr if what is done meanwhile takes longer."""
    timer = threading.Timer(after_s, print, [f"nicps: {text}"], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
