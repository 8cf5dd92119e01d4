# SPDX-License-Identifier: Apache-2.0
"""The processes that were started in a lab: started, found again, ended.

A process is the lab's if its environment carries NICPS_LAB=<lab> (descendants inherit it, however they detach
themselves), if the state file names it with its start time, or if it descends from such a process. No other process is
ever signalled. A pidfd makes sure that a number which the kernel has given to another process is not signalled either.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nicps.lab import enter, namespaces
from nicps.lab.errors import LabProblem
from nicps.lab.state import ProcessRecord

MARK = "NICPS_LAB"
TERM_GRACE_S = 5.0
KILL_GRACE_S = 10.0
_OURS = re.compile(r"(?:\S+ )*?(?:(?:-m nicps|(?:\S*/)?nicps) ([a-z]+)|-m (trainer))(?: .*)?")


@dataclass(frozen=True)
class Running:
    """A live process: `start` in clock ticks since boot, `netns` the identity of its namespace,
    `stopped` by SIGSTOP."""

    pid: int
    start: int
    parent: int
    command: str
    netns: tuple[int, int] | None
    marked: bool
    stopped: bool


def program(command: str) -> str:
    """The kind of a process: `agent` (`nicps join`), another command of ours, `trainer`; the first words of other
    commands.
    """
    found = _OURS.fullmatch(command)
    if found is None:
        return command[:40]
    return "agent" if found[1] == "join" else found[1] or found[2]


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none (or a zombie)."""
    found = _stat(pid)
    return found.start if found else None


def alive(process: ProcessRecord | Running) -> bool:
    """Whether that very process still runs."""
    return start_time(process.pid) == process.start


def stopped(process: Running) -> bool:
    """Whether that very process is stopped now."""
    found = _stat(process.pid)
    return found is not None and found.start == process.start and found.stopped


def environment(lab: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (ours by default) with the lab's mark."""
    return {**(os.environ if base is None else base), MARK: lab}


def launcher(netns: str, argv: Sequence[str], user: str | None = None) -> list[str]:
    """The command line of a process that enters `netns` and becomes `argv`."""
    identity = [] if user is None else ["--user", user]
    return [sys.executable, "-I", "-S", enter.__file__, netns, *identity, "--", *argv]


def start(
    lab: str, netns: str, argv: Sequence[str], user: str | None, options: dict[str, Any]
) -> subprocess.Popen[Any]:
    """Start `argv` inside `netns`, as a direct child with a session of its own.

    `options` go to Popen; `user` is the user that the command runs as (the launcher itself needs root).
    """
    options = {"start_new_session": True, **options}
    options["env"] = environment(lab, options.get("env"))
    return subprocess.Popen(launcher(netns, argv, user), **options)


def find(lab: str, recorded: Iterable[ProcessRecord] = ()) -> list[Running]:
    """The lab's live processes, without the caller and its ancestors."""
    everyone = {process.pid: process for process in _scan(f"{MARK}={lab}".encode())}
    known = {(record.pid, record.start) for record in recorded}
    ours = {
        process.pid
        for process in everyone.values()
        if process.marked or (process.pid, process.start) in known
    }
    grown = True
    while grown:
        children = {p.pid for p in everyone.values() if p.parent in ours and p.pid not in ours}
        ours |= children
        grown = bool(children)
    spared: int | None = os.getpid()
    while spared:
        ours.discard(spared)
        spared = everyone[spared].parent if spared in everyone else None
    return [everyone[pid] for pid in sorted(ours)]


def strangers(netns: Iterable[str], ours: Iterable[Running]) -> list[Running]:
    """Processes inside these namespaces that the lab did not start."""
    places = {namespaces.identity(enter.path_of(name)) for name in netns} - {None}
    known = {process.pid for process in ours}
    return [p for p in _scan(b"") if p.netns in places and p.pid not in known]


def end(
    lab: str,
    recorded: Sequence[ProcessRecord] = (),
    term_grace_s: float = TERM_GRACE_S,
    kill_grace_s: float = KILL_GRACE_S,
) -> list[Running]:
    """End the lab's processes: SIGTERM, after a grace SIGKILL. Returns those that were there."""
    ended: dict[tuple[int, int], Running] = {}
    begun = time.monotonic()
    while left := find(lab, recorded):
        waited = time.monotonic() - begun
        if waited > term_grace_s + kill_grace_s:
            process = left[0]
            raise LabProblem(
                f"process {process.pid} ({process.command}) of lab {lab} does not end, "
                "not even by SIGKILL; see what it waits for, then run `nicps lab down` again"
            )
        forced = waited >= term_grace_s
        deadline = begun + term_grace_s + (kill_grace_s if forced else 0.0)
        fresh = [p for p in left if forced or (p.pid, p.start) not in ended]
        ended.update({(process.pid, process.start): process for process in left})
        _signal(fresh, left, signal.SIGKILL if forced else signal.SIGTERM, deadline)
    return list(ended.values())


def _signal(
    fresh: Sequence[Running], left: Sequence[Running], number: signal.Signals, deadline: float
) -> None:
    """Signal the fresh ones, and wait for any of those left to end, until the deadline."""
    with _opened(left) as fds:
        for fd, process in fds.items():
            if process in fresh:
                _send(fd, number)
                _send(fd, signal.SIGCONT)
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        # Wake at intervals even if none ends: one may have started another meanwhile.
        remaining = deadline - time.monotonic()
        while fds and remaining > 0:
            if poll.poll(min(remaining, 0.5) * 1000):
                break
            remaining = deadline - time.monotonic()


def send(chosen: Sequence[Running], number: signal.Signals) -> None:
    """Signal these very processes, in their order; those that have ended are left out."""
    with _opened(chosen) as fds:
        for fd in fds:
            _send(fd, number)


@contextlib.contextmanager
def _opened(chosen: Iterable[Running]) -> Iterator[dict[int, Running]]:
    """A pidfd for each that still runs."""
    fds: dict[int, Running] = {}
    try:
        for process in chosen:
            try:
                fd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            fds[fd] = process
            if not alive(process):
                os.close(fd)
                del fds[fd]
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _send(fd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, number)


@dataclass(frozen=True)
class _Stat:
    parent: int
    start: int
    stopped: bool


def _stat(pid: int) -> _Stat | None:
    """The kernel's description of a live process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself.
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return _Stat(int(fields[1]), int(fields[19]), fields[0] == b"T")


def _scan(mark: bytes) -> list[Running]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        stat = _stat(pid)
        if stat is None:
            continue
        try:
            marked = bool(mark) and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        netns = namespaces.identity(f"/proc/{pid}/ns/net")
        command = b" ".join(words).decode(errors="replace")
        found.append(Running(pid, stat.start, stat.parent, command, netns, marked, stat.stopped))
    return found
