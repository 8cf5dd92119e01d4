# SPDX-License-Identifier: Apache-2.0
"""GO: with servers nobody pushes or offers before all workers have read the round before (docs/servers.md)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol import Committed, SendServed
from nicps.protocol.carried import Carried, Pending
from nicps.protocol.exchange.servers import Begun
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.rings import Rings
from nicps.protocol.served_ring import ServedRing
from nicps.protocol.signals import Silent
from nicps.protocol.token import TokenState
from tests.going_on import (
    COMPLETE,
    CONTRIBUTION,
    GOES_ON,
    NEXT,
    OFFERED,
    PULL,
    PUSH,
    START,
    TIMINGS,
    said,
    step,
    token,
    types,
    wants,
    worker,
)
from tests.served_kernel import ROUND, VIEW, ServedKernel, phase_of

pytestmark = pytest.mark.unit


# ---- a worker


def test_a_step_waits_for_go() -> None:
    ring, _ = worker()
    assert not types(ring.step(START, step()))
    steps = ring.on_want(START, said(1, GOES_ON))
    assert types(steps) == {PUSH}


def first_round(number: int, *, behind: bool = False) -> ServedRing:
    """In the first round of a phase."""
    phase = phase_of(first_round=NEXT)
    carried = Carried.at_the_start(phase, behind=behind)
    timeout = AdaptiveTimeout(TIMINGS)
    return ServedRing(phase, VIEW, number, ServedKernel(), TIMINGS, timeout, carried, START)


def test_in_a_phases_first_round_a_step_waits_for_go_too() -> None:
    """Another worker may not have pulled the last commit, as a server was lost: in this phase it does."""
    ring = first_round(2)
    assert not types(ring.step(START, step())), "the phase is not in force"
    steps = ring.on_token(START, token(5, read=NEXT - 3))
    assert wants(steps) == [(NEXT, 0, ROUND)] and not types(steps)
    assert types(ring.on_want(START, said(1, GOES_ON))) == {PUSH}


def test_a_worker_that_lacks_the_last_commit_tells_when_it_has_it() -> None:
    ring = first_round(2, behind=True)
    assert not wants(ring.on_token(START, token(5, read=NEXT - 3)))
    assert types(ring.pull(START, ())) == {PULL}
    assert wants(ring.read(START, ROUND, 0)) == [(NEXT, 0, ROUND)]


def test_the_lead_waits_in_a_phases_first_round_for_a_worker_that_is_behind() -> None:
    ring = first_round(1)
    ring.create(START)
    assert not wants(ring.on_want(START, said(2)))
    assert not wants(ring.on_want(START, said(3, read=ROUND - 1)))
    assert (NEXT, GOES_ON, ROUND) in wants(ring.on_want(START, said(3)))


def test_the_first_round_of_all_has_nothing_before_it() -> None:
    assert Carried.at_the_start(phase_of(first_round=1), behind=True).read == 0


@pytest.mark.parametrize("known", ["nothing", "read", "not read", "evicted"])
def test_what_a_program_has_read_is_known_in_the_next_phase(known: str) -> None:
    """Whoever comes back after it was evicted is given the state of the last commit."""
    host = LocalHost(VIEW.members[1].mac, "h2", NodeState.MEMBER, VIEW, 2)
    rings = Rings(host, ServedKernel(), TIMINGS, AdaptiveTimeout(TIMINGS))
    if known != "nothing":
        phase = phase_of()
        rings.note_committed(Committed(phase, ROUND, {2: 4}, -40, -40, phase.exchange, 3, (4, 1)))
        rings.note_read(ROUND - (known != "read"))
    if known == "evicted":
        rings.close()
    rings.prepare(START, phase_of(first_round=NEXT + 1))
    ring = rings.enter_coming()
    said_first = wants(ring.on_token(START, token(5, NEXT + 1, read=NEXT - 2)))
    assert said_first == ([] if known == "not read" else [(NEXT + 1, 0, NEXT)])


def test_what_a_host_commits_as_it_leaves_is_not_counted() -> None:
    host = LocalHost(VIEW.members[1].mac, "h2", NodeState.STANDBY, VIEW, 2)
    rings = Rings(host, ServedKernel(), TIMINGS, AdaptiveTimeout(TIMINGS))
    phase = phase_of()
    rings.note_committed(Committed(phase, ROUND, {2: 4}, -40, -40, phase.exchange, 3, (4, 1)))
    host.state = NodeState.MEMBER
    rings.prepare(START, phase_of(first_round=NEXT))
    assert wants(rings.enter_coming().on_token(START, token(5, read=NEXT - 3)))


@pytest.mark.parametrize(
    "heard", ["the lead", "its mark", "a member", "a member's mark", "an offer", "before the view"]
)
def test_whoever_hears_of_go_begins(heard: str) -> None:
    carried = Carried(NEXT, -40, ROUND, goes_on=NEXT if heard == "before the view" else 0)
    ring, _ = worker(every=64, carried=carried)
    if heard == "the lead":
        ring.on_want(START, said(1, GOES_ON))
    elif heard == "its mark":
        ring.on_token(START, token(6, marks=wire.Mark.GOES_ON))
    elif heard == "a member":
        ring.on_want(START, said(3, GOES_ON))
    elif heard == "a member's mark":
        ring.on_token(START, token(6, marks=wire.Mark.GOES_ON, of=3))
    elif heard == "an offer":
        ring.on_want(START, said(3, OFFERED))
    steps = ring.step(START, step())
    if heard == "an offer":  # and so the synchronisation is due
        assert wants(steps) == [(NEXT, OFFERED, ROUND)]
    else:
        assert types(steps) == {PUSH}


def test_go_of_another_round_does_not_count() -> None:
    ring, _ = worker()
    ring.on_want(START, said(1, GOES_ON, ROUND))
    ring.on_want(START, said(1, 0))
    assert not types(ring.step(START, step()))


def test_go_may_come_before_the_commit() -> None:
    ring, _ = worker(carried=Carried(ROUND, -40, ROUND - 1))
    ring.on_want(START, said(1, GOES_ON))
    ring.on_token(START, token(7))
    assert types(ring.step(START, step())) == {PUSH}


def test_what_was_read_is_told_until_go_is_heard() -> None:
    ring, _ = worker(read=ROUND - 1)
    assert wants(ring.read(START, ROUND, 77)) == [(NEXT, 0, ROUND)]
    now, waits = START, []
    for _ in range(3):
        waits.append(ring._served.deadline() - now)
        now = ring._served.deadline()
        assert (NEXT, 0, ROUND) in wants(ring.tick(now))
    assert waits == sorted(waits) and waits[0] < waits[-1]
    ring.on_want(now, said(1, GOES_ON))
    assert ring._served.deadline() == math.inf


def test_a_new_view_is_told_at_once_what_was_read() -> None:
    """Its lead has not heard it."""
    kernel, carried = ServedKernel(), Carried(NEXT, -40, ROUND)
    timeout = AdaptiveTimeout(TIMINGS)
    ring = ServedRing(phase_of(), VIEW, 2, kernel, TIMINGS, timeout, carried, START)
    assert wants(ring.on_token(START, token(5))) == [(NEXT, 0, ROUND)]


def test_no_offer_is_broadcast_before_go() -> None:
    """Also of a step that goes along into the next view, and with the token."""
    ring, _ = worker(carried=Carried(NEXT, -40, ROUND, offer=replace(step(), unit=0)))
    assert not ring.offered
    ring.on_want(START, said(1, GOES_ON))
    assert ring.offered == {2}


# ---- when a synchronisation is due


def test_a_step_is_pushed_until_the_version_says_otherwise() -> None:
    ring, kernel = worker(every=4, carried=Carried(NEXT, -40, ROUND, goes_on=NEXT))
    for version in (0, 1, 2):
        steps = ring.step(START, step())
        assert types(steps) == {PUSH}
        while types(steps):
            kernel.take_all(steps)
            kernel.answers = {4: (0, 1, NEXT, version), 1: (0, 1, NEXT, 0)}
            steps = ring.advance(START)
    assert wants(ring.step(START, step())) == [(NEXT, OFFERED, ROUND)]


def test_a_step_under_way_ends_before_the_next_is_offered() -> None:
    ring, kernel = worker(every=64, carried=Carried(NEXT, -40, ROUND, goes_on=NEXT))
    steps = ring.step(START, step())
    ring.on_want(START, said(3, OFFERED))
    assert not ring.offered >= {2}
    assert not wants(ring.step(START, step()))
    while types(steps):
        kernel.take_all(steps)
        steps = ring.advance(START)
    assert ring.offered == {2, 3}
    assert ring.token is not None and ring.token.state == wire.TokenState.CLOSING


@pytest.mark.parametrize("every", [0, 4])
def test_who_skips_lets_the_round_end(every: int) -> None:
    """Without synchronisations the others push on until their programs skip too."""
    ring, _ = worker(every=every, carried=Carried(NEXT, -40, ROUND, goes_on=NEXT))
    frame = token(8)
    entry = replace(frame.items[0][2], marks=wire.Mark.SKIPPED)  # type: ignore[type-var]
    entries = (*frame.items[0][:2], entry, frame.items[0][3])
    ring.on_token(START, wire.Frame(frame.header, frame.body, (entries, ())))
    assert types(ring.step(START, step())) == ({PUSH} if every == 0 else set())


def test_a_program_that_pulls_what_it_has_offered_for_gets_nothing() -> None:
    """Its contribution has the number that it was offered with, and numbers rise."""
    ring, _ = worker(every=1, carried=Carried(NEXT, -40, ROUND, goes_on=NEXT))
    ring.step(START, step())
    assert not types(ring.pull(START, ()))
    assert types(ring.on_want(START, said(3, OFFERED))) == {CONTRIBUTION}


def test_the_offers_of_all_workers_close_the_list_and_contributions_begin() -> None:
    ring, kernel = worker(every=1, carried=Carried(NEXT, -40, ROUND, goes_on=NEXT))
    ring.step(START, step())
    steps = ring.on_want(START, said(3, OFFERED))
    assert types(steps) == {CONTRIBUTION}
    while types(steps):
        kernel.take_all(steps)
        steps = ring.advance(START)
    assert ring.complete
    for number in (1, 3, 4):
        steps = ring.on_want(START, said(number, COMPLETE | OFFERED * (number == 3)))
    (commit,) = (one for one in steps if isinstance(one, Committed))
    assert dict(commit.counted) == {2: 4, 3: 4} and commit.aggregators == (4, 1)


def test_a_question_for_the_token_draws_no_other() -> None:
    """Who wants it too has asked."""
    ring, _ = worker(every=0, carried=Carried(NEXT, -40, ROUND, goes_on=NEXT))
    asked = wants(ring.step(START, step(skip=True)))
    assert asked == [(NEXT, wire.Flag.TOKEN_WANTED | GOES_ON, ROUND)]
    for number in (1, 3, 4):
        assert not wants(ring.on_want(START, said(number, wire.Flag.TOKEN_WANTED)))


@pytest.mark.parametrize("flags", [0, GOES_ON, OFFERED, COMPLETE])
def test_what_a_member_repeats_does_not_hide_that_the_token_is_lost(flags: int) -> None:
    """Member 3 owns it, and has not received it: the lead that sent it is dead, and gives no GO."""
    ring, _ = worker()
    lost = replace(TokenState.of(token(6)), owner=3)
    ring.on_token(START, lost.frame(VIEW.header(1, NEXT)))
    found = []
    for turn in range(200):
        now = START + turn * 0.01
        ring.on_want(now, said(3, flags))
        found += [one.number for one in ring.tick(now) if isinstance(one, Silent)]
    assert found == [3]


# ---- from view to view


def test_a_push_goes_on_in_the_next_view_with_its_number() -> None:
    ring, kernel = worker(every=64, carried=Carried(NEXT, -40, ROUND, goes_on=NEXT))
    (first, *_) = (one for one in ring.step(START, step()) if isinstance(one, SendServed))
    carried = ring.carry()
    assert carried.pending == Pending(None, Begun(PUSH, first.number, (), {4: 0, 1: 0}))
    assert carried.goes_on == NEXT
    later, _ = worker(every=64, carried=carried)
    timeout = AdaptiveTimeout(TIMINGS)
    later = ServedRing(phase_of(64), VIEW, 2, kernel, TIMINGS, timeout, carried, START)
    steps = later.on_token(START, token(5))
    assert {one.number for one in steps if isinstance(one, SendServed)} == {first.number}


def test_a_step_that_waits_goes_along() -> None:
    ring, _ = worker()
    ring.step(START, step())
    assert ring.carry().pending == Pending(step(), None)
    assert types(worker(carried=replace(ring.carry(), goes_on=NEXT))[0].pull(START, ())) == {PULL}


def test_without_a_server_what_is_asked_for_waits() -> None:
    view = replace(VIEW, live=frozenset({1, 2, 3}))
    kernel, carried = ServedKernel(), Carried(NEXT, -40, ROUND, goes_on=NEXT)
    timeout = AdaptiveTimeout(TIMINGS)
    ring = ServedRing(phase_of(), view, 2, kernel, TIMINGS, timeout, carried, START)
    ring.on_token(START, token(5))
    assert not types(ring.pull(START, ()))
    begun = ring.carry().pending.begun
    assert begun is not None and begun.type is PULL
    assert not types(ring.step(START, step()))
    assert ring.carry().pending.step == step()


def test_a_contribution_has_another_number_in_each_view() -> None:
    """What was acknowledged in the view before counts for nothing in this one."""
    numbers = iter(range(10, 20))
    found = []
    carried = Carried(NEXT, -40, ROUND, goes_on=NEXT)
    for _ in range(2):
        timeout = AdaptiveTimeout(TIMINGS)
        kernel = ServedKernel()
        ring = ServedRing(phase_of(1), VIEW, 2, kernel, TIMINGS, timeout, carried, START, numbers)
        ring.on_token(START, token(5))
        ring.step(START, step())
        steps = ring.on_want(START, said(3, OFFERED))
        found += sorted({one.number for one in steps if isinstance(one, SendServed)})
        carried = ring.carry()
    assert len(found) == 2 and found[0] < found[1]
