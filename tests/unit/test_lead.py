# SPDX-License-Identifier: Apache-2.0
"""The lead's side of a job: what it hands out, while its training program saves, and what is too late for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job import plan as phases
from nicps.job.actions import CloseStream, Log
from nicps.job.course import Course
from nicps.job.lead import Lead
from nicps.job.orders import (
    CommitNext,
    Decide,
    OfferStream,
    Orders,
    PublishEvent,
    SaveState,
    Saving,
)
from nicps.job.plan import Found, Plan
from nicps.job.roles import LifeSettings, Roles
from nicps.job.slow_work import Folder, KeepCheckpoint, OpenStream, StreamSize
from nicps.job.submission import Submission
from nicps.protocol import Node, NodeState, Phase, View
from nicps.protocol.serving import Serving
from tests.parts import MEMBERS, ROUND, Host, hand_out, training
from tests.rooms import NoKernel

pytestmark = pytest.mark.unit


class Leader:
    """A host that leads, with its own part in the job."""

    def __init__(self) -> None:
        self.host = Host()
        self.host.builds()
        self.host.spot.leads = True
        self.host.spot.learners = frozenset({2})
        assert self.host.part.program is not None
        self.host.part.program.saved = 42
        found = Found(able=True, trained=True, finishing=False)
        plan = Plan("job", 8, 16)
        streams = itertools.count(1)
        self.lead = Lead(plan, self.host.spot, self.host.tasks, streams, found, 0.0)

    def saves(self, saving: Saving, error: str = "") -> Orders:
        """The training program has written its state."""
        return self.do(self.lead.state_saved(saving, error, self.host.part))

    def do(self, orders: Orders) -> Orders:
        """As the life of a job carries them out."""
        self.host.do(orders)
        for offer in [order for order in orders if isinstance(order, OfferStream)]:
            size = offer.size
            decided = self.lead.course.stream_opened(offer.purpose, 1, size.size, size.index_bytes)
            self.host.do(decided)
        return orders

    def finish_task(self, outcome: object) -> object:
        """The first task is done."""
        begin = self.host.begun.pop(0)
        self.do(self.host.tasks.finish(0.0, begin.ticket, outcome))
        return begin.task

    @property
    def decided(self) -> list[Phase]:
        return [order.phase for order in self.host.found(Decide)]


@pytest.fixture
def leader() -> Leader:
    return Leader()


def for_a_learner(leader: Leader) -> Saving:
    leader.do(leader.lead.open_hand_out(0.0, "state", leader.host.part, None))
    assert leader.host.found(SaveState) == [SaveState(Saving.STATE)]
    return Saving.STATE


def for_the_alarm(leader: Leader) -> Saving:
    leader.host.spot.phase_in_force = training()
    leader.lead.course.raise_alarm("h2 left")
    leader.do(leader.lead.round_judged(0.0, 6, "continue"))
    assert leader.host.found(SaveState) == [SaveState(Saving.ALARM)]
    return Saving.ALARM


def test_the_state_is_handed_out_once_it_is_saved(leader: Leader) -> None:
    saving = for_a_learner(leader)
    assert not leader.decided
    leader.saves(saving)
    assert leader.finish_task(StreamSize(1440, 7)) == OpenStream(
        1, Folder.WORK, [{"path": "state.npz", "store": "all"}]
    )
    assert [phase.kind for phase in leader.decided] == [wire.PhaseKind.HANDOUT]


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST, wire.PhaseKind.FINISH])
def test_a_decision_names_the_job(leader: Leader, kind: wire.PhaseKind) -> None:
    """A host that was taken in before it had anything of the job prepares for it, too."""
    phase = leader.lead.complete(Phase(0, 0, kind), leader.host.part)
    digests = {} if kind is wire.PhaseKind.FINISH else {"handout": "files", "model": "d0"}
    assert phase.settings == {"job": "job", **digests}


@pytest.mark.parametrize("purpose", ["job", "files"])
def test_what_cannot_be_opened_ends_the_job(leader: Leader, purpose: str) -> None:
    submission = Submission(1, "job", {"files": [], "settings": {}})
    leader.host.part.job.prepared = {"files": []}
    leader.do(leader.lead.open_hand_out(0.0, purpose, leader.host.part, submission))
    begin = leader.host.begun.pop()
    leader.do(leader.host.tasks.fail(0.0, begin.ticket, "job.tar became shorter"))
    (stop,) = leader.decided
    assert stop.settings["message"] == f"cannot hand out the {purpose}: job.tar became shorter"


def test_a_setting_for_a_host_that_is_not_there(leader: Leader) -> None:
    settings = {"seed": 1, "slow.h2": 2, "slow.h9": 3, "slow.x\n": 3}
    submission = Submission(1, "job", {"files": [], "settings": settings})
    leader.do(leader.lead.open_hand_out(0.0, "job", leader.host.part, submission))
    text = "nobody is slowed down by slow.h9, slow.x : the hosts are h1, h2, h3"
    assert leader.host.found(PublishEvent) == [PublishEvent("warning", {"message": text})]
    assert [member.name for member in MEMBERS] == ["h1", "h2", "h3"]


def test_what_the_preparation_has_chosen_is_said(leader: Leader) -> None:
    prepared = {"files": [], "settings": {}, "notes": ["sync_every is\n3", 4]}
    submission = Submission(1, "job", prepared)
    leader.do(leader.lead.open_hand_out(0.0, "job", leader.host.part, submission))
    told = [PublishEvent("warning", {"message": text}) for text in ("sync_every is 3", "4")]
    assert leader.host.found(PublishEvent) == told


def test_which_branches_are_in_which_set_is_said(leader: Leader) -> None:
    """B1: in the log and in the result, where there are any."""
    prepared = {"files": [], "settings": {}, "data": "digits"}
    plain = Submission(1, "job", prepared)
    assert plain.about == {"settings": {}, "data": "digits"}
    submission = Submission(1, "job", {**prepared, "branches": "set 1 has 9 parameters: one\n"})
    leader.do(leader.lead.open_hand_out(0.0, "job", leader.host.part, submission))
    assert leader.host.found(Log) == [Log("branches: set 1 has 9 parameters: one")]
    assert submission.about == {**plain.about, "branches": "set 1 has 9 parameters: one"}


@pytest.mark.parametrize(("script", "does"), [(False, "trains"), (True, "runs the script")])
def test_a_host_that_is_alone_says_so(leader: Leader, script: bool, does: str) -> None:
    leader.lead.plan = Plan("job", 8, 16, script=script)
    orders = leader.lead.view_installed(View(1, MEMBERS[:1], frozenset({1}), lead=1), keyed=False)
    text = f"no other host is there: this one {does} alone"
    assert PublishEvent("warning", {"message": text}) in orders


def test_the_alarm_stops_the_job_once_it_is_saved(leader: Leader) -> None:
    leader.saves(for_the_alarm(leader))
    assert not leader.decided
    assert leader.finish_task(None) == KeepCheckpoint("state.npz")
    (stop,) = leader.decided
    assert stop.settings["alarm"] and stop.settings["saved"]
    assert leader.lead.saved == "saved after 42 rounds of training in runs/job"


def test_an_alarm_stops_the_job_also_where_it_cannot_be_saved(leader: Leader) -> None:
    leader.saves(for_the_alarm(leader), "the disk is full")
    (stop,) = leader.decided
    assert stop.settings["alarm"] and not stop.settings["saved"]
    assert stop.settings["message"].endswith("the model could not be saved: the disk is full")


def test_no_alarm_saves_while_training_is_opened(leader: Leader) -> None:
    """The round that is opened would count without being in what is saved."""
    course = leader.lead.course
    leader.do(course.model_built(1))
    leader.host.spot.phase_in_force, leader.host.spot.open_round = None, 7
    leader.do(course.view_installed(leader.host.spot.view))
    assert [phase.kind for phase in leader.decided] == [wire.PhaseKind.TRAIN]
    course.raise_alarm("h2 left")
    leader.do(leader.lead.round_judged(0.0, 6, "continue"))
    assert not leader.host.found(SaveState)
    leader.do(leader.lead.decision_agreed(leader.decided[0], {}))
    leader.host.spot.phase_in_force, leader.host.spot.open_round = training(), 9
    leader.do(leader.lead.round_judged(0.0, 8, "continue"))
    assert leader.host.found(SaveState) == [SaveState(Saving.ALARM)]


def test_no_alarm_saves_before_training_is_opened(leader: Leader) -> None:
    """A judgement that comes before the view is everybody's: what is decided then opens training."""
    course = leader.lead.course
    course.raise_alarm("h2 left")
    leader.host.spot.open_round = 7
    leader.do(leader.lead.round_judged(0.0, 6, "continue"))
    assert not leader.host.found(SaveState)


def test_no_training_is_opened_while_an_alarm_saves(leader: Leader) -> None:
    """A switch that is given up meanwhile opens no training: its rounds would not be in what is saved."""
    course = leader.lead.course
    leader.do(course.model_built(1))
    for_the_alarm(leader)
    leader.host.spot.phase_in_force = training(exchange=Exchange.STRIPES)
    leader.do(course.exchange_fails(Exchange.STRIPES))
    assert not leader.decided
    leader.do(course.view_installed(leader.host.spot.view))  # it may be saved in another view only
    assert leader.host.found(SaveState) == [SaveState(Saving.ALARM)] * 2


def test_a_switch_is_given_up_as_a_state_is_got_ready(leader: Leader) -> None:
    """Training that was opened meanwhile could count rounds which the state lacks. After the hand-out hosts add."""
    course = leader.lead.course
    leader.host.spot.phase_in_force = training(exchange=Exchange.SWITCH)
    leader.do(course.model_built(1))
    for_a_learner(leader)
    leader.lead.course._open_stream("state")
    leader.do(course.exchange_fails(Exchange.SWITCH))
    assert not leader.decided and course.choice.exchange == Exchange.BROADCAST


def test_a_long_reason_fits_the_last_decision() -> None:
    message = phases.stop("\N{GRINNING FACE}" * 400)
    assert len(message.pack()) < wire.MAX_FRAME_BYTES - 100


def test_a_job_is_cancelled_before_its_first_round_is_judged(leader: Leader) -> None:
    """The round counts: it is saved (seed 11735 of the simulator)."""
    spot = leader.host.spot
    course = Course(Plan("job", 8, 16), spot)
    spot.phase_in_force, spot.open_round = training(first_round=6), ROUND
    course.round_committed(-20, Exchange.BROADCAST)
    assert course.cancel("cancelled on h3") == []
    leader.do(course.round_judged(ROUND - 1, "continue"))
    assert leader.host.found(SaveState) == [SaveState(Saving.ALARM)]


def test_no_round_goes_on_unjudged_after_a_view_change(leader: Leader) -> None:
    """The starter's program has judged nothing yet, and is going to: R14 holds in the first rounds too."""
    spot = leader.host.spot
    course = Course(Plan("job", 8, 16), spot)
    leader.do(course.view_installed(spot.view))  # the hand-out of the job
    spot.phase_in_force, spot.open_round = training(first_round=6), ROUND
    leader.do(course.stream_opened("job", 1, 1440, 9))
    leader.do(course.hand_out_ended(hand_out(purpose="job")))
    leader.host.forget()
    leader.do(course.view_installed(spot.view))
    assert not leader.host.found(CommitNext)
    leader.do(course.round_judged(ROUND - 1, "continue"))
    assert leader.host.found(CommitNext)


@pytest.mark.parametrize(
    ("servers", "shares", "left", "judged"),
    [
        ((2, 3), (4, 0, 0), {1, 2, 3}, True),
        ((2, 3), (4, 0, 0), {1, 2}, False),
        ((2,), (4, 0, 4), {1, 3}, True),
        ((2, 3), (4, 4, 4), {1, 2}, True),
    ],
    ids=["all are there", "one of two servers", "the only server", "servers that train"],
)
def test_a_test_waits_until_servers_can_pull_for_it(
    leader: Leader, servers: tuple[int, ...], shares: tuple[int, ...], left: set[int], judged: bool
) -> None:
    """A server that does not train could not pull the part of one that has left: it would test another state."""
    spot, course = leader.host.spot, leader.lead.course
    of = {"exchange": Exchange.SERVERS, "serving": Serving(servers, 4), "shares": shares}
    spot.phase_in_force = training(**of)
    spot.view = replace(spot.view, live=frozenset(left), lead=1)
    leader.do(course.round_judged(ROUND - 1, "test"))
    assert not leader.decided, "not all have read it"
    leader.do(course.read_by_all(ROUND - 1))
    assert [phase.kind for phase in leader.decided] == [wire.PhaseKind.TEST] * judged


@pytest.mark.parametrize("saves", [for_a_learner, for_the_alarm])
def test_what_is_saved_too_late_is_for_nothing(
    leader: Leader, saves: Callable[[Leader], Saving]
) -> None:
    """It was evicted, or another leads: deciding is not its part any more."""
    leader.saves(saves(leader))
    leader.lead.over = True
    leader.finish_task(StreamSize(1440, 7))
    assert not leader.decided and not leader.host.found(OfferStream)
    closed = leader.host.found(CloseStream)
    assert closed == ([CloseStream(1)] if saves is for_a_learner else [])


@pytest.mark.parametrize(
    ("setting", "own", "trained", "expected"),
    [
        ("auto", Exchange.BROADCAST, None, Exchange.STRIPES),
        ("auto", Exchange.SWITCH, None, Exchange.SWITCH),
        ("broadcast", Exchange.SWITCH, None, Exchange.BROADCAST),
        ("stripes", Exchange.BROADCAST, None, Exchange.STRIPES),
        ("switch", Exchange.BROADCAST, None, Exchange.BROADCAST),
        ("stripes", Exchange.BROADCAST, Exchange.BROADCAST, Exchange.BROADCAST),
        ("switch", Exchange.BROADCAST, Exchange.SWITCH, Exchange.BROADCAST),
    ],
)
def test_who_takes_over_goes_on_with_the_exchange_of_the_job(
    setting: str, own: Exchange, trained: Exchange | None, expected: Exchange
) -> None:
    """The starter is lost before anybody has trained: the job's setting holds, as far as this host believes it."""
    host = Host()
    host.part.job.digest, host.part.exchange = "abc", trained
    host.part.job.prepared = {"settings": {"batch": 8, "exchange": setting}}
    node = Node(MEMBERS[0].mac, "h1", "nicps", NoKernel(), lambda: 1)
    node._host.state, node._host.number = NodeState.MEMBER, 1
    node._host.view = View(1, MEMBERS, frozenset({1, 2, 3}), 1)
    roles = Roles(LifeSettings("h1", "nicps", exchange=own, runs="/runs"), node, host.tasks)
    roles.part = host.part
    roles.follow_lead(0.0, leaving=False)
    assert roles.lead is not None and roles.lead.course.able
    assert roles.lead.plan.exchange is expected
