# SPDX-License-Identifier: Apache-2.0
"""`nicps cancel` ends a job on all hosts, from any of them; the agents stay, and the job can be resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nicps.session.events import Preparing
from nicps.session.fields import encode
from nicps.session.messages import ANSWERS, Watch
from tests.netns import light_nicps
from tests.netns.labs import until
from tests.netns.members import Network
from tests.netns.test_leaving import processes, programs, under_way
from tests.netns.test_saved import goes_on_from


@pytest.mark.short("h3-True")
@pytest.mark.parametrize(("host", "light"), [("h1", False), ("h3", True)])
def test_a_job_is_cancelled(three: Network, open_path: Path, host: str, light: bool) -> None:
    """It is saved on the host that leads it, whichever host cancels it; from there `nicps resume` goes on."""
    child = under_way(three, open_path, rounds=100_000, light=light)
    status = three.status("h1")
    assert status is not None
    job = status["job"]
    agents = {name: agent.process.pid for name, agent in three.agents.items()}
    done = three.command(host, "cancel")
    assert done.code == 0, done.err
    text = three.finish(child).error(7)
    kept = three.place("h1", "runs") / job / "checkpoint" / "checkpoint.npz"
    assert re.fullmatch(
        rf"cancelled on {host}; saved after \d+ rounds of training in {re.escape(str(kept.parent))}:"
        r" `nicps resume` goes on from there",
        text,
    ), text
    has_it = f"job {job} has ended; h1 has what was saved"
    assert done.out.strip() == (f"job {job}: {text}" if host == "h1" else has_it)
    assert done.err.splitlines() == [f"nicps: job {job} ends with its batch"]
    three.all_stand_by()
    until((kept.parent.parent / "report.html").exists, "the report of what there was", 60.0)
    for name in three.names:
        until(lambda name=name: not programs(three, name), f"no program on {name}")
        three.work_is_clear(name)
        assert three.agents[name].process.pid == agents[name]
        assert three.agents[name].process.poll() is None
    goes_on_from(three, "h1", kept, light)


def test_there_is_no_job(three: Network) -> None:
    assert three.command("h2", "cancel").only_error(4) == "no job is under way here"
    three.all_stand_by()


def test_a_job_that_is_being_prepared(three: Network, open_path: Path) -> None:
    """Only its own host knows of it: `submit --wait`, `status` and a watcher are told there. `cancel` ends it."""
    job = open_path / "slow"
    job.mkdir()
    (job / "job.py").write_text("import time\ntime.sleep(60)\n")
    watcher = three.agents["h2"].connect()
    watcher.send(encode(Watch()))
    child = three.start("h2", "submit", str(job), "--wait", light=True)
    until(lambda: processes(three, "h2", f"{light_nicps.ENTRY} prepare"), "the job is prepared")
    told = ANSWERS.decode(watcher.recv(10.0)[0])
    watcher.close()
    assert isinstance(told, Preparing) and told.job == str(job)
    status = three.status("h2")
    assert (
        status is not None and status["job"] is None and status["activity"]["preparing"] == str(job)
    )
    assert f"preparing  {job}" in three.command("h2", "status").out.splitlines()
    done = three.command("h2", "cancel")
    assert done.code == 0 and done.out == "job -: cancelled on h2\n", done.err
    ended = three.finish(child)
    assert ended.error(7) == "cancelled on h2"
    assert ended.err.splitlines()[0] == f"nicps: preparing: job {job}"
    status = three.status("h2")
    assert status is not None and "preparing" not in status["activity"]
    until(
        lambda: not processes(three, "h2", f"{light_nicps.ENTRY} prepare"),
        "its preparation has ended",
    )
    three.work_is_clear("h2")
