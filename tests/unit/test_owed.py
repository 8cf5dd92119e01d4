# SPDX-License-Identifier: Apache-2.0
"""What a training program owes in a step of a plan, and what its agent makes of such a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.actions import EnterPhase, Post
from nicps.job.owed import PlannedStep
from nicps.job.plan import Plan, read_plan
from nicps.job.program import Program
from nicps.job.slow_work import ReserveAccumulators
from nicps.protocol import Committed, Phase
from nicps.protocol.plan import ChannelPlan
from nicps.session import shared_form as says
from tests.parts import Host, training

#: Channel 0 has two rounds a step, channel 1 one.
PLANS = (ChannelPlan(0, 600, (600, 40)), ChannelPlan(1, 90, (90,)))


def planned(number: int = 3, first_round: int = 3) -> Phase:
    return training(number, first_round, exchange=Exchange.STRIPES, channels=PLANS)


def commit(channel: int, round_: int, phase: Phase) -> Committed:
    counted = {1: 4, 2: 4, 3: 4}
    return Committed(phase, round_, counted, 0, 0, Exchange.STRIPES, 1, (1, 2, 3), channel=channel)


def test_a_step_is_whole_with_its_last_round() -> None:
    step = PlannedStep(planned(), (3, 3))
    assert (step.current, step.judges, step.under_way) == (0, False, False)
    assert not step.note_committed(1, 3) and step.under_way
    assert not step.note_committed(0, 3) and not step.judges
    assert step.note_committed(0, 4)
    assert (step.current, step.judges, step.trained) == (1, True, 4)
    assert not step.note_committed(1, 4) and not step.judges, "the step after it has begun"


def test_it_begins_where_the_rounds_are() -> None:
    assert PlannedStep(planned(), (5, 4)).judges
    later = PlannedStep(planned(), (6, 4))
    assert later.current == 1 and later.under_way and not later.judges


def test_a_round_on_its_way_excuses_the_others() -> None:
    step = PlannedStep(planned(), (3, 3))
    assert step.owes(closed=False) and not step.owes(closed=True)
    step.note_offered(0, 3)
    assert not step.owes(closed=False)
    step.note_committed(0, 3)
    assert step.owes(closed=False) and step.owes(closed=True), "it has not read the sum"
    step.note_read(0, 3)
    assert step.owes(closed=False), "channel 1 has had nothing"
    assert not step.owes(closed=True)
    step.note_offered(1, 3)
    assert not step.owes(closed=False), "channel 0 may wait for it"


def test_a_round_that_waits_for_the_steps_list_excuses_nothing() -> None:
    """The list is that of the first round of channel 0, for which all wait."""
    step = PlannedStep(planned(), (3, 3))
    step.note_offered(1, 3)
    assert step.owes(closed=False) and not step.owes(closed=True)
    step.note_offered(0, 3)
    assert not step.owes(closed=False)
    for channel, round_ in ((0, 3), (1, 3), (0, 4)):
        step.note_committed(channel, round_)
        step.note_read(channel, round_)
    step.note_offered(1, 4)
    assert step.current == 1 and step.owes(closed=False), "so it is in each step"


def entered(phase: Phase, *rounds: int) -> Program:
    """A program that is in it."""
    host, program = Host(), Program(1, 60.0, 0.0)
    memory = host.part.accumulators.memory
    program.note_ready(600, "d0", PLANS)
    first = rounds[0] if rounds else phase.first_round
    (told,) = program.enter(0.0, phase, first, memory, host.spot, None, rounds)
    assert isinstance(told, EnterPhase)
    opened = [channel.open for channel in told.message.channels]
    assert opened == [*(rounds or (phase.first_round,) * 2)]
    program.note_prepared()
    return program


def test_its_duty_follows() -> None:
    phase = planned()
    program = entered(phase)
    assert program.duty == "work"
    program.note_offered(1, 3)
    assert program.duty == "work", "nobody knows the list of the step yet"
    program.note_offered(0, 3)
    assert program.duty == ""
    (told,) = program.show_commit(1.0, commit(1, 3, phase), 0.0)
    assert isinstance(told, Post) and isinstance(told.message, says.Committed)
    assert told.message.channel == 1 and program.duty == "work" and program.trained == 0
    program.note_read(3, "", 1)
    assert program.duty == "", "its round of channel 0 is on the way"
    program.show_commit(2.0, commit(0, 3, phase), 0.0)
    program.note_read(3, "", 0)
    assert program.duty == "work", "it has the second part of channel 0"
    program.note_offered(0, 4)
    program.show_commit(3.0, commit(0, 4, phase), 0.0)
    program.note_read(4, "", 0)
    assert program.duty == "work" and program.trained == 4


def test_a_program_without_a_part_in_the_step_only_reads() -> None:
    phase = planned()
    program = entered(phase)
    program.close_round(3)
    assert program.duty == ""
    program.show_commit(1.0, commit(1, 3, phase), 0.0)
    assert program.duty == "work"
    program.note_read(3, "", 1)
    assert program.duty == ""
    program.close_round(9)
    assert program.duty == "", "a hand-out has begun, in which it has nothing to do either"


def test_a_step_that_is_closed_before_it_has_begun_here_is_closed() -> None:
    """The token of channel 0 has its list, and the last round of the step before is not committed on channel 1 here."""
    phase = planned()
    program = entered(phase)
    for channel, round_ in ((0, 3), (0, 4)):
        program.show_commit(1.0, commit(channel, round_, phase), 0.0)
        program.note_read(round_, "", channel)
    program.note_offered(1, 3)
    program.close_round(5)
    program.show_commit(2.0, commit(1, 3, phase), 0.0)
    assert program.duty == "work", "it has a sum to read"
    program.note_read(3, "", 1)
    assert program.duty == "", "it has no part in the step"
    for channel, round_ in ((0, 5), (0, 6), (1, 4)):
        program.show_commit(3.0, commit(channel, round_, phase), 0.0)
        program.note_read(round_, "", channel)
    assert program.duty == "work", "it has one in the next"


@pytest.mark.parametrize("late", [False, True])
def test_a_word_on_a_step_that_others_have_gone_on_from_excuses_nothing(late: bool) -> None:
    phase = planned()
    program = entered(phase)
    for channel, round_ in ((0, 3), (0, 4), (1, 3), *[(1, 4)] * late):
        program.show_commit(1.0, commit(channel, round_, phase), 0.0)
    program.note_judged(4, "test")
    assert program.duty == ("work" if late else "")


def test_a_phase_goes_on_with_the_rounds_of_each_channel() -> None:
    entered(planned(), 5, 4)


def test_each_channel_has_room_and_places() -> None:
    host = Host()
    host.builds()
    host.decides(planned())
    host.finish_task()
    places = tuple(-(-(room // 3 + 1) // 2) for room in (600, 90))
    task = ReserveAccumulators(1, 690, sum(places), (600, 90), places)
    assert host.finish_task(4) == task
    (entered,) = host.found(EnterPhase)
    assert (entered.message.room, entered.message.stripes) == (690, places)
    assert [channel.rounds for channel in entered.message.channels] == [(600, 40), (90,)]


def test_plans_that_cannot_be_meant() -> None:
    settings = {"priorities": 2}
    told = (says.ChannelPlan(0, (600, 40)), says.ChannelPlan(1, (90,)))
    assert read_plan(settings, told) == PLANS and read_plan({}, ()) == ()
    for which, plan in (({}, told), (settings, ()), (settings, (says.ChannelPlan(0, (1,) * 33),))):
        with pytest.raises(JobFailed):
            read_plan(which, plan)


def test_a_training_phase_has_the_plan() -> None:
    settings = {"priorities": 2, "batch": 12, "bucket_mb": 1.0}
    assert Plan.choose(settings, Exchange.BROADCAST) is Exchange.STRIPES
    plan = Plan.of("job", settings, Exchange.STRIPES)
    assert plan.planned and not plan.steps and plan.feedback is False
    view = Host().spot.view
    phase = plan.training(view, 7, {1, 2, 3}, 5, 0, Exchange.STRIPES, channels=PLANS)
    assert phase.planned and phase.fragments == 600 and replace(phase).channels == PLANS
    with pytest.raises(JobFailed, match="with priorities it must be stripes or auto"):
        Plan.choose({**settings, "exchange": "broadcast"}, Exchange.BROADCAST)
