# SPDX-License-Identifier: Apache-2.0
"""Groups whose rounds have sizes of their own, on several channels, under seeded schedules of faults.

A seed that fails names itself: `python -m tests.simulator --seed N --sized --trace 200`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nicps.protocol import Action, Committed, Installed
from nicps.protocol.carried import Carried
from nicps.protocol.channels import ChannelledRing
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.signals import Steps
from nicps.wire import FrameType
from tests.simulator import channel_lan, sized_lan
from tests.simulator.channel_host import ChannelHost
from tests.simulator.host import Host
from tests.simulator.places import KernelFrame
from tests.simulator.schedules import Violation
from tests.simulator.sized_lan import SizedLan

pytestmark = pytest.mark.unit


def finish(lan: SizedLan) -> SizedLan:
    try:
        channel_lan.finish(lan)
    except Violation as error:
        raise AssertionError(f"seed {lan.seed}: {error}") from error
    return lan


def run(seeds: Sequence[int]) -> list[SizedLan]:
    return [finish(sized_lan.lan_of(seed)) for seed in seeds]


@pytest.mark.short("0")
@pytest.mark.parametrize("seeds", [(3, 7), (0, 1, 4, 5), (2, 6, 8, 9)], ids=("0", "1", "2"))
def test_seeds(seeds: Sequence[int]) -> None:
    """Also, rounds of several channels are under way at the same time."""
    assert any(lan.checks.beside for lan in run(seeds))


@pytest.mark.long
@pytest.mark.parametrize("first", range(2000, 3000, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25))


# ---- mistakes that are made on purpose


def is_found(seed: int) -> None:
    with pytest.raises(Violation):
        channel_lan.finish(sized_lan.lan_of(seed))


def test_offers_that_are_lost_on_the_way_into_the_next_view_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carry = ChannelledRing.carry

    def wrong(self: ChannelledRing) -> Carried:
        carried = carry(self)
        return replace(carried, others=tuple([replace(o, offer=None) for o in carried.others]))

    monkeypatch.setattr(ChannelledRing, "carry", wrong)
    is_found(15)


@pytest.mark.long
def test_what_is_repeated_on_one_channel_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: ChannelledRing, now: float) -> Steps:
        for channel in self._channels:
            if now >= channel.announcer.due:
                channel.announcer._marks.back_off(now)
        if now < self._announcer.due:
            return []
        return [*self._announcer.repeat(now), *self._act_or_want(now)]

    monkeypatch.setattr(ChannelledRing, "_repeat", wrong)
    is_found(9)


def test_a_round_of_the_size_of_its_room_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Exchanger, round_: int) -> int:
        return self._phase.fragments_in(round_, self._channel)

    monkeypatch.setattr(Exchanger, "_fragments_in", wrong)
    is_found(0)


# ---- one fault


def quiet(hosts: int = 4, seed: int = 0) -> SizedLan:
    """A group with channels, and no fault but those that a test makes."""
    for at in range(seed, seed + 1000):
        lan = sized_lan.lan_of(at, hosts, faults=0)
        section = lan.calls.sections[0]
        full = [calls for calls in section.calls if len(calls) > 2]
        short = not lan.conditions.loss and len(lan.calls.sections) < 5
        if short and len(section.plan) == 3 and len(full) == 3:
            return lan
    raise AssertionError("no seed is like that")


def test_a_channel_whose_sums_do_not_come_holds_up_no_other() -> None:
    """Calls on different channels do not wait for one another."""
    lan = quiet()
    stripe, committed_in = lan.stripe, lan.checks.committed_in
    lost: list[float] = []
    passed: list[int] = []

    def lose(sender: ChannelHost, frame: KernelFrame, when: float, **how: bool) -> None:
        sums = frame.type is FrameType.SUM and not getattr(sender, "channel", 0)
        if sums and (not lost or lan.now < lost[0] + 0.2):
            lost.append(lan.now)
        else:
            stripe(sender, frame, when, **how)

    def note(host: ChannelHost, commit: Committed) -> None:
        committed_in(host, commit)
        if lost and lan.now < lost[0] + 0.2:
            passed.append(commit.channel)

    lan.stripe = lose  # type: ignore[method-assign]
    lan.checks.committed_in = note  # type: ignore[method-assign]
    finish(lan)
    assert lost and set(passed) == {1, 2}, passed


def test_the_lead_is_lost_as_the_plan_changes() -> None:
    """Members that are prepared for it go back to the phase in force, and the next lead decides the same."""
    lan = next(each for seed in itertools.count() if (each := replanned(seed)))
    back: list[int] = []
    installed = lan.checks.installed

    def note(host: ChannelHost, action: Installed) -> None:
        installed(host, action)
        if action.again and action.phase is not None:
            back.append(host.index)

    def kill(host: Host, action: Action) -> bool:
        if not sized_lan.is_replanned(host, action):
            return False
        lan.trouble(lan.now)
        lan.at(lan.now, next(each for each in lan.hosts if each.node.leads).kill)
        return True

    lan.checks.installed = note  # type: ignore[method-assign,assignment]
    lan.moments.append(kill)
    finish(lan)
    assert back, "the decision has come to nothing"
    phases = {first for first, _, _ in lan.checks.done}
    assert len(phases) > 1, "another plan has come into force"


def replanned(seed: int) -> SizedLan | None:
    """A group of four that has a plan from the beginning, and changes it; no fault comes."""
    lan = sized_lan.lan_of(seed, 4, faults=0)
    plans = {section.plan for section in lan.calls.sections}
    fits = len(plans) == 2 and all(plans) and len(lan.calls.sections) < 5
    return lan if fits and not lan.conditions.loss else None
