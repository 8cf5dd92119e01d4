# SPDX-License-Identifier: Apache-2.0
"""Channels in the report: what each host's rounds have waited for, and what its forward passes have.

An agent writes a row `rounds` of timeline.jsonl for each channel and step (docs/jobs.md).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from trainer.figures import Row
from trainer.page import table
from trainer.percents import percents
from trainer.svg import text

if TYPE_CHECKING:
    from trainer.rundata import Host, Run

KIND = "rounds"
#: Of a bar: what a round waits for, or what is on its way.
KEY = {
    "offers": "offered, others have not",
    "flow": "sums on their way",
    "behind": "sums, behind a more urgent channel",
    "marks": "sums are here, others lack some",
}
_FIGURES = 6  # of a round in such a row
_MOST_ROWS = 20_000  # of a host, for the table: the last ones
_MOST_NAMED = 3  # modules and members
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Flow:
    """One round of a channel at one host; times are None where the host does not know them.

    Attributes: `listed`, when all members had offered; `whole`, when all sums were here; `last`, whose offer came last;
    `mark`, whose mark the host has waited for.
    """

    channel: int
    urgency: int
    round: int
    place: int
    places: int
    offered: float | None
    listed: float | None
    whole: float | None
    committed: float
    last: int | None
    mark: int | None

    @property
    def sums(self) -> Span | None:
        """From the closed list to the sums."""
        end = self.committed if self.whole is None else self.whole
        return None if self.listed is None or end < self.listed else (self.listed, end)

    @property
    def offers(self) -> Span | None:
        """From this host's offer to the last one."""
        if self.offered is None or self.listed is None or self.listed < self.offered:
            return None
        return self.offered, self.listed

    @property
    def marks(self) -> Span | None:
        """From the sums to the commit."""
        return None if self.whole is None else (self.whole, self.committed)


def read_rounds(row: Row) -> bool:
    """Whether the row can be read; its rounds are flat numbers then, as there are many rows."""
    rounds = row.get("rounds")
    numbers = row.get("channel", 0), row.get("urgency")
    if not isinstance(rounds, list) or any(type(each) is not int for each in numbers):
        return False
    if not all(isinstance(each, list) and len(each) >= _FIGURES for each in rounds):
        return False
    figures = [figure for each in rounds for figure in each[:_FIGURES]]
    if not all(each is None or isinstance(each, int | float) for each in figures):
        return False
    row["rounds"] = array("d", [math.nan if each is None else each for each in figures])
    return not any(math.isnan(at) for at in row["rounds"][3::_FIGURES])


def flows_of(row: Row) -> Iterator[Flow]:
    """The rounds of such a row."""
    flat: array[float] = row["rounds"]
    places = len(flat) // _FIGURES
    for place in range(places):
        figures = flat[place * _FIGURES : (place + 1) * _FIGURES]
        times = [None if math.isnan(ms) else row["t0"] + ms / 1000 for ms in figures[:4]]
        last, mark = (None if math.isnan(each) else int(each) for each in figures[4:])
        assert times[3] is not None, "as `read_rounds` has seen"
        whose = row.get("channel", 0), row["urgency"], row["round"] + place, place, places
        yield Flow(*whose, *times[:3], times[3], last, mark)


def behind(flows: Iterable[Flow]) -> dict[int, list[Span]]:
    """By the identity of one host's flows: when their sums were on their way beside those of a more urgent channel."""
    found: dict[int, list[Span]] = defaultdict(list)
    active: list[tuple[Flow, Span]] = []
    for flow, span in sorted(_with_sums(flows), key=lambda each: each[1]):
        active = [(other, at) for other, at in active if at[1] > span[0]]
        for other, at in active:
            both = span[0], min(span[1], at[1])
            if both[1] > both[0] and flow.urgency != other.urgency:
                found[id(min(flow, other, key=lambda each: each.urgency))].append(both)
        active.append((flow, span))
    return {key: _merged(spans) for key, spans in found.items()}


def _with_sums(flows: Iterable[Flow]) -> Iterator[tuple[Flow, Span]]:
    for flow in flows:
        if (span := flow.sums) is not None:
            yield flow, span


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def bars(
    host: str, flow: Flow, later: Sequence[Span], names: Mapping[int, str]
) -> Iterator[tuple[float, float, str, str]]:
    """The bars of a round: from, to, kind, and a hint.

    Args:
        later: when it was behind a more urgent channel.
        names: of hosts, by their numbers.
    """
    what = f"{host}, channel {flow.channel}, round {flow.round} ({flow.place + 1} of {flow.places})"
    if (span := flow.offers) is not None:
        who = f", the last of {_name(names, flow.last)}" if flow.last is not None else ""
        yield *span, "offers", f"{what}: waited {_ms(span)} for offers{who}"
    if (span := flow.sums) is not None:
        yield *span, "flow", f"{what}: sums took {_ms(span)}"
        for each in later:
            yield *each, "behind", f"{what}: {_ms(each)} behind a more urgent channel"
    if (span := flow.marks) is not None:
        who = _name(names, flow.mark) if flow.mark is not None else "the others"
        yield *span, "marks", f"{what}: sums were here, waited {_ms(span)} for {who}"


def computing(row: Row) -> Iterator[Span]:
    """When a training program was at work on a round; forward passes beside the exchange are work, but for waits."""
    yield row["t_start"], row["t_offer"]
    yield row["t_commit"], row["t_end"]
    if row["waits"] is not None:
        at = row["t_offer"]
        for begun, ended, *_ in row["waits"]:
            yield at, begun
            at = ended
        yield at, row["t_commit"]


# ---- the section


def section(run: Run) -> str:
    """What the rounds of each channel, and forward passes, have waited for; nothing without channels."""
    flows = [(host, list(_last_flows(host))) for host in run.hosts]
    if not any(of for _, of in flows):
        return ""
    names = {host.number: host.name for host in run.hosts}
    note = (
        "Of the rounds at all hosts, medians: from a host's offer to the last one; until all sums were there, and "
        "what of that a more urgent channel had sums on their way, too; until all members had theirs. The last to "
        "offer are the members that the others have waited for."
    )
    head = (
        "channel",
        "urgency",
        "rounds",
        "offers",
        "sums",
        "of it behind",
        "marks",
        "last to offer",
    )
    parts = [f"<p>{note}</p>", table(head, _channel_rows([of for _, of in flows], names))]
    if rows := list(_forward_rows(run.hosts)):
        forward = (
            "What the next forward pass has waited for while sums were on their way, a step; and the modules in front "
            "of which it waited most, with their channels."
        )
        head = ("host", "steps", "waiting", "updating", "in front of")
        parts += [f"<p>{forward}</p>", table(head, rows)]
    return f'<section class="channels"><h2>Channels</h2>{"".join(parts)}</section>'


def _last_flows(host: Host) -> Iterator[Flow]:
    for row in host.flows[-_MOST_ROWS:]:
        yield from flows_of(row)


def _channel_rows(
    hosts: Sequence[Sequence[Flow]], names: Mapping[int, str]
) -> Iterator[tuple[str, ...]]:
    spans: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    last: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for flows in hosts:
        later = behind(flows)
        for flow in flows:
            channel = spans[flow.urgency, flow.channel]
            for name, span in (("offers", flow.offers), ("sums", flow.sums), ("marks", flow.marks)):
                if span is not None:
                    channel[name].append(span[1] - span[0])
            channel["behind"].append(sum(b - a for a, b in later.get(id(flow), ())))
            last[flow.urgency, flow.channel].update(() if flow.last is None else (flow.last,))
    for key, channel in sorted(spans.items(), reverse=True):
        urgency, number = key
        times = (channel[name] for name in ("offers", "sums", "behind", "marks"))
        yield (
            f"<b>{number}</b>",
            str(urgency),
            f"{len(channel['behind']):,}",
            *(f"{median(each) * 1000:.1f} ms" if each else "" for each in times),
            text(", ".join(_shares(last[key], names))),
        )


def _shares(counts: Counter[int], names: Mapping[int, str]) -> list[str]:
    most = counts.most_common()
    parts = percents([count for _, count in most])
    named = zip(most[:_MOST_NAMED], parts, strict=False)
    return [f"{_name(names, number)} {part}" for (number, _), part in named]


def _forward_rows(hosts: Iterable[Host]) -> Iterator[tuple[str, ...]]:
    for host in hosts:
        rows = [row for row in host.timed if row["waits"] is not None]
        if not rows:
            continue
        waited: dict[str, float] = defaultdict(float)
        for row in rows:
            for begun, ended, module, channel in row["waits"]:
                where = f"{module} (channel {channel})" if module else "the end of forward"
                waited[where] += ended - begun
        updates = sum(ended - begun for row in rows for begun, ended in row["updates"])
        most = sorted(waited.items(), key=lambda each: -each[1])[:_MOST_NAMED]
        yield (
            f"<b>{text(host.name)}</b>",
            f"{len(rows):,}",
            f"{sum(waited.values()) / len(rows) * 1000:.1f} ms",
            f"{updates / len(rows) * 1000:.1f} ms",
            text(", ".join(f"{where} {s / len(rows) * 1000:.1f} ms" for where, s in most)),
        )


def _name(names: Mapping[int, str], number: int) -> str:
    return names.get(number, f"member {number}")


def _ms(span: Span) -> str:
    return f"{(span[1] - span[0]) * 1000:.1f} ms"
