# SPDX-License-Identifier: Apache-2.0
"""Which exchange a job has where a Linux switch may add, and what becomes of it when that makes no sums."""

from __future__ import annotations

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
from nicps.job.lead import SWITCH_S
from nicps.job.orders import (
    CommitNext,
    Decide,
    NeedRoom,
    OpenHandOut,
    PublishEvent,
    SaveState,
)
from nicps.job.plan import REFUSED, Plan
from nicps.protocol import NO_REST, Committed, Joiner, Phase, View
from nicps.protocol.actions import Answered
from nicps.session import shared_form as says
from tests.leader import LINUX, P4, SETTINGS, STRIPES, Leader, adding
from tests.parts import LANES, MEMBERS, ROUND, Host, training

pytestmark = pytest.mark.unit


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


def test_the_submitter_is_told_that_a_switch_takes_over() -> None:
    """Not only the log of the host that leads: the submitter was told that the hosts add."""
    leader = Leader()
    leader.installed()
    assert leader.decided == [STRIPES]
    assert not leader.host.found(PublishEvent), "that comes with the event that training begins"
    leader.comes()
    leader.installed()
    leader.installed()
    assert leader.decided[-1] is LINUX
    told = [event.values["message"] for event in leader.host.found(PublishEvent)]
    assert told == ["exchange linux-switch: the switch adds"]


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


@pytest.mark.parametrize("ends", ["time", "switch"])
@pytest.mark.parametrize("then", ["a host is taken back", "the model is saved"])
def test_a_wait_opens_no_training_in_the_middle_of_something_else(ends: str, then: str) -> None:
    """The state that is handed out, or saved, is that of all, and training begins after it."""
    leader = Leader()
    leader.comes("the switch is not ready for view 1")
    leader.spot.phase_in_force = replace(training(first_round=3), kind=wire.PhaseKind.TEST)
    leader.spot.learners = frozenset({3})
    leader.host.do(leader.course.round_judged(ROUND - 1, "continue"))
    leader.tick(10.0)
    assert not leader.decided and leader.course.choice.wait is not None
    if then == "a host is taken back":
        joiner = Joiner(MEMBERS[2].mac, "h3", 1)
        leader.host.do(leader.course.host_answered(Answered(joiner, 3, wire.Stage.WAITING)))
    else:
        leader.course.raise_alarm("h2 left")
    leader.spot.view = View(2, MEMBERS, frozenset({1, 3}), 1)
    leader.installed()
    assert leader.host.found(OpenHandOut) or leader.host.found(SaveState)
    if ends == "time":
        leader.tick(10.0 + SWITCH_S)
    else:
        leader.comes()
    assert not leader.decided
    leader.tick(30.0)
    assert leader.lead.deadline() > 1e9, "nothing is waited for"
