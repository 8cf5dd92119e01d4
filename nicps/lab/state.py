# SPDX-License-Identifier: Apache-2.0
"""The state of a lab outside the process that made it: /run/nicps/labs/<name>.json.

Written whole and renamed into place, under one lock for all labs. The file is only a help: a lab whose file is missing
or damaged is still found, and removed, by its namespaces.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nicps.errors import UsageProblem
from nicps.lab.settings import LabSettings

LABS_DIR = Path("/run/nicps/labs")
VERSION = 2


@dataclass(frozen=True)
class ProcessRecord:
    """A process that the lab started; `start` (clock ticks since boot) tells it from a later one
    with the same number."""

    pid: int
    start: int
    host: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class LabState:
    """`ready` is False while `up` works. The maps are the kernel's ids of the ports' settings and counts; None
    until the first fault. `scratch` is a folder that goes with the lab. `switch` has the last further arguments of
    `nicps switch xdp run`.
    """

    settings: LabSettings
    ready: bool = False
    faults_map: int | None = None
    counts_map: int | None = None
    processes: tuple[ProcessRecord, ...] = ()
    scratch: Path | None = None
    switch: tuple[str, ...] = ()


@contextmanager
def lock() -> Iterator[None]:
    """Hold all labs' state exclusively; the kernel releases it when the holder dies."""
    LABS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(LABS_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def path_of(name: str) -> Path:
    """The lab's state file."""
    return LABS_DIR / f"{name}.json"


def switch_log(name: str) -> Path:
    """The output of the lab's switch, if it adds."""
    return LABS_DIR / f"{name}.switch.log"


def names() -> list[str]:
    """Every lab that has a state file."""
    return sorted(path.stem for path in LABS_DIR.glob("[!.]*.json"))


def read(name: str) -> LabState | None:
    """The lab's state; None if there is none, or it cannot be read."""
    try:
        raw = json.loads(path_of(name).read_bytes())
        if raw["version"] != VERSION:
            return None
        return LabState(
            settings=LabSettings(**raw["settings"]),
            ready=bool(raw["ready"]),
            faults_map=raw["faults_map"],
            counts_map=raw["counts_map"],
            processes=tuple(
                ProcessRecord(int(p["pid"]), int(p["start"]), str(p["host"]), tuple(p["argv"]))
                for p in raw["processes"]
            ),
            scratch=Path(raw["scratch"]) if raw.get("scratch") else None,
            switch=tuple(raw.get("switch", ())),
        )
    except (OSError, ValueError, KeyError, TypeError, UsageProblem):
        return None


def write(state: LabState) -> None:
    """Put the state into place, whole or not at all."""
    path = path_of(state.settings.name)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    document = {
        "version": VERSION,
        "settings": asdict(state.settings),
        "ready": state.ready,
        "faults_map": state.faults_map,
        "counts_map": state.counts_map,
        "processes": [asdict(process) for process in state.processes],
        "scratch": str(state.scratch) if state.scratch else None,
        "switch": state.switch,
    }
    draft.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(draft, path)


def remove(name: str) -> None:
    """Remove the lab's state, and drafts that a killed process left."""
    path = path_of(name)
    for leftover in (path, switch_log(name), *LABS_DIR.glob(f".{path.name}.*")):
        leftover.unlink(missing_ok=True)


def add_process(name: str, record: ProcessRecord, keep: Callable[[ProcessRecord], bool]) -> None:
    """Note a process; earlier ones are kept if `keep` returns true for them."""
    with lock():
        state = read(name)
        if state is not None:
            kept = tuple(filter(keep, state.processes))
            write(replace(state, processes=(*kept, record)))
