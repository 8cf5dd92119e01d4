# SPDX-License-Identifier: Apache-2.0
"""A program that BPF_PROG_TEST_RUN runs, and its counters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nicps.dataplane import bpf
from nicps.layout import layout
from tests.xdp.target import VERDICTS


class Counted:
    """Attributes: `program`, and the maps' descriptors by name, `fds`."""

    def __init__(self, program: int, fds: Mapping[str, int]) -> None:
        self.program, self.fds = program, fds
        memory = bpf.map_memory(fds["counters"])
        self._counters = np.frombuffer(memory, np.uint64, bpf.map_info(fds["counters"]).entries)

    def give(self, frame: bytes) -> bpf.Run:
        """One frame, from its Ethernet header on."""
        return bpf.prog_test_run(self.program, frame)

    def counters(self) -> dict[str, int]:
        """Counts of our frames by outcome."""
        return dict(zip(layout().counters, self._counters.tolist(), strict=True))

    def count(self, frame: bytes) -> tuple[str, tuple[str, ...], bytes]:
        """One frame: the verdict, the reasons that were counted, each once, and the frame that comes out."""
        before = self._counters.copy()
        result = self.give(frame)
        risen = self._counters - before
        assert set(risen.tolist()) <= {0, 1}
        names = tuple(layout().counters[at] for at in np.flatnonzero(risen))
        return VERDICTS[result.verdict], names, result.frame
