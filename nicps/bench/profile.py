# SPDX-License-Identifier: Apache-2.0
"""Where the processors' time of a round goes: by mode of the machine, by process, and by BPF program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nicps.dataplane import bpf

#: Columns of /proc/stat.
_MODES = {"user": (0, 1), "system": (2,), "softirq": (6,), "irq": (5,), "steal": (7,)}
#: A tail call's time is the caller's: what `nicps_stripes` takes is in the time of `nicps_xdp`.
_PROGRAMS = ("nicps_xdp", "nicps_stripes", "nicps_egress", "lab_pass")

Amounts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """Of a round, mean of those counted.

    Attributes:
        machine: seconds of all processors by mode, idle ones left out. The kernel samples modes a hundred times a
            second, so that only many rounds together say something.
        bpf_seconds, bpf_runs: by program, of all hosts and ports together. `nicps_xdp` includes `nicps_stripes`, which
            it reaches by a tail call.
    """

    machine: Amounts
    bpf_seconds: Amounts
    bpf_runs: Amounts


@dataclass
class Profiler:
    """Adds up what passes between `begin` and `end`, of all that runs on this machine."""

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
def open_programs() -> Iterator[list[tuple[str, int]]]:
    """Names and descriptors of our loaded programs, whose runs the kernel measures in here."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, bpf.enable_statistics())
        programs = []
        for ident in bpf.program_ids():
            with contextlib.suppress(FileNotFoundError):  # it has just gone
                fd = bpf.open_program(ident)
                stack.callback(os.close, fd)
                if (name := bpf.program_info(fd).name) in _PROGRAMS:
                    programs.append((name, fd))
        yield programs


def processor_seconds(pids: Sequence[int]) -> float:
    """Seconds on a processor of all threads of these processes, interrupts that came meanwhile included."""
    total_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                total_ns += int(task.read_text().split()[0])
    return total_ns * 1e-9


def _read_modes() -> Amounts:
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    hertz = os.sysconf("SC_CLK_TCK")
    return {mode: sum(ticks[at] for at in columns) / hertz for mode, columns in _MODES.items()}


def _mean(amounts: Amounts, rounds: int) -> Amounts:
    return {name: float(f"{amount / rounds:.4g}") for name, amount in amounts.items()}
