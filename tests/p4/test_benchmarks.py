# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of a P4 switch run, in tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nicps import wire
from tests.netns.test_benchmarks import bench


def test_switch(checkout: Path) -> None:
    found = bench(checkout, "switch --hosts 2 --windows 2 --repeat 1")
    (row,) = found["rows"]
    sums = 2 * wire.QUANTUM
    assert (row["hosts"], row["lane"]) == (2, "i32")
    assert (row["fragments"], row["sums"]) == (2 * sums, sums)
    assert found["switch"]["summed"] == found["switch"]["added"] == sums


@pytest.mark.p4("simple_switch", "iperf3")
@pytest.mark.parametrize("ports", ["priorities", "unheeded"])
def test_a_stream_beside_urgent_calls(checkout: Path, ports: str) -> None:
    """Through a BMv2 with a queue for each priority, and with one."""
    command = [sys.executable, "-m", "benchmarks.urgent", "--switch", "bmv2", "--beside", "stream"]
    command += ["--ports", ports, "--rate", "12mbit", "--seconds", "1", "--turns", "1", "--json"]
    done = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert (row["switch"], row["ports"]) == ("bmv2", ports)
    assert min(row["idle_seconds"], row["beside_seconds"], row["bulk_alone"]) > 0
