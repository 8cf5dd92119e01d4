# SPDX-License-Identifier: Apache-2.0
"""GO at the lead: when it is given, and what members are told of it (docs/servers.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol import ReadByAll, Send, ServerLost
from nicps.protocol.carried import Carried
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.served_ring import ServedRing
from nicps.protocol.token import TokenState
from tests.going_on import (
    GOES_ON,
    NEXT,
    START,
    TIMINGS,
    lead,
    said,
    token,
    wants,
    worker,
)
from tests.served_kernel import ROUND, VIEW, ServedKernel, phase_of

pytestmark = pytest.mark.unit


def test_the_lead_gives_go_once_all_have_read_and_it_has_decided() -> None:
    ring = lead(decided=False)
    ring.on_want(START, said(2))
    steps = ring.on_want(START, said(3))
    assert ReadByAll(ROUND) in steps and not wants(steps)
    assert wants(ring.go_on(START, saves=False)) == [(NEXT, GOES_ON, ROUND)]
    again = ring.on_want(START + 1, said(3))
    assert wants(again) == [(NEXT, GOES_ON, ROUND)], "it has not heard it"
    assert not wants(ring.on_want(START + 1, said(2))), "it is on its way"


def test_the_lead_waits_for_the_last_that_reads() -> None:
    ring = lead()
    assert not wants(ring.on_want(START, said(2)))
    assert not wants(ring.on_want(START, said(3, read=ROUND - 1)))
    assert not wants(ring.on_want(START, said(4))), "a server"
    assert (NEXT, GOES_ON, ROUND) in wants(ring.on_want(START, said(3)))


def test_the_lead_tells_what_each_has_read_once_a_server_is_lost() -> None:
    """Once, when it knows it of all workers: one of them is to serve in its place."""
    ring = lead(view=replace(VIEW, live=frozenset({1, 2, 3})))
    steps = ring.on_want(START, said(2))
    assert not [one for one in steps if isinstance(one, ServerLost)]
    steps = ring.on_want(START, said(3, read=ROUND - 1))
    assert ServerLost({2: ROUND, 3: ROUND - 1}) in steps
    assert ServerLost({2: ROUND, 3: ROUND}) not in ring.on_want(START, said(3))
    whole = lead()
    whole.on_want(START, said(2))
    assert not [one for one in whole.on_want(START, said(3)) if isinstance(one, ServerLost)]


@pytest.mark.parametrize("later", [0, 1, 2, 9])
def test_who_replaces_a_server_is_known_only_once_each_has_told(later: int) -> None:
    """However old the phase is: the open round says of each worker that it has read the last but two."""
    view, round_ = replace(VIEW, live=frozenset({1, 2, 3})), NEXT + later
    carried = Carried(round_, -40, round_ - 1)
    timeout = AdaptiveTimeout(TIMINGS)
    ring = ServedRing(phase_of(), view, 1, ServedKernel(), TIMINGS, timeout, carried, START)
    steps = ring.create(START) + ring.on_want(START, said(3, round_=round_, read=round_ - 2))
    assert not [one for one in steps if isinstance(one, ServerLost)]
    steps = ring.on_want(START, said(2, round_=round_, read=round_ - 1))
    assert ServerLost({2: round_ - 1, 3: round_ - 2}) in steps


@pytest.mark.parametrize("every", [0, 1, 4])
@pytest.mark.parametrize("told", ["a worker", "its mark", "nobody"])
def test_a_new_lead_goes_on_where_workers_may_have_pushed(told: str, every: int) -> None:
    """Its program judges otherwise than that of the lead before it, say. It knows once all have told what they have
    read. Where each step is a synchronisation nobody pushes.
    """
    ring = lead(decided=False, every=every)
    ring.on_want(START, said(2))
    if told == "its mark":
        steps = ring.on_token(START, _handed_back(ring, marks=wire.Mark.GOES_ON, read=ROUND))
    else:
        steps = ring.on_want(START, said(3, wire.Flag.TOKEN_WANTED | GOES_ON * (told != "nobody")))
    assert ReadByAll(ROUND) in steps
    free = told == "nobody" or every == 1
    assert ring.between_steps is free and ring._control.held_back is free


def test_a_lead_without_a_server_leaves_the_round() -> None:
    ring = lead(view=replace(VIEW, live=frozenset({1, 2, 3})))
    ring.on_want(START, said(3, GOES_ON))
    assert ring.between_steps


def test_members_tell_go_on() -> None:
    ring, _ = worker(carried=Carried(NEXT, -40, ROUND, goes_on=NEXT), read=ROUND)
    steps = ring.on_token(
        START, replace(TokenState.of(token(6)), owner=2).frame(VIEW.header(1, NEXT))
    )
    marks = [
        [entry.marks for entry in one.frame.items[0]]  # type: ignore[union-attr]
        for one in steps
        if isinstance(one, Send) and isinstance(one.frame.body, wire.Token)
    ]
    assert marks == [[0, wire.Mark.GOES_ON, 0, 0]]


def test_a_lead_that_promises_another_view_gives_no_go() -> None:
    ring = lead()
    ring.freeze()
    ring.on_want(START, said(2))
    assert not wants(ring.on_want(START, said(3)))


def test_the_token_tells_it_too() -> None:
    ring = lead()
    for number in (2, 3):
        ring.on_want(START, said(number))
    steps = ring.tick(START + TIMINGS.beacon_s)  # a parked token goes round
    steps += ring.on_token(START + 0.2, _handed_back(ring))
    marks = [
        one.frame.items[0][0].marks  # type: ignore[union-attr]
        for one in steps
        if isinstance(one, Send) and isinstance(one.frame.body, wire.Token)
    ]
    assert marks[-1] & wire.Mark.GOES_ON


def _handed_back(ring: ServedRing, marks: int = 0, read: int = 0) -> wire.Frame:
    """`marks` of the worker 3, which has read that round."""
    assert ring.token is not None
    lines = [line.copy() for line in ring.token.lines]
    lines[2].marks, lines[2].read = marks, max(read, lines[2].read)
    made = replace(ring.token, hop=ring.token.hop + 9, owner=1, lines=lines)
    return made.frame(VIEW.header(4, NEXT, 0))
