# SPDX-License-Identifier: Apache-2.0
"""The time of an all-reduce over the size of its tensor, as a picture of what `nicps bench allreduce --json` measured;
or that of a step over the rate, out of `python -m benchmarks.which --json`.

    python -m benchmarks.picture RESULT ... --out benchmarks/sizes.svg

RESULT is a file with the output of one run. Each combination of hosts and rate is a panel, each engine with its lanes a
line through its medians. Of steps each way is a line. Both axes are logarithmic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nicps.errors import EnvironmentProblem, NicpsError, UsageProblem
from nicps.rates import format_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
#: Of `benchmarks.which`: how a line is named and drawn.
_WAYS = {
    "gloo": ("DDP on Gloo", "black", "-."),
    "plain": ("DDP on nicps", "tab:blue", "-"),
    "i8": ('compress(lane="i8")', "tab:red", "-"),
    "rank-2": ("compress(rank=2)", "tab:purple", "-"),
    "local-8": ("local SGD, 8 steps", "tab:orange", "--"),
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
        if not is_step(rows[0]):
            panel_of(rows[0]), line_of(rows[0])
    except (IndexError, KeyError, TypeError, ValueError):
        raise UsageProblem(
            f"{path} does not end with the results of `nicps bench allreduce --json`"
            " or `python -m benchmarks.which --json`"
        ) from None
    return rows


def is_step(row: Row) -> bool:
    """Whether it is of `benchmarks.which`."""
    return "way" in row


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
        UsageProblem: there are rows of both kinds.
        EnvironmentProblem: the picture cannot be written.
    """
    if len({is_step(row) for row in rows}) > 1:
        raise UsageProblem("all-reduces and steps do not go into one picture")
    # Its import takes a second of processor time, also in tests that draw nothing.
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "nicps", "svg.fonttype": "none", "font.size": 9})
    figure = (_draw_steps if is_step(rows[0]) else _draw_sizes)(rows)
    figure.tight_layout()
    try:
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
        if out.suffix == ".svg":
            head, rest = out.read_text().split("\n", 1)
            out.write_text(f"{head}\n<!-- SPDX-License-Identifier: Apache-2.0 -->\n{rest}")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"cannot write {out}: {error}") from None


def _draw_sizes(rows: Sequence[Row]) -> Figure:
    from matplotlib import pyplot

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
    return figure


def _draw_steps(rows: Sequence[Row]) -> Figure:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.2, 4.2))
    for way, (name, color, style) in _WAYS.items():
        points = {row["rate_bps"]: row["seconds_median"] for row in rows if row["way"] == way}
        if points:
            line = zip(*sorted(points.items()), strict=True)
            axis.loglog(*line, style, color=color, marker=".", label=name)
    rates = sorted({row["rate_bps"] for row in rows})
    axis.set_xticks(rates, [format_rate(rate) for rate in rates])
    axis.minorticks_off()
    axis.set_title(f"{rows[0]['hosts']} hosts, {rows[0]['params'] / 1e6:.1f} million parameters")
    axis.set_xlabel("rate of a host's line")
    axis.set_ylabel("seconds of a step above computing (median)")
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    sys.exit(main())
