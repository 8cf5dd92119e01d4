# SPDX-License-Identifier: Apache-2.0
"""However an agent goes, nothing of it stays on its host; the others go on as long as they are enough (R16 to R22)."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps.bench import sums
from nicps.lab.processes import Running
from tests.netns import light_nicps
from tests.netns.labs import until
from tests.netns.members import LIGHT, Ended, Network, tiny_job


@pytest.fixture(scope="module")
def made() -> Iterator[Network]:
    with Network(3, program=LIGHT) as network:
        network.up()
        yield network


@pytest.fixture
def three(made: Network) -> Network:
    """Three hosts whose agents stand by."""
    made.ready()
    return made


def under_way(
    network: Network, folder: Path, rounds: int = 45, *more: str, light: bool = False
) -> subprocess.Popen[str]:
    """`nicps submit --wait` of a job on h1, once it trains; a round takes 90 ms at least."""
    settings = [f"rounds={rounds}", "microbatch_seconds=0.009", *more]
    arguments = [word for setting in settings for word in ("--set", setting)]
    command = ["submit", str(tiny_job(folder)), "--wait", "--json", *arguments]
    child = network.start("h1", *command, light=light)
    network.in_training("h1")
    return child


def ends_well(done: Ended, members: set[str], rounds: int = 45) -> dict[str, Any]:
    """The job's result; these were in it at the end."""
    assert done.code == 0, done.err
    result: dict[str, Any] = json.loads(done.out)
    assert set(result["members"]) == members
    assert result["weights_identical"] is True and result["rounds"] == rounds
    return result


def last_job(network: Network, job_id: str, *hosts: str) -> dict[str, Any]:
    """The line about the job's end of the one that led it."""

    def ended() -> dict[str, Any]:
        found = [network.status(host) for host in hosts]
        lasts = [s["last_job"] for s in found if s is not None]
        return next((dict(last) for last in lasts if last.get("job_id") == job_id), {})

    return dict(until(ended, f"the job's end at {hosts}", 60.0))


def processes(network: Network, host: str, word: str) -> list[Running]:
    """The host's processes with that in their command line."""
    return [process for process in network.lab.processes()[host] if word in process.command]


def programs(network: Network, host: str) -> list[Running]:
    """The host's training programs, and the programs that prepare a job or draw its report."""
    found = [*processes(network, host, "trainer"), *processes(network, host, light_nicps.ENTRY)]
    return [process for process in found if " -m nicps join " not in process.command]


def others_stand_by(network: Network, gone: str) -> None:
    """The others can take a job, and nothing is left of the last one."""
    others = [host for host in network.names if host != gone]
    network.all_stand_by(*others)
    for host in others:
        assert not programs(network, host)
        network.work_is_clear(host)


def comes_back(network: Network, gone: str, folder: Path) -> None:
    """The host comes back with a fresh join, and is in the next job."""
    network.ready()
    starter = next(host for host in network.names if host != gone)
    run = network.train(tiny_job(folder), host=starter)
    assert sorted(run.members) == network.names
    assert run.members[0] == starter
    assert run.result["weights_identical"] is True


# ---- at rest


@pytest.mark.short("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_moment_from_which_the_socket_answers(
    three: Network, number: signal.Signals
) -> None:
    three.leave("h3")
    script = Path(__file__).with_name("signalled_join.py")
    three.join("h3", wrap=[sys.executable, str(script), str(int(number))])
    assert three.agents.pop("h3").process.wait(30.0) == 0
    three.nothing_left("h3")


@pytest.mark.short("9")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_while_compiling(three: Network, number: signal.Signals) -> None:
    """Without compiled programs from an earlier start."""
    three.leave("h3")
    said = len(three.log("h3"))
    bare = 'mkdir -p /run/nicps && mount -t tmpfs none /run/nicps && exec "$@"'
    three.join("h3", wrap=["unshare", "--mount", "sh", "-c", bare, "sh"])
    until(lambda: processes(three, "h3", "nicps.dataplane.compile"), "the compiler runs")
    code = three.end("h3", number)
    assert code == {signal.SIGINT: 130}.get(number, -number)
    assert "Traceback" not in three.log("h3")[said:]
    three.nothing_left("h3")


@pytest.mark.short("9")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_as_soon_as_the_program_is_there(three: Network, number: signal.Signals) -> None:
    three.leave("h3")
    said = len(three.log("h3"))
    three.join("h3")
    host = three.lab.host("h3")
    until(lambda: host.read_link().xdp_mode, "a program on h3")
    three.end("h3", number)
    assert "Traceback" not in three.log("h3")[said:]
    three.nothing_left("h3")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_while_standing_by(three: Network, number: signal.Signals) -> None:
    assert three.end("h3", number) == (-number if number == signal.SIGKILL else 0)
    three.nothing_left("h3")


def test_started_with_sigint_ignored(three: Network) -> None:
    """As `nicps join &` in a script: Ctrl-C is meant for others, and SIGTERM ends it as always."""
    three.leave("h3")
    three.join("h3", wrap=["sh", "-c", "trap '' INT; exec \"$@\"", "sh"])
    three.all_stand_by()
    agent = three.agents["h3"].process
    agent.send_signal(signal.SIGINT)
    ignored = re.search(
        r"^SigIgn:\s*([0-9a-f]+)", Path(f"/proc/{agent.pid}/status").read_text(), re.M
    )
    assert ignored is not None and int(ignored[1], 16) >> (signal.SIGINT - 1) & 1
    assert three.stands_by("h3") and agent.poll() is None
    assert three.leave("h3") == 0
    three.nothing_left("h3")


def test_leave(three: Network) -> None:
    process = three.agents["h3"].process
    done = three.command("h3", "leave")
    said = "h3 has left network nicps on eth1\n"
    assert (done.code, done.out, done.err) == (0, said, "")
    assert process.wait(5) == 0
    three.nothing_left("h3")


# ---- while a job is prepared


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_starter_while_it_prepares(
    three: Network, open_path: Path, number: signal.Signals
) -> None:
    job = tiny_job(open_path, "import time\ntime.sleep(60)\n")
    child = three.start("h1", "submit", str(job), "--wait")
    until(lambda: processes(three, "h1", f"{light_nicps.ENTRY} prepare"), "the job is prepared")
    until(lambda: select.select([child.stderr], [], [], 0)[0], "the command has said so")
    three.end("h1", number)
    done = three.finish(child)
    if number == signal.SIGINT:
        assert done.error(5) == "h1 has left the network"
    else:
        assert done.error(4).startswith("the agent of this host has gone")
    assert done.err.splitlines()[:-1] == [f"nicps: preparing: job {job}"]
    three.nothing_left("h1", work=number != signal.SIGKILL)
    assert all(map(three.stands_by, ("h2", "h3")))


# ---- while a job trains


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL", "leave"])
def test_a_member_while_training(three: Network, open_path: Path, how: str) -> None:
    """The others train on, and the job ends well without it."""
    child = under_way(three, open_path)
    if how == "leave":
        assert three.command("h3", "leave").code == 0
    else:
        three.end("h3", signal.Signals[how])
    three.nothing_left("h3", work=how != "SIGKILL")
    ends_well(three.finish(child), {"h1", "h2"})
    others_stand_by(three, "h3")
    if how == "SIGKILL":
        comes_back(three, "h3", open_path)


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_the_starter_while_training(three: Network, open_path: Path, how: str) -> None:
    """Another host leads the job to its end; the submitter is told that this host has left."""
    child = under_way(three, open_path)
    status = three.status("h1")
    assert status is not None
    three.end("h1", signal.Signals[how])
    if how == "SIGINT":
        assert three.finish(child).error(5) == "h1 has left the network"
    else:
        assert three.finish(child).error(4).startswith("the agent of this host has gone")
    three.nothing_left("h1", work=how != "SIGKILL")
    last = last_job(three, status["job"], "h2", "h3")
    assert last["error"] is None
    assert set(last["result"]["members"]) == {"h2", "h3"}
    assert last["result"]["weights_identical"] is True
    others_stand_by(three, "h1")
    if how == "SIGKILL":
        comes_back(three, "h1", open_path)


@pytest.mark.long
def test_a_training_program_that_is_killed(three: Network, open_path: Path) -> None:
    """Its host leaves, and is back with another one; all sums can be made again from what was kept."""
    child = under_way(three, open_path, 70, "save_gradients=true", "exchange=broadcast")
    (trainer,) = programs(three, "h2")
    os.kill(trainer.pid, signal.SIGKILL)
    result = ends_well(three.finish(child), {"h1", "h2", "h3"}, rounds=70)
    kept = [three.place(host, "runs") / result["job_id"] / host for host in three.names]
    rounds = sums.read(kept)
    found = sums.compare(rounds, 16)
    assert found["rounds"] == 70 and found["gradients"] > 140
    lives = {(n, str(own["life"])) for saved in rounds.values() for n, own in saved.items()}
    assert len(lives) > 3
    three.all_stand_by()
    assert not any(programs(three, host) for host in three.names)


def test_ctrl_c_of_submit_leaves_the_job_running(three: Network, open_path: Path) -> None:
    settings = ["--set", "rounds=30", "--set", "microbatch_seconds=0.01"]
    child = three.start("h2", "submit", str(tiny_job(open_path)), "--wait", *settings)
    three.in_training("h2")
    begun = three.status("h2")
    child.send_signal(signal.SIGINT)
    done: Ended = three.finish(child)
    assert done.code == 130
    assert "error" not in done.err and "Traceback" not in done.err

    def last_job_there() -> dict[str, Any] | None:
        status = three.status("h2")
        assert begun is not None and status is not None
        last: dict[str, Any] = status["last_job"]
        return last if last.get("job_id") == begun["job"] else None

    last = until(last_job_there, "the job's end", 60.0)
    assert last["error"] is None
    assert last["result"]["rounds"] == 30


def test_the_next_job_can_come_from_another_host(three: Network, open_path: Path) -> None:
    run = three.train(tiny_job(open_path), host="h3")
    assert run.members[0] == "h3"
    assert sorted(run.members) == three.names
