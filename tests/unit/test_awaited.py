# SPDX-License-Identifier: Apache-2.0
"""Whom the open round waits for, and how long; which host is slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.flows import FlowWatch
from nicps.agent.records import TimeLine
from nicps.agent.waits import SlowHost, Waited, Waits, find_late, find_slow, read_waited
from nicps.exchange import Exchange
from nicps.protocol import Node
from nicps.protocol.signals import Late
from nicps.protocol.token import Line, TokenState
from nicps.session.activity import SLOW_WHATS
from tests.ring_parts import VIEW, node_of, ring_of

CONTRIBUTED, SKIPPED, COMPLETE = wire.Mark.CONTRIBUTED, wire.Mark.SKIPPED, wire.Mark.COMPLETE
OPEN, CLOSING = wire.TokenState.OPEN, wire.TokenState.CLOSING
MEMBERS = VIEW.members
A, B, C = (member.mac for member in MEMBERS)


def host_in(
    *marks: int,
    state: int = OPEN,
    live: tuple[int, ...] = (1, 2, 3),
    shares: tuple[int, ...] = (8, 8, 8),
    offered: tuple[int, ...] = (),
    round_: int = 5,
    late: Mapping[int, Late] | None = None,
    kind: wire.PhaseKind = wire.PhaseKind.TRAIN,
) -> Node:
    """Member 1, whose open round is `round_`; `late`: what its exchange says of the sums that lack here."""
    view = replace(VIEW, live=frozenset(live))
    about = {"quorum": 24, "first_round": round_, "shares": shares, "view": view, "kind": kind}
    ring = ring_of(1, Exchange.STRIPES, **about)  # type: ignore[arg-type]
    ring._control.token = TokenState(1, 1, 1, 5, 0, 0, [Line(marks=mark) for mark in marks], state)
    for number in offered:
        ring._control.offers.hear(round_, number, 8, -20)
    ring.find_late = lambda: late or {}  # type: ignore[method-assign]
    return node_of(1, ring, view)


def waits(*marks: int, **more: Any) -> set[int]:
    return set(find_late(host_in(*marks, **more)))


def test_nobody_while_all_compute() -> None:
    assert waits(0, 0, 0) == set()
    assert waits(0, 0, 0, live=(1,)) == set()


@pytest.mark.parametrize("done", [CONTRIBUTED, SKIPPED])
def test_who_has_not_offered_while_the_list_is_open(done: int) -> None:
    assert waits(done, 0, done) == {2}
    assert waits(0, 0, done) == {1, 2}
    assert find_late(host_in(done, 0, done)) == {2: Late.GRADIENT}


def test_an_offer_that_was_broadcast_counts() -> None:
    assert waits(0, 0, 0, offered=(1, 2)) == {3}


def test_who_has_left_or_has_no_share_is_not_waited_for() -> None:
    assert waits(CONTRIBUTED, 0, 0, live=(1, 3)) == {3}
    assert waits(CONTRIBUTED, 0, 0, shares=(8, 0, 8)) == {3}
    assert waits(0, 0, 0, shares=(8, 0, 8)) == set()


def test_who_lacks_fragments_once_the_list_is_closed() -> None:
    """Also one that only receives."""
    full = CONTRIBUTED | COMPLETE
    assert find_late(host_in(full, CONTRIBUTED, full, state=CLOSING)) == {2: Late.MARK}
    assert waits(full, full, 0, state=CLOSING, shares=(8, 8, 0)) == {3}
    assert waits(full, full, full, state=CLOSING) == set()


def test_the_lead_marks_itself_last() -> None:
    full = CONTRIBUTED | COMPLETE
    assert waits(CONTRIBUTED, CONTRIBUTED, full, state=CLOSING) == {2}
    assert waits(CONTRIBUTED, full, full, state=CLOSING) == {1}


def test_a_slow_aggregator_or_switch_is_waited_for_though_all_lack_its_sums() -> None:
    listed = (CONTRIBUTED, CONTRIBUTED, CONTRIBUTED)
    assert waits(*listed, state=CLOSING) == set()
    for late in ({2: Late.SUMS}, {0: Late.SUMS}, {3: Late.GRADIENT}):
        assert find_late(host_in(*listed, state=CLOSING, late=late)) == late


def test_a_token_of_another_round_says_nothing() -> None:
    assert waits(CONTRIBUTED, 0, 0, round_=6) == set()


# ---- how long


class Host:
    """Measures at one host."""

    def __init__(self) -> None:
        self.now = 0.0
        self.node = host_in(0, 0, 0)
        self.waits = Waits(self.node, FlowWatch(self.node, TimeLine()), self.now)

    def spends(self, seconds: float, turns: int, *marks: int, **more: Any) -> None:
        """So long in such a round, in so many turns of the loop."""
        self.node.__dict__.update(host_in(*marks, **more).__dict__)
        for _ in range(turns):
            self.waits.look(self.now)
            self.now += seconds / turns
            self.waits.note(self.now, seconds / turns)

    @property
    def slow(self) -> dict[Any, tuple[float, Late]]:
        return {of.host: (round(of.part, 3), of.what) for of in self.waits.slow()}


def test_a_straggler_is_slow() -> None:
    host = Host()
    host.spends(1.2, 20, 0, 0, 0)
    assert host.slow == {}
    host.spends(0.8, 20, CONTRIBUTED, 0, CONTRIBUTED)
    assert host.slow == {B: (0.4, Late.GRADIENT)}


def test_a_slow_aggregator_and_a_slow_switch_are_slow() -> None:
    listed = (CONTRIBUTED, CONTRIBUTED, CONTRIBUTED)
    for late, address in (({3: Late.SUMS}, C), ({0: Late.SUMS}, wire.SWITCH)):
        host = Host()
        host.spends(1.0, 20, 0, 0, 0)
        host.spends(1.0, 20, *listed, state=CLOSING, late=late)
        assert host.slow == {address: (0.5, Late.SUMS)}


def test_hosts_that_wait_for_one_another_are_not_slow() -> None:
    host = Host()
    for marks in ((0, CONTRIBUTED, CONTRIBUTED), (CONTRIBUTED, 0, CONTRIBUTED)):
        host.spends(1.0, 20, *marks)
    host.spends(0.9, 20, CONTRIBUTED, CONTRIBUTED, 0)
    assert host.slow == {}


def test_short_waits_pauses_of_this_host_and_other_phases_do_not_count() -> None:
    host = Host()
    host.spends(2.0, 40, 0, 0, 0)
    host.spends(100.0, 1, CONTRIBUTED, 0, CONTRIBUTED)  # it was stopped
    host.spends(2.0, 4000, CONTRIBUTED, 0, CONTRIBUTED)  # of half a millisecond
    host.spends(20.0, 400, 0, 0, CONTRIBUTED, kind=wire.PhaseKind.TEST)
    assert host.slow == {} and host.waits.of_job.seconds == pytest.approx(4.1)


def test_a_host_that_has_recovered_is_not_slow_any_more() -> None:
    host = Host()
    host.spends(20.0, 400, CONTRIBUTED, 0, CONTRIBUTED)
    assert host.slow.keys() == {B}
    host.spends(45.0, 900, 0, 0, 0)
    assert host.slow == {}
    assert find_slow(host.waits.of_job, {A, B, C}) == [
        SlowHost(B, pytest.approx(20 / 65), Late.GRADIENT)
    ]


def test_a_host_that_has_left_is_not_slow() -> None:
    host = Host()
    host.spends(2.0, 40, CONTRIBUTED, 0, CONTRIBUTED)
    assert host.slow.keys() == {B}
    host.spends(0.1, 2, 0, 0, 0, live=(1, 3))
    assert host.slow == {}


def test_work_of_the_loop_is_no_wait() -> None:
    """Otherwise a search that takes long would be made in each turn."""
    host = Host()
    host.node.__dict__.update(host_in(CONTRIBUTED, 0, CONTRIBUTED).__dict__)
    for _ in range(40):
        host.now += 0.05
        host.waits.note(host.now, 0.0)
    assert host.slow == {} and host.waits.of_job.seconds == pytest.approx(2.0)


def test_waits_that_were_not_looked_at_count_as_the_next_one_that_was() -> None:
    """A look takes processor time, and rounds of a few milliseconds have many waits."""
    host, looks = Host(), list[float]()
    node = host_in(CONTRIBUTED, 0, CONTRIBUTED)
    host.node.__dict__.update(node.__dict__)
    find = host.waits._find_late
    host.waits._find_late = lambda: (looks.append(host.now), find())[1]  # type: ignore[method-assign]
    for _ in range(512):
        host.spends(2**-8, 1, CONTRIBUTED, 0, CONTRIBUTED)
    assert len(looks) == 64, "each eighth"
    assert host.slow == {B: (1.0, Late.GRADIENT)}


def test_little_time_shows_nothing() -> None:
    host = Host()
    host.spends(0.9, 18, CONTRIBUTED, 0, CONTRIBUTED)
    assert host.slow == {}


def test_the_result_has_it_by_name_and_another_job_begins_anew() -> None:
    host = Host()
    host.spends(1.0, 20, CONTRIBUTED, 0, CONTRIBUTED)
    host.spends(0.5, 10, CONTRIBUTED, CONTRIBUTED, CONTRIBUTED, state=CLOSING, late={0: Late.SUMS})
    facts = host.waits.facts(MEMBERS)
    waited = read_waited([facts, facts])
    assert waited.seconds == pytest.approx(3.0)
    assert dict(waited.of) == {
        ("h2", Late.GRADIENT): pytest.approx(2.0),
        (None, Late.SUMS): pytest.approx(1.0),
    }
    assert host.waits.facts(MEMBERS[:1])["for"] == [
        {"name": None, "what": "sums", "seconds": pytest.approx(0.5)}
    ], "a host that is no longer a member has no name"
    host.waits.begin_job()
    assert host.waits.of_job == Waited() and host.slow == {}


def test_the_status_has_the_same_words() -> None:
    assert tuple(Late) == SLOW_WHATS
