# SPDX-License-Identifier: Apache-2.0
"""Jobs with `priorities`: parts of the gradient on several channels (docs/channels.md). Real agents and the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.netns.members import DIGITS, Network, tiny_job
from tests.netns.test_steps import same_weights

SETTINGS = {"exchange": "stripes", "lane": "i8", "quorum": 1.0}


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    """No host is taken for silent, however busy the machine is: both are counted in every step."""
    with Network(2, arguments=("--silence", "20")) as made:
        made.up()
        yield made


def test_channels_change_no_bit(two: Network) -> None:
    """A step's rounds on three channels at once, and the same ones one after the other: the same weights."""
    settings = {**SETTINGS, "rounds": 20, "test_every": 10, "priorities": 3, "bucket_mb": 0.004}
    found = {}
    for scope in ("queue", "order"):
        run = two.train(DIGITS, **settings, priority_scope=scope)
        assert run.result["rounds"] == 20 and run.result["weights_identical"]
        found[scope] = same_weights(run, *two.names)
        rows = run.training("h1")
        assert len(rows) == 20 and len({*found[scope].values()}) == 20
        rounds = {later["round"] - row["round"] for row, later in pairwise(rows[:9])}
        assert len(rounds) == 1 and max(rounds) > 1, "channel 0 has several rounds a step"
    assert found["queue"] == found["order"]


NORMED = """
def model():
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
"""


def test_a_straggler_is_not_waited_for(three: Network) -> None:
    """A quorum below 1, and buffers that are averaged: each part has the same members, and the weights are the same."""
    slow = {"slow.h3": 6.0, "microbatch_seconds": 0.004, "micro_batches": 10}
    settings = {**SETTINGS, **slow, "quorum": 0.6, "rounds": 20, "priorities": 2}
    run = three.train(tiny_job(three.folder, NORMED), **settings)
    assert run.result["rounds"] == 20 and run.result["weights_identical"]
    same_weights(run, *three.names)
    counted = [row["counted"] for row in run.training("h1")]
    assert any(sum(each.values()) < 63 for each in counted), (
        "some step was closed before all had it"
    )
    assert any(row["own_samples"] < 21 for row in run.training("h3"))
