# SPDX-License-Identifier: Apache-2.0
"""The report's picture of parameter servers: versions and staleness over time (S2)."""

from __future__ import annotations

from itertools import chain

from trainer.figures import is_timed
from trainer.page import table
from trainer.rundata import Host, Run
from trainer.svg import Point, Series, chart, smooth, text, thin


def section(run: Run) -> str:
    """Nothing, where nobody has pushed anything."""
    stale = [point for host in run.hosts for point in _staleness(host)]
    if not stale:
        return ""
    stale.sort()
    times = sorted(at for at, _ in chain(stale, _commits(run)))
    versions: list[Point] = [(at, number) for number, at in enumerate(times, 1)]
    along, window = (0.0, max(run.seconds, times[-1])), max(1, len(stale) // 40)
    curves = [Series(thin(stale), "raw")] if window > 1 else []
    curves.append(Series(thin(smooth(stale, window)), "loss"))
    left = chart([Series(thin(versions), "loss")], "s", "version", x_range=along)
    most = max(value for _, value in stale)
    right = chart(curves, "s", "staleness", x_range=along, y_range=(0.0, most * 1.05))
    mean = f"; the line is the mean of {window}" if window > 1 else ""
    head = ("host", "pushes", "staleness", "largest", "a push")
    return (
        '<div class="pair"><section><h2>Version</h2><p>Pushes and synchronisations of all '
        f"workers.</p>{left}</section>"
        f"<section><h2>Staleness</h2><p>Of each push{mean}.</p>{right}</section></div>"
        f"<section><h2>Workers</h2>{table(head, _rows(run))}</section>"
    )


def _staleness(host: Host) -> list[Point]:
    """Of each push with a time, the mean over the servers."""
    return [
        (row["t_commit"], sum(row["staleness"]) / len(row["staleness"]))
        for row in host.pushes
        if row["staleness"] and is_timed(row)
    ]


def _commits(run: Run) -> list[Point]:
    return [(row["t_commit"], 0.0) for row in run.training if is_timed(row)]


def _rows(run: Run) -> list[tuple[str, ...]]:
    rows = []
    for host in run.hosts:
        found = [value for row in host.pushes for value in row["staleness"]]
        if not found:
            continue
        took = [row["t_end"] - row["t_start"] for row in host.pushes if is_timed(row)]
        rows.append(
            (
                f"<b>{text(host.name)}</b>",
                f"{len(host.pushes):,}",
                f"{sum(found) / len(found):.2f}",
                f"{max(found):,}",
                f"{sum(took) / len(took) * 1000:.1f} ms" if took else "",
            )
        )
    return rows
