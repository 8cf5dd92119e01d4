# SPDX-License-Identifier: Apache-2.0
"""The simulator can find what is wrong: mistakes that are made on purpose, in the state machines and by a test."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import (
    Action,
    Installed,
    Send,
    View,
)
from nicps.protocol.installation import Installation
from nicps.protocol.ring import Ring
from nicps.protocol.signals import Steps
from nicps.protocol.token import Line
from nicps.protocol.view import Successor
from nicps.protocol.view_change import ViewChange
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, ends_well, job, training
from tests.simulator.faults import MOMENTS
from tests.simulator.host import Host
from tests.simulator.lan import Lan
from tests.simulator.schedules import Violation
from tests.simulator.stripes import Stripes

pytestmark = pytest.mark.unit


def test_a_token_with_two_holders_is_found_at_once() -> None:
    lan, _ = job()
    first, second = lan.hosts[1:3]
    assert lan.run(lambda: first.node.ring is not None and first.node.ring.holding, limit_s=5.0)
    second.node.rings.current = first.node.ring
    with pytest.raises(Violation, match="is held by two"):
        lan.run(lambda: not first.node.ring.holding)


def forming(monkeypatch: pytest.MonkeyPatch, untold: int = 0) -> Lan:
    """Of three hosts the third is told of their view, and killed; the lead never tells it to number `untold`."""
    lan, _ = job(hosts=3)
    tell = Installation.send_to

    def told(installation: Installation, number: int, nonce: int) -> Send:
        return tell(installation, number if number != untold else wire.MAX_MEMBERS, nonce)

    def lose(host: Host, action: Action) -> bool:
        if host is not lan.hosts[2] or not isinstance(action, Installed):
            return False
        host.kill()
        return True

    monkeypatch.setattr(Installation, "send_to", told)
    lan.moments.append(lose)
    lan.at(2.0, lan.hosts[2].restart)
    lan.trouble(2.0)
    return lan


def test_who_started_again_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second was killed before the list was closed: its nonce in it is that of its former life."""
    lan = forming(monkeypatch)
    lan.at(0.5, lan.hosts[1].kill)
    lan.at(1.5, lan.hosts[1].restart)
    outcome = schedules.finish(lan)
    assert outcome.what == "standing by"
    assert outcome.why == "of view 1 with [1, 2, 3] only [1] are left to whom it was told"
    assert not lan.moments, "the moment has never come"


@pytest.mark.parametrize("untold", [0, 2])
def test_who_can_be_told_is_waited_for(untold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lan = forming(monkeypatch, untold)
    if untold:
        with pytest.raises(Violation, match="the job has not ended"):
            schedules.finish(lan)
    else:
        ends_well(lan)


def test_a_view_can_be_told_by_who_knows_it_only() -> None:
    """The third has put a view in force, of itself and the first, and was killed before it could tell anybody."""
    lan, _ = training(hosts=3)
    lan.run(lambda: lan.now > TRAINING_S)
    first, second, third = lan.hosts
    left = "of view 2 with [1, 3] only [] are left"
    before = first.node.view
    view = replace(before, number=2, live=frozenset({1, 3}), seed=bytes([2] * 16))
    lan.checks.known(third, view)
    third.kill()
    third.restart()
    assert not schedules.stuck(lan), "two of three can find what was agreed on"
    second.node.membership.stand_by()
    assert left in schedules.stuck(lan)
    lan.checks.known(second, view)
    assert not schedules.stuck(lan), "who was told that it is out can tell the first, who is in"
    second.kill()
    assert left in schedules.stuck(lan), "it has forgotten it"
    view_change = first.node.membership.view_change
    assert view_change is not None
    view_change._successor = Successor(view.members, view.live, 1, 0, 1, 5, 0, view.seed)
    view_change._accepted = (1, second.mac)
    assert not schedules.stuck(lan), "the first and who had asked it to accept are two of three"


def found() -> bool:
    """First where it is worst: cut off just after it has committed, before anybody else knows, until it is evicted;
    then in the seed that finds the most.
    """
    worst, _ = job()
    seen = itertools.count(1)

    def cut_off(host: Host, action: Action) -> bool:
        if not MOMENTS["committed"](host, action) or next(seen) < 21:
            return False
        everybody = frozenset(range(len(worst.hosts)))
        worst.cut([frozenset({host.index}), everybody - {host.index}])
        worst.trouble(worst.now + 3.0)
        worst.at(worst.now + 3.0, lambda: worst.cut([]))
        return True

    worst.moments.append(cut_off)
    for lan in itertools.chain([worst], map(schedules.lan_of, (10, *range(40)))):
        try:
            schedules.finish(lan)
        except Violation:
            return True
    return False


def _minority_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "agreed", lambda view, numbers, *, alone=False: len(numbers) > 1)


def _commit_without_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Line, "complete", property(lambda line: line.marks & wire.Mark.COMPLETE or not line.samples)
    )


def _promises_downward(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(view_change: ViewChange, *frame: object) -> Steps:
        view_change.promised = (0, b"\0")
        return on_view(view_change, *frame)  # type: ignore[arg-type]

    on_view = ViewChange.on_view
    monkeypatch.setattr(ViewChange, "on_view", forget)
    monkeypatch.setattr(ViewChange, "_takeover_s", 0.01)


def _token_from_a_stale_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(ring: Ring, *frame: object) -> Steps:
        ring._key = ring._seen = (ring.phase.generation, 0)
        return on_token(ring, *frame)  # type: ignore[arg-type]

    on_token = Ring.on_token
    monkeypatch.setattr(Ring, "on_token", forget)


def _hides_that_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "complete", property(lambda ring: False))


def test_places_that_are_not_retired_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is made in the places of another view leaves its remainder where nobody reads it."""
    monkeypatch.setattr(Stripes, "retire_places", lambda stripes: None)

    def violation(seed: int) -> str:
        try:
            schedules.run(seed, series=Exchange.STRIPES)
        except Violation as found:
            return str(found)
        return ""

    assert any("uses the remainder" in violation(seed) for seed in range(2017, 2100))


@pytest.mark.parametrize(
    "mistake",
    [
        _minority_agrees,
        _commit_without_complete,
        _promises_downward,
        _token_from_a_stale_repeat,
        _hides_that_it_is_complete,
    ],
)
def test_a_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert found(), "the simulator has not noticed"
