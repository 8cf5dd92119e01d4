# SPDX-License-Identifier: Apache-2.0
"""Jobs with hostile code: files of the training user make no agent wait, and nothing in them runs as root."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.agent.process import User
from nicps.session.events import Warned
from tests.netns.labs import until
from tests.netns.members import Network, tiny_job

#: Prepares and trains like any other, and names itself. Asked for a report, it records its user and its files.
ENTRY = """
import json, os, sys
from pathlib import Path
from nicps.startup import leave
from trainer.__main__ import main

if sys.argv[1] == "report":
    status = Path("/proc/self/status").read_text()
    rights = status.split("CapEff:")[1].split()[0]
    sys.exit(f"uid {os.getuid()} caps {rights} at {sorted(os.listdir(sys.argv[2]))}")
code = main()
if sys.argv[1] == "prepare":
    prepared = Path(sys.argv[sys.argv.index("--out") + 1], "prepared.json")
    prepared.write_text(json.dumps(json.loads(prepared.read_text()) | {"entry": "entry"}))
leave(code)
"""
FIFO = """
def before_batch():
    if not os.path.exists("moved.json"):
        os.rename("prepared.json", "moved.json")
        os.mkfifo("prepared.json")
"""
#: Another process of the training user traces the program, and is there when the job has ended.
TRACED = """
import ctypes
from trainer.errors import JobError
traced = False

def before_batch():
    global traced
    if host() == "h2" and not traced:
        traced = True
        libc, me = ctypes.CDLL(None), os.getpid()
        libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
        read, write = os.pipe()
        tracer = os.fork()
        if tracer == 0:
            os.setsid()
            os.write(write, b"%d" % libc.ptrace(0x4206, me, None, None))
            time.sleep(60)
            os._exit(0)
        assert os.read(read, 1) == b"0"
        with open(FLAG + ".new", "w") as file:
            file.write(str(tracer))
        os.rename(FLAG + ".new", FLAG)
    while host() == "h1":
        if os.path.exists(FLAG):
            raise JobError("that is enough")
        time.sleep(0.01)
"""
#: A process of the job's that has a session of its own, and whose parent has ended. It writes down its number.
DETACHED = """
detached = False

def before_batch():
    global detached
    if host() == "h2" and not detached:
        detached = True
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(FLAG + ".new", "w") as file:
                    file.write(str(os.getpid()))
                os.rename(FLAG + ".new", FLAG)
                time.sleep(120)
            os._exit(0)
        while not os.path.exists(FLAG):
            time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[Network]:
    """Two hosts, whose agents find a module `entry` that trains."""
    with Network(2) as made:
        (made.folder / "entry.py").write_text(ENTRY)
        path = os.pathsep.join([str(made.folder), os.environ.get("PYTHONPATH", "")])
        made.lab.up()
        for host in made.names:
            made.join(host, env={**os.environ, "PYTHONPATH": path})
        for host in made.names:
            made.answered(host)
        yield made


def test_a_fifo_in_the_place_of_what_was_handed_out(pair: Network, open_path: Path) -> None:
    run = pair.train(tiny_job(open_path, hooks=FIFO), light=True)
    assert run.members == ["h1", "h2"]
    assert Path(run.result["report"]).exists()
    pair.all_stand_by()
    for host in pair.names:
        pair.work_is_clear(host)


def test_the_module_of_a_job_draws_as_the_training_user(pair: Network, open_path: Path) -> None:
    """It has the records to read, and no rights."""
    channel = pair.agents["h1"].submit(tiny_job(open_path), settings={}, entry="entry")
    try:
        run = pair.finished(channel)
    finally:
        channel.close()
    (said,) = [event.message for event in run.events if isinstance(event, Warned)]
    user = User.named(pair.user)
    rights = "" if user.uid == 0 else "0" * 16
    assert said.startswith(f"no report: uid {user.uid} caps {rights}")
    assert "at ['h1', 'h2', 'result.json']" in said
    pair.work_is_clear("h1")


def test_a_training_program_that_is_traced(pair: Network, open_path: Path) -> None:
    """The job has ended at its host too, and its agent answers, long before the tracer would end."""
    open_path.chmod(0o777)
    flag = open_path / "traced"
    job = tiny_job(open_path, hooks=f"FLAG = {str(flag)!r}\n{TRACED}")
    try:
        text = pair.command("h1", "submit", str(job), "--wait", light=True).error(5)
        assert "that is enough" in text
        pair.all_stand_by(timeout_s=10.0)
        for host in pair.names:
            pair.work_is_clear(host)
    finally:
        end_of(flag)


def test_a_process_that_has_detached_itself(pair: Network, open_path: Path) -> None:
    """It ends with the job, or with the agent. Beside it the job goes on."""
    open_path.chmod(0o777)
    flag = open_path / "detached"
    job = tiny_job(open_path, hooks=f"FLAG = {str(flag)!r}\n{DETACHED}")
    try:
        assert pair.train(job, light=True).members == ["h1", "h2"]
        place = Path("/proc", flag.read_text())
        until(lambda: not place.exists(), "the job's process has ended")
        flag.unlink()
        endless = "settings = Settings(batch=64, rounds=100000, quorum=1.0, test_every=1000000)\n"
        (job / "job.py").write_text((job / "job.py").read_text() + endless)
        channel = pair.submit("h1", job, light=True)
        pair.in_training()
        place = Path("/proc", flag.read_text())
        assert place.exists()
        assert pair.leave("h2") == 0
        channel.close()
        assert not place.exists()
        pair.nothing_left("h2")
    finally:
        end_of(flag)


def end_of(flag: Path) -> None:
    """Kill the process of that number, if it is there still."""
    if flag.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(flag.read_text()), signal.SIGKILL)
