# SPDX-License-Identifier: Apache-2.0
"""The contents of `nicps top`: figures from the last statuses, and a frame of them for a terminal (rich)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nicps.session.activity import Activity, ChannelActivity
from nicps.session.messages import MemberStatus, Status

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_LEAST_MEMBERS = 3  # lines of them, however few lines the terminal has
_LABEL = 10  # columns
_REASONS = 5  # of the XDP program's counters, those that rise fastest
_AWAITED_OFTEN = 0.5  # the part of the statuses

#: Members' states for people, where they differ from the status: a host that leaves is struck off as one that is lost.
STATES = {"left": "evicted"}

#: What the training program reports, by the line that shows it: a name, the key, the form.
_REPORTED = {
    "training": (
        ("loss", "loss", "{:.4f}"),
        ("accuracy", "accuracy", "{:.2%}"),
        ("epoch", "epoch", "{:.2f}"),
    ),
    "its time": (
        ("computing", "share_compute", "{:.0%}"),
        ("waiting", "share_wait", "{:.0%}"),
        ("network", "share_network", "{:.0%}"),
    ),
    "a step": (
        ("took", "step_seconds", "{:.3f} s"),
        ("waiting", "wait_seconds", "{:.3f} s"),
        ("predicted", "predicted_seconds", "{:.3f} s"),
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the upper part: its label, its text, and its style."""

    label: str
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member's line; rates are per second, None if there is none yet."""

    number: int
    name: str
    state: str
    awaited: float  # part of the statuses in which the round waited for it
    samples: float | None
    asked: int
    resent: int
    marks: str


class Looks:
    """The last statuses of one agent, the newest at the end. There is one at least.

    Raises:
        ValueError: the agent's statuses have no activity: it is of an older nicps.
    """

    def __init__(self, statuses: Sequence[Status]) -> None:
        self.now = statuses[-1]
        if self.now.activity is None:
            raise ValueError("no activity")
        self.activity: Activity = self.now.activity
        began = self.activity.uptime_s
        # An agent that was started again counts from zero.
        kept = [(s, s.activity) for s in statuses if s.activity and s.activity.uptime_s <= began]
        self._all = kept
        self._first = kept[0]
        self.seconds = began - kept[0][1].uptime_s

    def rate(self, figure: Callable[[Status, Activity], float]) -> float | None:
        """The rate of a count, per second; None without an earlier status."""
        if self.seconds <= 0:
            return None
        return max(0.0, figure(self.now, self.activity) - figure(*self._first)) / self.seconds

    @property
    def _of_job(self) -> list[Activity]:
        """What these statuses say of this job."""
        now = self.now
        return [a for s, a in self._all if (s.job, s.view) == (now.job, now.view)]

    def awaited(self, number: int) -> float:
        """The part of this job's statuses in which the round waited for that member."""
        looks = self._of_job
        found = sum(m.awaited for a in looks for m in a.members if m.number == number)
        return found / len(looks)

    def awaited_on(self, channel: int, number: int) -> float:
        """The part of this job's statuses with that channel in which its round waited for that member."""
        looks = self._with(channel)
        return sum(number in of.awaits for _, of in looks) / len(looks)

    def rate_on(self, channel: ChannelActivity, figure: str) -> float | None:
        """The rate of a channel's count, per second, since the first of this job's statuses that have the channel."""
        first, before = self._with(channel.number)[0]
        seconds = self.activity.uptime_s - first.uptime_s
        if seconds <= 0:
            return None
        rise = float(getattr(channel, figure) - getattr(before, figure))
        return max(0.0, rise) / seconds

    def _with(self, channel: int) -> list[tuple[Activity, ChannelActivity]]:
        return [(a, c) for a in self._of_job for c in a.channels if c.number == channel]

    def round_seconds(self) -> float | None:
        """The mean time of a round in these statuses."""
        before, after = self._first[1].round_seconds, self.activity.round_seconds
        rounds = sum(after.counts) - sum(before.counts)
        return (after.sum - before.sum) / rounds if rounds > 0 else None


def members_of(looks: Looks) -> list[MemberRow]:
    """A line for each member of the list."""
    status = looks.now
    counted = {m.number: m for m in looks.activity.members}
    found = []
    for member in status.members:
        of = counted.get(member.number)
        if of is None:
            continue

        def samples(_: Status, activity: Activity, number: int = member.number) -> float:
            return sum(m.samples for m in activity.members if m.number == number)

        found.append(
            MemberRow(
                member.number,
                plain(member.name),
                STATES.get(member.state, member.state),
                looks.awaited(member.number),
                looks.rate(samples) if looks.activity.samples else None,
                of.asked,
                of.resent,
                _marks(status, member, of.awaited),
            )
        )
    return found


def _marks(status: Status, member: MemberStatus, awaited: bool) -> str:
    leads = status.state == "member" and member.number == status.lead
    marks = ["waited for"] * awaited + ["lead"] * leads + ["this host"] * member.is_self
    marks += [member.role] * bool(member.role)
    return ", ".join(marks)


def rows(looks: Looks) -> list[Row]:
    """The lines of the upper part."""
    return [*_network_rows(looks), *_job_rows(looks), *_wire_rows(looks)]


def _network_rows(looks: Looks) -> Iterator[Row]:
    status, activity = looks.now, looks.activity
    live = sum(member.state != "left" for member in status.members)
    state = status.state + (f", {status.phase}" if status.phase else "")
    here = f"{live} of {len(status.members)} members, " if status.members else ""
    yield Row("state", f"{state}; {here}view {status.view}", "bold")
    if activity.views:
        yield Row(
            "so far",
            f"views {activity.views}  evicted {activity.evictions}  back {activity.returns}",
        )
    for label, text, style in (
        ("trouble", status.trouble, "bold red"),
        ("warning", status.warning, "yellow"),
        ("switch", status.switch, ""),
        ("other job", status.other_job, ""),
    ):
        if text:
            yield Row(label, plain(text), style)


def _job_rows(looks: Looks) -> Iterator[Row]:
    status, activity, told = looks.now, looks.activity, looks.now.progress
    if activity.preparing:
        yield Row("preparing", plain(activity.preparing))
        return
    if status.job is None:
        last = status.last_job
        which = f", {last.job_id}" if last and last.job_id else " was refused"
        done = f"none; the last one{which}: {last.error or 'done'}" if last else "none"
        yield Row("job", plain(done))
        return
    how = " ".join(part for part in (activity.exchange, activity.lane) if part)
    yield Row("job", plain(status.job) + (f"  ({how})" if how else ""), "bold")
    total = told.get("rounds_total")
    parts = [f"{told.get('trained_rounds', status.round)}" + (f" of {total}" if total else "")]
    parts.append(f"{_number(looks.rate(lambda _, a: a.rounds))} rounds/s")
    if activity.pushes:  # S: rounds are counted at synchronisations only
        parts.append(f"{_number(looks.rate(lambda _, a: a.pushes))} pushes/s here")
    if activity.samples:  # the rounds of a script have none
        parts.append(f"{_number(looks.rate(lambda _, a: a.samples))} samples/s")
    if (seconds := looks.round_seconds()) is not None:
        parts.append(f"{1000 * seconds:.1f} ms a round")
    yield Row("round", "  ".join(parts))
    for label, figures in _REPORTED.items():
        shown = [
            f"{name} {form.format(value)}"
            for name, key, form in figures
            if isinstance(value := told.get(key), int | float)
        ]
        if shown:
            yield Row(label, "  ".join(shown))
    names = {m.number: plain(m.name) for m in status.members}
    waits = [names.get(m.number, "?") for m in activity.members if m.awaited]
    often = _often(names, looks.awaited)
    text = ", ".join(waits) or "nobody in particular"
    yield Row("waits for", text + (f"  (of the last looks: {', '.join(often)})" if often else ""))
    if slow := slow_hosts(status):
        yield Row("slow", slow, "yellow")
    yield from _channel_rows(looks, names)


def _channel_rows(looks: Looks, names: Mapping[int, str]) -> Iterator[Row]:
    """Each channel of a job with `priorities`, the most urgent one first."""
    for channel in sorted(looks.activity.channels, key=lambda c: c.urgency, reverse=True):
        parts = [f"urgency {channel.urgency}", f"{channel.state:7}"]
        parts.append(f"round {channel.place + 1} of {channel.places}")
        parts.append(f"{_number(looks.rate_on(channel, 'rounds'))}/s")
        parts.append(_bytes(looks.rate_on(channel, "bytes")))
        often = _often(names, partial(looks.awaited_on, channel.number))
        waits = often or [names.get(k, "?") for k in channel.awaits]
        if waits:
            parts.append(f"waits for {', '.join(waits)}")
        yield Row(f"channel {channel.number}", "  ".join(parts))


def _often(names: Mapping[int, str], part_of: Callable[[int], float]) -> list[str]:
    """The members that are waited for in many of the looks."""
    parts = sorted(((part_of(number), number) for number in names), reverse=True)
    return [f"{names[number]} {part:.0%}" for part, number in parts if part >= _AWAITED_OFTEN]


def _wire_rows(looks: Looks) -> Iterator[Row]:
    status, activity = looks.now, looks.activity
    turns = looks.rate(lambda s, _: s.token_turns)
    hops = looks.rate(lambda s, _: s.counters.get("bounced", 0))
    rests = "; it rests here" if activity.parked else ""
    yield Row("token", f"{_number(turns)} turns/s here, {_number(hops)} by the kernel{rests}")
    if activity.traffic is not None:
        yield Row(
            "interface",
            f"in {_bytes(looks.rate(_traffic('received_bytes')))}"
            f" {_number(looks.rate(_traffic('received_frames')))} frames/s,"
            f" out {_bytes(looks.rate(_traffic('sent_bytes')))}"
            f" {_number(looks.rate(_traffic('sent_frames')))} frames/s",
        )
    sent = looks.rate(lambda _, a: a.frames_sent)
    fragments = looks.rate(lambda s, _: s.fragments_sent)
    yield Row("nicps sent", f"{_number(sent)} frames/s, of them {_number(fragments)} fragments/s")
    rising = sorted(
        ((looks.rate(_counter(reason)) or 0.0, reason) for reason in status.counters), reverse=True
    )
    kernel = [f"{reason} {_number(rate)}/s" for rate, reason in rising[:_REASONS] if rate > 0]
    yield Row("XDP", "  ".join(kernel) or "nothing")
    refused = sum(status.control_refused.values()) + status.frames_malformed
    yield Row(
        "losses",
        f"{activity.fragments_resent:,} sent again, {activity.fragments_asked:,} asked again,"
        f" {refused:,} refused",
        "yellow" if looks.rate(lambda _, a: a.fragments_resent + a.fragments_asked) else "",
    )


def _traffic(figure: str) -> Callable[[Status, Activity], float]:
    return lambda _, activity: getattr(activity.traffic, figure, 0)


def _counter(reason: str) -> Callable[[Status, Activity], float]:
    return lambda status, _: status.counters.get(reason, 0)


#: What training waits for (`nicps.session.activity.SLOW_WHATS`), for people.
_WAITED = {
    "gradient": "for its gradient",
    "sums": "for its sums",
    "mark": "until it has all sums",
}


def slow_hosts(status: Status) -> str:
    """The hosts that training waits for much longer than for the others, in one line; empty if there are none."""
    activity, parts = status.activity, list[str]()
    if activity is None:
        return ""
    names = {m.number: plain(m.name) for m in status.members} | {0: "the Linux switch"}
    for of in activity.slow:
        text = f"{names.get(of.number, '?')}: training waits {of.part:.0%} of the time {_WAITED[of.what]}"
        if not of.number and activity.switch_asked:
            text += f", {activity.switch_asked:,} sums asked for again"
        parts.append(text)
    return "; ".join(parts)


def plain(text: str) -> str:
    """A text of another host, for a terminal: without characters that move its cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _bytes(rate: float | None) -> str:
    if rate is None:
        return "-"
    for unit in ("B/s", "kB/s", "MB/s"):
        if rate < 999.5:
            return f"{rate:.3g} {unit}"
        rate /= 1000
    return f"{rate:.3g} GB/s"


# ---- the frame


def frame(looks: Looks, height: int, note: str = "") -> RenderableType:
    """A frame of at most so many lines.

    Args:
        note: at the end of the first line.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status = looks.now
    key = "key" if status.keyed else "no key"
    title = Table.grid(expand=True, padding=(0, 1))
    title.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    title.add_column(justify="right", no_wrap=True)
    told = f"nicps {plain(status.network)}: {plain(status.name)} on {status.iface}"
    title.add_row(
        Text(f"{told} (XDP {status.xdp_mode}), {key}", "bold reverse"),
        Text(f"up {_clock(looks.activity.uptime_s)}{note}", "dim"),
    )
    upper = Table.grid(expand=True, padding=(0, 2))
    upper.add_column(style="cyan", no_wrap=True, width=_LABEL)
    upper.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    lines = rows(looks)
    for row in lines:
        upper.add_row(row.label, Text(row.text, row.style))
    members = members_of(looks)
    if not members:
        return Group(title, upper)
    room = max(_LEAST_MEMBERS, height - len(lines) - 3)
    return Group(title, upper, Text(""), _members_table(members, room))


def _members_table(members: Sequence[MemberRow], room: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="cyan")
    for title, options in _COLUMNS:
        table.add_column(title, no_wrap=True, overflow="ellipsis", **options)
    shown = members if len(members) <= room else members[: room - 1]
    for m in shown:
        style = (
            "red"
            if m.state == STATES["left"]
            else ("yellow" if m.awaited >= _AWAITED_OFTEN else "")
        )
        cells = (
            str(m.number),
            m.name,
            m.state,
            _number(m.samples),
            f"{m.awaited:.0%}",
            f"{m.asked:,}",
            f"{m.resent:,}",
            m.marks,
        )
        table.add_row(*(Text(cell, overflow="ellipsis") for cell in cells), style=style)
    if len(shown) < len(members):
        table.add_row("", Text(f"and {len(members) - len(shown)} more"))
    return table


_COLUMNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no", {"justify": "right", "min_width": 2}),
    ("name", {"min_width": 4}),
    ("state", {"min_width": 9}),
    ("samples/s", {"justify": "right", "min_width": 9}),
    ("waited", {"justify": "right", "min_width": 6}),
    ("asked", {"justify": "right", "min_width": 6}),
    ("resent", {"justify": "right", "min_width": 6}),
    ("", {}),
)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
