# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job whose exchange makes no sums, and when that exchange is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps.exchange import Exchange
from nicps.job import LifeSettings
from nicps.job.orders import CommitNext, Decide
from nicps.job.roles import Roles
from nicps.protocol import View
from tests.leader import LINUX, STRIPES, Leader, adding
from tests.parts import MEMBERS, ROUND, Host, training

pytestmark = pytest.mark.unit


def test_a_switch_that_makes_no_sums_is_given_up_for_stripes() -> None:
    """And for nothing else, however often that is said before the next phase is in force."""
    leader = adding()
    for _ in range(3):
        leader.host.do(leader.course.exchange_fails(LINUX))
    assert leader.decided == [STRIPES] and leader.told[0] == LINUX.fails
    leader.spot.phase_in_force = training(exchange=STRIPES)
    leader.installed()
    leader.host.do(leader.course.exchange_fails(LINUX))
    leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
    assert STRIPES.fails not in leader.told and set(leader.decided) == {STRIPES}
    leader.host.do(leader.course.exchange_fails(STRIPES))
    assert leader.decided[-1] is Exchange.BROADCAST


def test_what_was_given_up_does_not_come_back_after_a_switch() -> None:
    """Stripes have made no sums, then a switch became ready, and failed too: else nobody would ever add."""
    leader = Leader()
    leader.spot.phase_in_force = training(exchange=STRIPES)
    leader.host.do(leader.course.exchange_fails(STRIPES))
    assert leader.decided == [Exchange.BROADCAST]
    leader.comes()
    leader.spot.phase_in_force = training(exchange=LINUX)
    leader.host.do(leader.course.exchange_fails(LINUX))
    assert leader.decided[-1] is Exchange.BROADCAST
    assert leader.told[-1] == f"{LINUX.fails}; that has failed before: broadcast"


def both_given_up() -> Leader:
    """One after the other, in the same round; every host adds for itself, and has made no sum yet."""
    leader = adding()
    for exchange in (LINUX, STRIPES):
        leader.spot.phase_in_force = training(exchange=exchange, first_round=ROUND)
        leader.host.do(leader.course.exchange_fails(exchange))
    phase = leader.lead.complete(leader.host.found(Decide)[-1].phase, leader.host.part)
    assert phase.exchange is Exchange.BROADCAST and phase.settings["doubted"] is True
    leader.spot.phase_in_force = replace(phase, first_round=ROUND)
    leader.host.do(leader.course.decision_agreed(phase, {}))
    leader.host.forget()
    return leader


def loses_a_member(leader: Leader, number: int = 2) -> None:
    leader.spot.view = View(number, MEMBERS, frozenset({1, 2}), 1)
    leader.installed()


def judges(leader: Leader, round_: int) -> None:
    leader.spot.open_round = round_ + 1
    leader.host.do(leader.course.round_judged(round_, "continue"))


def test_what_fails_because_of_a_member_is_tried_again_without_it() -> None:
    """Once the round is over, in which every host adds for itself. That is said once."""
    leader = both_given_up()
    loses_a_member(leader)
    text = "h3 left before broadcast has made a sum: tried again after this round: linux-switch, stripes"
    assert leader.told == [text] and leader.decided == []
    judges(leader, ROUND)
    assert leader.decided == [LINUX]
    phase = leader.lead.complete(leader.host.found(Decide)[-1].phase, leader.host.part)
    assert "doubted" not in phase.settings and "switch_failed" not in phase.settings
    leader.spot.phase_in_force = replace(phase, first_round=ROUND + 1)
    leader.host.forget()
    loses_a_member(leader, 3)
    assert leader.told == [] and leader.decided == []


def test_without_the_switch_stripes_are_tried_again() -> None:
    leader = both_given_up()
    leader.comes("no switch is heard")
    loses_a_member(leader)
    judges(leader, ROUND)
    leader.host.do(leader.course.end_wait())
    assert leader.decided == [STRIPES]


def test_while_a_switch_is_waited_for_no_round_is_committed() -> None:
    """Nor in the views after it. The next phase begins with the round after the open one. A member that had committed
    the open round would be a step ahead of the others.
    """
    leader = both_given_up()
    loses_a_member(leader)
    leader.comes("the switch is not ready for view 2")
    judges(leader, ROUND)
    for number in (3, 4):
        leader.spot.view = View(number, MEMBERS, frozenset({1, 2}), 1)
        leader.installed()
    assert leader.course.choice.wait is not None and leader.decided == []
    assert not leader.host.found(CommitNext)
    leader.comes()
    assert leader.decided == [LINUX]


@pytest.mark.parametrize("handed_out", [False, True])
def test_a_member_that_leaves_before_the_next_phase_is_in_force_counts_as_well(
    handed_out: bool,
) -> None:
    """While that is being decided on, or while hosts are taken in before it. It is said as they are tried again."""
    leader = adding()
    for exchange in (LINUX, STRIPES):
        leader.spot.phase_in_force = training(exchange=exchange, first_round=ROUND)
        leader.course._purpose = "state" if handed_out else ""
        leader.host.do(leader.course.exchange_fails(exchange))
    leader.course._purpose = ""
    loses_a_member(leader)
    phase = leader.host.found(Decide)[-1].phase
    assert phase.exchange is Exchange.BROADCAST
    leader.spot.phase_in_force = replace(phase, first_round=ROUND)
    leader.host.do(leader.course.decision_agreed(phase, {}))
    leader.host.forget()
    judges(leader, ROUND)
    text = "h3 left before another exchange has made a sum: tried again: linux-switch, stripes"
    assert leader.decided == [LINUX]
    assert leader.told[-2:] == [text, "exchange linux-switch: the switch adds"]


@pytest.mark.parametrize("fails", ["now", "before the view"])
def test_in_place_of_an_exchange_that_fails_no_switch_is_waited_for(fails: str) -> None:
    """The lead has not marked the open round yet. Once it has, others may commit it, and that phase would begin behind
    it at some, and in front of it at others. The switch takes over after a round.
    """
    leader = Leader()
    leader.spot.phase_in_force = training(exchange=STRIPES, first_round=ROUND)
    leader.comes("the switch is not ready for view 1")
    leader.host.do(leader.course.exchange_fails(STRIPES))
    assert leader.decided == [Exchange.BROADCAST]
    if fails == "before the view":  # what was decided on comes to nothing
        leader.host.forget()
        loses_a_member(leader)
        assert leader.decided == [Exchange.BROADCAST]
    leader.tick(10.0)
    leader.tick(100.0)
    leader.comes()
    assert leader.decided == [Exchange.BROADCAST]
    phase = leader.host.found(Decide)[-1].phase
    leader.spot.phase_in_force = replace(phase, first_round=ROUND)
    leader.host.do(leader.course.decision_agreed(phase, {}))
    judges(leader, ROUND)
    assert leader.decided[-1] is LINUX


def test_a_lead_after_that_knows_that_the_switch_is_tried_again() -> None:
    """Also where stripes come first, as the switch is not ready."""
    leader = both_given_up()
    part, phase = leader.host.part, leader.spot.phase_in_force
    assert phase is not None and phase.settings["switch_failed"] is True
    part.prepare(0.0, phase)
    leader.comes("no switch is heard")
    loses_a_member(leader)
    judges(leader, ROUND)
    leader.host.do(leader.course.end_wait())
    phase = leader.lead.complete(leader.host.found(Decide)[-1].phase, part)
    assert phase.exchange is STRIPES and "switch_failed" not in phase.settings
    leader.spot.phase_in_force = replace(phase, first_round=ROUND)
    leader.host.do(leader.course.exchange_fails(STRIPES))
    phase = leader.lead.complete(leader.host.found(Decide)[-1].phase, part)
    assert "switch_failed" not in phase.settings, "it has not failed again"


def test_what_was_given_up_stays_so_after_a_sum() -> None:
    """The network may be at fault: a member that leaves later changes nothing."""
    leader = both_given_up()
    judges(leader, ROUND)
    assert leader.host.found(CommitNext)
    loses_a_member(leader)
    judges(leader, ROUND + 1)
    assert leader.told == [] and leader.decided == []


def test_a_view_with_the_same_members_is_no_reason_to_try_again() -> None:
    leader = both_given_up()
    leader.spot.view = View(2, MEMBERS, frozenset({1, 2, 3}), 1)
    leader.installed()
    judges(leader, ROUND)
    assert leader.told == [] and leader.decided == []


def test_what_a_kernel_has_refused_is_not_tried_again() -> None:
    """Nor the switch that was given up in the same round: its frames need the same program."""
    leader = adding()
    leader.spot.phase_in_force = training(exchange=LINUX, first_round=ROUND)
    leader.host.do(leader.course.exchange_fails(LINUX))
    leader.host.do(leader.course.choice.refuse_stripes("h2: no"))
    leader.spot.phase_in_force = training(exchange=Exchange.BROADCAST, first_round=ROUND)
    leader.host.forget()
    loses_a_member(leader)
    judges(leader, ROUND)
    assert leader.told == [] and leader.decided == []


def test_exchanges_are_tried_again_four_times_at_most() -> None:
    """A member that comes back may be the reason again, each time."""
    leader = both_given_up()
    for _ in range(4):
        loses_a_member(leader)
        judges(leader, ROUND)
        assert leader.decided == [LINUX]
        leader.spot.view = View(4, MEMBERS, frozenset({1, 2, 3}), 1)
        for exchange in (LINUX, STRIPES):
            leader.spot.open_round = ROUND
            leader.spot.phase_in_force = training(exchange=exchange, first_round=ROUND)
            leader.host.do(leader.course.exchange_fails(exchange))
        leader.spot.phase_in_force = training(exchange=Exchange.BROADCAST, first_round=ROUND)
        leader.host.forget()
    loses_a_member(leader)
    judges(leader, ROUND)
    assert leader.decided == []


def test_the_next_lead_tries_again_what_failed_because_of_the_one_before() -> None:
    """After the round that it finds open."""
    leader = Leader(anew=True)
    leader.spot.phase_in_force = training(exchange=Exchange.BROADCAST, first_round=ROUND)
    leader.installed()
    assert leader.decided == []
    judges(leader, ROUND)
    assert leader.decided == [STRIPES]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("first", ["the member", "the lead", "nobody"])
def test_the_next_lead_knows_who_has_left_before_the_first_sum(first: str, summed: bool) -> None:
    """The lead itself, or a member, though the lead leaves only after that sum, and before it has decided."""
    host = Host()
    host.builds()
    host.spot.open_round = ROUND
    phase = training(exchange=Exchange.BROADCAST, first_round=ROUND)
    phase = replace(phase, settings={**phase.settings, "switch_failed": True, "doubted": True})
    host.trains(phase)
    gone = {"the member": [{1, 2}], "the lead": [{1, 3}], "nobody": []}[first]
    for number, live in enumerate(gone, 2):
        host.spot.view = View(number, MEMBERS, frozenset(live), 1)
        host.goes_on(phase, again=False)
    if summed:
        host.commits(phase)
        host.spot.view = View(5, MEMBERS, frozenset({1} | (gone or [{3}])[-1] - {2}), 1)
        host.goes_on(phase, again=False)
    roles = Roles(LifeSettings("h1", "nicps", believes_switch=True), host.spot, host.tasks)  # type: ignore[arg-type]
    roles.part, host.spot.leads = host.part, True
    roles.follow_lead(0.0, leaving=False)
    assert roles.lead is not None
    choice = roles.lead.course.choice
    again = first != "nobody"
    assert choice.exchange is (STRIPES if again else Exchange.BROADCAST)
    assert choice.has_failed(LINUX) is not again
    assert choice.improves(phase, 600) is again


def test_a_phase_that_goes_on_with_what_was_given_up_is_replaced() -> None:
    leader = adding()
    leader.host.do(leader.course.exchange_fails(LINUX))
    leader.host.forget()
    leader.installed()  # before the decision was agreed on
    assert leader.decided == [STRIPES]


def test_the_next_lead_knows_that_it_was_given_up() -> None:
    leader = adding()
    leader.host.do(leader.course.exchange_fails(LINUX))
    (decide,) = leader.host.found(Decide)
    phase = leader.lead.complete(decide.phase, leader.host.part)
    assert phase.settings["switch_failed"] is True
    next_one = Leader(failed=frozenset({LINUX}))
    next_one.host.part.prepare(0.0, phase)
    assert next_one.host.part.switch_failed
    next_one.comes()
    next_one.installed()
    assert next_one.decided == [STRIPES]
    assert next_one.told == ["exchange stripes: the Linux switch has been given up"]


@pytest.mark.parametrize("boots", [1, 3, 4])
def test_a_switch_that_was_started_again_is_taken_again(boots: int) -> None:
    """By the lead that has given it up, and after four boots no more. The boot that has failed is not tried again."""
    leader = adding()
    for boot in range(1, boots + 1):
        leader.spot.switch.granted_boot = boot
        leader.spot.phase_in_force = training(exchange=LINUX)
        leader.host.do(leader.course.exchange_fails(LINUX))
        leader.spot.phase_in_force = training(exchange=STRIPES)
        leader.installed()
        leader.host.forget()
        leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
        assert leader.decided == [], "that boot is ready, and makes no sums"
        leader.spot.switch.boot = boot + 1
        leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
        assert leader.decided == ([LINUX] if boot < 4 else [])
    if boots < 4:
        (decide,) = leader.host.found(Decide)
        phase = leader.lead.complete(decide.phase, leader.host.part)
        assert "switch_failed" not in phase.settings


def test_a_new_boot_that_is_heard_before_the_old_one_is_given_up_is_taken() -> None:
    """It has made no sums yet, and so has not failed."""
    leader = adding()
    leader.spot.phase_in_force = training(exchange=LINUX)
    leader.spot.switch.boot = 2
    leader.host.do(leader.course.exchange_fails(LINUX))
    leader.spot.phase_in_force = training(exchange=STRIPES)
    leader.installed()
    leader.host.forget()
    leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
    assert leader.decided == [LINUX]


def test_a_switch_whose_frames_a_kernel_refuses_is_not_taken_once_it_was_started_again() -> None:
    leader = adding()
    leader.host.do(leader.course.exchange_fails(LINUX))
    leader.host.do(leader.course.choice.refuse_stripes("h2: no room"))
    leader.spot.phase_in_force = training(exchange=Exchange.BROADCAST)
    leader.spot.switch.boot = 2
    leader.installed()
    leader.host.forget()
    leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
    assert leader.decided == []
