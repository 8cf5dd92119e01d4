# SPDX-License-Identifier: Apache-2.0
"""Direct calls between hosts (docs/direct.md), with losses and with hosts that are lost in the middle of a call."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.netns.members import Network

HOSTS = 3


@pytest.fixture(scope="module")
def lossy() -> Iterator[Network]:
    """A hundredth of all frames is lost."""
    with Network(HOSTS, loss=0.01) as made:
        made.up()
        yield made


def called(
    network: Network, seconds: float, dies: str = "", after_s: float = 0.0, **more: Any
) -> dict[str, dict[str, Any]]:
    """Let a program on each host call; what those that are left say, by host.

    Args:
        dies: the agent of that host is killed so long after its group has formed.
    """
    network.ready()
    settings = {"size": HOSTS, "seconds": seconds, **more}
    program = [sys.executable, "-m", "tests.netns.direct_program", orjson.dumps(settings).decode()]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {host: network.run(host, program, **pipes) for host in network.names}
    said = {}
    try:
        if dies:
            assert started[dies].stdout is not None
            started[dies].stdout.readline()
            time.sleep(after_s)
            network.end(dies, signal.SIGKILL)
        for host, process in started.items():
            out, err = process.communicate(timeout=60)
            if host != dies:
                assert not process.returncode and "Traceback" not in err, (out, err)
                said[host] = orjson.loads(out.splitlines()[-1])
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    return said


def test_calls_are_direct_and_the_same_at_all(lossy: Network) -> None:
    said = called(lossy, 1.0)
    results = [each["results"] for each in said.values()]
    assert len(said) == HOSTS and all(each == results[0] for each in results)
    (calls, _), *others = results[0].values()
    assert not others and calls > 50
    assert all(each["directly"] > calls // 2 for each in said.values())


def lose(network: Network, seed: int) -> None:
    drawn = random.Random(seed)
    dies = drawn.choice(network.names)
    said = called(network, 2.0, dies, drawn.uniform(0.0, 0.8))
    results = [each["results"] for each in said.values()]
    assert len(said) == HOSTS - 1 and results[0] == results[1]
    assert set(results[0]) == {"0", "1"}
    assert all(each["directly"] for each in said.values())


def test_a_host_is_lost_in_the_middle(lossy: Network) -> None:
    lose(lossy, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 22))
def test_a_host_is_lost_at_any_moment(lossy: Network, seed: int) -> None:
    lose(lossy, seed)
