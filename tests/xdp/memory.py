# SPDX-License-Identifier: Apache-2.0
"""The kernel's memory that maps take."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from nicps.dataplane import bpf


def memory_of(*numbers: int) -> int:
    """Bytes of the kernel's memory that maps of these numbers take, as it accounts for them."""
    total = 0
    for number in numbers:
        with contextlib.suppress(FileNotFoundError):
            fd = bpf.map_by_id(number)
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
            os.close(fd)
            total += next(int(line.split()[1]) for line in lines if line.startswith("memlock:"))
    return total
