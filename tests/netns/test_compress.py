# SPDX-License-Identifier: Apache-2.0
"""DDP with compressed gradients (docs/pytorch.md), with real agents on three hosts."""

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
PROGRAM = [sys.executable, "-m", "tests.netns.compress_program"]


def run(network: Network, what: str) -> tuple[list[list[dict[str, Any]]], list[int]]:
    """The script on all hosts: what each rank says after its rank, in order of rank, and its exit code."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        network.run(host, [*PROGRAM, what], text=True, env=dict(os.environ), **pipes)
        for host in network.names
    ]
    ended = []
    for process in started:
        try:
            ended.append(process.communicate(timeout=100))
        except subprocess.TimeoutExpired:
            process.kill()
            ended.append(process.communicate())
    codes = [process.returncode for process in started]
    assert "Traceback" not in "".join(err for _, err in ended), (codes, ended)
    said: list[tuple[int, list[dict[str, Any]], int]] = []
    for (out, _), code in zip(ended, codes, strict=True):
        first, *lines = map(orjson.loads, out.splitlines())
        said.append((first["rank"], lines, code))
    said.sort(key=lambda each: each[0])
    return [lines for _, lines, _ in said], [code for _, _, code in said]


@pytest.fixture(scope="module")
def all_of_it(module_network: Network) -> tuple[list[list[dict[str, Any]]], list[int]]:
    """One script for all: its start costs more than its work."""
    said = run(module_network, "all")
    module_network.all_stand_by()
    return said


def told_by(said: tuple[list[list[dict[str, Any]]], list[int]], at: slice) -> list[list[Any]]:
    return [lines[at] for lines in said[0]]


def test_means_are_those_of_the_model(all_of_it: Any) -> None:
    """Kernels and programs against the model, bit for bit: means and residuals, in lanes of all widths."""
    first, second, third = told_by(all_of_it, slice(0, 3))
    assert first == second == third and [line["lane"] for line in first] == ["i8", "i16", "i32"]


@pytest.mark.parametrize("at", [3, 4])
def test_all_ranks_have_the_same_weights(all_of_it: Any, at: int) -> None:
    """Nothing is lost: sums and residuals come to the gradients, though DDP makes its buckets anew."""
    said = [line for (line,) in told_by(all_of_it, slice(at, at + 1))]
    assert len({line["weights"] for line in said}) == 1
    for line in said:
        assert line["missing"] < 1e-5 and line["told"] == line["lost"] == []
        assert line["losses"][-1] < line["losses"][0]
        assert line["buckets"] == 2 * len(line["losses"]) - 1  # one in the first step


def test_a_loss_scaler_and_a_checkpoint(all_of_it: Any) -> None:
    """NaN at one rank: all skip that step, and halve the scale. A handle that was saved and loaded goes on alike."""
    first, second, third = told_by(all_of_it, slice(5, 8))
    assert first == second == third
    plain, resumed, compared = first
    assert plain["skipped"] == resumed["skipped"] == [[4, 2.0**17, 2.0**16]]
    assert compared["far"] < 1e-3


def test_training_goes_on_without_a_rank_that_is_killed(all_of_it: Any) -> None:
    """The others' backward goes on within a second, the mean is over them, and the script is warned once."""
    assert all_of_it[1] == [0, 0, -signal.SIGKILL]
    said = told_by(all_of_it, slice(8, None))
    assert said[2] == [] and said[0][0]["weights"] == said[1][0]["weights"]
    for line, done in said[:2]:
        assert line["lost"] == [2] and line["told"] == [[2]] and done == {"done": True}
        assert line["seconds"] < 5  # 0.1 s on a quiet machine
        assert line["losses"][-1] < line["losses"][0]


@pytest.mark.long
def test_hooks_and_averagers_of_pytorch(three: Network) -> None:
    said, codes = run(three, "others")
    assert codes == [0, 0, 0]
    for lines in zip(*said, strict=True):
        assert len({line.get("weights") for line in lines}) == 1
    assert [line.get("hook") for line in said[0]] == [
        *("fp16_compress", "PowerSGD", "PeriodicModelAverager", "ChangeAverager"),
        None,
    ]
    for lines in said:
        assert all(line["losses"][-1] < line["losses"][0] for line in lines[:-1])
