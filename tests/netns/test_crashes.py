# SPDX-License-Identifier: Apache-2.0
"""Training programs that crash: the job's error says what ended them, at which host, and in which round."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.members import LIGHT, Network, tiny_job

#: Ends in its third round of training (a round has ten micro-batches) without a word.
CRASHES = """
import signal

calls = 0

def before_batch():
    global calls
    calls += 1
    if calls > 25 and host() in {hosts}:
        {how}
"""
KILLED = "os.kill(os.getpid(), signal.SIGSEGV)"
EXITED = "os._exit(3)"
ALL = ["h1", "h2", "h3"]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three hosts."""
    with Network(3, program=LIGHT) as made:
        made.up()
        yield made


@pytest.mark.parametrize("hosts", [["h1"], ["h2"], ALL])
def test_a_program_that_exits_ends_the_job(
    network: Network, open_path: Path, hosts: list[str]
) -> None:
    """Its exit status, its host and its round, whether it is the lead's or another's."""
    network.ready()
    job = tiny_job(open_path, hooks=CRASHES.format(how=EXITED, hosts=hosts))
    error = network.command("h1", "submit", str(job), "--wait").error(5)
    said = re.fullmatch(
        r"(h\d): the training program ended: exit status 3 in round (\d+), and it said nothing",
        error,
    )
    assert said is not None, error
    assert said[1] in hosts and int(said[2]) >= 3


def test_a_signal_at_every_host(network: Network, open_path: Path) -> None:
    """The job's error is the crash, wherever it ends and whoever is told; not that nobody has its state."""
    network.ready()
    job = tiny_job(open_path, hooks=CRASHES.format(how=KILLED, hosts=ALL))
    error = network.command("h1", "submit", str(job), "--wait", "--set", "rounds=9").error(5)
    assert re.match(
        r"h\d: the training program ended: SIGSEGV has ended it in round \d+\b", error
    ), error


def test_a_signal_at_one_host(network: Network, open_path: Path) -> None:
    """Its host comes back with another program; its log says why it was gone."""
    network.ready()
    job = tiny_job(open_path, hooks=CRASHES.format(how=KILLED, hosts=["h2"]))
    run = network.train(job, rounds=4)
    assert run.result["weights_identical"]
    assert re.search(
        r"h2: the training program ended: SIGSEGV has ended it in round \d+\n", network.log("h2")
    )
