# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a P4 switch runs, in a tiny size."""

from __future__ import annotations

from pathlib import Path

from nicps import wire
from tests.netns.test_benchmarks import bench


def test_switch(checkout: Path) -> None:
    found = bench(checkout, "switch --hosts 2 --windows 2 --repeat 1")
    (row,) = found["rows"]
    sums = 2 * wire.QUANTUM
    assert (row["hosts"], row["lane"]) == (2, "i32")
    assert (row["fragments"], row["sums"]) == (2 * sums, sums)
    assert found["switch"]["summed"] == found["switch"]["added"] == sums
