# SPDX-License-Identifier: Apache-2.0
"""Where an interface's frames are received: in kernel threads, which the scheduler weighs against other programs, or as
softirqs, before whatever runs there.

The sums of bulk are made in such softirqs. They would hold up the agent of this host, which urgent frames wait for.
"""

from __future__ import annotations

from pathlib import Path

from nicps.dataplane.interface import Interface, current_name
from nicps.errors import InterfaceMissing

_SYS = Path("/sys/class/net")


def switch_threads(interface: Interface, on: bool) -> bool:
    """Receive in threads, or do not; whether that has changed something. Not every driver and kernel can."""
    try:
        folder = _SYS / current_name(interface.index, interface.name)
        if int((folder / "ifindex").read_text()) != interface.index:
            return False  # what is mounted there shows another network namespace
        setting = folder / "threaded"
        if (setting.read_text().strip() != "0") is on:
            return False
        setting.write_text(str(int(on)))
    except (OSError, ValueError, InterfaceMissing):
        return False
    return True
