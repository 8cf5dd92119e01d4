# SPDX-License-Identifier: Apache-2.0
"""Jobs with `priorities`: parts of the gradient on several channels (docs/channels.md). Real agents and the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.netns.members import DIGITS, Network
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
