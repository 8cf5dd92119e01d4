# SPDX-License-Identifier: Apache-2.0
"""DDP with factors of low rank (docs/pytorch.md), with real agents on three hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import orjson
import pytest

from tests.netns.members import Network

pytest.importorskip("torch")
PROGRAM = [sys.executable, "-m", "tests.netns.low_rank_program"]
#: Another processor, as far as PyTorch is concerned.
OTHER = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}


def run(network: Network, *arguments: str) -> list[tuple[list[dict[str, Any]], int]]:
    """The script on all hosts, the last of which is another processor: the output of each rank, and its exit code."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = []
    for host in network.names:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(OTHER if host == network.names[-1] else {})}
        started.append(network.run(host, [*PROGRAM, *arguments], text=True, env=env, **pipes))
    said = []
    for process in started:
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        assert "Traceback" not in err, err
        said.append(([orjson.loads(line) for line in out.splitlines()], process.returncode))
    said.sort(key=lambda each: each[0][0]["rank"])
    return said


@pytest.mark.long
def test_all_ranks_have_the_same_weights_on_different_processors(three: Network) -> None:
    said = run(three)
    assert [code for _, code in said] == [0, 0, 0]
    assert "DEFAULT" in {lines[0]["capability"] for lines, _ in said}
    told = [lines[1] for lines, _ in said]
    assert len({each["weights"] for each in told}) == 1
    assert all(each["starts"] == told[0]["starts"] for each in told)
    assert {"0.weight", "2.weight", "3.weight"} <= told[0]["starts"].keys()
    for each in told:
        assert each["skipped"] == 1 and each["told"] == []
        assert each["losses"][-1] < 0.7 * each["losses"][0]
    three.all_stand_by()


@pytest.mark.long
def test_the_others_go_on_without_a_rank_that_is_killed(three: Network) -> None:
    said = run(three, "2")
    assert [code for _, code in said] == [0, 0, -signal.SIGKILL]
    told = [lines[1] for lines, _ in said[:2]]
    assert told[0]["weights"] == told[1]["weights"] and told[0]["starts"] == told[1]["starts"]
    for each in told:
        assert each["told"] == [[2]] and each["skipped"] == 1 and each["seconds"] < 5
        assert each["losses"][-1] < 0.7 * each["losses"][0]
    three.all_stand_by()
