# SPDX-License-Identifier: Apache-2.0
"""Training programs of agents that tests start begin with PyTorch imported: its import is most of their processor time.

A warm agent (`tests/netns/warm.py`) forks a *stem* before it does anything else. The stem has PyTorch and the trainer
in memory and waits. For `python -m trainer ...`, and for the tests' own training programs, it makes a copy of itself,
which becomes what the agent would have made: streams, descriptors, session, user, namespaces, environment and command
line are the same. The copy is a child of the agent (CLONE_PARENT), not of the stem, so the agent's own killing and
reaping apply to it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from nicps.agent import process
from nicps.startup import permanent

STEM = "stem"  # its command line
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # the number of the system call
_CLONE_PARENT = 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_MODULE = "trainer"
_MOST = 1 << 16  # bytes of a request
_DESCRIPTORS = 16  # of a request, at most
_ANSWER_S = 10.0
_ABOVE = 1 << 10  # descriptors that wait for their place lie here
_python = ctypes.PyDLL(None)  # it keeps the interpreter's lock, also across a clone


def import_all() -> None:
    """Import what the trainer and the jobs that ship need."""
    from trainer import startup

    startup.import_torch()
    with permanent():
        for name in ("check", "prepare", "run"):
            importlib.import_module(f"trainer.{name}")
        for name in ("safetensors.torch", "sklearn.datasets"):
            importlib.import_module(name)


def grow_stem(show: Callable[[Sequence[str]], None]) -> None:
    """In the agent, before it has opened anything: its training programs come from a stem from now on.

    Args:
        show: writes a command line where the kernel shows this process's own.
    """
    if _CLONE is None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent, stem = os.getpid(), os.fork()
    if stem == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the agent
        _python.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == agent:
            show([STEM])
            _serve(theirs, show)
        os._exit(0)
    theirs.close()
    ours.settimeout(_ANSWER_S)
    process.start = partial(_start, process.start, ours, stem)  # type: ignore[assignment]


def _start(
    cold: Callable[..., tuple[int, int]],
    stem: socket.socket,
    pid: int,
    argv: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    fds: Sequence[int],
    user: process.User | None,
    network_access: bool,
) -> tuple[int, int]:
    """As `start` of `nicps.agent.process`. A scene that kills or stops an agent's programs does so to its stem, too."""
    python, *words = argv
    trains = words[:3] == ["-P", "-m", _MODULE]
    of_tests = words[:1] == ["-P"] and Path(words[1]).parent == Path(__file__).parent
    if python == sys.executable and (trains or of_tests) and _waits(pid):
        request = {
            "argv": list(argv),
            "cwd": os.fspath(folder),
            "env": dict(environment),
            "places": [1, 2, *fds[2:]],
            "user": None if user is None else (user.name, user.uid, user.gid),
            "network_access": network_access,
        }
        with contextlib.suppress(ConnectionError):  # the stem is killed in this moment
            return _ask(stem, request, fds)
    return cold(argv, folder, environment, fds, user, network_access)


def _ask(stem: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> tuple[int, int]:
    failed, fails = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        sent = array.array("i", [*fds, fails])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)]
        stem.sendmsg([json.dumps(request).encode()], ancillary)
        if not (answer := stem.recv(64)):
            raise ConnectionResetError("the stem has gone")
        return int(answer), failed
    except OSError:
        os.close(failed)
        raise
    finally:
        os.close(fails)


def _waits(pid: int) -> bool:
    """Whether the process is there, and is not stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0]
    except OSError:
        return False
    return state in (b"R", b"S")


# ---- the stem's side


def _serve(requests: socket.socket, show: Callable[[Sequence[str]], None]) -> None:
    """Make a copy for each request until the agent has gone."""
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MOST, _DESCRIPTORS)
        if not data:
            return
        pid = _clone_to_parent()
        if pid == 0:
            _become(json.loads(data), fds, requests, show)
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def _clone_to_parent() -> int:
    """As os.fork, but the new process is a child of this one's parent."""
    _python.PyOS_BeforeFork()
    pid = int(_python.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    return pid


def _become(
    request: dict[str, Any],
    fds: Sequence[int],
    requests: socket.socket,
    show: Callable[[Sequence[str]], None],
) -> NoReturn:
    """In the copy: what the agent and the interpreter do before the program's own code runs."""
    waiting = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in fds]
    requests.detach()
    os.closerange(3, _ABOVE)
    *passed, fails = waiting
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for fd, place in zip(passed, request["places"], strict=True):
        os.dup2(fd, place)
        os.close(fd)
    show(request["argv"])
    os.setsid()
    try:
        user = process.User(*request["user"]) if request["user"] else None
        process._before_exec(user, request["network_access"])
        os.chdir(request["cwd"])
    except OSError as error:
        os.write(fails, str(error).encode())
        os._exit(255)
    _python.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # as exec does
    os.close(fails)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in request["env"]
    module, sys.argv = request["argv"][2] == "-m", request["argv"][2:]
    if module:
        sys.argv = sys.argv[1:]
        runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()
