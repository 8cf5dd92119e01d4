# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed (docs/pytorch.md), with real agents on three hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from tests.netns.members import Network

pytest.importorskip("torch")
PROGRAM = ["-m", "tests.netns.torch_program"]
#: On host k, as its documentation has it for several hosts; the rank follows.
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1"),
    *("--master-addr=10.77.0.2", "--master-port=29511", "--node-rank"),
)


def run(
    network: Network, what: str, ranks: Sequence[int] = (), **environment: str
) -> tuple[list[list[Any]], list[int]]:
    """The script on all hosts: the output of each rank, in order of rank, and its exit code.

    Args:
        ranks: those of the hosts under torchrun; otherwise nothing but the script is started.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = {**os.environ, **environment}
    launchers = [[*TORCHRUN, str(rank)] for rank in ranks] or [[] for _ in network.names]
    started = [
        network.run(host, [sys.executable, *launcher, *PROGRAM, what], text=True, env=env, **pipes)
        for host, launcher in zip(network.names, launchers, strict=True)
    ]
    said: list[tuple[list[Any], int]] = []
    for process in started:
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        assert "Traceback" not in err, err
        said.append(([orjson.loads(line) for line in out.splitlines()], process.returncode))
    said.sort(key=lambda each: each[0][0].get("rank", 0))
    return [lines for lines, _ in said], [code for _, code in said]


def test_all_collectives_of_tensors(three: Network) -> None:
    """All types and operations against torch; rank and size come from the agents."""
    said, codes = run(three, "collectives")
    assert codes == [0, 0, 0]
    assert [lines[0]["environ"] for lines in said] == ["0 0 3", "1 0 3", "2 0 3"]
    assert all(lines[-1] == {"done": True} for lines in said)
    three.all_stand_by()


def test_what_it_does_not_do_without_tcp(three: Network) -> None:
    said, codes = run(three, "refusals", WORLD_SIZE="3", NICPS_TORCH_TCP="0")
    assert codes == [0, 0, 0]
    for lines in said:
        told = {key: value for line in lines for key, value in line.items()}
        why = re.escape("no IP address, or NICPS_TORCH_TCP=0")
        for what in ("send", "subgroup", "all_reduce of sparse tensors"):
            text = told[{"all_reduce of sparse tensors": "sparse"}.get(what, what)]
            assert re.fullmatch(f"nicps has no {what}s? without TCP: h., h., h.: {why}", text)
        assert told["gloo"].endswith("Unable to find address for: no-tcp-between-the-hosts")
        assert told["meta"].startswith("nicps takes dense tensors of the processor and of CUDA")
        assert "all_reduce(sum) of 5 int32" in told["differs"]
        assert "all_reduce(sum) of 4 float32" in told["differs"]


@pytest.mark.long
def test_what_gloo_does_for_it(three: Network) -> None:
    """send, recv, all_to_all and subgroups, and a store, between hosts that have told each other their addresses."""
    said, codes = run(three, "over_tcp")
    assert codes == [0, 0, 0], said
    assert all(lines[-1] == {"done": True} for lines in said)


@pytest.mark.long
def test_a_subgroup_after_the_loss_of_rank_0(three: Network) -> None:
    """The store that its ranks meet in outlives rank 0."""
    said, codes = run(three, "regroups")
    assert codes == [-signal.SIGKILL, 0, 0], said
    assert all(lines[-1] == {"done": True} for lines in said[1:])
    three.all_stand_by()


@pytest.mark.long
@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "3"}])
def test_a_second_process_group_after_a_loss(three: Network, environment: dict[str, str]) -> None:
    """It is of the ranks that were left, and does not wait for the lost one, whose agent stands by."""
    said, codes = run(three, "again", **environment)
    assert codes == [0, -signal.SIGKILL, 0], said
    assert said[0][1:] == [{"ranks": [0, 0, 2], "environ": "0 0 2"}, {"done": True}]
    assert said[2][1:] == [{"ranks": [2, 1, 2], "environ": "1 0 2"}, {"done": True}]
    three.all_stand_by()


@pytest.mark.long
def test_a_host_without_an_address(three: Network) -> None:
    """One is enough for the group to do without TCP; its native calls go on."""
    three.run("h2", ["ip", "address", "flush", "dev", "eth1"]).wait(10)
    try:
        said, codes = run(three, "refusals", WORLD_SIZE="3")
    finally:
        three.run("h2", ["ip", "address", "add", "10.77.0.2/24", "dev", "eth1"]).wait(10)
    assert codes == [0, 0, 0]
    for lines in said:
        told = {key: value for line in lines for key, value in line.items()}
        assert (
            told["send"] == "nicps has no send without TCP: h2: no IP address, or NICPS_TORCH_TCP=0"
        )


def test_more_than_one_rank_a_host(three: Network) -> None:
    said, codes = run(three, "train", LOCAL_WORLD_SIZE="2")
    text = "nicps has one rank a host, and LOCAL_WORLD_SIZE is 2: start one process on every host"
    assert codes == [1, 1, 1] and all(lines == [{"error": text}] for lines in said)


@pytest.mark.long
def test_torchrun_gives_ranks_and_store(three: Network) -> None:
    """Ranks are those that torchrun gives. Rank 0 is on h2, where torchrun's store is."""
    said, codes = run(three, "over_tcp", ranks=(1, 0, 2))
    assert codes == [0, 0, 0], said
    assert [lines[0] for lines in said] == [
        {"rank": k, "host": host, "environ": f"{k} 0 3"}
        for k, host in enumerate(("h2", "h1", "h3"))
    ]
    assert all(lines[-1] == {"done": True} for lines in said)
    three.all_stand_by()


def test_ddp_trains_the_same_weights_everywhere(three: Network) -> None:
    said, codes = run(three, "train")
    assert codes == [0, 0, 0]
    assert len({lines[1]["weights"] for lines in said}) == 1
    assert all(lines[1]["lost"] == [] for lines in said)
    assert all(lines[2] == {"buckets": 1} for lines in said), (
        "one round for a small model's gradients"
    )


def test_ddp_goes_on_without_a_rank_that_is_killed(three: Network) -> None:
    """The others' backward goes on, and they are warned once; their weights stay the same."""
    said, codes = run(three, "dies")
    assert codes == [0, 0, -signal.SIGKILL]
    assert said[0][1]["weights"] == said[1][1]["weights"]
    for lines in said[:2]:
        (text,) = lines[1]["lost"]
        assert "(rank 2): sums are over the 2 members that are left" in text
        assert lines[1]["seconds"] < 5
    three.all_stand_by()
