# SPDX-License-Identifier: Apache-2.0
"""Processes that the agent starts: it learns of their ends, and waits for none of them."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps.agent import children, process
from nicps.agent.children import Children
from nicps.agent.loop import Loop
from nicps.agent.process import Child, User
from nicps.errors import EnvironmentProblem

#: A program whose end goes to its child first, which is in a session of its own. PR_SET_PTRACER, PTRACE_SEIZE.
TRACED = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
read, write = os.pipe()
traced = os.getpid()
if os.fork() == 0:
    os.setsid()
    if libc.ptrace(0x4206, traced, None, None):
        os._exit(ctypes.get_errno())
    os.write(write, b"%d" % os.getpid())
    time.sleep(60)
    os._exit(0)
with open("tracer.new", "wb") as file:
    file.write(os.read(read, 20))
os.rename("tracer.new", "tracer")
"""
SLEEPS = "import time; time.sleep(60)"


class Host:
    """As much of an agent as its processes need; `codes` are those it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.codes: list[int] = []
        self.loop = Loop(lambda error: None)
        self.user = User("us", os.getuid(), pwd.getpwuid(os.getuid()).pw_gid)
        self.now = time.monotonic()
        self.children = Children(
            self.user, self.loop, lambda: self.now, lambda connection, uid: None
        )

    def starts(self, program: str, **options: Any) -> Child:
        argv = [sys.executable, "-S", "-c", program]
        log = self.folder / "log"
        return self.children.spawn(
            argv, self.folder, log, self.codes.append, network_access=True, **options
        )

    def steps(self) -> None:
        """As the agent's loop does; none of it may take long."""
        events = self.loop.wait(0.01)
        self.now = time.monotonic()
        self.loop.handle(events)
        self.children.tick(self.now)
        assert time.monotonic() < self.now + 1.0

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, (what, (self.folder / "log").read_text())
            self.steps()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.children.close()
    made.loop.drain()
    made.loop.close()


@pytest.fixture
def tracer(host: Host) -> Iterator[Callable[[], int]]:
    """Its process number, once it traces."""
    path = host.folder / "tracer"

    def number() -> int:
        host.until(path.exists, "it is traced")
        return int(path.read_text())

    yield number
    if path.exists():
        os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("program", "code"), [("raise SystemExit(3)", 3), ("", 0)])
def test_the_exit_code_is_told_once(host: Host, program: str, code: int) -> None:
    host.starts(program)
    host.until(lambda: host.codes, "it has ended")
    host.steps()
    assert host.codes == [code]


def test_who_is_ended_tells_nobody(host: Host) -> None:
    child = host.starts(SLEEPS)
    host.children.end(child)
    gone: list[bool] = []
    host.children.once_gone(lambda: gone.append(True))
    host.until(lambda: gone, "it is gone")
    assert not host.codes and child.reap() == -signal.SIGKILL


@pytest.fixture
def slow(host: Host, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine so busy that a process does not begin before there is this file, or 10 s have passed."""
    go = host.folder / "go"

    def wait(user: User | None, network_access: bool) -> None:
        until = time.monotonic() + 10.0
        while not go.exists() and time.monotonic() < until:
            time.sleep(0.01)
        (host.folder / "begun").touch()

    monkeypatch.setattr(process, "_before_exec", wait)
    return go


def test_nobody_waits_until_a_process_has_begun(host: Host, slow: Path) -> None:
    """Others would evict a host that stands still."""
    host.starts("raise SystemExit(3)")
    host.steps()
    assert not (host.folder / "begun").exists()
    slow.touch()
    host.until(lambda: host.codes, "it has ended")
    assert host.codes == [3]


def test_who_has_not_begun_can_be_ended(host: Host, slow: Path) -> None:
    child = host.starts(SLEEPS)
    host.children.end(child)
    gone: list[bool] = []
    host.children.once_gone(lambda: gone.append(True))
    host.until(lambda: gone, "it is gone")
    assert child.reap() == -signal.SIGKILL and not (host.folder / "begun").exists()


def test_what_cannot_be_begun_ends_and_says_why(host: Host) -> None:
    log = host.folder / "log"
    argv = ["/no/such/program"]
    child = host.children.spawn(argv, host.folder, log, host.codes.append, network_access=True)
    host.until(lambda: host.codes, "it has ended")
    assert host.codes == [EnvironmentProblem.exit_code]
    assert child.failure.startswith("user 'us' cannot run /no/such/program: [Errno 2] No such file")
    assert child.last_line() == child.reported_error() == child.failure


def test_nobody_is_waited_for_where_nobody_was_ended(host: Host) -> None:
    host.starts(SLEEPS)
    gone: list[bool] = []
    host.children.once_gone(lambda: gone.append(True))
    assert gone


def test_who_takes_too_long_is_killed(host: Host) -> None:
    host.starts(SLEEPS, limit_s=0.2)
    host.until(lambda: host.codes, "it is killed")
    assert host.codes == [-signal.SIGKILL]


LEAVES = """
import os, time
if os.fork() == 0:
    with open("left.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("left.new", "left")
    time.sleep(60)
while not os.path.exists("left"):
    time.sleep(0.01)
"""


def test_what_a_program_leaves_in_its_session_is_ended(host: Host) -> None:
    host.starts(LEAVES)
    host.until(lambda: host.codes, "it has ended")
    left = int((host.folder / "left").read_text())
    host.until(lambda: not runs(left), "what it left is ended")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- a program whose end another process is told first


def test_a_traced_program_is_ended_without_waiting(host: Host, tracer: Callable[[], int]) -> None:
    child = host.starts(TRACED + SLEEPS)
    number = tracer()
    host.children.end(child)
    gone: list[bool] = []
    host.children.once_gone(lambda: gone.append(True))
    host.until(lambda: gone, "it is gone")
    assert runs(number) and child.reap() is None
    os.kill(number, signal.SIGKILL)
    host.until(lambda: child.reap() is not None, "its end is told at last")


def test_a_traced_program_that_ends_is_taken_for_killed(
    host: Host, tracer: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_END_LIMIT_S", 0.5)
    host.starts(TRACED)
    number = tracer()
    host.until(lambda: host.codes, "it is taken for killed")
    assert runs(number) and host.codes == [-signal.SIGKILL]


def test_a_tracer_that_ends_first_keeps_nothing(host: Host, tracer: Callable[[], int]) -> None:
    """As with a debugger."""
    host.starts(TRACED + "raise SystemExit(3)")
    os.kill(tracer(), signal.SIGKILL)
    host.until(lambda: host.codes, "its end is told")
    assert host.codes == [3]


def test_an_agent_ends_beside_a_tracer(host: Host, tracer: Callable[[], int]) -> None:
    child = host.starts(TRACED + SLEEPS)
    tracer()
    host.children.end(child)
    then: list[bool] = []
    host.children.once_gone(lambda: then.append(True))
    started = time.monotonic()
    host.children.close()
    assert time.monotonic() < started + 4.0 and then


# ---- processes that detach themselves


#: Forks once, and then so often again; the last one, in a session of its own, writes down its number.
DETACHES = """
import os, time
def detached(times):
    for _ in range(times):
        if os.fork():
            os._exit(0)
        os.setsid()
    with open("left.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("left.new", "left")
    time.sleep(60)
if os.fork() == 0:
    detached(TIMES)
while not os.path.exists("left"):
    time.sleep(0.01)
"""
#: For as long as it can: a new process, whose parent ends.
#: An agent has more of the processor than its programs, too.
FLEES = """
import os
os.nice(10)
if os.fork() == 0:
    while True:
        os.setsid()
        if os.fork():
            os._exit(0)
        with open("fled", "a") as file:
            file.write(f"{os.getpid()}\\n")
import time
while not os.path.exists("fled"):
    time.sleep(0.01)
"""


@pytest.fixture
def adopting(host: Host) -> Iterator[Host]:
    """As `nicps join`, which is an agent and nothing else."""
    host.children.adopt()
    yield host
    host.children.close()


def left_by(host: Host) -> int:
    path = host.folder / "left"
    host.until(path.exists, "it has detached itself")
    return int(path.read_text())


@pytest.mark.parametrize("times", [1, 3])
def test_what_detaches_itself_is_ended_with_its_program(adopting: Host, times: int) -> None:
    adopting.starts(f"TIMES = {times}" + DETACHES)
    left = left_by(adopting)
    adopting.until(lambda: adopting.codes, "the program has ended")
    gone: list[bool] = []
    adopting.children.once_gone(lambda: gone.append(True))
    adopting.until(lambda: gone, "it is ended")
    assert not Path(f"/proc/{left}").exists(), "not even as a zombie"


def test_what_flees_is_caught(adopting: Host) -> None:
    adopting.starts(FLEES)
    adopting.until(lambda: adopting.codes, "the program has ended")
    gone: list[bool] = []
    adopting.children.once_gone(lambda: gone.append(True))
    adopting.until(lambda: gone, "it is ended")
    fled = adopting.folder / "fled"
    size = fled.stat().st_size
    adopting.steps()
    assert fled.stat().st_size == size
    assert not runs(int(fled.read_text().split()[-1]))


def test_an_agents_end_is_theirs(adopting: Host) -> None:
    adopting.starts("TIMES = 2" + DETACHES + SLEEPS)
    left = left_by(adopting)
    adopting.children.close()
    assert not Path(f"/proc/{left}").exists()


def test_the_operators_processes_are_left_alone(host: Host) -> None:
    """What was there before the agent, and what could gain privileges, which no process of a job's can."""
    sleeps = [sys.executable, "-S", "-c", SLEEPS]
    before = subprocess.Popen(sleeps, start_new_session=True)
    host.children.adopt()
    later = subprocess.Popen(sleeps, start_new_session=True)
    try:
        host.starts("TIMES = 1" + DETACHES)
        left = left_by(host)
        host.until(lambda: not Path(f"/proc/{left}").exists(), "it is ended")
        assert runs(before.pid) and runs(later.pid)
    finally:
        host.children.close()
        for program in (before, later):
            program.kill()
            program.wait()


def test_zombies_of_others_are_reaped(adopting: Host) -> None:
    """Such as those of an alarm's hook."""
    before = children_of_ours()
    script = "import os, time; os.fork() or time.sleep(0.2)"
    subprocess.run([sys.executable, "-S", "-c", script], check=True)
    assert len(children_of_ours() - before) == 1
    child = adopting.starts(SLEEPS)
    adopting.until(lambda: children_of_ours() - before == {child.pid}, "only the program is left")


def children_of_ours() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
