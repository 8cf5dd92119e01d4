# SPDX-License-Identifier: Apache-2.0
"""The stages of a round at the slowest host: until the list is known, until all sums are here, and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from nicps.agent.records import TIMELINE

#: The end of each stage at a host: a kind of its time line, the first of a round or the last.
_ENDS = {"list": ("send", min), "exchange": ("sums", max), "commit": ("commit", max)}


@dataclass
class Stages:
    """When rounds began, were converted and ended, by the clock that all hosts of a lab share.

    Attributes: `rounds`, by number: seconds of the common start, of the last host's conversion, and of the last end.
    """

    rounds: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def add(self, start: float, messages: Sequence[Mapping[str, Any]]) -> None:
        """Keep a round, as its hosts report it; nothing is kept of an engine that reports no rounds."""
        if all("round" in message for message in messages):
            last = (max(message[name] for message in messages) for name in ("converted", "ended"))
            self.rounds[messages[0]["round"]] = start, *last

    def medians(self, folder: Path) -> dict[str, float]:
        """Seconds of each stage by name, each measured up to the last host; an empty dictionary if they are unknown.

        "conversion" overlaps "list" and "exchange", and "marks" is the first part of "commit": until one host has the
        marks of all, and so commits. In stripes and with a Linux switch that is the lead, which marks itself last. The
        rest of "commit" is until the last host has that mark. "list", "exchange", "commit" and "reading" follow one
        another, and add up to a round.

        Args:
            folder: the engine's, in which its hosts have kept their time lines.
        """
        found = _read(folder)
        rows = [row for round_ in self.rounds if (row := self._row(round_, found)) is not None]
        return {name: median(row[name] for row in rows) for name in rows[0]} if rows else {}

    def _row(
        self, round_: int, found: Mapping[tuple[str, int], Sequence[float]]
    ) -> dict[str, float] | None:
        start, converted, ended = self.rounds[round_]
        row, before = {"conversion": converted - start}, start
        for stage in _ENDS:
            at = found.get((stage, round_))
            if at is None:
                return None
            if stage == "commit":
                # Sums that are noted late, after a frame has led the agent to look, may be noted after the commit.
                row["marks"] = max(0.0, min(at) - before)
            row[stage], before = max(at) - before, max(at)
        return {**row, "reading": ended - before}


def _read(folder: Path) -> dict[tuple[str, int], list[float]]:
    """When each stage of each round ended, host by host."""
    found: dict[tuple[str, int], list[float]] = {}
    for path in folder.glob(f"*/runs/*/*/{TIMELINE}"):
        of_host: dict[tuple[str, int], float] = {}
        for line in path.read_bytes().splitlines():
            row = orjson.loads(line)
            for stage, (kind, choose) in _ENDS.items():
                key = stage, row["round"]
                if row["kind"] == kind:
                    of_host[key] = choose(of_host.get(key, row["t0"]), row["t0"])
        for key, at in of_host.items():
            found.setdefault(key, []).append(at)
    return found
