# SPDX-License-Identifier: Apache-2.0
"""R13: one host four times slower. Rounds close at the quorum, every host at the same gradient.

A batch of 160 is 40 samples a host, in ten micro-batches of 4. While the three fast hosts work theirs (0.2 s), the slow
one gets through 10 samples of its own.
"""

from __future__ import annotations

from pathlib import Path

from tests import reference
from tests.netns.members import Network, Run, tiny_job

BATCH, SHARE, MICRO_BATCH = 160, 40, 4
ROUNDS = 6


def train(network: Network, folder: Path, quorum: float) -> tuple[Run, list[dict[str, int]]]:
    """A run, and the samples counted from each host, round by round; all hosts must list the same."""
    settings = {"batch": BATCH, "rounds": ROUNDS, "quorum": quorum, "microbatch_seconds": 0.02}
    run = network.train(tiny_job(folder), **settings, **{"slow.h4": 4, "save_gradients": True})
    listed = [row["counted"] for row in run.training("h1")]
    assert len(listed) == ROUNDS
    for host in run.members:
        assert [row["counted"] for row in run.training(host)] == listed
        assert [row["samples"] for row in run.training(host)] == [sum(c.values()) for c in listed]
    assert run.result["weights_identical"] is True
    # What was rounded off a gradient that did not count must not be lost, nor added twice.
    assert reference.check(16, run.gradients()) == sum(map(len, listed))
    names = dict(zip(map(str, range(1, 5)), run.members, strict=True))
    return run, [{names[number]: n for number, n in counted.items()} for counted in listed]


def test_at_90_percent_the_slow_host_sends_what_it_has(network: Network, open_path: Path) -> None:
    _, rounds = train(network, open_path, 0.9)
    for counted in rounds:
        assert 0.9 * BATCH <= sum(counted.values()) < BATCH
        assert set(counted) == {"h1", "h2", "h3", "h4"}
        assert 0 < counted["h4"] < SHARE
        # No more than needed: with one micro-batch less it would not have been enough.
        assert sum(counted.values()) - MICRO_BATCH < 0.9 * BATCH


def test_at_75_percent_the_slow_host_is_not_waited_for(network: Network, open_path: Path) -> None:
    run, rounds = train(network, open_path, 0.75)
    for counted in rounds:
        assert sum(counted.values()) >= 0.75 * BATCH
    without = [counted for counted in rounds if "h4" not in counted]
    assert len(without) >= ROUNDS - 1  # another may stumble once on a busy machine
    own = [row["own_samples"] for row in run.training("h4")]
    assert own.count(0) == len(without)


def test_at_100_percent_everybody_counts(network: Network, open_path: Path) -> None:
    _, rounds = train(network, open_path, 1.0)
    assert rounds == [dict.fromkeys(counted, SHARE) for counted in rounds]
    assert all(len(counted) == 4 for counted in rounds)
