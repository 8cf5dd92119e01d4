# SPDX-License-Identifier: Apache-2.0
"""Jobs with `priorities`: parts of the gradient on several channels (docs/channels.md). Real agents and the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from tests.netns.members import DIGITS, Network, Run, tiny_job
from tests.netns.test_leaving import ends_well

SETTINGS = {"exchange": "stripes", "lane": "i8", "quorum": 1.0}


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    """No host is taken for silent, however busy the machine is: both are counted in every step."""
    with Network(2, arguments=("--silence", "20")) as made:
        made.up()
        yield made


def same_weights(run: Run, *hosts: str) -> list[str]:
    """After each step; the same at these hosts."""
    found = [[row["weights_sha256"] for row in run.training(host)] for host in hosts]
    assert all(each == found[0] for each in found)
    return found[0]


def test_channels_change_no_bit(two: Network) -> None:
    """A step's rounds on three channels at once, and the same ones one after the other: the same weights."""
    settings = {**SETTINGS, "rounds": 20, "test_every": 10, "priorities": 3, "bucket_mb": 0.004}
    found = {}
    for scope in ("queue", "order"):
        run = two.train(DIGITS, **settings, priority_scope=scope)
        assert run.result["rounds"] == 20 and run.result["weights_identical"]
        found[scope] = same_weights(run, *two.names)
        rows = run.training("h1")
        assert len(rows) == 20 and len({*found[scope]}) == 20
        rounds = {later["round"] - row["round"] for row, later in pairwise(rows[:9])}
        assert len(rounds) == 1 and max(rounds) > 1, "channel 0 has several rounds a step"
    assert found["queue"] == found["order"]


def test_a_resumed_job_has_the_same_bits(two: Network) -> None:
    """Every host goes on with what rounding had left over at it."""
    job = tiny_job(two.folder)
    settings = {**SETTINGS, "priorities": 2, "batch": 16}
    straight = same_weights(two.train(job, rounds=12, **settings), *two.names)
    half = two.train(job, rounds=6, **settings)
    folder = two.place("h1", "runs") / half.result["job_id"]
    for host in two.names:
        kept = two.place(host, "runs") / half.result["job_id"] / "checkpoint"
        with np.load(kept / f"{host}.residual.npz") as archive:
            assert archive["residual"].any()
    done = two.command("h1", "resume", str(folder), "--set", "rounds=12", "--wait", "--json")
    result = ends_well(done, set(two.names), rounds=6)
    run = Run(result, [], {host: two.place(host, "runs") for host in two.names})
    assert same_weights(run, *two.names) == straight[6:]
