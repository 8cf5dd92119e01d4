# SPDX-License-Identifier: Apache-2.0
"""A run's records as the report needs them: all hosts' rounds and token times on one clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.clocks import Clock, clock_shifts
from trainer.errors import JobError
from trainer.figures import MOMENTS, Row, is_timed, read_row

TOKEN_KINDS = ("hold", "send", "repair")


@dataclass(frozen=True)
class Host:
    """One host's records. `rounds`: what metrics.jsonl says (`figures.read_row`); `token`: lines of timeline.jsonl
    (t0, t1, kind, round). Times are seconds since the run's first round began."""

    name: str
    number: int
    rounds: list[Row]
    token: list[Row]
    agent: Row

    @property
    def timed(self) -> list[Row]:
        """The rounds of which it is known when they were."""
        return [row for row in self.rounds if is_timed(row)]

    def seconds(self, what: str) -> float:
        """Sum of `seconds_<what>` over all rounds."""
        return float(sum(row[f"seconds_{what}"] for row in self.rounds))

    def in_window(self, first: float, last: float) -> tuple[list[Row], list[Row]]:
        """Rounds and token times that overlap with a window of time."""
        return (
            [row for row in self.timed if row["t_end"] > first and row["t_start"] < last],
            [row for row in self.token if row["t1"] > first and row["t0"] < last],
        )


@dataclass(frozen=True)
class Run:
    """A run: its result (result.json, empty if it did not get that far) and its hosts in order.

    `seconds` is 0 where no host says when its rounds were.
    """

    folder: Path
    result: Row
    hosts: list[Host]
    seconds: float
    rounds: list[Row] = field(default_factory=list)
    """Every round once: the row of the first host that was there."""
    losses: list[Row] = field(default_factory=list)
    """Per training round of which a loss is known: round, loss (mean over the members' samples)."""
    tests: list[Row] = field(default_factory=list)
    """Per test: round, accuracy."""

    @property
    def title(self) -> str:
        """The data's name, or the folder's."""
        return str(self.result.get("data") or self.folder.name)

    @property
    def training(self) -> list[Row]:
        """The training rounds."""
        return [row for row in self.rounds if row["phase"] == "train"]


def read(folder: Path) -> Run:
    """Read RUN_DIR; hosts' clocks are laid over each other at the commits, which all see at once.

    Raises:
        JobError: there are no records.
    """
    if not folder.is_dir():
        raise JobError(f"no such run: {folder}")
    result = _json(folder / "result.json")
    names = [name for name in result.get("members", []) if (folder / name).is_dir()]
    names += sorted(
        path.parent.name for path in folder.glob("*/metrics.jsonl") if path.parent.name not in names
    )
    raw = [(name, list(_rounds(folder / name / "metrics.jsonl"))) for name in names]
    raw = [(name, rows) for name, rows in raw if rows]
    if not raw:
        raise JobError(f"{folder} holds no HOST/metrics.jsonl with a round in it: nothing to draw")
    shifts = clock_shifts([_clock(rows) for _, rows in raw])
    starts = (
        row["t_start"] - (shift or 0.0)
        for (_, rows), shift in zip(raw, shifts, strict=True)
        for row in rows
        if is_timed(row)
    )
    zero = min(starts, default=0.0)
    hosts = []
    for (name, rows), ahead in zip(raw, shifts, strict=True):
        shift = zero + (ahead or 0.0)
        for row in filter(is_timed, rows):
            row.update((key, row[key] - shift) for key in MOMENTS)
        timed = any(map(is_timed, rows))
        token = list(_token(folder / name / "timeline.jsonl", shift)) if timed else []
        agent = _json(folder / name / "agent.json")
        hosts.append(Host(name, names.index(name) + 1, rows, token, agent))
    end = max((row["t_end"] for host in hosts for row in host.timed), default=0.0)
    first = {row["round"]: row for host in reversed(hosts) for row in host.rounds}
    rounds = [first[number] for number in sorted(first)]
    return Run(folder, result, hosts, end, rounds, _losses(hosts), _tests(rounds))


def _clock(rows: list[Row]) -> Clock:
    commits = {row["round"]: row["t_commit"] for row in rows if is_timed(row)}
    return Clock(commits, sum(row["seconds_wait"] for row in rows))


def _losses(hosts: list[Host]) -> list[Row]:
    losses: dict[int, list[tuple[float, int]]] = {}
    for host in hosts:
        for row in host.rounds:
            if row["phase"] == "train" and row["loss"] is not None:
                losses.setdefault(row["round"], []).append((row["loss"], row["own_samples"] or 1))
    return [
        {"round": round_, "loss": sum(loss * n for loss, n in own) / sum(n for _, n in own)}
        for round_, own in sorted(losses.items())
    ]


def _tests(rounds: list[Row]) -> list[Row]:
    return [
        {"round": row["round"], "accuracy": row["accuracy"]}
        for row in rounds
        if row["phase"] == "test" and row["accuracy"] is not None
    ]


def _json(path: Path) -> Row:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _rounds(path: Path) -> Iterator[Row]:
    for line in _lines(path):
        row = read_row(line)
        if row is not None:
            yield row


def _token(path: Path, shift: float) -> Iterator[Row]:
    for row in _lines(path):
        if row.get("kind") in TOKEN_KINDS:
            yield row | {"t0": row["t0"] - shift, "t1": row["t1"] - shift}


def _lines(path: Path) -> Iterator[Any]:
    """A .jsonl file's lines; what cannot be read is left out, as the last line of a host that was cut off."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    continue
    except OSError:
        return
