# SPDX-License-Identifier: Apache-2.0
"""A host that dies in the middle of its broadcast (docs/faults.md)."""

from __future__ import annotations

import signal

import pytest

from nicps.lab import processes
from tests.netns.scenes import Drill, Stage

#: 336,000 parameters: 934 fragments, 0.23 s at 50 Mbit/s. The last 512 of them wait in the kernel, and go out in any
#: case. So a host that dies within the first 0.1 s leaves a part unsent.
LARGE = """
def model():
    return nn.Sequential(nn.Linear(16, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 64))
"""
FRAGMENTS, IN_KERNEL = 934, 512


@pytest.mark.needs_exchange("broadcast", "test_faults_stripes.py kills an aggregator in mid-round")
@pytest.mark.long
def test_a_host_dies_in_its_broadcast() -> None:
    """Part of its gradient has arrived and cannot be repaired: the round is done again without it."""
    with Drill(Stage(4, rate_bps=50_000_000), LARGE, settings={"lane": "i32"}) as drill:
        stage = drill.stage
        drill.begin()
        agent = stage.agent("h3")

        def sent() -> int:
            return stage.lab.counters()["h3"].link.rx_packets

        quiet, last = 0, sent()
        while True:
            now = sent()
            if now - last > 20 and quiet >= 3:
                break
            quiet, last = (quiet + 1 if now - last < 5 else 0), now
        processes.send([agent], signal.SIGKILL)
        stage.end("h3", signal.SIGKILL)
        drill.goes_on("h1", "h2", "h4", rounds=2, timeout_s=60.0)
        assert 20 < sent() - last < FRAGMENTS
        drill.exact()
        drill.end("h1", "h2", "h4", timeout_s=90.0)
