# SPDX-License-Identifier: Apache-2.0
"""Jobs whose steps take several rounds: as factors of low rank, in buckets, or in parts on channels. Real agents."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.errors import JobFailed
from nicps.wire import FrameType
from tests.netns.labs import until
from tests.netns.members import DIGITS, Network, Run, tiny_job
from tests.netns.test_leaving import ends_well

#: Two rounds a step of the tiny job.
KINDS: dict[str, dict[str, Any]] = {
    "rank": {"rank": 1, "exchange": "stripes"},
    "buckets": {"bucket_mb": 0.0001, "lane": "i8", "exchange": "stripes"},
    "channels": {"priorities": 2, "lane": "i8", "exchange": "stripes", "quorum": 1.0},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    """No host is taken for silent, however busy the machine is: both are counted in every step."""
    with Network(2, arguments=("--silence", "20")) as made:
        made.up()
        yield made


def same_weights(run: Run, *hosts: str) -> dict[int, str]:
    """After each step, by its number; the same at these hosts."""
    found: dict[int, str] = {}
    for host in hosts:
        for row in run.training(host):
            step, weights = row["trained_rounds"], row["weights_sha256"]
            assert found.setdefault(step, weights) == weights, (host, step)
    return found


@pytest.mark.short("rank")
@kinds
def test_rounds_are_steps_for_users(three: Network, kind: str) -> None:
    """In the result, the metrics, the status and the log; the kernels have counted every fragment."""
    before = {host: three.status(host)["activity"] for host in three.names}  # type: ignore[index]
    settings = {**KINDS[kind], "rounds": 40, "test_every": 20}
    if kind == "channels":
        settings["priority_cuts"] = "equal"  # the same rounds in all steps
    run = three.train(DIGITS, **settings)
    assert run.result["rounds"] == 40 and run.result["weights_identical"]
    assert run.result["test_accuracy"] > 0.7 and run.result["fragments_added"] > 0
    assert sorted(same_weights(run, *three.names)) == [*range(1, 41)]
    rows = run.training("h1")
    rounds = {"rank": 2, "buckets": 3, "channels": 1}[
        kind
    ]  # of channel 0; a layer's weights and its biases can be buckets each
    assert {later["round"] - row["round"] for row, later in pairwise(rows[:19])} == {rounds}
    assert all(row["counted"] == {"1": 40, "2": 40, "3": 40} for row in rows)
    for host in three.names:
        after = three.status(host)["activity"]  # type: ignore[index]
        assert after["rounds"] - before[host]["rounds"] == 40, host
        assert after["samples"] - before[host]["samples"] == 40 * 120, host


@pytest.mark.short("channels-h1")
@pytest.mark.parametrize(
    ("kind", "host"), [("rank", "h1"), ("buckets", "h2"), ("channels", "h1"), ("channels", "h2")]
)
def test_a_host_is_killed_and_comes_back(
    three: Network, open_path: Path, kind: str, host: str
) -> None:
    """The lead, or another one. What the others' factors begin with comes to it with the state."""
    stop = open_path / "stop"
    ends = f"def done(state):\n    return os.path.exists({str(stop)!r})\n"
    name = f"{kind}_{host}"
    job = tiny_job(open_path, ends, name)
    with closing(three.submit("h1", job, rounds=100_000, **KINDS[kind])):
        three.in_training("h3", rounds=20)
        three.end(host, signal.SIGKILL)
        three.in_training("h3", rounds=6)
        alone = samples(three, host)
        three.in_training("h3", rounds=6)
        assert samples(three, host) == alone, "the others train without it"
        three.join(host)
        until(lambda: samples(three, host) > alone + 200, "it is counted again")
        stop.touch()
        places = [three.place(each, "runs") for each in three.names]
        until(lambda: results(places, name), "the result")
        three.all_stand_by()
    (path,) = results(places, name)
    run = Run(json.loads(path.read_text()), [], dict.fromkeys(three.names, path.parents[1]))
    assert run.result["weights_identical"] and set(run.members) == {"h1", "h2", "h3"}
    found = same_weights(run, *three.names)
    last = [set(run.training(each)[-1]["counted"]) for each in three.names]
    assert last == [{"1", "2", "3"}] * 3 and {row["trained_rounds"] for row in run.training(host)}
    assert min(row["trained_rounds"] for row in run.training(host)) > 3 and max(found) > 20


def samples(network: Network, host: str) -> int:
    """That host's, as h3 has counted them in whole steps."""
    status = network.status("h3")
    assert status is not None
    (number,) = [member["number"] for member in status["members"] if member["name"] == host]
    of = {each["number"]: each["samples"] for each in status["activity"]["members"]}
    return int(of[number])


def results(places: list[Path], name: str) -> list[Path]:
    """Of the job of that name."""
    return [path for place in places for path in place.glob(f"*-{name}-*/result.json")]


@pytest.mark.long
@kinds
def test_no_majority_is_left(three: Network, open_path: Path, kind: str) -> None:
    """R18: the last of three saves the state after its last whole step, also from the middle of the next one."""
    settings = {**KINDS[kind], "rounds": 100_000, "alarm_below": 0.0}
    with closing(three.submit("h1", tiny_job(open_path), **settings)):
        three.in_training("h3", rounds=20)
        job = three.status("h3")["job"]  # type: ignore[index]
        for host in ("h1", "h2"):
            os.killpg(three.agents[host].process.pid, signal.SIGKILL)
        until(lambda: "saved after" in three.status("h3")["trouble"], "it is saved")  # type: ignore[index]
        trouble = three.status("h3")["trouble"]  # type: ignore[index]
    kept = three.place("h3", "runs") / job / "checkpoint" / "checkpoint.npz"
    with np.load(kept) as saved:
        trained = json.loads(saved["state.json"])["progress"]["round"]
    assert trained > 5 and f"saved after {trained} rounds of training" in trouble
    for host in ("h1", "h2"):
        three.end(host, signal.SIGKILL)
    three.leave("h3")
    three.ready()


@pytest.mark.long
@kinds
def test_a_resumed_job_has_the_same_bits(two: Network, kind: str) -> None:
    """Every host goes on with its own error, and all with what their factors begin with."""
    job = tiny_job(two.folder)
    settings = {**KINDS[kind], "batch": 16}
    lanes = 16 * 8 + 8 * 4 + (8 + 4) * (kind != "rank")
    straight = same_weights(two.train(job, rounds=12, **settings), *two.names)
    half = two.train(job, rounds=6, **settings)
    folder = two.place("h1", "runs") / half.result["job_id"]
    for host in two.names:
        path = two.place(host, "runs") / half.result["job_id"] / "checkpoint"
        with np.load(path / f"{host}.residual.npz") as archive:
            head, error = json.loads(archive["residual.json"]), archive["residual"]
        assert head["lanes"] == len(error) == lanes and error.any()
    done = two.command("h1", "resume", str(folder), "--set", "rounds=12", "--wait", "--json")
    result = ends_well(done, set(two.names), rounds=6)
    run = Run(result, [], {host: two.place(host, "runs") for host in two.names})
    assert same_weights(run, *two.names) == {at: straight[at] for at in range(7, 13)}


def test_a_network_that_cannot_do_stripes(tmp_path: Path) -> None:
    """There is no other exchange for factors: the job ends with what to do."""
    with Network(2) as network:
        network.up()
        network.lab.lose_next("all", FrameType.SUM, 1 << 30)
        with pytest.raises(
            JobFailed, match="which rank and bucket_mb need: submit the job without it"
        ):
            network.train(tiny_job(network.folder), rank=1, exchange="auto")
        network.all_stand_by()
