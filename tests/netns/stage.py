# SPDX-License-Identifier: Apache-2.0
"""A lab of agents whose training programs record their offers and sums."""

from __future__ import annotations

import contextlib
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nicps.auth import write_key
from nicps.lab import LabSettings
from nicps.lab.processes import Running
from tests.netns.labs import ROOT
from tests.netns.members import LIGHT, Network

SUMMING = ROOT / "tests" / "netns" / "summing_trainer.py"


@dataclass
class Stage(Network):
    """A lab whose training programs record all offers and sums. Hosts in `away` have no agent yet.

    `program` is LIGHT, or RECORDING where the scene is about PyTorch's own tensors.
    """

    keyed: bool = False
    away: set[str] = field(default_factory=set)
    rate_bps: int | None = None
    program: Path | None = LIGHT

    def __post_init__(self) -> None:
        super().__post_init__()
        self.key = self.folder / "key"
        if self.keyed:
            write_key(self.key)
            if self.box is not None:
                self.box.key = self.folder / "switch.key"
                write_key(self.box.key)
        self.clear()

    def lab_settings(self) -> LabSettings:
        return replace(super().lab_settings(), rate_bps=self.rate_bps)

    @property
    def names(self) -> list[str]:
        return [name for name in super().names if name not in self.away]

    def ready(self) -> None:
        with contextlib.suppress(AssertionError, KeyError):
            if all(self.agents[host].process.poll() is None for host in self.names):
                self.all_stand_by(timeout_s=5.0)
                return
        # All at once: a job that is under way would go on with the hosts that are left.
        for host in self.names:
            self.end(host, signal.SIGKILL)
        super().ready()

    def clear(self) -> None:
        """Forget the records."""
        if self.box is not None:
            self.box.forget()
        for host in super().names:
            place = self.records(host)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o777)

    def records(self, host: str) -> Path:
        """The records of that host's training programs."""
        return self.folder / "records" / host

    def more_arguments(self, host: str) -> list[str]:
        more = super().more_arguments(host)
        return [*more, "--key", str(self.key)] if self.keyed else more

    def program_arguments(self, host: str) -> list[Path]:
        return [self.records(host)]

    def recorded(self) -> dict[int, dict[int, dict[str, Any]]]:
        """That, by round and member number; of a round without a sum there are the offers only."""
        rounds: dict[int, dict[int, dict[str, Any]]] = {}
        for host in self.names:
            for path in sorted(self.records(host).glob("[0-9]*.npz")):  # offers first
                with np.load(path) as saved:
                    of = rounds.setdefault(int(path.name.split(".")[0]), {})
                    of.setdefault(int(saved["number"]), {}).update(saved)
        return rounds

    def offers_and_sums(self) -> dict[int, tuple[dict[int, Any], dict[int, Any]]]:
        """What is recorded, by round, each by member number."""
        rounds: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        for host in self.names:
            for path in self.records(host).glob("[0-9]*.npz"):
                round_, what, _ = path.name.split(".")
                with np.load(path) as file:
                    saved = dict(file)
                both = rounds.setdefault(int(round_), ({}, {}))
                both[what == "sum"][int(saved["number"])] = saved
        return rounds

    def boots(self) -> dict[int, int] | None:
        """Of a Linux switch that adds, if there is one: in which of its boots it has added for each view."""
        return self.box.boots() if self.box is not None else None

    def path(self, host: str, what: str) -> Path:
        """`place`, as the agent there sees it."""
        return self.place(host, what)

    def agent(self, host: str) -> Running:
        """The process of the agent there."""
        (found,) = [p for p in self.lab.processes()[host] if " join " in p.command]
        return found
