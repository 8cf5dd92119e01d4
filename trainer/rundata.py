# SPDX-License-Identifier: Apache-2.0
"""A run's records as the report needs them: all hosts' rounds and token times on one clock."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.channels import KIND, flows_of, read_rounds
from trainer.clocks import Clock, clock_shifts
from trainer.errors import JobError
from trainer.events import Event, merge_events, with_tests
from trainer.figures import MOMENTS, Row, is_timed, read_row

TOKEN_KINDS = ("hold", "send", "repair")
COMMITS = ("commit", "test")
_NO_EVENTS = (*TOKEN_KINDS, "sums", "commit", KIND)
Files = tuple[list[Path], Path]


@dataclass(frozen=True)
class Host:
    """One host's records, of all its lives. `rounds`, and `pushes` to parameter servers: what metrics.jsonl says
    (`figures.read_row`); `token`: lines of timeline.jsonl (t0, t1, kind, round); `flows`, those of channels
    (`channels.flows_of`). Times are seconds since the run's first round began."""

    name: str
    number: int
    rounds: list[Row]
    token: list[Row]
    agent: Row
    pushes: list[Row] = field(default_factory=list)
    flows: list[Row] = field(default_factory=list)

    @property
    def timed(self) -> list[Row]:
        """The rounds and pushes of which it is known when they were."""
        return [row for row in (*self.rounds, *self.pushes) if is_timed(row)]

    def seconds(self, what: str) -> float:
        """Sum of `seconds_<what>` over all rounds and pushes."""
        return float(sum(row[f"seconds_{what}"] for row in (*self.rounds, *self.pushes)))

    def in_window(self, first: float, last: float) -> tuple[list[Row], list[Row], list[Row]]:
        """Rounds, token times, and channels' rounds that overlap with a window of time."""
        return (
            [row for row in self.timed if row["t_end"] > first and row["t_start"] < last],
            [row for row in self.token if row["t1"] > first and row["t0"] < last],
            [row for row in self.flows if row["t1"] > first and row["t0"] < last],
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
    events: list[Event] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The data's name; without a result the job's, as the run's name has it between a date and four digits."""
        parts = re.fullmatch(r"\d{8}-\d{6}-(.+)-[0-9a-f]{4}", self.folder.name)
        return str(self.result.get("data") or (parts[1] if parts else self.folder.name))

    @property
    def served(self) -> bool:
        """Whether servers held the parameters: a round of the network is a synchronisation then."""
        return str(self.result.get("system", "R")) != "R"

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
    names += sorted({path.parent.name for path in folder.glob("*/*metrics.jsonl")} - set(names))
    lives = [
        _Life(name, list(_rounds(metrics)), list(_timeline(timeline)))
        for name in names
        for metrics, timeline in _files(folder / name)
    ]
    if not any(life.rows for life in lives):
        raise JobError(f"{folder} holds no HOST/metrics.jsonl with a round in it: nothing to draw")
    shifts = clock_shifts([life.clock for life in lives])
    for life, shift in zip(lives, shifts, strict=True):
        life.move(shift if shift is not None else _of_the_same(life, lives, shifts))
    zero = min((time for life in lives for time in life.starts), default=0.0)
    for life in lives:
        life.move(zero)
    hosts = [
        _host(name, number, [life for life in lives if life.name == name], folder)
        for number, name in enumerate(names, 1)
    ]
    hosts = [host for host in hosts if host.rounds]
    end = max((time for life in lives for time in life.ends), default=0.0)
    first = {row["round"]: row for host in reversed(hosts) for row in host.rounds}
    rounds = [first[number] for number in sorted(first)]
    told = [(life.name, row) for life in lives for row in life.events]
    events = with_tests(merge_events(told), rounds)
    return Run(folder, result, hosts, end, rounds, _losses(hosts), _tests(rounds), events)


@dataclass(frozen=True)
class _Life:
    """What one agent of a host and its training programs have written down, with one clock."""

    name: str
    rows: list[Row]
    timeline: list[Row]

    @property
    def clock(self) -> Clock:
        """Commits as the training programs have seen them, or as the agent has."""
        commits = {row["round"]: row["t0"] for row in self.timeline if row["kind"] in COMMITS}
        rounds = [row for row in self.rows if row["phase"] != "push"]
        commits |= {row["round"]: row["t_commit"] for row in rounds if is_timed(row)}
        # A program notes the end of a step when its own forward pass has ended, its agent when it comes.
        bulk = [row for row in self.timeline if row["kind"] == KIND and not row.get("channel")]
        commits |= {flow.round: flow.committed for row in bulk for flow in flows_of(row)}
        return Clock(commits, sum(row["seconds_wait"] for row in self.rows))

    @property
    def starts(self) -> list[float]:
        """When its rounds began, or were committed if its training programs do not say when they began."""
        return [row["t_start"] for row in self.rows if is_timed(row)] or self._commits

    @property
    def ends(self) -> list[float]:
        """When its rounds ended."""
        return [row["t_end"] for row in self.rows if is_timed(row)] or self._commits

    @property
    def _commits(self) -> list[float]:
        return [row["t0"] for row in self.timeline if row["kind"] in COMMITS]

    @property
    def events(self) -> list[Row]:
        """All in the time line but times with the token."""
        return [row for row in self.timeline if row["kind"] not in _NO_EVENTS]

    def move(self, seconds: float) -> None:
        """Subtract so much from all times."""
        for row in filter(is_timed, self.rows):
            row.update((key, row[key] - seconds) for key in MOMENTS)
            for span in (*(row["waits"] or ()), *row["updates"]):
                span[:2] = [at - seconds for at in span[:2]]
        for row in self.timeline:
            row.update(t0=row["t0"] - seconds, t1=row["t1"] - seconds)


def _files(host: Path) -> Iterator[Files]:
    """The metrics of each life of a host, and its time line; the last life's have no number."""
    metrics = sorted(host.glob("earlier-*.metrics.jsonl"), key=_numbers)
    timelines = {_numbers(path)[0]: path for path in host.glob("earlier-*.timeline.jsonl")}
    for number, path in sorted(timelines.items()):
        yield [of for of in metrics if _numbers(of)[0] == number], path
    last = [of for of in metrics if _numbers(of)[0] not in timelines]
    yield [*last, host / "metrics.jsonl"], host / "timeline.jsonl"


def _numbers(path: Path) -> tuple[int, ...]:
    """`earlier-2.1.metrics.jsonl`: 2, 1; something else: 0."""
    parts = path.name.removeprefix("earlier-").split(".")
    return tuple(int(part) for part in parts if part.isdecimal()) or (0,)


def _of_the_same(life: _Life, lives: list[_Life], shifts: list[float | None]) -> float:
    """A life that shares no round with others: the clock is that of its host's next one, unless it was switched off."""
    known = (s for other, s in zip(lives, shifts, strict=True) if other.name == life.name and s)
    return next(known, 0.0)


def _host(name: str, number: int, lives: list[_Life], folder: Path) -> Host:
    rows = sorted((row for life in lives for row in life.rows), key=lambda row: row["round"])
    pushes = [row for row in rows if row["phase"] == "push"]
    rounds = [row for row in rows if row["phase"] != "push"]
    tests = {row["round"] for life in lives for row in life.timeline if row["kind"] == "test"}
    for row in rounds:  # the agent knows, whatever the training program says
        if row["round"] in tests:
            row["phase"] = "test"
    token = [row for life in lives for row in life.timeline if row["kind"] in TOKEN_KINDS]
    flows = [row for life in lives for row in life.timeline if row["kind"] == KIND]
    agent = _json(folder / name / "agent.json")
    known = agent.get(
        "number"
    )  # the order of the result's members is another once the lead has changed
    return Host(name, known if type(known) is int else number, rounds, token, agent, pushes, flows)


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


def _rounds(paths: list[Path]) -> Iterator[Row]:
    for path in paths:
        for line in _lines(path):
            row = read_row(line)
            if row is not None:
                yield row


def _timeline(path: Path) -> Iterator[Row]:
    """Its agent has written it: what is something else is of another version."""
    for row in _lines(path):
        if isinstance(row, dict) and isinstance(row.get("kind"), str):
            times = row.get("t0"), row.get("t1")
            if (
                not all(isinstance(t, int | float) for t in times)
                or type(row.get("round")) is not int
            ):
                continue
            if row["kind"] != KIND or read_rounds(row):
                yield row


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
