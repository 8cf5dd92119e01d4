# SPDX-License-Identifier: Apache-2.0
"""Which exchange a job has where a Linux switch may add, and what becomes of it when that makes no sums."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job import LifeSettings
from nicps.job.actions import Log
from nicps.job.choice import Choice
from nicps.job.lead import SWITCH_S, Lead
from nicps.job.orders import CommitNext, Decide, NeedRoom, PublishEvent
from nicps.job.plan import REFUSED, Found, Plan
from nicps.protocol import NO_REST, Committed, Phase, View
from nicps.session import shared_form as says
from tests.parts import LANES, MEMBERS, ROUND, Host, training

pytestmark = pytest.mark.unit

SETTINGS = {"batch": 8, "lane": "i16"}
LINUX, STRIPES, P4 = Exchange.LINUX_SWITCH, Exchange.STRIPES, Exchange.SWITCH


class Leader:
    """A host that leads a job whose model is built, and what it decides."""

    def __init__(
        self,
        asked: str = "auto",
        believes: bool = True,
        own: Exchange = Exchange.BROADCAST,
        **found: Any,
    ) -> None:
        self.host = Host()
        self.host.builds()
        self.spot = self.host.spot
        self.spot.leads = True
        settings = {**SETTINGS, "exchange": asked}
        exchange = Plan.choose(settings, own, believes_switch=believes)
        plan = Plan.of("job", settings, exchange, believes_switch=believes)
        known = Found(able=True, trained=True, finishing=False, **found)
        self.lead = Lead(plan, self.spot, self.host.tasks, itertools.count(1), known, 0.0)
        self.course = self.lead.course
        self.course.fragments = 600

    def comes(self, lack: str = "") -> None:
        self.spot.switch.heard, self.spot.switch.lack = True, lack
        self.host.do(self.course.switch_changed())

    def installed(self) -> None:
        self.host.do(self.course.view_installed(self.spot.view))

    def tick(self, now: float) -> None:
        if now >= self.lead.deadline():
            self.host.do(self.lead.tick(now))

    @property
    def decided(self) -> list[Exchange]:
        return [order.phase.exchange for order in self.host.found(Decide)]

    @property
    def told(self) -> list[str]:
        logged = [log.text for log in self.host.found(Log)]
        events = self.host.found(PublishEvent)
        return logged + [str(e.values["message"]) for e in events if e.event == "warning"]


# ---- what is asked for


@pytest.mark.parametrize(
    ("asked", "own", "believes", "chosen", "tries"),
    [
        ("auto", Exchange.BROADCAST, False, STRIPES, False),
        ("auto", Exchange.BROADCAST, True, STRIPES, True),
        ("auto", P4, True, P4, True),
        ("switch", Exchange.BROADCAST, True, STRIPES, True),
        ("switch", P4, True, P4, True),
        ("switch", P4, False, P4, False),
        ("stripes", P4, True, STRIPES, False),
        ("broadcast", Exchange.BROADCAST, True, Exchange.BROADCAST, False),
    ],
)
def test_settings(asked: str, own: Exchange, believes: bool, chosen: Exchange, tries: bool) -> None:
    settings = {**SETTINGS, "exchange": asked}
    exchange = Plan.choose(settings, own, believes_switch=believes)
    plan = Plan.of("job", settings, exchange, believes_switch=believes)
    assert (plan.exchange, plan.tries_switch) == (chosen, tries)


def test_a_switch_that_nobody_believes_is_refused() -> None:
    with pytest.raises(JobFailed, match="--trust-switch or --switch-key for a Linux switch"):
        Plan.choose({"exchange": "switch"}, Exchange.BROADCAST)
    with pytest.raises(JobFailed, match="it must be auto, broadcast, stripes or switch"):
        Plan.choose({"exchange": "linux-switch"}, Exchange.BROADCAST, believes_switch=True)


def test_who_believes_which() -> None:
    linux = LifeSettings("h1", "nicps", believes_switch=True)
    p4 = LifeSettings("h1", "nicps", exchange=P4)
    assert linux.believes(LINUX) and not linux.believes(P4)
    assert p4.believes(P4) and not p4.believes(LINUX)
    assert linux.believes(STRIPES)


# ---- the choice


def test_a_switch_that_is_ready_is_taken() -> None:
    leader = Leader()
    leader.comes()
    leader.installed()
    assert leader.decided == [LINUX] and leader.told == ["exchange linux-switch: the switch adds"]
    leader.installed()
    assert leader.decided == [LINUX, LINUX] and len(leader.told) == 1, "said once"


def test_the_submitter_is_told_the_exchange_and_why() -> None:
    """With the event that training begins, once."""
    leader = Leader(believes=False)
    leader.course._trained = False  # as a job begins
    leader.installed()
    (decision,) = leader.host.found(Decide)
    leader.host.do(leader.course.decision_agreed(decision.phase, {}))
    (begun,) = [event for event in leader.host.found(PublishEvent) if event.event == "training"]
    why = "auto, and this host believes no switch"
    assert dict(begun.values) == {"exchange": "stripes", "exchange_reason": why}


@pytest.mark.parametrize("asked", ["auto", "switch"])
def test_without_one_the_hosts_add(asked: str) -> None:
    """At once; whoever has asked for a switch by name is warned."""
    leader = Leader(asked)
    leader.installed()
    text = "exchange stripes: no switch is heard"
    assert leader.decided == [STRIPES] and leader.told == [text]
    warned = [event for event in leader.host.found(PublishEvent) if event.event == "warning"]
    assert len(warned) == (asked == "switch")


@pytest.mark.parametrize(
    ("asked", "own", "text"),
    [
        ("auto", Exchange.BROADCAST, "exchange stripes: auto, and this host believes no switch"),
        ("auto", P4, "exchange switch: auto, and this host believes a P4 switch (--mode switch)"),
        ("switch", P4, "exchange switch: the job's setting"),
        ("stripes", P4, "exchange stripes: the job's setting"),
        ("broadcast", P4, "exchange broadcast: the job's setting"),
    ],
)
def test_a_choice_without_a_linux_switch_is_said_once(asked: str, own: Exchange, text: str) -> None:
    leader = Leader(asked, believes=False, own=own)
    leader.comes()
    leader.installed()
    leader.installed()
    assert leader.told == [text] and text.startswith(f"exchange {leader.decided[0].name}: ")
    assert not leader.host.found(PublishEvent), "no warning"


@pytest.mark.parametrize("believes", [True, False])
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"priorities": 4}, "exchange stripes: rounds of several sizes need it"),
        ({"rank": 2}, "exchange stripes: rounds of several sizes need it"),
        ({"system": "S"}, "exchange servers: the parameters are at servers"),
    ],
)
def test_a_job_for_which_no_switch_adds_says_so(
    believes: bool, asked: dict[str, Any], why: str
) -> None:
    """Once, with the choice; whoever set a switch up would wait for it to add."""
    leader, settings = Leader(), {**SETTINGS, **asked}
    exchange = Plan.choose(settings, Exchange.BROADCAST, believes_switch=believes)
    plan = Plan.of("job", settings, exchange, believes_switch=believes)
    choice = Choice(plan, leader.spot)  # type: ignore[arg-type]
    leader.spot.switch.heard = True
    more = ", and the Linux switch that this host believes adds nothing of this job" * believes
    assert choice.make(600, frozenset()) is exchange
    assert choice.explain(exchange, 600) == [Log(why + more)]
    assert choice.explain(exchange, 600) == []


def test_a_host_that_is_left_alone_says_so_and_that_it_is_not() -> None:
    leader = Leader(believes=False, own=P4)
    for number, live in enumerate(({1, 2, 3}, {1}, {1, 2}), 1):
        leader.spot.view = View(number, MEMBERS, frozenset(live), 1)
        leader.installed()
    assert [text.partition(":")[0] for text in leader.told] == [
        *("exchange switch", "exchange broadcast", "exchange switch")
    ]
    assert leader.told[1] == "exchange broadcast: one host trains alone"


def test_training_waits_for_a_switch_that_is_heard() -> None:
    leader = Leader()
    leader.comes("the switch is not ready for view 1")
    leader.installed()
    assert leader.decided == []
    leader.tick(10.0)
    leader.comes("the switch has no grant of h3")
    leader.tick(10.0 + SWITCH_S - 0.1)
    assert leader.decided == []
    leader.comes()
    assert leader.decided == [LINUX]
    leader.tick(100.0)
    assert leader.decided == [LINUX]


def test_training_does_not_wait_for_ever_and_once_in_a_view() -> None:
    leader = Leader()
    leader.comes("the switch has no grant of h3")
    leader.installed()
    leader.tick(10.0)
    leader.tick(10.0 + SWITCH_S)
    assert leader.decided == [STRIPES]
    assert leader.told == ["exchange stripes: the switch has no grant of h3"]
    leader.installed()
    assert leader.decided == [STRIPES] * 2, "the same view"
    leader.spot.view = View(2, MEMBERS, frozenset({1, 2, 3}), 1)
    leader.installed()
    assert leader.decided == [STRIPES] * 2
    leader.tick(30.0)
    leader.tick(30.0 + SWITCH_S)
    assert leader.decided == [STRIPES] * 3


def test_a_wait_ends_where_the_switch_is_not_heard_any_more() -> None:
    leader = Leader()
    leader.comes("the switch is not ready for view 1")
    leader.installed()
    leader.spot.switch.heard = False
    leader.host.do(leader.course.switch_changed())
    assert leader.decided == [STRIPES]


def test_a_wait_ends_with_another_decision() -> None:
    leader = Leader()
    leader.comes("the switch is not ready for view 1")
    leader.installed()
    leader.host.do(leader.course.stop("it is over"))
    leader.comes()
    assert [order.phase.kind for order in leader.host.found(Decide)] == [wire.PhaseKind.STOP]


@pytest.mark.parametrize("feedback", [True, False])
def test_a_switch_that_comes_later_takes_over(feedback: bool) -> None:
    """Not under programs of all-reduces, to which that is a round that fails."""
    leader = Leader()
    object.__setattr__(leader.lead.plan, "feedback", feedback)
    leader.spot.phase_in_force = training(first_round=3, exchange=STRIPES)
    leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
    assert leader.decided == [] and leader.host.found(CommitNext)
    leader.comes()
    leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
    assert leader.decided == ([LINUX] if feedback else [])


# ---- it makes no sums


def adding() -> Leader:
    leader = Leader()
    leader.comes()
    leader.installed()
    leader.spot.phase_in_force = training(exchange=LINUX)
    leader.host.forget()
    return leader


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
    leader.host.do(leader.course.go_on_without_switch())
    assert leader.decided == [STRIPES]


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


# ---- the round whose remainders are used first


def commit(phase: Phase, round_: int, view: int) -> Committed:
    counted = {1: 4, 2: 4}
    return Committed(phase, round_, counted, -20, -20, phase.exchange, view, (0,))


def test_the_lead_says_whose_remainders_the_switch_has() -> None:
    leader, phase = adding(), training(exchange=LINUX)
    part = leader.host.part
    part.commit(0.0, commit(phase, 7, 1))
    part.commit(0.0, commit(training(exchange=STRIPES), 8, 1))
    (decide,) = Leader().host.found(Decide) or [Decide(phase)]
    assert leader.lead.complete(decide.phase, part).rest == (1, 7)


def test_members_take_it_from_the_decision_and_a_learner_knows_none() -> None:
    host = Host()
    host.builds()
    phase = training(exchange=LINUX, rest=(3, 40))
    host.trains(phase)
    assert host.part.rest == (3, 40)
    host.spot.learners = frozenset({host.spot.number})
    host.goes_on(None)
    assert host.part.rest == NO_REST


@pytest.mark.parametrize("group", [False, True])
def test_the_room_is_asked_for_as_the_model_is_built(group: bool) -> None:
    """Not for a group, whose hosts add: the switch would make other maps, and they would renew their view."""
    host = Host()
    host.settings |= {"group": {"name": "x", "size": 3}} if group else {}
    host.has_job()
    orders = host.hears(says.Ready(LANES, "d0"))
    assert [o for o in orders if isinstance(o, NeedRoom)] == ([] if group else [NeedRoom(600, 16)])


def refuses(leader: Leader) -> list[Decide]:
    """The members agree to a phase in stripes or of a Linux switch, and h3's kernel does not take it."""
    answers = {1: b"", 2: b"", 3: json.dumps({REFUSED: "last insn is not an exit"}).encode()}
    leader.host.forget()
    leader.host.do(leader.lead.decision_agreed(training(exchange=STRIPES), answers))
    return leader.host.found(Decide)


def test_a_kernel_that_takes_no_stripes_takes_no_sums_of_a_linux_switch() -> None:
    leader = Leader()
    leader.comes()
    (decided,) = refuses(leader)
    assert decided.phase.exchange == Exchange.BROADCAST and decided.phase.shares == (2, 3, 3)
    (told,) = leader.told
    assert told.startswith("h3: last insn is not an exit: every host adds for itself")
    completed = leader.lead.complete(decided.phase, leader.host.part)
    assert completed.settings["switch_failed"], "the next lead takes no switch either"


def test_a_group_ends_where_a_kernel_takes_no_stripes() -> None:
    leader = Leader()
    leader.course.plan = replace(leader.course.plan, group=True)
    (decided,) = refuses(leader)
    assert decided.phase.kind is wire.PhaseKind.STOP
    reason = "h3: last insn is not an exit; a group needs that program"
    assert decided.phase.settings["message"] == reason
