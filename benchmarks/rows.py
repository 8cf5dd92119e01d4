# SPDX-License-Identifier: Apache-2.0
"""What `time_to_accuracy` and `served_training` have measured: kept in a file, and completed; a table of the first."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.ways import Way
from nicps.errors import UsageProblem

Row = dict[str, Any]


class Rows:
    """What has been measured, in a file of JSON lines, so that it is not run again.

    Args:
        asked: what each row says of the question, and a row must say to be one of its answers.

    Raises:
        UsageProblem: the file cannot be read or written, or a line is not a row.
    """

    def __init__(self, path: Path | None, asked: Mapping[str, Any]) -> None:
        self._path, self._asked = path, dict(asked)
        self.rows: list[Row] = []
        if path is not None:
            try:
                path.open("a").close()  # better now than after the first run
                lines = enumerate(path.read_text().splitlines(), 1)
            except OSError as error:
                raise UsageProblem(
                    f"cannot keep rows in {path}: {error.strerror}: --out takes a file"
                ) from None
            rows = [_row(path, number, line) for number, line in lines]
            self.rows = [row for row in rows if all(row.get(k) == v for k, v in asked.items())]

    def find(self, rate: str, way: str, seed: int) -> Row | None:
        """The row of that run, if there is one."""
        key = (rate, way, seed)
        return next((r for r in self.rows if (r["rate"], r["way"], r["seed"]) == key), None)

    def add(self, rate: str, way: str, seed: int, found: Mapping[str, Any]) -> Row:
        """Keep it, and print it."""
        row = {**self._asked, "rate": rate, "way": way, "seed": seed, **found}
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{rate:<9}{way:<18}seed {seed}  {_said(row)}", file=sys.stderr, flush=True)
        return row


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UsageProblem(
            f"{path}, line {number}: not a JSON object, so perhaps cut off: remove that line"
        )
    return row


def _said(row: Row) -> str:
    if row["seconds"] is None:
        return (
            f"not reached: at best {row['best']:.4f} after {row['steps_in_all']} steps, "
            f"{row['seconds_in_all']:.1f} s"
        )
    return f"{row['seconds']:.1f} s, {row['steps']} steps"


def best_of(rows: list[Row]) -> Row:
    """The row that reached the target first, or else came nearest to it."""
    return min(rows, key=lambda row: (row["seconds"] is None, row["seconds"] or 0.0, -row["best"]))


def chosen(rows: Rows, rate: str, way: Way, starts: tuple[int, ...]) -> Way | None:
    """Which variant of a way counts: the one that is best with the first seed. None: not all have run with it."""
    variants = way.variants(starts)
    first = [rows.find(rate, variant.name, 1) for variant in variants]
    tried = [row for row in first if row is not None]
    if len(tried) < len(variants):
        return None
    best = best_of(tried)
    return next(variant for variant in variants if variant.name == best["way"])


def fill(
    rows: Rows,
    rate: str,
    ways: tuple[Way, ...],
    seeds: int,
    starts: tuple[int, ...],
    run: Callable[[Way, int], Row],
) -> None:
    """Run what is missing: with seed 1 all variants, with the others those that were best with it."""
    for seed in range(1, seeds + 1):
        for way in ways:
            best = chosen(rows, rate, way, starts) if seed > 1 else None
            for variant in way.variants(starts) if best is None else [best]:
                if rows.find(rate, variant.name, seed) is None:
                    rows.add(rate, variant.name, seed, run(variant, seed))


def missing(
    rows: Rows, rate: str, ways: tuple[Way, ...], seeds: int, starts: tuple[int, ...]
) -> bool:
    """Whether anything has still to be run at that rate: a lab is made for nothing else."""
    for way in ways:
        best = chosen(rows, rate, way, starts)
        if best is None or any(not rows.find(rate, best.name, s) for s in range(1, seeds + 1)):
            return True
    return False


def summary(
    rows: Rows, rates: tuple[str, ...], ways: tuple[Way, ...], seeds: int, starts: tuple[int, ...]
) -> Iterator[Row]:
    """A line for each rate and way. Seconds are of the seeds that reached the target.

    `of_ddp` is the median of the ratios to plain DDP with the same seed; None where either did not reach the target.
    """
    for rate in rates:
        base = {seed: rows.find(rate, "ddp", seed) for seed in range(1, seeds + 1)}
        for asked in ways:
            way = chosen(rows, rate, asked, starts)
            if way is None:
                continue
            found = {seed: rows.find(rate, way.name, seed) for seed in range(1, seeds + 1)}
            have = {seed: row for seed, row in found.items() if row is not None}
            took = [row["seconds"] for row in have.values() if row["seconds"] is not None]
            steps = [row["steps"] for row in have.values() if row["steps"] is not None]
            ratios = [
                row["seconds"] / ddp["seconds"]
                for seed, row in have.items()
                if row["seconds"] and (ddp := base[seed]) is not None and ddp["seconds"]
            ]
            yield {
                "rate": rate,
                "way": way.name,
                "seeds": len(have),
                "reached": len(took),
                "seconds_median": _of(statistics.median, took),
                "seconds_least": _of(min, took),
                "seconds_most": _of(max, took),
                "steps_median": _of(statistics.median, steps),
                "of_ddp": _of(statistics.median, ratios),
                "best": max(row["best"] for row in have.values()),
            }


def _of(figure: Callable[[list[float]], float], values: list[float]) -> float | None:
    return figure(values) if values else None


def table(lines: list[Row]) -> str:
    """A table of the rows, for the terminal."""
    text = [
        f"{'rate':<9}{'way':<16}{'reached':>8}{'median':>10}{'least':>10}{'most':>10}{'steps':>8}{'of DDP':>8}"
        f"{'best test':>11}"
    ]
    for line in lines:
        seconds = "".join(
            f"{'never' if value is None else f'{value:.1f} s':>10}"
            for value in (line["seconds_median"], line["seconds_least"], line["seconds_most"])
        )
        steps = "" if line["steps_median"] is None else f"{line['steps_median']:.0f}"
        ratio = "" if line["of_ddp"] is None else f"{line['of_ddp']:.2f}"
        reached = f"{line['reached']} of {line['seeds']}"
        text.append(
            f"{line['rate']:<9}{line['way']:<16}{reached:>8}{seconds}{steps:>8}{ratio:>8}"
            f"{line['best']:>11.4f}"
        )
    return "\n".join(text)
