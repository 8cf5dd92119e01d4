# SPDX-License-Identifier: Apache-2.0
"""The order of accesses to memory that is shared with the kernel's programs.

A program writes in an order that says what is valid, for example the lanes before the seen-bits, and expects the same
of whoever writes to it. Some processors may exchange two loads, or two stores, and Python has no barrier.
"""

from __future__ import annotations

import ctypes
import os
import platform

#: `__NR_membarrier` of processors that exchange accesses; x86_64 and s390x keep loads, and stores, in order.
_SYSCALL = {"aarch64": 283, "riscv64": 283, "ppc64le": 365}
_GLOBAL_EXPEDITED = (
    2  # MEMBARRIER_CMD_GLOBAL_EXPEDITED: of all commands the cheapest that needs no registration
)
_NUMBER = _SYSCALL.get(platform.machine())
_libc: ctypes.CDLL | None = None


def barrier() -> None:
    """Loads before this happen before loads after it, and stores before stores.

    Raises:
        OSError: the kernel refuses membarrier(2), or has none.
    """
    global _libc
    if _NUMBER is None:
        return
    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
    if _libc.syscall(_NUMBER, _GLOBAL_EXPEDITED, 0, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"membarrier: {os.strerror(code)}")
