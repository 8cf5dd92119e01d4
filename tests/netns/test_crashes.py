# SPDX-License-Identifier: Apache-2.0
"""Training programs that crash: the job's error names the signal or status, the host and the round."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.agent.records import MOST_LOG_BYTES
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


@pytest.mark.short("hosts1", "hosts2")
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
    """The job's error is the crash, at every host and for every user that is told; not that the state is lost."""
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


RAISES = """
from trainer.errors import JobError

calls = 0

def before_batch():
    global calls
    calls += 1
    if calls > 25 and host() == "h2":
        print("noise\\n" * 100_000, flush=True)
        {call}

def inner():
    raise ValueError("on purpose")

def tells():
    try:
        inner()
    except ValueError as error:
        raise JobError("ValueError: on purpose (job.py)") from error
"""


def kept_log(network: Network, error: str, host: str) -> str:
    """The content of the log that an error names, which is a run's of that host."""
    said = re.search(r"; its log: (/\S+)$", error)
    assert said is not None, error
    path = Path(said[1])
    assert path.is_relative_to(network.place(host, "runs"))
    assert path.stat().st_size <= MOST_LOG_BYTES
    return path.read_text()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("tells()", "h2: ValueError: on purpose (job.py); its log: "),
        (
            "inner()",
            "h2: the training program ended: ValueError: on purpose (exit status 1 in round",
        ),
    ],
)
def test_the_call_stack_of_an_error_is_kept(
    network: Network, open_path: Path, call: str, said: str
) -> None:
    """A training program that tells the agent of it, and one that just ends; the host's folder of runs has it."""
    network.ready()
    job = tiny_job(open_path, hooks=RAISES.format(call=call))
    error = network.command("h1", "submit", str(job), "--wait").error(5)
    assert error.startswith(said)
    text = kept_log(network, error, "h2")
    assert "in inner\n" in text
    assert text.rstrip().endswith("ValueError: on purpose")
    for host in ("h1", "h3"):
        run = Path(error.rpartition(" ")[2]).parts[-3]
        assert not (network.place(host, "runs") / run).exists()
    for host in network.names:
        network.work_is_clear(host)


def test_the_call_stack_of_an_error_while_a_job_is_prepared(
    network: Network, open_path: Path
) -> None:
    network.ready()
    job = tiny_job(open_path, name="raises")
    text = (job / "job.py").read_text()
    (job / "job.py").write_text(
        f"{text}\n\ndef begins():\n    raise ValueError('no')\n\nbegins()\n"
    )
    before = set(network.place("h1", "runs").iterdir())
    assert "; its log" not in network.command(
        *("h1", "submit", str(tiny_job(open_path)), "--wait", "--set", "seed=x")
    ).error(2)
    error = network.command("h1", "submit", str(job), "--wait").error(5)
    assert error.startswith("ValueError: no (job.py:") and "in begins())" in error
    text = kept_log(network, error, "h1")
    assert "in begins\n" in text and "trainer: error: ValueError: no" in text.splitlines()[-1]
    (made,) = set(network.place("h1", "runs").iterdir()) - before
    assert made.name.split("-")[2] == "raises" and [p.name for p in made.iterdir()] == [
        "prepare.log"
    ]
