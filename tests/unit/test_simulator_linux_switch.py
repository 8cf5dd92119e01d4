# SPDX-License-Identifier: Apache-2.0
"""A Linux switch that adds, under seeded schedules of faults; and that the simulator can find a mistake in it.

A seed that fails names itself: `python -m tests.simulator --seed N --exchange linux-switch --trace 200`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Committed
from nicps.protocol.phase import Timings
from nicps.protocol.switch_link import SwitchLink
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, run
from tests.simulator.lan import Conditions, Lan
from tests.simulator.linux_switch import LinuxSwitch, Pair
from tests.simulator.schedules import Violation

pytestmark = pytest.mark.unit

CHUNK = 15
#: How many of seeds 0 to 14 end well, and so on.
DONE = (7, 10, 12)


@pytest.mark.short("0-7")
@pytest.mark.parametrize(("chunk", "done"), list(enumerate(DONE)))
def test_seeds(chunk: int, done: int) -> None:
    """In the others the starter is lost, or a majority, or nobody is left who has the job."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    assert run(seeds, exchange=Exchange.LINUX_SWITCH)["done"] >= done - 1


def test_a_sum_that_is_asked_for_before_the_switch_has_sent_it() -> None:
    """The switch stalls in between. The check has to know which boot has made it."""
    run([2105018], exchange=Exchange.LINUX_SWITCH)


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 11_000, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25), exchange=Exchange.LINUX_SWITCH)


def job(
    hosts: int = 4, conditions: Conditions | None = None, rounds: int = 12, **settings: Any
) -> Lan:
    """A job with a switch that adds, without any fault as yet."""
    plan = Plan("job", batch=10 * hosts, width=8, alarm_below=0.0, exchange=Exchange.LINUX_SWITCH)
    lan = Lan(hosts, conditions, 7, plan, rounds=rounds, fragments=12, **settings)
    lan.hosts[0].submit()
    lan.at(0.5, lambda: schedules.watch(lan, "", 0.0))
    return lan


def slow(hosts: int = 4, **settings: Any) -> Lan:
    """One that trains for half a second, and does not wait long for what does not come."""
    timings = Timings(silence_most_s=0.6, call_back_s=2.0)
    return job(hosts, timings=timings, compute_s=0.05, **settings)


def views(lan: Lan) -> set[tuple[int, ...]]:
    return {tuple(sorted(live)) for _, live, *_ in lan.checks.views.values()}


def warned(lan: Lan) -> set[str]:
    messages = [action.message for action in lan.hosts[0].published]
    return {str(getattr(message, "message", "")) for message in messages} - {""}


def test_the_switch_makes_all_sums_and_adds_what_is_left_over() -> None:
    lan = job()
    assert schedules.finish(lan).what == "done"
    sums = lan.checks.sums
    assert len(sums.central) == len(sums.made) == 12
    assert sum(any(made.added) for made in sums.made.values()) == 11
    assert sums.balance(), "all residuals are known"


def test_a_switch_that_is_started_again_gets_a_view_of_its_own() -> None:
    lan = slow()
    lan.at(TRAINING_S + 0.2, lan.linux.kill)
    lan.at(TRAINING_S + 0.25, lan.linux.start)
    lan.trouble(TRAINING_S + 0.3)
    assert schedules.finish(lan).what == "done"
    assert len(lan.checks.sums.central) == 12 and not warned(lan)
    boots = [boots for boots in lan.linux.boots.values() if boots]
    assert len(boots) == 2 and all(len(one) == 1 for one in boots)
    assert views(lan) == {(1, 2, 3, 4)}


def test_a_switch_that_is_gone_is_given_up_and_nobody_is_evicted() -> None:
    lan = slow()
    lan.at(TRAINING_S + 0.2, lan.linux.kill)
    lan.trouble(TRAINING_S + 0.2)
    assert schedules.finish(lan).what == "done"
    sums = lan.checks.sums
    assert 0 < len(sums.central) < len(sums.made) == 12
    assert warned(lan) == {Exchange.LINUX_SWITCH.fails} and views(lan) == {(1, 2, 3, 4)}


def test_a_switch_that_was_given_up_is_taken_again_once_it_has_been_started_again() -> None:
    lan = slow(rounds=100)
    lan.at(TRAINING_S + 0.2, lan.linux.kill)
    lan.at(TRAINING_S + 4.0, lan.linux.start)
    lan.trouble(TRAINING_S + 4.0)
    assert schedules.finish(lan).what == "done"
    sums = lan.checks.sums
    by_hosts = [at for at, round_ in enumerate(sorted(sums.made)) if round_ not in sums.central]
    assert len(sums.made) == 100
    assert warned(lan) == {Exchange.LINUX_SWITCH.fails, "exchange linux-switch: the switch adds"}
    assert len(by_hosts) > 10 and by_hosts == list(range(by_hosts[0], by_hosts[-1] + 1))
    assert by_hosts[0] > 0 and by_hosts[-1] < 99


def test_a_switch_that_ends_again_and_again_is_given_up_in_the_end() -> None:
    """Each of its boots costs seconds without sums."""
    lan = slow(rounds=500)
    for at in range(8):
        lan.at(TRAINING_S + 0.2 + 6 * at, lan.linux.kill)
        lan.at(TRAINING_S + 4.0 + 6 * at, lan.linux.start)
    lan.trouble(TRAINING_S + 46.0)
    assert schedules.finish(lan).what == "done"
    sums = lan.checks.sums
    at = [round_ in sums.central for round_ in sorted(sums.made)]
    taken = sum(now and not before for before, now in itertools.pairwise([False, *at]))
    assert taken == 4 and not at[-1]


@pytest.mark.parametrize("pair", [(2, -1), (-1, 2)])
def test_a_host_and_the_switch_that_do_not_reach_each_other(pair: tuple[int, int]) -> None:
    """The host says that the switch does not answer, and stripes go on with it.

    One that the switch does not hear is missing there: the others may have judged that before.
    """
    lan = slow()
    lan.at(TRAINING_S + 0.2, lambda: lan.starved.add(pair))
    lan.trouble(TRAINING_S + 0.2)
    assert schedules.finish(lan).what == "done"
    assert Exchange.LINUX_SWITCH.fails in warned(lan)
    assert 0 < len(lan.checks.sums.central) < len(lan.checks.sums.made) == 12
    evicted = {1, 2, 3, 4} - set.intersection(*(set(live) for live in views(lan)))
    assert evicted <= ({3} if pair == (2, -1) else set())


def test_a_host_that_does_not_believe_the_switch_is_named() -> None:
    lan = job()
    lan.hosts[2].believes = False
    lan.hosts[2]._boot()
    assert schedules.finish(lan).what == "done"
    assert not lan.checks.sums.central and len(lan.checks.sums.made) == 12
    assert warned(lan) == {"exchange stripes: the switch has no grant of h3"}


def test_a_switch_without_memory_is_not_taken() -> None:
    lan = job()
    lan.linux.memory = 3
    assert schedules.finish(lan).what == "done"
    assert not lan.checks.sums.central
    (text,) = warned(lan)
    assert "room for 0 fragments" in text


def test_a_switch_that_comes_in_the_middle_takes_over() -> None:
    lan = slow()
    lan.linux.there = False
    lan.at(TRAINING_S + 0.2, lambda: setattr(lan.linux, "there", True))
    lan.at(TRAINING_S + 0.2, lan.linux.start)
    lan.trouble(TRAINING_S + 0.2)
    assert schedules.finish(lan).what == "done"
    assert 0 < len(lan.checks.sums.central) < len(lan.checks.sums.made) == 12


def test_loss_costs_no_sum() -> None:
    lan = job(5, Conditions(loss=0.05, duplicate=0.05, late=0.05))
    assert schedules.finish(lan).what == "done"
    assert len(lan.checks.sums.central) == 12 and lan.now < 10.0


# ---- mistakes are found


def test_a_view_that_is_granted_to_two_boots_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members' rule, without which sums of one round could differ by what the first boot had left over."""
    ask = SwitchLink._ask_to_grant

    def grant(link: SwitchLink, now: float, *, hello: bool = False) -> Any:
        link._granted = None
        return ask(link, now, hello=hello)

    monkeypatch.setattr(SwitchLink, "_ask_to_grant", grant)
    lan = slow()
    for k in range(20):
        at = TRAINING_S + k * 0.02
        lan.at(at, lan.linux.kill)
        lan.at(at + 0.005, lan.linux.start)
    lan.trouble(TRAINING_S + 0.5)
    with pytest.raises(Violation, match=r"started again in view|is Lane"):
        schedules.finish(lan)


@pytest.mark.parametrize("mistake", ["twice", "never", "another", "unfinished"])
def test_a_remainder_that_is_not_added_once_is_found(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    first = LinuxSwitch.first

    def wrong(switch: LinuxSwitch, pair: Pair, place: Any, rest: int, frame: Any) -> int:
        if mistake == "never":
            return 0
        if mistake == "another":  # it is taken as if it were in this round's units
            other = next(p for p in pair.places if p is not place)
            return other.total if rest and other.tag == rest else 0
        return first(switch, pair, place, rest, frame) * (2 if mistake == "twice" else 1)

    if mistake == "unfinished":  # a commit of one contributor takes the place of what is left over
        after = Committed.rest_after
        monkeypatch.setattr(
            Committed,
            "rest_after",
            lambda commit, before: (after(commit, before)[0], commit.round - 1),
        )
    else:
        monkeypatch.setattr(LinuxSwitch, "first", wrong)
    with pytest.raises(Violation, match=r"fragment .* of round .* is Lane"):
        schedules.finish(job())


def test_a_place_that_holds_what_is_left_over_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the other one, whatever the contribution asks for, loses it."""

    def find(switch: LinuxSwitch, pair: Pair, tag: int, rest: int) -> Any:
        same = [place for place in pair.places if place.tag == tag]
        older = [place for place in pair.places if place.tag < tag]
        return next(iter(same), None) or max(older, key=lambda p: p.tag, default=None)

    monkeypatch.setattr(LinuxSwitch, "find", find)
    with pytest.raises(Violation, match=r"fragment .* of round .* is Lane"):
        schedules.finish(job())
