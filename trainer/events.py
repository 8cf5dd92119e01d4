# SPDX-License-Identifier: Apache-2.0
"""What happened to a run, as the report shows it: hosts that went and came back, other leads, tests, alarms.

Every agent writes down what it sees (timeline.jsonl). Several see the same; an agent that was away or killed has not
seen all. So all that was written down is put together, and each event is shown once, at its earliest time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.figures import Row, is_timed

#: What can happen, in the order of the legend; and what is said of the hosts, or of the run, that it happens to.
KINDS = {
    "evicted": "host evicted, or left",
    "returned": "host back, or new",
    "lead": "another host leads",
    "alarm": "alarm",
    "cancelled": "cancelled",
    "differs": "other weights at a host",
    "test": "test",
    "view": "new view, same hosts",
}
SAYS = {
    "evicted": "evicted",
    "returned": "in the view again",
    "lead": "leads from now on",
    "alarm": "alarm",
    "cancelled": "the job was cancelled",
    "differs": "had other weights than the rest",
    "test": "test",
    "view": "new view of the same hosts",
}
_DEPARTS_S = 30.0  # a host that departs is in no view any more after so long
_SKEW_S = 0.5  # between two hosts' clocks


@dataclass(frozen=True, order=True)
class Event:
    """Something that happened at `time` (seconds since the run began), in a round, to `hosts`.

    `view`: the view's number, 0 where it is not known. `why`: one line, or empty.
    """

    time: float
    round: int
    kind: str
    hosts: tuple[str, ...] = ()
    view: int = 0
    why: str = ""

    @property
    def title(self) -> str:
        """One line for people: `h2: in the view again (round 7, view 3, 1.20 s)`."""
        names = f"{', '.join(self.hosts)}: " if self.hosts else ""
        view = f"view {self.view}, " if self.view else ""
        why = f": {self.why}" if self.why else ""
        return f"{names}{SAYS[self.kind]} (round {self.round}, {view}{self.time:.2f} s){why}"


def merge_events(told: Iterable[tuple[str, Row]]) -> list[Event]:
    """The events of a run, in their order.

    Args:
        told: events in the hosts' timeline.jsonl, each with its host's name; `t0` is in seconds since the run began.
    """
    views: dict[int, Row] = {}
    departs: list[tuple[float, str, str]] = []
    others: dict[tuple[object, ...], Event] = {}
    for host, row in told:
        time, round_, kind, why = row["t0"], row["round"], row["kind"], str(row.get("why", ""))
        if kind == "view" and isinstance(row.get("live"), list):
            number = int(row.get("view", 0))
            if number not in views or time < views[number]["t0"]:
                views[number] = row
        elif kind == "departs":
            departs.append((time, host, why))
        elif kind in ("test", "alarm", "cancelled", "differs"):
            hosts = {"alarm": (host,), "differs": tuple(map(str, row.get("members", ())))}
            event = Event(time, round_, kind, hosts.get(kind, ()), why=why)
            key = (kind, round_, event.hosts)
            others[key] = min(others.get(key, event), event)
    return sorted([*_changes(views, departs), *others.values()])


def _changes(
    views: Mapping[int, Row], departs: Sequence[tuple[float, str, str]]
) -> Iterator[Event]:
    """What each view has changed, against the one before it that anybody knows of."""
    before: Row | None = None
    for number, row in sorted(views.items()):
        event = Event(row["t0"], row["round"], "view", view=number)
        if before is not None:
            live, was = row["live"], before["live"]
            left = tuple(name for name in was if name not in live)
            back = tuple(name for name in live if name not in was)
            leads_now = row.get("lead") != before.get("lead")
            if left:
                why = _why(left, event.time, departs)
                yield replace(event, kind="evicted", hosts=left, why=why)
            if back:
                yield replace(event, kind="returned", hosts=back)
            if leads_now:
                yield replace(event, kind="lead", hosts=(str(row.get("lead")),))
            if not (left or back or leads_now):
                yield event
        before = row


def _why(left: tuple[str, ...], time: float, departs: Sequence[tuple[float, str, str]]) -> str:
    """Why a host is not in a view, if it has said so itself before: the last that it said."""
    said = [
        (when, why)
        for when, host, why in departs
        if host in left and time - _DEPARTS_S < when < time + _SKEW_S
    ]
    return max(said)[1] if said else ""


def with_tests(events: Sequence[Event], rounds: Iterable[Row]) -> list[Event]:
    """The same with what the rounds say of tests: their accuracy, and where no agent has written them down."""
    tests = {row["round"]: row for row in rounds if row["phase"] == "test"}
    known = {event.round for event in events if event.kind == "test"}
    more = [
        Event(row["t_commit"], round_, "test")
        for round_, row in tests.items()
        if round_ not in known and is_timed(row)
    ]
    return sorted(
        replace(event, why=f"{tests[event.round]['accuracy']:.2%} succeeded")
        if event.kind == "test" and tests.get(event.round, {}).get("accuracy") is not None
        else event
        for event in (*events, *more)
    )


def away(events: Iterable[Event], end: float) -> dict[str, list[tuple[float, float]]]:
    """When hosts were not in the view, by name; a host that did not come back was away until the `end`."""
    since: dict[str, float] = {}
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        for name in event.hosts:
            if event.kind == "evicted":
                since[name] = event.time
            elif event.kind == "returned" and name in since:
                spans.setdefault(name, []).append((since.pop(name), event.time))
    for name, time in since.items():
        spans.setdefault(name, []).append((time, end))
    return spans
