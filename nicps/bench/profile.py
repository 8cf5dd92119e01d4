# SPDX-License-Identifier: Apache-2.0
"""How a round's processor time is divided: by mode of the machine, by process, and by BPF program."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nicps.dataplane import bpf

#: Of the clocks that the kernel has for each process, the one in nanoseconds (linux/posix-timers.h).
_CPUCLOCK_SCHED = 2
#: Columns of /proc/stat.
_MODES = {"user": (0, 1), "system": (2,), "softirq": (6,), "irq": (5,), "steal": (7,)}
Amounts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """Of a round, the mean of those counted.

    Attributes:
        machine: seconds of all processors by mode, idle ones left out. The kernel samples modes a hundred times a
            second, so only the mean of many rounds is meaningful.
        bpf_seconds, bpf_runs: by program, of all the engine's agents together. The kernel counts a tail call as its
            caller: so the time of `nicps_stripes` is in that of `nicps_xdp`.
    """

    machine: Amounts
    bpf_seconds: Amounts
    bpf_runs: Amounts


@dataclass
class Profiler:
    """Adds up the time between `begin` and `end`: of these programs, and of the whole machine's modes."""

    _programs: Sequence[tuple[str, int]]
    _machine: Amounts = field(default_factory=dict)
    _seconds: Amounts = field(default_factory=dict)
    _runs: Amounts = field(default_factory=dict)

    def begin(self) -> None:
        """A round begins."""
        self._add(-1)

    def end(self) -> None:
        """A round has ended."""
        self._add(1)

    def _add(self, sign: int) -> None:
        for mode, seconds in _read_modes().items():
            self._machine[mode] = self._machine.get(mode, 0.0) + sign * seconds
        for name, fd in self._programs:
            run_ns, runs = bpf.program_run_time(fd)
            self._seconds[name] = self._seconds.get(name, 0.0) + sign * run_ns * 1e-9
            self._runs[name] = self._runs.get(name, 0.0) + sign * runs

    def profile(self, rounds: int) -> Profile:
        """The mean of so many."""
        return Profile(*(_mean(a, rounds) for a in (self._machine, self._seconds, self._runs)))


@contextlib.contextmanager
def statistics() -> Iterator[None]:
    """In this context the kernel measures every run of a BPF program."""
    fd = bpf.enable_statistics()
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def profiler(agents: Sequence[int]) -> Iterator[Profiler]:
    """A profiler for the programs that these processes have open."""
    with contextlib.ExitStack() as stack:
        programs = []
        for ident in sorted({ident for pid in agents for ident in _program_ids(pid)}):
            fd = bpf.open_program(ident)
            stack.callback(os.close, fd)
            programs.append((bpf.program_info(fd).name, fd))
        yield Profiler(programs)


def _program_ids(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if found := re.search(r"^prog_id:\s*(\d+)$", path.read_text(), re.M):
                yield int(found[1])


def processor_seconds(pids: Sequence[int]) -> dict[int, float]:
    """Seconds on a processor of each of these processes that has not ended, with ended threads, and interrupts that
    came meanwhile."""
    seconds = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            seconds[pid] = time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # clock_getcpuclockid(3)
    return seconds


def seconds_since(before: Mapping[int, float]) -> float:
    """The time that the processes of `processor_seconds` have taken since; one that has ended meanwhile does not
    count.
    """
    now = processor_seconds(list(before))
    return sum(now[pid] - before[pid] for pid in now)


def _read_modes() -> Amounts:
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    hertz = os.sysconf("SC_CLK_TCK")
    return {mode: sum(ticks[at] for at in columns) / hertz for mode, columns in _MODES.items()}


def _mean(amounts: Amounts, rounds: int) -> Amounts:
    return {name: float(f"{amount / rounds:.4g}") for name, amount in amounts.items()}
