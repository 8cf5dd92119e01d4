# SPDX-License-Identifier: Apache-2.0
"""TC programs on the lab's interfaces."""

from __future__ import annotations

from typing import Any


def add_filter(
    ipr: Any, index: int, parent: int, name: str, program: int, classid: int = 1
) -> None:
    """Let a loaded program look at the frames of that queueing discipline, and decide on them by itself.

    Args:
        classid: its upper half is that of the classes that the program names.
    """
    ipr.tc(
        "add-filter",
        "bpf",
        index,
        ":1",
        fd=program,
        name=name,
        parent=parent,
        classid=classid,
        direct_action=True,
    )
