# SPDX-License-Identifier: Apache-2.0
"""The life of jobs whose steps have a plan, under seeded schedules of faults (docs/channels.md).

A seed that fails names itself: `python -m tests.simulator --seed N --channels --steps --trace 200`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nicps.job import actions as act
from nicps.job.accumulators import Accumulators
from nicps.job.course import Course
from nicps.job.dialogue import Dialogue
from nicps.job.orders import CommitNext, MarkRead
from nicps.job.owed import PlannedStep
from nicps.protocol.open_round import OpenRound
from nicps.session import shared_form as says
from tests.simulator import planned_lan, schedules
from tests.simulator.checks import Violation
from tests.simulator.faults import Faults
from tests.simulator.lan import Conditions
from tests.simulator.planned_checks import PlannedChecks
from tests.simulator.planned_host import PlannedHost
from tests.simulator.planned_lan import PlannedLan
from tests.simulator.planned_program import PlannedProgram
from tests.simulator.schedules import Outcome

pytestmark = pytest.mark.unit


def one(seed: int) -> Outcome:
    try:
        return schedules.finish(planned_lan.lan_of(seed))
    except Violation as error:
        again = f"python -m tests.simulator --seed {seed} --channels --steps --trace 200"
        raise AssertionError(f"{again}: {error}") from error


@pytest.mark.short("0")
@pytest.mark.parametrize("first", [0, 3, 6])
def test_seeds(first: int) -> None:
    """Whatever happens, all hosts have the same weights; some jobs end well."""
    assert Counter(one(seed).what for seed in range(first, first + 3))["done"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_more_seeds(first: int) -> None:
    for seed in range(first, first + 20):
        one(seed)


def test_a_job_changes_its_plan_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the seeds drive: other plans at phase boundaries, checkpoints, tests."""
    said: Counter[str] = Counter()
    hear = PlannedHost.hear

    def heard(self: PlannedHost, process: Any, message: Any) -> None:
        if isinstance(message, says.Decide) and self.node.leads:
            said[message.what] += 1
        said["checkpoint"] += isinstance(message, says.Checkpoint)
        hear(self, process, message)

    monkeypatch.setattr(PlannedHost, "hear", heard)
    for seed in range(20, 24):
        one(seed)
    assert all(said[what] for what in ("continue", "plan", "test", "end", "checkpoint")), said


def test_a_lead_goes_on_with_a_step_that_it_has_not_let_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Member 2 reads channel 0 slowly, and would test after each step. A quorum is enough for the next step, of which
    channel 1 commits a round. Then the lead dies, and member 2 leads before it has judged the step before.
    """
    lans = (PlannedLan(seed, random.Random(seed), 4, Conditions()) for seed in itertools.count())
    lan = next(each for each in lans if each.plan.quorum < 0.9 and len(each.first_plan) > 1)
    read, train = PlannedProgram._read_part, PlannedProgram._train_planned
    committed, killed = PlannedChecks.committed, list[int]()

    def read_slowly(self: PlannedProgram, channel: int, *rest: Any) -> Any:
        if self.host.node.number == 2 and not channel and not killed:
            yield 0.9  # longer than a change of the view takes, and shorter than the job's `stall_s`
        yield from read(self, channel, *rest)

    def train_to_test(self: PlannedProgram, phase: Any) -> Any:
        if self.host.node.number == 2 and not killed:
            self._own = SimpleNamespace(random=lambda: 0.0)
        return (yield from train(self, phase))

    def kill_lead(self: PlannedChecks, host: Any, commit: Any, phase: Any) -> None:
        committed(self, host, commit, phase)
        program = host.process
        if killed or host.node.number != 2 or not commit.channel or not program._pending:
            return
        step = phase.step_of(commit.round, commit.channel)
        if phase.planned and step and program._base[0] < phase.first_of(step):
            killed.append(commit.round)
            lan.at(lan.now, lambda: Faults(lan, random.Random(1)).kill(lan.hosts[0]))

    monkeypatch.setattr(PlannedProgram, "_read_part", read_slowly)
    monkeypatch.setattr(PlannedProgram, "_train_planned", train_to_test)
    monkeypatch.setattr(PlannedChecks, "committed", kill_lead)
    lan.hosts[0].submit()
    lan.at(schedules.WATCH_S, lambda: schedules.watch(lan, "", 0.0))
    assert schedules.finish(lan).what == "done" and killed


def test_a_step_closes_without_a_program_that_is_called_back_to_its_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lead dies as it changes the plan, and all go back to the phase before. A quorum commits rounds of that while
    member 3 still computes: these commits are behind the phase, which that program has not begun.
    """
    lans = (PlannedLan(seed, random.Random(seed), 5, Conditions()) for seed in itertools.count())
    lan = next(each for each in lans if each.plan.quorum < 0.9 and len(each.first_plan) > 1)
    train, settle = PlannedProgram._train_planned, PlannedProgram._settle
    compute, committed, do = (
        PlannedProgram._compute_parts,
        PlannedChecks.committed,
        PlannedHost._do,
    )
    killed, behind = list[int](), list[int]()

    def train_apart(self: PlannedProgram, phase: Any) -> Any:
        self._ahead &= self.host.index > 0
        return (yield from train(self, phase))

    def change_plan(self: PlannedProgram, phase: Any) -> Any:
        if not self.host.index:
            self._due = "plan"
        return (yield from settle(self, phase))

    def kill_lead(self: PlannedHost, action: Any) -> None:
        do(self, action)
        again = isinstance(action, act.EnterPhase) and action.message.number > 2
        if again and self.node.number == 3 and not killed:
            killed.append(action.message.number)
            lan.at(lan.now, lambda: Faults(lan, random.Random(1)).kill(lan.hosts[0]))

    def compute_long(self: PlannedProgram, phase: Any) -> Any:
        while self.host.node.number == 3 and killed and not behind:
            yield 0.01
        return (yield from compute(self, phase))

    def note(self: PlannedChecks, host: Any, commit: Any, phase: Any) -> None:
        committed(self, host, commit, phase)
        if killed and host.node.number == 3 and not commit.counted.get(3):
            behind.append(commit.round)

    monkeypatch.setattr(PlannedProgram, "_train_planned", train_apart)
    monkeypatch.setattr(PlannedProgram, "_settle", change_plan)
    monkeypatch.setattr(PlannedProgram, "_compute_parts", compute_long)
    monkeypatch.setattr(PlannedHost, "_do", kill_lead)
    monkeypatch.setattr(PlannedChecks, "committed", note)
    lan.hosts[0].submit()
    lan.at(schedules.WATCH_S, lambda: schedules.watch(lan, "", 0.0))
    assert schedules.finish(lan).what == "done" and killed and behind


def test_a_program_that_stops_before_it_offers_to_a_steps_first_round_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in seed 578: it has offered on another channel, whose rounds wait for the list of that first round."""
    lans = (PlannedLan(seed, random.Random(seed), 4, Conditions()) for seed in itertools.count())
    lan = next(each for each in lans if each.plan.quorum == 1 and len(each.first_plan) > 1)
    offer, ends = PlannedProgram._offer_part, PlannedChecks.ends
    elsewhere, ended = set[int](), list[str]()

    def stop(self: PlannedProgram, phase: Any, channel: int, round_: int, *rest: Any) -> Any:
        mine = self.host.index == 1 and not ended
        while mine and (channel, round_) == (0, self._base[0]) and self.state.trained:
            if self._serial in elsewhere:
                self.host.hang()
            yield 1e-3
        yield from offer(self, phase, channel, round_, *rest)
        if mine and channel:
            elsewhere.add(self._serial)

    def note(self: PlannedChecks, host: PlannedHost, reason: str) -> None:
        ends(self, host, reason)
        ended.append(reason)

    monkeypatch.setattr(PlannedProgram, "_offer_part", stop)
    monkeypatch.setattr(PlannedChecks, "ends", note)
    lan.hosts[0].submit()
    lan.at(schedules.WATCH_S, lambda: schedules.watch(lan, "", 0.0))
    assert schedules.finish(lan).what == "done"
    assert ended[0].startswith("it has not moved")


# ---- mistakes that are made on purpose


def finds(seed: int, what: str) -> None:
    """That seed shows it."""
    with pytest.raises(Violation, match=what):
        schedules.finish(planned_lan.lan_of(seed))


def test_areas_of_a_plan_before_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooms of the same number, and of other sizes, are other ones."""
    lacks = Accumulators._lacks

    def wrong(self: Accumulators, phase: Any) -> Any:
        sizes = lacks(self, phase)
        return replace(sizes, rooms=()) if sum(sizes.rooms) <= self.memory.room else sizes

    monkeypatch.setattr(Accumulators, "_lacks", wrong)
    finds(4, "has room for")


def test_a_lead_that_forgets_that_it_saves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Course, "_go_on", lambda self: [CommitNext()])
    finds(1, "has said True")


def test_sums_that_are_read_on_another_channel_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Dialogue._read

    def wrong(self: Dialogue, *told: Any) -> Any:
        orders = read(self, *told)
        return [replace(o, channel=0) if isinstance(o, MarkRead) else o for o in orders]

    monkeypatch.setattr(Dialogue, "_read", wrong)
    finds(0, "has not ended")


def test_a_program_that_owes_what_it_has_done_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for others, and its agent ends it."""
    monkeypatch.setattr(PlannedStep, "owes", lambda self, *, closed: not closed)
    finds(3, "ends a training program that works")


def test_an_offer_ahead_that_is_never_given_to_its_round_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(self: OpenRound) -> None:
        self._held.ahead = None

    monkeypatch.setattr(OpenRound, "_take_ahead", wrong)
    finds(0, "has not ended")


def test_an_offer_ahead_that_is_lost_with_a_view_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = OpenRound.carry
    monkeypatch.setattr(OpenRound, "carry", lambda self: replace(carry(self), ahead=None))
    finds(2, "has not ended")
