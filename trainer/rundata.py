# SPDX-License-Identifier: Apache-2.0
"""A run's records as the report needs them: all hosts' rounds and token times on one clock."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import JobError

Row = dict[str, Any]
SAME_CLOCK_S = 0.25
MOMENTS = ("t_start", "t_offer", "t_commit", "t_end")


@dataclass(frozen=True)
class Host:
    """One host's records. `rounds`: lines of metrics.jsonl; `token`: lines of timeline.jsonl (t0, t1,
    kind "hold", "send" or "repair", round). Times are seconds since the run's first round began."""

    name: str
    number: int
    rounds: list[Row]
    token: list[Row]
    agent: Row

    def seconds(self, what: str) -> float:
        """Sum of `seconds_<what>` over all rounds."""
        return float(sum(row[f"seconds_{what}"] for row in self.rounds))

    def in_window(self, first: float, last: float) -> tuple[list[Row], list[Row]]:
        """Rounds and token times that overlap with a window of time."""
        return (
            [row for row in self.rounds if row["t_end"] > first and row["t_start"] < last],
            [row for row in self.token if row["t1"] > first and row["t0"] < last],
        )


@dataclass(frozen=True)
class Run:
    """A run: its result (result.json, empty if it did not get that far) and its hosts in order."""

    folder: Path
    result: Row
    hosts: list[Host]
    seconds: float
    rounds: list[Row] = field(default_factory=list)
    """Every round once: the row of the first host that was there."""
    training: list[Row] = field(default_factory=list)
    """Per committed training round: round, loss (mean over the members' samples), samples."""
    tests: list[Row] = field(default_factory=list)
    """Per test: round, accuracy."""

    @property
    def title(self) -> str:
        """The data's name, or the folder's."""
        return str(self.result.get("data") or self.folder.name)


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
    raw = [(name, _lines(folder / name / "metrics.jsonl")) for name in names]
    raw = [(name, rows) for name, rows in raw if rows]
    if not raw:
        raise JobError(f"{folder} holds no HOST/metrics.jsonl with a round in it: nothing to draw")
    shifts = clock_shifts([rows for _, rows in raw])
    zero = min(
        row["t_start"] - shift for (_, rows), shift in zip(raw, shifts, strict=True) for row in rows
    )
    hosts = []
    for (name, rows), ahead in zip(raw, shifts, strict=True):
        shift = zero + ahead
        token = _lines(folder / name / "timeline.jsonl")
        for row in rows:
            row.update((key, row[key] - shift) for key in MOMENTS)
        for row in token:
            row.update(t0=row["t0"] - shift, t1=row["t1"] - shift)
        agent = _json(folder / name / "agent.json")
        hosts.append(Host(name, names.index(name) + 1, rows, token, agent))
    end = max(row["t_end"] for host in hosts for row in host.rounds)
    first = {row["round"]: row for host in reversed(hosts) for row in host.rounds}
    rounds = [first[number] for number in sorted(first)]
    return Run(folder, result, hosts, end, rounds, _training(hosts, rounds), _tests(rounds))


def clock_shifts(hosts: list[list[Row]]) -> list[float]:
    """How far each host's clock is ahead of one of theirs, in seconds.

    All see a round's commit at the same time, except those that are computing just then and see it
    late. So the host that waited most is the measure, and of the differences the low ones count.
    """
    waited = [sum(row["seconds_wait"] for row in rows) for rows in hosts]
    measure = hosts[waited.index(max(waited))]
    commits = {row["round"]: row["t_commit"] for row in measure}
    shifts = []
    for rows in hosts:
        ahead = sorted(row["t_commit"] - commits[row["round"]] for row in rows
                       if row["round"] in commits)  # fmt: skip
        shifts.append(ahead[len(ahead) // 10] if ahead else 0.0)
    # The clocks of two machines, which count from their starts, are never as near as that.
    return [0.0] * len(hosts) if max(map(abs, shifts)) < SAME_CLOCK_S else shifts


def _training(hosts: list[Host], rounds: list[Row]) -> list[Row]:
    losses: dict[int, list[tuple[float, int]]] = {}
    for host in hosts:
        for row in host.rounds:
            if row["phase"] == "train" and row["loss"] is not None:
                samples = max(1, row.get("own_samples") or 0)
                losses.setdefault(row["round"], []).append((row["loss"], samples))
    return [
        {
            "round": row["round"],
            "samples": row["samples"],
            "loss": sum(loss * n for loss, n in own) / sum(n for _, n in own),
        }
        for row in rounds
        if (own := losses.get(row["round"])) and row["phase"] == "train"
    ]


def _tests(rounds: list[Row]) -> list[Row]:
    return [
        {"round": row["round"], "accuracy": row["accuracy"]}
        for row in rounds
        if row["phase"] == "test"
    ]


def _json(path: Path) -> Row:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> list[Row]:
    """A .jsonl file's lines; the last may be cut off where a host was."""
    rows = []
    try:
        for line in path.read_text().splitlines():
            rows.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return rows
