# SPDX-License-Identifier: Apache-2.0
"""R13: one host four times slower. Rounds close at the quorum, every host at the same gradient.

A batch of 160 is 40 samples a host, in ten micro-batches of 4. While the three fast hosts compute theirs, the slow host
computes 10 samples. All hosts must agree in every round. How fast a host is can depend on what else the machine does:
one round may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests import reference
from tests.netns.members import LIGHT, Network, Run, tiny_job

BATCH, SHARE, MICRO_BATCH = 160, 40, 4


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Four hosts."""
    with Network(4, program=LIGHT) as made:
        made.up()
        yield made


def train(
    network: Network, folder: Path, quorum: float, rounds: int, microbatch_s: float = 0.08
) -> tuple[Run, list[dict[str, int]]]:
    """A run, and the samples counted from each host, round by round; all hosts must list the same."""
    settings = {"batch": BATCH, "rounds": rounds, "quorum": quorum}
    settings["microbatch_seconds"] = microbatch_s
    run = network.train(tiny_job(folder), **settings, **{"slow.h4": 4, "save_gradients": True})
    listed = [row["counted"] for row in run.training("h1")]
    assert len(listed) == rounds
    for host in run.members:
        assert [row["counted"] for row in run.training(host)] == listed
        assert [row["samples"] for row in run.training(host)] == [sum(c.values()) for c in listed]
    assert run.result["weights_identical"] is True
    # The rounding error of a gradient that did not count must not be lost, nor added twice.
    assert reference.check(16, run.gradients()) == sum(map(len, listed))
    names = dict(zip(map(str, range(1, 5)), run.members, strict=True))
    return run, [{names[number]: n for number, n in counted.items()} for counted in listed]


def in_all_but_one(facts: Iterable[bool]) -> bool:
    """Whether the condition holds in every round, except perhaps one."""
    return list(facts).count(False) <= 1


def test_at_90_percent_the_slow_host_sends_what_it_has(network: Network, open_path: Path) -> None:
    _, rounds = train(network, open_path, 0.9, rounds=5)
    for counted in rounds:
        assert 0.9 * BATCH <= sum(counted.values()) <= BATCH
    assert in_all_but_one(0 < counted.get("h4", 0) < SHARE for counted in rounds)
    # No more than needed: with one micro-batch less it would not have been enough.
    assert in_all_but_one(sum(counted.values()) - MICRO_BATCH < 0.9 * BATCH for counted in rounds)


@pytest.mark.long
def test_at_75_percent_the_slow_host_is_not_waited_for(network: Network, open_path: Path) -> None:
    # A fast host that lags by a micro-batch lets the slow one in.
    run, rounds = train(network, open_path, 0.75, rounds=6, microbatch_s=0.25)
    for counted in rounds:
        assert sum(counted.values()) >= 0.75 * BATCH
    without = ["h4" not in counted for counted in rounds]
    assert in_all_but_one(without)
    assert [row["own_samples"] == 0 for row in run.training("h4")] == without


@pytest.mark.long
def test_at_100_percent_everybody_counts(network: Network, open_path: Path) -> None:
    _, rounds = train(network, open_path, 1.0, rounds=3)
    assert rounds == [dict.fromkeys(("h1", "h2", "h3", "h4"), SHARE)] * 3
