# SPDX-License-Identifier: Apache-2.0
"""report.html: what a run did, in one file that needs nothing else and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer import channels, pushes, timeline
from trainer.events import KINDS, SAYS, Event
from trainer.page import page, settings_section, table, tile_of, tile_row, write_page
from trainer.percents import percents
from trainer.rundata import Run, read
from trainer.svg import Series, chart, mark, smooth, svg, text, thin

LOG_FROM = 20  # ratio of the largest loss to the smallest from which on its axis is logarithmic

KEY = {
    "compute": "computing",
    "update": "sum and update",
    "testing": "testing",
    "dropped": "computed, not counted",
    "wait": "waiting",
    "send": "token: sending",
    "hold": "token: held",
    "repair": "token: sending again",
    "away": "not in the view",
    "forward": "next forward pass",
    **channels.KEY,
}
#: What training waited for, of a slow host.
WAITED = {
    "gradient": "for its gradient",
    "sums": "for its sums",
    "mark": "until it had all sums",
}
_OF_CHANNELS = ("forward", *channels.KEY)
MOST_EVENTS = 400  # lines in the table


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html and return its path.

    Raises:
        JobError: the run has no records, or the report cannot be written.
    """
    return write_page(folder, render(read(folder)))


def render(run: Run) -> str:
    """The page."""
    parts = [_head(run), _tiles(run), _curves(run), pushes.section(run), _hosts(run)]
    parts += [channels.section(run), _whole(run), _events(run)]
    parts += [_details(run), _settings(run)]
    return page(run.title, parts)


def _head(run: Run) -> str:
    hosts = ", ".join(host.name for host in run.hosts)
    packed = f"<p>Branches: {text(told)}</p>" if (told := run.result.get("branches")) else ""
    return f"<h1>{text(run.title)}</h1><p>{text(run.folder.name)} on {text(hosts)}</p>{packed}"


def _tiles(run: Run) -> str:
    result, tiles = run.result, []

    def tile(value: str, name: str, bad: bool = False) -> None:
        tiles.append(tile_of(value, name, bad))

    if run.tests:
        tile(f"{run.tests[-1]['accuracy']:.2%}", "test accuracy")
    tile(f"{len(run.training):,}", "synchronisations" if run.served else "training rounds")
    # Where another host has led before, the result has the time since the last one leads.
    seconds = max(result.get("seconds") or 0.0, run.seconds)
    if seconds:
        tile(f"{seconds:.1f} s", "training and testing")
    samples = sum(row["samples"] for row in run.training)
    if samples and run.seconds:
        tile(f"{samples / run.seconds:,.0f}", "samples a second")
    if "weights_identical" in result:
        same = bool(result["weights_identical"])
        tile("identical" if same else "DIFFERENT", "weights of all hosts, every round", not same)
    if "fragments_added" in result:
        tile(f"{result['fragments_added']:,}", "fragments added by the kernels")
    if "fragments_sent_again" in result:
        tile(f"{result['fragments_sent_again']:,}", "fragments sent again")
    for key, name in (("server_bytes_out", "from servers"), ("partner_bytes", "from partners")):
        if key in result:
            tile(f"{result[key] / 1e6:,.1f} MB", f"parameters {name}")
    if result.get("predicted_seconds") and result.get("step_seconds"):
        took, due = result["step_seconds"], result["predicted_seconds"]
        tile(f"{took:.3f} s", f"a step on {result['channels']} channels; predicted: {due:.3f} s")
    cancelled = [event.why for event in run.events if event.kind == "cancelled"]
    if cancelled:
        tile("cancelled", cancelled[-1])
    elif not result:
        tile("no result", "the run did not get to its end", bad=True)
    return tile_row(tiles)


def _curves(run: Run) -> str:
    points = [(row["round"], row["loss"]) for row in run.losses]
    losses = [loss for _, loss in points]
    log = bool(losses) and min(losses) > 0 and max(losses) / min(losses) > LOG_FROM
    window = max(1, len(points) // 40)
    curves = [Series(thin(points), "raw")] if window > 1 else []
    curves.append(Series(thin(smooth(points, window)), "loss"))
    rounds = [float(row["round"]) for row in run.rounds]
    along = rounds[0] - 1, rounds[-1]
    loss = chart(curves, "round", "loss", log=log, x_range=along)
    tests = [(row["round"], row["accuracy"]) for row in run.tests]
    worst = min((accuracy for _, accuracy in tests), default=0.0)
    best = max((accuracy for _, accuracy in tests), default=1.0)
    room = max(best - worst, 0.004) * 0.2
    accuracy = chart(
        [Series(tests, "accuracy", dots=True)],
        "round",
        "test accuracy",
        x_range=along,
        y_range=(max(0.0, worst - room), min(1.0, best + room) + 1e-9),
        y_text=lambda y: f"{y * 100:.4g} %",
    )
    mean = f"; the line is the mean of {window} rounds" if window > 1 else ""
    return (
        f'<div class="pair"><section><h2>Loss</h2><p>All hosts{mean}.</p>{loss}</section>'
        f"<section><h2>Test accuracy</h2><p>All hosts, each its own part.</p>{accuracy}</section>"
        f"</div>"
    )


def _hosts(run: Run) -> str:
    rows = []
    for host in run.hosts:
        train = [row for row in host.rounds if row["phase"] == "train"]
        number = str(host.number)
        told = [row["counted"] for row in train if row["counted"] is not None]
        counted = [of[number] for of in told if number in of]
        seconds = [host.seconds(what) for what in ("compute", "wait", "network")]
        whole = sum(seconds) or 1.0
        token = sum(row["t1"] - row["t0"] for row in host.token if row["kind"] != "hold")
        bar = "".join(
            f'<i style="width:{part / whole:.2%};background:var(--{colour})"></i>'
            for part, colour in zip(seconds, ("compute", "wait", "send"), strict=True)
        )
        shares = " / ".join(percents(seconds))
        agent, trains = host.agent, f"{len(counted):,} of {len(train):,}"
        rows.append(
            (
                f"<b>{text(host.name)}</b>",
                number,
                f"<code>{text(agent.get('mac', ''))}</code>",
                text(agent.get("xdp_mode", "")),
                "" if not told else "serves" if run.served and not counted else trains,
                f"{sum(counted):,}" if told else "",
                *(f"{part:.1f} s" for part in seconds),
                f"{token:.2f} s",
                _count(agent.get("fragments_added")),
                _count(agent.get("fragments_sent_again")),
                f'<div class="bar" title="{shares}">{bar}</div>',
            )
        )
    head = (
        "host", "number", "MAC", "XDP", "gradients counted", "samples", "computing", "waiting",
        "network", "sending", "fragments added", "sent again", "shares",
    )  # fmt: skip
    note = (
        "Network: converting the gradient, sending it and reading the sum, as far as the training "
        "program waited for it; sending: with the token, by the agent."
    )
    return f"<section><h2>Hosts</h2><p>{note}</p>{_slow(run)}{table(head, rows)}</section>"


def _slow(run: Run) -> str:
    """A line for each host that training waited for much longer than for the others."""
    lines = []
    for of in run.result.get("slow") or ():
        name = of["name"] or "the Linux switch"
        waited = f"training waited {of['part']:.0%} of the time {WAITED.get(of['what'], '')}"
        lines.append(f'<p class="slow">Slow: {text(name)}: {text(waited)}</p>')
    return "".join(lines)


def _whole(run: Run) -> str:
    if not run.seconds:
        return ""
    away = ["away"] if any(event.kind == "evicted" for event in run.events) else []
    key = _key(("compute", "send", "wait", *away), run.events)
    return (
        "<section><h2>The whole run</h2><p>Each column is "
        f"{run.seconds / 260 * 1000:.0f} ms of a host's time: what part of it was spent computing, "
        "sending with the token, and waiting. Point at a mark for what happened.</p>"
        f"{key}{timeline.overview(run)}</section>"
    )


def _events(run: Run) -> str:
    """A table of all but tests, which have a curve."""
    events = [event for event in run.events if event.kind != "test"]
    if not events:
        return ""
    rows = [
        (
            f"{event.time:.2f} s",
            str(event.round),
            str(event.view or ""),
            text(", ".join(event.hosts)),
            text(SAYS[event.kind]),
            text(event.why),
        )
        for event in events[:MOST_EVENTS]
    ]
    more = f"<p>And {len(events) - MOST_EVENTS} more.</p>" if len(events) > MOST_EVENTS else ""
    note = "As the hosts have seen it; the time is that of the first one."
    head = ("time", "round", "view", "host", "event", "why")
    return (
        f'<section class="events"><h2>Events</h2><p>{note}</p>{table(head, rows)}{more}</section>'
    )


def _details(run: Run) -> str:
    firsts = timeline.windows(run)
    if not firsts:
        return ""
    body = [
        f"<h3>{text(timeline.window_title(run, first))}</h3>{timeline.detail(run, first, 10)}"
        for first in firsts
    ]
    flows = any(host.flows for host in run.hosts)
    more = ", and each channel, the most urgent one first" if flows else ""
    kinds = [kind for kind in KEY if kind != "away" and (flows or kind not in _OF_CHANNELS)]
    return (
        "<section><h2>Who held the token, who computed</h2><p>Per host, above: the training "
        f"program; below: the token{more}. Dashed lines: commits, with the round's number. Point at a bar "
        "for its figures. The hosts' clocks are laid over each other at the commits.</p>"
        f"{_key(kinds)}{''.join(body)}</section>"
    )


def _settings(run: Run) -> str:
    settings = run.result.get("settings") or {}
    if not settings:
        return ""
    return settings_section(settings)


def _key(kinds: Iterable[str], events: Iterable[Event] = ()) -> str:
    items = [f'<span><i style="background:var(--{kind})"></i>{KEY[kind]}</span>' for kind in kinds]
    seen = {event.kind for event in events}
    for kind, name in KINDS.items():
        if kind in seen:
            shape = svg(16, 16, [mark(8, 8, timeline.SHAPE_OF[kind], kind)], name)
            items.append(f"<span>{shape}{text(name)}</span>")
    return f'<div class="key">{"".join(items)}</div>'


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""
