# SPDX-License-Identifier: Apache-2.0
"""Inline SVG for the report: curves, bars and time lines. Plain strings, no dependencies."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 34


def text(value: object) -> str:
    """Escaped for HTML."""
    return html.escape(str(value), quote=True)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers within low .. high, about `count` of them."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within low .. high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]


def number(value: float) -> str:
    """Short, without an exponent where that reads better."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:.6g}"
    return f"{value:.3g}"


def svg(width: float, height: float, body: Iterable[str], label: str) -> str:
    """The element; it scales with the page."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(label)}">'
        f"{''.join(body)}</svg>"
    )


def rect(x: float, y: float, w: float, h: float, kind: str, title: str = "") -> str:
    """A bar of class `kind`; `title` shows when pointed at."""
    inner = f"<title>{text(title)}</title>" if title else ""
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}">{inner}'
        f"</rect>"
    )


def line(a: Point, b: Point, kind: str) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{a[0]:.2f}" y1="{a[1]:.2f}" x2="{b[0]:.2f}" y2="{b[1]:.2f}"/>'


#: Shapes by name, around a point, within 6 units of it.
SHAPES = {
    "cross": "M-5,-5 L5,5 M-5,5 L5,-5",
    "up": "M0,-5.5 L5.5,4.5 L-5.5,4.5 Z",
    "diamond": "M0,-6 L6,0 L0,6 L-6,0 Z",
    "square": "M-4.5,-4.5 H4.5 V4.5 H-4.5 Z",
    "flag": "M-3,6 V-6 H6 L3,-3 L6,0 H-3",
    "tick": "M0,-5 V5",
    "circle": "M4.5,0 A4.5,4.5 0 1 1 -4.5,0 A4.5,4.5 0 1 1 4.5,0 Z",
}


def mark(x: float, y: float, shape: str, kind: str, title: str = "") -> str:
    """A small shape at a point, of class `mark` and `kind`; `title` shows when pointed at."""
    inner = f"<title>{text(title)}</title>" if title else ""
    return (
        f'<path class="mark {kind}" transform="translate({x:.2f} {y:.2f})" d="{SHAPES[shape]}">'
        f"{inner}</path>"
    )


def label(x: float, y: float, words: str, kind: str = "tick", anchor: str = "middle") -> str:
    """Text at a point."""
    return (
        f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{text(words)}</text>'
    )


@dataclass(frozen=True)
class Series:
    """One curve: class `kind`; dots at its points when `dots`, and where there is one point only."""

    points: Sequence[Point]
    kind: str
    dots: bool = False


def chart(
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    *,
    log: bool = False,
    x_range: Point | None = None,
    y_range: Point | None = None,
    y_text: Callable[[float], str] = number,
    width: float = 520,
    height: float = 260,
) -> str:
    """Curves over linear x and linear or logarithmic y."""
    points = [point for each in series for point in each.points]
    if not points:
        return '<p class="none">nothing was recorded</p>'
    low_x, high_x = x_range or (min(x for x, _ in points), max(x for x, _ in points))
    high_x = max(high_x, low_x + 1)
    low, high = y_range or _padded([y for _, y in points], log)
    scale: Callable[[float], float] = math.log10 if log else float
    wide, tall = width - LEFT - RIGHT, height - TOP - BOTTOM

    def place(point: Point) -> Point:
        part = (scale(max(point[1], low)) - scale(low)) / (scale(high) - scale(low))
        return LEFT + (point[0] - low_x) / (high_x - low_x) * wide, TOP + (1 - part) * tall

    body = []
    marks = decades(low, high) if log else ticks(low, high, 5)
    for y in marks if len(marks) > 1 else ticks(low, high, 4):
        at = place((low_x, y))[1]
        body.append(line((LEFT, at), (LEFT + wide, at), "grid"))
        body.append(label(LEFT - 7, at + 4, y_text(y), anchor="end"))
    whole = all(float(x).is_integer() for x, _ in points)  # epochs, rounds
    for x in ticks(low_x, high_x):
        if whole and abs(x - round(x)) > 1e-9:
            continue
        body.append(label(place((x, low))[0], TOP + tall + 16, number(x)))
    body.append(line((LEFT, TOP + tall), (LEFT + wide, TOP + tall), "axis"))
    body.append(label(LEFT + wide, height - 3, x_name, "name", "end"))
    for each in series:
        placed = [place(point) for point in each.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        body.append(f'<polyline class="{each.kind}" points="{path}"/>')
        for (x, y), (at_x, at_y) in zip(placed, each.points, strict=True):
            if each.dots or len(placed) == 1:
                hint = f"{x_name} {number(at_x)}: {y_text(at_y)}"
                body.append(
                    f'<circle class="{each.kind} dot" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                    f"<title>{text(hint)}</title></circle>"
                )
    return svg(width, height, body, f"{y_name} over {x_name}")


def _padded(ys: Sequence[float], log: bool) -> Point:
    low, high = min(ys), max(ys)
    if log:
        return low / 1.15, high * 1.15
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad


def thin(points: Sequence[Point], most: int = 600) -> list[Point]:
    """At most `most` points: means over equal runs of them."""
    if len(points) <= most:
        return list(points)
    size = len(points) / most
    parts = [points[int(i * size) : int((i + 1) * size)] for i in range(most)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """A running mean of y over the last `window` points."""
    values = [y for _, y in points]
    result = []
    for i, (x, _) in enumerate(points):
        last = values[max(0, i + 1 - window) : i + 1]
        # Added anew each time: a running sum keeps the rounding errors of large values.
        result.append((x, math.fsum(last) / len(last)))
    return result
