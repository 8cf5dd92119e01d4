# SPDX-License-Identifier: Apache-2.0
"""The report's time lines: who computed, who waited, and who held the token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainer import channels
from trainer.events import Event, away
from trainer.figures import Row, is_timed
from trainer.percents import percents
from trainer.rundata import TOKEN_KINDS, Host, Run
from trainer.svg import label, line, mark, number, rect, svg, ticks

WIDTH = 1080.0
NAMES = 72.0  # room for the names of hosts and rows
MARK, LEVELS = 14.0, 2  # an event's mark: its size, and how many lie below each other
SHAPE_OF = {
    "evicted": "cross",
    "returned": "up",
    "lead": "diamond",
    "alarm": "flag",
    "cancelled": "flag",
    "differs": "square",
    "test": "circle",
    "view": "tick",
}
TOKEN_TEXT = {"hold": "held the token", "send": "token: sent", "repair": "token: sent again"}


def overview(run: Run, bins: int = 260) -> str:
    """The whole run: per host and slice of time, the shares of computing, token and waiting."""
    row, gap, top = 40.0, 10.0, 38.0 if run.events else 4.0
    width = WIDTH - NAMES
    size = run.seconds / bins
    gone = away(run.events, run.seconds)
    body = [label(NAMES - 10, 14, "events", anchor="end")] if run.events else []
    for at, host in enumerate(run.hosts):
        y = top + at * (row + gap)
        body.append(label(NAMES - 10, y + row / 2 + 4, host.name, "name", "end"))
        body.append(rect(NAMES, y, width, row, "wait"))
        for t0, t1 in gone.get(host.name, ()):
            x0, x1 = _inside(t0, 0.0, run.seconds), _inside(t1, 0.0, run.seconds)
            hint = f"{host.name} was away, {t0:.1f} to {t1:.1f} s"
            body.append(rect(x0, y, max(x1 - x0, 0.7), row, "away", hint))
        spans = (span for row in host.timed for span in channels.computing(row))
        compute = _density(spans, size, bins)
        token = _density(((r["t0"], r["t1"]) for r in host.token), size, bins)
        for i in range(bins):
            # Conversion and sending overlap with computing by a little: never more than all.
            parts = [min(1.0, compute[i])]
            parts.append(min(1.0 - parts[0], token[i]))
            shares = percents([*parts, 1.0 - sum(parts)], 1)
            tall = [part * row for part in parts]
            x = NAMES + i * width / bins
            hint = (
                f"{host.name}, {i * size:.1f} to {(i + 1) * size:.1f} s: "
                f"{shares[0]} computing, {shares[1]} token"
            )
            body.append(rect(x, y + row - tall[0], width / bins, tall[0], "compute", hint))
            body.append(
                rect(x, y + row - tall[0] - tall[1], width / bins, tall[1], "send", hint)
            )  # fmt: skip
    bottom = top + len(run.hosts) * (row + gap)
    body += _marks(run.events, 0.0, run.seconds, (top, bottom - gap))
    body += _seconds(0.0, run.seconds, bottom + 8)
    return svg(WIDTH, bottom + 30, body, "computing, token and waiting over the whole run")


def detail(run: Run, first: int, count: int) -> str:
    """Some rounds in full: a lane for computing, one for the token and one for each channel per host, commits marked.

    Args:
        first: index into the training rounds.
        count: how many of them.
    """
    rounds = _train(run)[first : first + count]
    start = min(row["t_start"] for row in rounds)
    end = max(row["t_end"] for row in rounds)
    numbers = {row["round"] for row in rounds}
    for host in run.hosts:
        for row in host.timed:
            if row["round"] in numbers:
                start, end = min(start, row["t_start"]), max(end, row["t_end"])
    events = [event for event in run.events if start <= event.time <= end]
    names = {host.number: host.name for host in run.hosts}
    in_order = _channels(run, start, end)
    flow = 10.0
    lane, token, gap, top = 24.0, 13.0, 12.0, 56.0 if events else 26.0
    tall = lane + token + gap + flow * len(in_order)  # a host
    scale = (WIDTH - NAMES) / (end - start or 1.0)  # clocks may be coarse
    body: list[str] = []

    def bar(t0: float, t1: float, y: float, high: float, kind: str, hint: str) -> None:
        t0, t1 = max(t0, start), min(t1, end)
        if t1 > t0:
            wide = max((t1 - t0) * scale, 0.7)
            body.append(rect(NAMES + (t0 - start) * scale, y, wide, high, kind, hint))

    for at, host in enumerate(run.hosts):
        y = top + at * tall
        body.append(label(NAMES - 10, y + lane / 2 + 4, host.name, "name", "end"))
        body.append(label(NAMES - 10, y + lane + token - 2, "token", anchor="end"))
        body.append(rect(NAMES, y + lane + 1, WIDTH - NAMES, token - 1, "lane"))
        rows, held, rounds_of = host.in_window(start, end)
        for row in rows:
            for bounds in _round_bars(host, row):
                bar(bounds[0], bounds[1], y, lane, *bounds[2:])
        for row in sorted(held, key=lambda r: TOKEN_KINDS.index(r["kind"])):
            hint = f"{host.name}, round {row['round']}: {TOKEN_TEXT[row['kind']]}, "
            hint += _ms(row["t1"] - row["t0"])
            bar(row["t0"], row["t1"], y + lane + 1, token - 1, row["kind"], hint)
        flows = [each for row in rounds_of for each in channels.flows_of(row)]
        later = channels.behind(flows)
        for place, channel in enumerate(in_order):
            below = y + lane + token + place * flow
            body.append(label(NAMES - 10, below + flow - 1, f"channel {channel}", anchor="end"))
            body.append(rect(NAMES, below + 1, WIDTH - NAMES, flow - 1, "lane"))
            for each in flows:
                if each.channel == channel:
                    for bounds in channels.bars(host.name, each, later.get(id(each), ()), names):
                        bar(bounds[0], bounds[1], below + 1, flow - 1, *bounds[2:])
    bottom = top + len(run.hosts) * tall
    last = -100.0
    for row in rounds:
        x = NAMES + (row["t_commit"] - start) * scale
        body.append(line((x, top - 6), (x, bottom - gap), "commit"))
        if x - last > 34:
            body.append(label(min(x, WIDTH - 10), top - 11, f"{row['round']}"))
            last = x
    body.append(label(NAMES - 10, top - 11, "commit", anchor="end"))
    if events:
        body.append(label(NAMES - 10, 14, "events", anchor="end"))
        body += _marks(events, start, end, (top, bottom - gap))
    body += _seconds(start, end, bottom + 2)
    return svg(WIDTH, bottom + 24, body, f"rounds {rounds[0]['round']} to {rounds[-1]['round']}")


def _round_bars(host: Host, row: Row) -> Iterator[tuple[float, float, str, str]]:
    """The bars of a round in the lane for computing: from, to, kind, and a hint."""
    what = f"{host.name}, round {row['round']}: "
    counted = row["counted"]
    dropped = counted is not None and str(host.number) not in counted
    kind, how = ("dropped", "not counted") if dropped else ("compute", "computed")
    if row["phase"] == "test":
        kind, how = "testing", "tested"
    took = row["t_offer"] - row["t_start"]
    own = f" {row['own_samples']} samples," if row["own_samples"] else ""
    yield row["t_start"], row["t_offer"], kind, f"{what}{how},{own} {_ms(took)}"
    waited = row["t_commit"] - row["t_offer"]
    verb = "pushed" if row["phase"] == "push" else "waited"
    if row["waits"] is None:
        yield row["t_offer"], row["t_commit"], "wait", f"{what}{verb} {_ms(waited)}"
    else:
        yield from _forward_bars(what, row)
    update = row["t_end"] - row["t_commit"]
    yield row["t_commit"], row["t_end"], "update", f"{what}updated, {_ms(update)}"


def _forward_bars(what: str, row: Row) -> Iterator[tuple[float, float, str, str]]:
    """While a step's sums were on their way: the next forward pass, what it has waited for, and updates."""
    took = row["t_commit"] - row["t_offer"]
    yield row["t_offer"], row["t_commit"], "forward", f"{what}next forward pass, {_ms(took)} in all"
    for begun, ended, module, channel in row["waits"]:
        where = f"in front of {module}, channel {channel}" if module else "at the end of forward"
        yield begun, ended, "wait", f"{what}waited {_ms(ended - begun)} {where}"
    for begun, ended in row["updates"]:
        yield begun, ended, "update", f"{what}updated parameters, {_ms(ended - begun)}"


def _channels(run: Run, start: float, end: float) -> list[int]:
    """The channels that have rounds in that time, the most urgent one first."""
    found = {
        (row["urgency"], row.get("channel", 0))
        for host in run.hosts
        for row in host.in_window(start, end)[2]
    }
    return [number for _, number in sorted(found, reverse=True)]


def windows(run: Run, count: int = 10) -> list[int]:
    """First training rounds of the windows that are worth a look: the first and the middle ones."""
    total = len(_train(run))
    if total <= count:
        return [0] if total else []
    middle = total // 2 - count // 2
    return [0, middle] if middle >= count else [0]


def window_title(run: Run, first: int, count: int = 10) -> str:
    """`Rounds 7 to 16, 12.40 to 13.05 s`."""
    rows = _train(run)[first : first + count]
    return (
        f"Rounds {rows[0]['round']} to {rows[-1]['round']}, "
        f"{rows[0]['t_start']:.2f} to {rows[-1]['t_end']:.2f} s"
    )


def _marks(
    events: Iterable[Event], start: float, end: float, ends: tuple[float, float]
) -> list[str]:
    """Each event's line through all hosts, between the heights `ends`, and above them its mark.

    A mark that would lie over the one before it is a little lower.
    """
    placed = [(_inside(event.time, start, end), event) for event in events]
    body = [line((x, ends[0]), (x, ends[1]), f"event {event.kind}") for x, event in placed]
    last, level = -MARK, 0
    for x, event in placed:
        x = min(x, WIDTH - MARK / 2)
        level = (level + 1) % LEVELS if x - last < MARK else 0
        last = x
        at = 9.0 + level * MARK * 0.8
        body.append(mark(x, at, SHAPE_OF[event.kind], event.kind, event.title))
    return body


def _inside(time: float, start: float, end: float) -> float:
    """Where a time is on the axis; at its end what is outside."""
    return NAMES + (min(max(time, start), end) - start) / (end - start) * (WIDTH - NAMES)


def _train(run: Run) -> list[Row]:
    return [row for row in run.training if is_timed(row)]


def _density(spans: Iterable[tuple[float, float]], size: float, bins: int) -> list[float]:
    """The part of every bin of `size` seconds that the spans cover."""
    covered = [0.0] * bins
    for t0, t1 in spans:
        first, last = max(0, int(t0 / size)), min(bins - 1, int(t1 / size))
        for i in range(first, last + 1):
            covered[i] += max(0.0, min(t1, (i + 1) * size) - max(t0, i * size)) / size
    return covered


def _seconds(start: float, end: float, y: float) -> list[str]:
    body = [line((NAMES, y - 4), (WIDTH, y - 4), "axis")]
    for t in ticks(start, end, 10):
        x = NAMES + (t - start) / (end - start) * (WIDTH - NAMES)
        body.append(line((x, y - 4), (x, y), "axis"))
        body.append(label(min(x, WIDTH - 16), y + 13, f"{number(round(t, 6))} s"))
    return body


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
