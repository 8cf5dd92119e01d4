# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed against the backend: `distributed_suite` with four hosts that stand by."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.netns import distributed_suite
from tests.netns.members import Network

pytest.importorskip("torch")
needs_expecttest = pytest.mark.skipif(
    find_spec("expecttest") is None, reason="PyTorch's tests import expecttest: make setup"
)
#: Of each call one, and of DDP one.
SOME = (
    "test_all_gather",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_barrier_timeout_global",
    "test_broadcast",
    "test_gather_object_subgroup",
    "test_DistributedDataParallelCPU",
    "test_gather",
    "test_reduce_product",
    "test_scatter",
    "test_send_recv",
)


def outcomes(
    network: Network, folder: Path, *tests: str, timeout_s: float
) -> dict[str, dict[str, Any]]:
    """The outcomes of these tests, or of all, by name. None leaves a file in the folder."""
    command = [sys.executable, "-m", "tests.netns.distributed_suite", "--lab", network.lab.name]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [*command, *tests], env=environment, capture_output=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr.decode()
    assert list(folder.iterdir()) == []
    rows = [orjson.loads(line) for line in done.stdout.splitlines()]
    return {row["test"]: row for row in rows}


@needs_expecttest
@pytest.mark.timeout(600)
def test_some_of_pytorchs_tests(network: Network, tmp_path: Path) -> None:
    found = outcomes(network, tmp_path, *SOME, timeout_s=550)
    assert {name: row for name, row in found.items() if row["outcome"] != "passed"} == {}
    assert set(found) == set(SOME)
    network.all_stand_by()


@needs_expecttest
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_of_pytorchs_tests(network: Network, tmp_path: Path) -> None:
    """Only tests fail that Gloo fails, too; skipped ones need a GPU, more ranks or a library, or are for other
    backends.
    """
    found = outcomes(network, tmp_path, timeout_s=3500)
    assert len(found) > 280
    failed = {name: row["why"] for name, row in found.items() if row["outcome"] == "failed"}
    ours = {n: w for n, w in failed.items() if not w.startswith(distributed_suite.NOT_HERE)}
    assert ours == {} and len(failed) < 12
    reasons = {row["why"] for row in found.values() if row["outcome"] == "skipped"}
    unknown = {why for why in reasons if not distributed_suite.is_a_reason(why)}
    assert unknown == set()
