# SPDX-License-Identifier: Apache-2.0
"""The ring of frames that leave, whose status words the kernel changes at any moment."""

from __future__ import annotations

import mmap
import os
import signal
import time

import numpy as np
import pytest

from nicps.dataplane.txring import TxRing

pytestmark = pytest.mark.unit

_FRAMES, _LIMIT_S = 512, 1.0


def test_slots_may_change_while_free_ones_are_counted() -> None:
    """NumPy raises where words change as it looks for those that are not 0; here another process is the kernel."""
    memory = mmap.mmap(-1, 4 * _FRAMES)
    status = np.frombuffer(memory, np.uint32)
    if not (kernel := os.fork()):
        while True:
            status[:] = 0
            status[::3] = 1
    try:
        ring = TxRing.__new__(TxRing)
        ring._status, ring.frames = status, _FRAMES
        until, counts = time.monotonic() + _LIMIT_S, set[int]()
        while time.monotonic() < until:
            for ring._next in (0, _FRAMES // 2):
                counts.add(ring._available(_FRAMES))
    finally:
        os.kill(kernel, signal.SIGKILL)
        os.waitpid(kernel, 0)
    assert len(counts) > 2 and counts <= set(range(_FRAMES + 1))
