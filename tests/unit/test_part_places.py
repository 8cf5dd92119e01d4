# SPDX-License-Identifier: Apache-2.0
"""The places of a host's own stripe: it is longer in a smaller view, and they are made while that view goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps.exchange import Exchange
from nicps.job.actions import (
    DropAccumulators,
    EnterPhase,
    Post,
    RenewAccumulators,
    RetirePlaces,
    UseAccumulators,
)
from nicps.job.slow_work import ReserveAccumulators
from nicps.protocol import Phase, View
from nicps.session import shared_form as says
from tests.parts import MEMBERS, Host, training

PLACES = {n: -(-(600 // n + 1) // 2) for n in (1, 2, 3)}  # blocks of two fragments, by aggregators


@pytest.fixture
def host() -> Host:
    host = Host()
    host.trains(striped())
    return host


def striped(number: int = 3, **settings: object) -> Phase:
    return training(number, exchange=Exchange.STRIPES, **settings)


def loses(host: Host, *live: int) -> Phase:
    """Another view, with these members only; the phase goes on in it."""
    number = host.spot.view.number + 1
    host.spot.view = View(number, MEMBERS, frozenset(live), lead=1)
    phase = replace(striped(), shares=tuple(4 * (k in live) for k in (1, 2, 3)))
    host.goes_on(phase, again=False)
    return phase


def views(host: Host) -> list[tuple[int, int]]:
    """What the training program was told: views, and the blocks of new places that came with them."""
    told = [post.message for post in host.found(Post)]
    return [(m.view, m.places) for m in told if isinstance(m, says.View)]


def test_a_phase_waits_for_its_places() -> None:
    """All that it needs is made in one task."""
    host = Host()
    host.builds()
    host.decides(striped())
    host.finish_task()  # what was handed out is on the disk
    assert not host.found(UseAccumulators) and not host.found(EnterPhase)
    assert host.finish_task(4) == ReserveAccumulators(1, 600, PLACES[3])
    assert host.found(UseAccumulators) == [UseAccumulators(4)]
    (entered,) = host.found(EnterPhase)
    message = entered.message
    assert (message.blocks, message.room, message.places) == (1, 600, PLACES[3])


def test_a_view_does_not_wait_for_them(host: Host) -> None:
    loses(host, 1, 2)
    assert host.found(RetirePlaces) and not host.found(RenewAccumulators)
    assert views(host) == [(2, 0)]
    assert not host.found(UseAccumulators)
    assert host.finish_task(5) == ReserveAccumulators(0, 0, PLACES[2])
    assert host.found(UseAccumulators) == [UseAccumulators(5)]
    assert views(host) == [(2, 0), (2, PLACES[2])]
    assert not host.begun


def test_a_view_with_as_long_stripes_keeps_them(host: Host) -> None:
    host.spot.view = View(2, MEMBERS, frozenset({1, 2, 3}), lead=1)
    host.goes_on(striped(), again=False)
    assert not host.found(RetirePlaces) and not host.begun


def test_places_of_a_view_that_has_passed_are_dropped(host: Host) -> None:
    loses(host, 1, 2)
    loses(host, 1)
    assert host.finish_task(5) == ReserveAccumulators(0, 0, PLACES[2])
    assert host.found(DropAccumulators) == [DropAccumulators(5)]
    assert not host.found(UseAccumulators)
    assert host.finish_task(6) == ReserveAccumulators(0, 0, PLACES[1])
    assert host.found(UseAccumulators) == [UseAccumulators(6)]
    assert views(host) == [(2, 0), (3, 0), (3, PLACES[1])]


def test_another_phase_brings_its_own(host: Host) -> None:
    """It was decided on before they were there."""
    loses(host, 1, 2)
    host.decides(striped(4, first_round=9, shares=(6, 6, 0)))
    assert host.finish_task(5) == ReserveAccumulators(0, 0, PLACES[2])
    assert host.found(UseAccumulators) == [UseAccumulators(5)]
    host.settle()
    assert len(host.found(UseAccumulators)) == 1, "they are there by then"
    (entered,) = host.found(EnterPhase)
    assert entered.message.places == 0 and views(host)[-1] == (2, PLACES[2])


def test_a_phase_that_is_entered_first_makes_the_others_superfluous(host: Host) -> None:
    phase = loses(host, 1, 2)
    later = replace(phase, number=4, first_round=9)
    late = host.begun.pop()  # the thread is slow
    host.decides(later)
    host.finish_task()
    assert host.finish_task(6) == ReserveAccumulators(0, 0, PLACES[2])
    (entered,) = host.found(EnterPhase)
    assert entered.message.places == PLACES[2]
    host.begun.append(late)
    host.finish_task(5)
    assert host.found(UseAccumulators) == [UseAccumulators(6)]
    assert host.found(DropAccumulators) == [DropAccumulators(5)]


def test_a_program_that_is_lost_meanwhile_hears_nothing(host: Host) -> None:
    loses(host, 1, 2)
    assert host.part.program is not None
    host.do(host.part.note_ended(host.now, host.part.program.number, -9, "killed"))
    host.forget()
    host.finish_task(5)
    assert host.found(UseAccumulators) == [UseAccumulators(5)] and not views(host)


def test_a_program_is_not_blamed_for_places(host: Host) -> None:
    """All wait for this host to enter the list, and it cannot."""
    program = host.part.program
    assert program is not None
    program.excuse()  # it has offered
    limit = program.silence_limit_s(awaited=True)
    while host.now < limit + 1.0:
        host.do(host.part.tick(host.now, awaited=False))
        host.now += 1.0
    loses(host, 1, 2)
    host.do(host.part.tick(host.now, awaited=True))
    assert not program.ended
    host.finish_task(5)
    host.do(host.part.tick(host.now, awaited=True))
    assert not program.ended, "it has time from now on"
