# SPDX-License-Identifier: Apache-2.0
"""A stderr whose writer is not this thread."""

from __future__ import annotations

import threading


class Heard:
    """Attributes: `said`, all that was written; `told` is set once something was."""

    def __init__(self) -> None:
        self.said = ""
        self.told = threading.Event()

    def write(self, text: str) -> None:
        self.said += text

    def flush(self) -> None:
        self.told.set()
