# SPDX-License-Identifier: Apache-2.0
"""`nicps dbn` on a standalone cluster of Spark in lab hosts, and with nicps's agents on its executors' hosts."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps.lab.links import ip_of
from tests.netns.labs import until
from tests.netns.members import Ended, Network
from tests.netns.spark_cluster import EXECUTOR, PORT, Cluster
from tests.unit.test_dbn_cli import TINY, write_data

pytestmark = pytest.mark.spark

LIMIT_S = 280.0
#: Epochs of seconds: long enough to kill an executor in the middle of one.
LONG = (
    *("--workers", "3", "--layers", "300", "--epochs", "3", "--finetune", "3"),
    *("--batch", "20", "--averages", "2"),
)


@pytest.fixture(scope="module")
def cluster(module_network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(module_network, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("long"), 12_000, (28, 28))


def words(data: Path, settings: tuple[str, ...]) -> list[str]:
    return ["--data", str(data), "--runs", str(data / "runs"), "--json", *settings]


def result(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def without_spark(network: Network, data: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    return result(network.command("h1", "dbn", *words(data, settings), timeout_s=LIMIT_S))


@pytest.mark.long
@pytest.mark.parametrize("reduce", ["spark", "nicps"])
def test_the_bits_are_those_of_a_run_without_spark(
    cluster: Cluster, three: Network, tiny: Path, reduce: str
) -> None:
    child = cluster.dbn(*words(tiny, TINY), "--reduce", reduce)
    found = result(three.finish(child, LIMIT_S))
    assert (found["master"], found["reduce"]) == (cluster.url, reduce)
    wanted = without_spark(three, tiny, TINY)
    assert found["weights_sha256"] == wanted["weights_sha256"]
    assert found["test_error"] == wanted["test_error"]


@pytest.mark.long
def test_training_that_diverges_is_told_once(cluster: Cluster, three: Network, tiny: Path) -> None:
    """By the member whose worker it was, and no epoch is tried again."""
    arguments = words(tiny, (*TINY, "--epochs", "0", "--lr", "1e30"))
    ended = three.finish(cluster.dbn(*arguments, "--reduce", "nicps"), LIMIT_S)
    assert ended.error(5).startswith("fine-tuning, epoch 1: training diverges: a parameter is ")


@pytest.mark.long
def test_a_host_without_an_agent_is_named(cluster: Cluster, three: Network, tiny: Path) -> None:
    three.leave("h3")
    ended = three.finish(cluster.dbn(*words(tiny, TINY), "--reduce", "nicps"), LIMIT_S)
    assert f"{ip_of(3)}: no agent listens on @nicps" in ended.error(4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("reduce", "what"), [("spark", "executor"), ("nicps", "executor"), ("nicps", "agent")]
)
def test_what_is_killed_in_mid_epoch_changes_no_bit(
    cluster: Cluster, three: Network, long: Path, reduce: str, what: str
) -> None:
    """In the second epoch of a layer, and in the second epoch with labels; an agent is started again."""
    wanted = without_spark(three, long, LONG)
    child = cluster.dbn(*words(long, LONG), "--reduce", reduce, bufsize=1)
    assert child.stderr is not None
    told, killed = [], 0
    for line in child.stderr:
        told.append(line)
        if "epoch 1/3" in line:
            until(lambda: cluster.java("h2", EXECUTOR), "an executor on h2")
            time.sleep(0.5)
            if what == "executor":
                cluster.kill_executor("h2")
            else:
                three.end("h2", signal.SIGKILL)
                three.ready()
            killed += 1
    assert child.stdout is not None
    out = child.stdout.read()
    assert child.wait(LIMIT_S) == 0, "".join(told)
    assert killed == 2 and ("exitStatus 137" in cluster.log("h2") or what == "agent")
    found = json.loads(out.splitlines()[-1])
    assert found["weights_sha256"] == wanted["weights_sha256"]


@pytest.mark.long
def test_a_master_that_is_not_there_is_named(cluster: Cluster, three: Network, tiny: Path) -> None:
    """Its process was killed; then its host cannot be reached."""
    place = f"{ip_of(1)}:{PORT}"
    cluster.processes["h1"].kill()
    cluster.processes["h1"].wait()
    child = cluster.dbn(*words(tiny, TINY), host="h2")
    assert f"no Spark master answers at {place} (Connection refused)" in three.finish(child).error(
        4
    )
    three.lab.host("h1").set_link(False)
    try:
        child = cluster.dbn(*words(tiny, TINY), host="h2")
        assert f"no Spark master answers at {place} (" in three.finish(child).error(4)
    finally:
        three.lab.host("h1").set_link(True)
