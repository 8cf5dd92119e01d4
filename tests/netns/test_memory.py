# SPDX-License-Identifier: Apache-2.0
"""The kernel's memory of a job: an agent has it while the job is there, and gives what stripes took back after it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from nicps.bench.memory import map_bytes
from tests.netns.labs import until
from tests.netns.members import LIGHT, Network, tiny_job

#: 510,000 numbers, 355 fragments of 8 bits.
WIDE = "\ndef model():\n    return nn.Sequential(nn.Linear(16, 30_000))\n"
FRAGMENTS = 355
OWN_AND_SUMS = 2 * (1448 + 1472) * FRAGMENTS
SETTINGS = {"quorum": 1.0, "lane": "i8", "exchange": "stripes", "microbatch_seconds": 0.005}


def places(fragments: int) -> int:
    """Bytes of the maps of so long a stripe."""
    return 2 * (11520 + 384) * fragments


@pytest.fixture(scope="module")
def three() -> Iterator[Network]:
    with Network(3, program=LIGHT) as made:
        made.up()
        yield made


def test_what_stripes_take_is_given_back(three: Network) -> None:
    """Also the memory of a stripe that was longer in a smaller view."""
    job = tiny_job(three.folder, WIDE)
    pids = {host: agent.process.pid for host, agent in three.agents.items()}
    before = {host: map_bytes(pid) for host, pid in pids.items()}
    with closing(three.submit("h1", job, rounds=100_000, **SETTINGS)):
        three.in_training("h1")
        held = OWN_AND_SUMS + places(FRAGMENTS // 3)
        for host, pid in pids.items():
            assert map_bytes(pid) - before[host] == pytest.approx(held, rel=0.05), host
        three.end("h3", signal.SIGKILL)
        longer = OWN_AND_SUMS + places(FRAGMENTS // 2)

        def grown(host: str) -> bool:
            more = map_bytes(pids[host]) - before[host]
            return more == pytest.approx(longer, rel=0.05)

        until(lambda: all(map(grown, ("h1", "h2"))), "places of the longer stripes")
        three.in_training("h1")  # it trains on with them
        assert three.command("h1", "cancel").code == 0
        three.all_stand_by("h1", "h2")
    for host in ("h1", "h2"):
        # Accumulators of a hand-out, or of a test, stay: a block or two.
        until(lambda host=host: map_bytes(pids[host]) - before[host] < 200_000, f"{host} has freed")
