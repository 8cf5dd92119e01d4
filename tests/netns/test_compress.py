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
    said: list[tuple[int, list[dict[str, Any]], int]] = []
    for process in started:
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        assert "Traceback" not in err, err
        first, *lines = map(orjson.loads, out.splitlines())
        said.append((first["rank"], lines, process.returncode))
    said.sort(key=lambda each: each[0])
    return [lines for _, lines, _ in said], [code for _, _, code in said]


def test_means_are_those_of_the_model(three: Network) -> None:
    """Kernels and programs against the model, bit for bit: means and residuals, in lanes of all widths."""
    said, codes = run(three, "means")
    assert codes == [0, 0, 0]
    assert said[0] == said[1] == said[2] and [line.get("lane") for line in said[0]] == [
        *("i8", "i16", "i32"),
        None,
    ]
    three.all_stand_by()


@pytest.mark.parametrize("lane", ["i8", "i16"])
def test_all_ranks_have_the_same_weights(three: Network, lane: str) -> None:
    """Nothing is lost: sums and residuals come to the gradients, though DDP makes its buckets anew."""
    said, codes = run(three, lane)
    assert codes == [0, 0, 0]
    assert len({lines[0]["weights"] for lines in said}) == 1
    for lines in said:
        told = lines[0]
        assert told["missing"] < 1e-5 and told["told"] == told["lost"] == []
        assert told["losses"][-1] < told["losses"][0]
        assert told["buckets"] == 2 * len(told["losses"]) - 1  # one in the first step


def test_training_goes_on_without_a_rank_that_is_killed(three: Network) -> None:
    """The others' backward goes on within a second, the mean is over them, and the script is told once."""
    said, codes = run(three, "i8-dies")
    assert codes == [0, 0, -signal.SIGKILL]
    assert said[0][0]["weights"] == said[1][0]["weights"]
    for lines in said[:2]:
        assert lines[0]["lost"] == [2] and lines[0]["told"] == [[2]]
        assert lines[0]["seconds"] < 5  # 0.1 s on a quiet machine
        assert lines[0]["losses"][-1] < lines[0]["losses"][0]
    three.all_stand_by()


def test_a_loss_scaler_and_a_checkpoint(three: Network) -> None:
    """NaN at one rank: all skip that step, and halve the scale. A handle that was saved and loaded goes on alike."""
    said, codes = run(three, "scaled")
    assert codes == [0, 0, 0]
    assert said[0] == said[1] == said[2]
    plain, resumed, _ = said[0]
    assert plain["skipped"] == [[4, 2.0**17, 2.0**16]]
    assert resumed == plain


@pytest.mark.long
def test_hooks_and_averagers_of_pytorch(three: Network) -> None:
    said, codes = run(three, "others")
    assert codes == [0, 0, 0]
    for lines in zip(*said, strict=True):
        assert len({line.get("weights") for line in lines}) == 1
    assert [line.get("hook") for line in said[0]] == [
        *("fp16_compress", "PowerSGD", "post_localSGD"),
        None,
    ]
    for lines in said:
        assert all(line["losses"][-1] < line["losses"][0] for line in lines[:-1])
