# SPDX-License-Identifier: Apache-2.0
"""The time of an all-reduce over the size of its tensor, as a picture of what `nicps bench allreduce --json` measured.

    python -m benchmarks.picture RESULT ... --out benchmarks/sizes.svg

RESULT is a file with the output of one run. Each combination of hosts and rate is a panel, each engine with its lanes a
line through its medians; both axes are logarithmic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import orjson
from matplotlib import pyplot

from nicps.errors import EnvironmentProblem, NicpsError, UsageProblem
from nicps.rates import format_rate

_STYLES = {
    "broadcast": ":",
    "stripes": "-",
    "switch": "--",
    "linux-switch": "--",
    "gloo": "-.",
}
_COLORS = {
    "i32": "tab:blue",
    "i16": "tab:green",
    "i8": "tab:red",
    "float32": "black",
    "float16": "0.55",
}
Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; 0, or an exit code of nicps with one line on stderr."""
    parser = argparse.ArgumentParser(prog="benchmarks.picture", description=__doc__)
    parser.add_argument("results", metavar="RESULT", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="an .svg or .png")
    options = parser.parse_args(arguments)
    try:
        draw([row for path in options.results for row in read(path)], options.out)
    except NicpsError as error:
        print(f"benchmarks.picture: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read(path: Path) -> list[Row]:
    """The rows of one run.

    Raises:
        UsageProblem: the file cannot be read, or does not end with the line of `--json`.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageProblem(f"cannot read {path}: {error.strerror}") from None
    try:
        rows: list[Row] = orjson.loads(lines[-1])["results"]
        panel_of(rows[0]), line_of(rows[0])
    except (IndexError, KeyError, TypeError, ValueError):
        raise UsageProblem(
            f"{path} does not end with the results of `nicps bench allreduce --json`"
        ) from None
    return rows


def panel_of(row: Row) -> tuple[int, int]:
    """Hosts, and bits a second of a port."""
    return row["hosts"], row["rate_bps"]


def line_of(row: Row) -> tuple[str, str, str]:
    """Engine, exchange ("" if it has none) and lanes."""
    return row["engine"], row["exchange"], row["lane"]


def lines_of(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
    """(bytes of a float32 tensor, median seconds) of each line, by size; of a size measured twice the later one."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        found.setdefault(line_of(row), {})[4 * row["params"]] = row["seconds_median"]
    return {line: sorted(points.items()) for line, points in found.items()}


def draw(rows: Sequence[Row], out: Path) -> None:
    """Write the picture.

    Raises:
        EnvironmentProblem: the picture cannot be written.
    """
    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "nicps", "svg.fonttype": "none", "font.size": 9})
    panels = sorted({panel_of(row) for row in rows})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4.2), squeeze=False, sharey=True
    )
    for panel, axis in zip(panels, axes[0], strict=True):
        for (engine, exchange, lane), points in lines_of(
            row for row in rows if panel_of(row) == panel
        ).items():
            name = f"{exchange or engine} {lane}"
            style, color = _STYLES.get(exchange, "-"), _COLORS.get(lane)
            axis.loglog(*zip(*points, strict=True), style, color=color, marker=".", label=name)
        hosts, rate = panel
        axis.set_title(f"{hosts} hosts, {format_rate(rate)}")
        axis.set_xlabel("bytes of the float32 tensor")
        axis.grid(visible=True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("seconds of an all-reduce (median)")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    try:
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
        if out.suffix == ".svg":
            head, rest = out.read_text().split("\n", 1)
            out.write_text(f"{head}\n<!-- SPDX-License-Identifier: Apache-2.0 -->\n{rest}")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"cannot write {out}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
