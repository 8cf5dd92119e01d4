# SPDX-License-Identifier: Apache-2.0
"""Where an interface's frames are received: in kernel threads, which the scheduler weighs against other programs, or as
softirqs, before whatever runs there.

The sums of bulk are made in such softirqs. They would hold up the agent of this host, which urgent frames wait for.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from nicps.dataplane.interface import Interface, current_name
from nicps.errors import InterfaceMissing

_SYS = Path("/sys/class/net")


def has_threads(interface: Interface) -> bool | None:
    """Whether it receives in threads; None if that cannot be known here."""
    try:
        folder = _SYS / current_name(interface.index, interface.name)
        if int((folder / "ifindex").read_text()) != interface.index:
            return None  # what is mounted there shows another network namespace
        return (folder / "threaded").read_text().strip() != "0"
    except (OSError, ValueError, InterfaceMissing):
        return None


def switch_threads(interface: Interface, on: bool) -> None:
    """Receive in threads, or do not. Not every driver and kernel can, and then nothing changes."""
    if has_threads(interface) != (not on):
        return
    with contextlib.suppress(OSError, InterfaceMissing):
        folder = _SYS / current_name(interface.index, interface.name)
        (folder / "threaded").write_text(str(int(on)))
