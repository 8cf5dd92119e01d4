# SPDX-License-Identifier: Apache-2.0
"""Arrays of the kernel's programs as memory of a training program."""

from __future__ import annotations

import mmap
import os


def mapped(fd: int, size: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """The first `size` bytes of an array, rounded up to pages; the descriptor is closed.

    Args:
        prot: a frozen array can be mapped for reading only, and any other one for writing too.
    """
    memory = mmap.mmap(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, prot=prot)
    os.close(fd)
    return memory
