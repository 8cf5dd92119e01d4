# SPDX-License-Identifier: Apache-2.0
"""Jobs whose steps take several rounds, under seeded schedules of faults.

A seed that fails names itself: `python -m tests.simulator --seed N --steps --trace 200`.
"""

from __future__ import annotations

from typing import Any

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.course import Course
from nicps.job.plan import Plan
from nicps.protocol import Timings
from tests.simulator import schedules
from tests.simulator.drill import run
from tests.simulator.lan import Lan

pytestmark = pytest.mark.unit


@pytest.mark.short("0")
@pytest.mark.parametrize("first", [0, 15])
def test_seeds(first: int) -> None:
    """Nothing but a member that leaves interrupts a step; what is saved is the state between two."""
    assert run(range(first, first + 15), steps=True)["done"] >= 8


@pytest.mark.long
@pytest.mark.parametrize("first", range(20_000, 20_500, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25), steps=True)


def test_two_hosts_of_which_one_may_go_on_alone() -> None:
    run(range(30), hosts=2, steps=True)


def job(hosts: int = 4, fragments: int = 8) -> Lan:
    """Whose rounds nothing but stripes can exchange. It is about to form."""
    plan = Plan(
        "job", batch=10 * hosts, width=16, quorum=1.0, exchange=Exchange.STRIPES, steps=True
    )
    timings = Timings(silence_most_s=0.6, call_back_s=2.0)
    lan = Lan(hosts, plan=plan, rounds=4, fragments=fragments, compute_s=0.05, timings=timings)
    lan.hosts[0].submit()
    lan.at(schedules.WATCH_S, lambda: schedules.watch(lan, "", 0.0))
    lan.trouble(0.0)
    return lan


def ever_out(lan: Lan) -> set[int]:
    """Members that some view was without."""
    live = [set(live) for _, live, *_ in lan.checks.views.values()]
    return set.union(*live) - set.intersection(*live)


def test_answers_that_are_lost_for_a_while_end_no_job() -> None:
    """In its first round, of one fragment: nothing shows yet that this network carries frames to one host."""
    lan = job(hosts=2, fragments=1)
    lan.lose |= {wire.FrameType.CONTRIBUTION: 1, wire.FrameType.LACKING: 20}
    assert schedules.finish(lan).what == "done"
    assert not lan.lose[wire.FrameType.LACKING] and not ever_out(lan)


def test_a_member_whose_sums_do_not_come_is_at_fault_in_the_first_round_too() -> None:
    """The sums of the others come, so the network is not."""
    lan = job()
    lan.answers_lost.add(2)
    assert schedules.finish(lan).what == "done"
    assert ever_out(lan) == {3}


def test_a_network_that_carries_no_frames_to_one_host_ends_the_job() -> None:
    """Nobody is evicted before."""
    lan = job()
    lan.unicast = False
    outcome = schedules.finish(lan)
    assert outcome.what == "stopped" and "does not carry frames to one host" in outcome.why
    assert not ever_out(lan) and lan.now < 5.0


def test_a_host_that_has_come_back_is_not_evicted_before_it_has_a_share() -> None:
    """A round is smaller than its room: until then it has the size from the list."""
    lan = job()
    lan.rounds, lan.spare = 150, 3
    lan.trouble(2.5)
    lan.at(1.0, lan.hosts[2].kill)
    lan.at(2.5, lan.hosts[2].restart)
    assert schedules.finish(lan).what == "done"
    assert len(lan.checks.views) == 3, "its loss, and its return"


def test_the_simulator_finds_a_lead_that_takes_every_round_for_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged = Course.round_judged

    def mistaken(self: Course, round_: int, what: str, **more: Any) -> Any:
        return judged(self, round_, "continue" if what == "more" else what, **more)

    monkeypatch.setattr(Course, "round_judged", mistaken)
    with pytest.raises(AssertionError, match="in the middle of a step"):
        run(range(40), steps=True)
