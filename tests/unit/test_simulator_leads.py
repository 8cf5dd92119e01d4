# SPDX-License-Identifier: Apache-2.0
"""A lead is lost, or a view changes, at the worst moment that was found: by a seed, or by reading."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.errors import WireError
from nicps.exchange import Exchange
from nicps.job.course import Course
from nicps.job.orders import Orders
from nicps.job.plan import Plan
from nicps.protocol import Action, Declined, Installed, PhaseAgreed, Prepare, Send, SendFragments
from nicps.protocol.departure import Departure
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import AdaptiveTimeout, Timings
from nicps.protocol.rings import Rings
from nicps.protocol.signals import Chosen, Signal, WithoutSelf
from nicps.protocol.standing import Place, Standing
from nicps.protocol.view import Successor, View
from nicps.protocol.view_change import ViewChange
from tests.listed import members_of
from tests.ring_parts import TIMINGS, VIEW
from tests.rooms import NoKernel
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, ends_well, job, training
from tests.simulator.host import Host
from tests.simulator.lan import Lan

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_majority_that_has_no_state_waits_for_who_has_it(hosts: int) -> None:
    """All but the last come back, and are cut off from it before they have the state; they are the majority then."""
    lan, _ = training(hosts=hosts)
    full = lan.hosts[-1]
    for host in lan.hosts[:-1]:
        lan.at(TRAINING_S + 0.1, host.kill_program)

    def cut(host: Host, action: Action) -> bool:
        learning = len(host.node.learners) == hosts - 1
        if host is not full or not isinstance(action, PhaseAgreed) or not learning:
            return False
        lan.cut([frozenset(range(hosts - 1)), frozenset({hosts - 1})])
        lan.trouble(lan.now + 3.0)
        lan.at(lan.now + 3.0, lambda: lan.cut([]))
        return True

    lan.moments.append(cut)
    ends_well(lan)


@pytest.mark.parametrize("compute_s", [0.02, 0.05])
def test_a_view_that_swallows_a_test_keeps_the_unit(compute_s: float) -> None:
    """The lead is lost as it decides on a test; the others have the next training round whole, and go on from there."""
    plan = Plan("job", batch=30, width=16, quorum=0.6, alarm_below=0.0)
    lan, faults = job(hosts=3, plan=plan, rounds=30, compute_s=compute_s)
    lan.hosts[0].slowness = 4.0  # so that a round has its quorum without it
    lan.at(TRAINING_S, lambda: faults.at_moment("deciding", 1, "lead pause"))
    ends_well(lan)
    assert {what[1] for what in lan.checks.commits.values() if what[2] == 2} == {plan.unit}


@pytest.mark.parametrize("round_", [1, 2])
def test_a_new_lead_in_a_phases_first_rounds(round_: int) -> None:
    """The lead dies in a round after a test. In the first the next one's program has said all that it has to say."""
    lan, _ = job(hosts=4, rounds=10, test_every=3, compute_s=0.05)

    def after_a_test(host: Host, _: Action) -> bool:
        ring, program = host.node.ring, host.process
        if host is not lan.hosts[1] or ring is None or program is None or program.state.trained < 3:
            return False
        training = ring.phase.kind is wire.PhaseKind.TRAIN
        if not training or ring.round != ring.phase.first_round + round_ - 1:
            return False
        lan.hosts[0].kill()
        return True

    lan.moments.append(after_a_test)
    ends_well(lan)


def returning(saving_s: float, compute_s: float) -> Lan:
    """Four hosts train; the last one is killed, and comes back."""
    lan, _ = job(hosts=4, rounds=200, test_every=1000, compute_s=compute_s, saving_s=saving_s)
    lan.at(TRAINING_S + 0.1, lan.hosts[3].kill)
    lan.at(TRAINING_S + 1.6, lan.hosts[3].restart)
    lan.trouble(TRAINING_S + 1.6)
    return lan


@pytest.mark.short("kill-0.01", "renew-0.05")
@pytest.mark.parametrize("saving_s", [0.01, 0.05])
@pytest.mark.parametrize("fault", ["kill", "renew"])
def test_a_round_that_programs_have_left_is_run_again(fault: str, saving_s: float) -> None:
    """The lead saves its state while the others have the next round whole: it dies, or the view changes."""
    lan = returning(saving_s, 0.01)

    def prepares(host: Host, action: Action) -> bool:
        state = isinstance(action, Prepare) and action.phase.settings.get("purpose") == "state"
        if host is not lan.hosts[2] or not state:
            return False
        getattr(lan.hosts[0], fault)()
        return True

    lan.moments.append(prepares)
    ends_well(lan)


def test_no_round_counts_while_the_state_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view changes once the lead has let the round come that it then saves in: it holds that back again."""
    lan = returning(1.0, 0.2)
    lead, taken = lan.hosts[0], []

    def learner_waits(_: Host, action: Action) -> bool:
        role, ring = lead.machine.roles.lead, lead.node.ring
        if role is None or ring is None or ring.phase.kind is not wire.PhaseKind.TRAIN:
            return False
        undecided = ring.frozen or ring._control.word.undecided
        freed = ring.round > ring.phase.first_round and not undecided
        if not freed or not role.course.joiners.learners(wire.Stage.WAITING):
            return False
        taken.append(ring.round)
        lan.at(lan.now + 1e-4, lead.renew)
        return True

    monkeypatch.setattr("tests.simulator.program.START_S", 0.7)
    lan.moments.append(learner_waits)
    assert schedules.finish(lan).what == "done"
    assert taken, "the moment has never come"


def test_a_host_is_taken_in_without_the_jobs_files_as_the_lead_dies() -> None:
    """The next lead goes on training before it hands the files out, and the host prepares for that."""
    lan, _ = training(hosts=4, lost=(3,))
    lead, back = lan.hosts[0], lan.hosts[3]
    declined: list[Action] = []

    def take_in(host: Host, action: Action) -> bool:
        if host is not lead or not isinstance(action, Installed) or 4 not in host.node.learners:
            return False
        lan.at(lan.now + 0.001, lead.kill)
        lan.at(lan.now + 1.5, lead.restart)
        lan.trouble(lan.now + 2.0)
        return True

    def decline(host: Host, action: Action) -> bool:
        if host is back and isinstance(action, Declined):
            declined.append(action)
        return False

    lan.moments += [take_in, decline]
    assert schedules.finish(lan).what == "done"
    assert take_in not in lan.moments, "the moment has never come"
    assert not declined


def test_who_learns_of_the_end_from_another_is_at_rest() -> None:
    """A host that is cut off as the job is stopped proposes a view; once it knows of the end nothing is due there."""
    lan, _ = job(hosts=4, rounds=4)
    stop = Course.stop

    def stops(course: Course, *arguments: Any, **options: Any) -> Orders:
        lan.cut([frozenset({2}), frozenset({0, 1, 3})])
        return stop(course, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Course, "stop", stops)
        assert lan.run(lambda: bool(lan.groups), 30.0)
        lan.run(lambda: False, lan.now + 4.0)
    lan.cut([])
    node = lan.hosts[2].node
    assert lan.run(lambda: node.ended, lan.now + 5.0)
    assert node.deadline() == math.inf and not node.changing


def test_a_lead_that_takes_over_in_a_test_keeps_the_unit() -> None:
    """What the gradients have grown to is known to all."""
    lan, _ = job(hosts=3, rounds=30, test_every=6, compute_s=0.02, too_large=0.5)

    def tests(host: Host, action: Action) -> bool:
        if not isinstance(action, Prepare) or action.phase.kind is not wire.PhaseKind.TEST:
            return False
        lan.hosts[0].kill()
        return True

    lan.moments.append(tests)
    ends_well(lan)
    units = [what[1] for key, what in sorted(lan.checks.commits.items()) if what[2] == 2]
    assert units == sorted(units) and units[0] < units[-1]


def test_a_host_for_which_there_is_no_number_is_not_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers every call; as there is no room in the list no view is made for it."""
    monkeypatch.setattr(wire, "MAX_MEMBERS", 3)
    plan = Plan("job", batch=30, width=16, alarm_below=0.0, admit=True)
    lan, _ = job(hosts=3, late=1, plan=plan, rounds=30, compute_s=0.05)
    lan.at(1.0, lan.hosts[3].restart)
    assert schedules.finish(lan).what == "done"
    assert lan.hosts[0].node.view.number == 1


def test_where_nobody_has_all_files_who_has_none_is_not_taken_back() -> None:
    """It has been started again; the others train to the end, and are told once."""
    plan = Plan("job", batch=30, width=16, alarm_below=0.0, redeal=False)
    lan, _ = job(hosts=3, plan=plan, rounds=30, compute_s=0.05)
    lan.at(TRAINING_S + 0.1, lan.hosts[2].kill)
    lan.at(TRAINING_S + 0.5, lan.hosts[2].restart)
    lan.trouble(TRAINING_S + 0.5)
    assert schedules.finish(lan).what == "done"
    assert not any("TAKES BACK" in line for line in lan.trace)
    assert sum("event warning" in line for line in lan.trace) == 1


def test_who_finds_out_that_it_is_left_out_tells_the_others() -> None:
    """It finds the list agreed on, whose proposer is dead, and is not in it; the one that is has not been told."""
    lan, _ = training(hosts=3)
    first, dead, out = lan.hosts

    def finds() -> None:
        node = out.node
        members = tuple(node.view.members)
        phase = node.phase.number if node.phase is not None else 0
        agreed = Successor(
            members, frozenset({1, 2}), 1, 0, phase + 1, node.open_round, 0, bytes(15) + b"1"
        )
        told = node.membership._put_in_force(out.clock(), 2, 1, agreed, 1, {})
        out.do(node._take(out.clock(), told))

    lan.at(TRAINING_S + 0.1, dead.kill)
    lan.at(TRAINING_S + 0.1001, finds)
    lan.trouble(TRAINING_S + 0.2)
    lan.run(lambda: first.node.view.number > 1, TRAINING_S + 5.0)
    assert first.node.view.number > 1


def test_a_new_lead_whose_program_stands_still_is_found() -> None:
    """It has offered, and may be silent until the commit; as the lead's it has to say again what comes next."""
    lan, _ = training(hosts=4)
    lan.hosts[3].slowness = 4.0  # the round is open for a while yet

    def offered(host: Host, action: Action) -> bool:
        open_ = host.node.ring is not None and host.node.ring.round > 5
        if host is not lan.hosts[1] or not isinstance(action, SendFragments) or not open_:
            return False
        lan.at(lan.now + 1e-3, host.hang)
        lan.at(lan.now + 2e-3, lan.hosts[0].kill)
        lan.trouble(lan.now + 1.0)
        return True

    lan.moments.append(offered)
    ends_well(lan)


def test_a_lead_that_leaves_misses_the_others() -> None:
    """Of two hosts the one has stopped the job and been started again, and the other has not heard of it: its training
    program was lost as it led, between two phases. It decides nothing more, and nobody answers.
    """
    assert schedules.run(950021, 2, Exchange.STRIPES).what == "stopped"
    host = LocalHost(bytes(6), "h2", NodeState.MEMBER, VIEW, VIEW.lead)
    rings = Rings(host, NoKernel(), TIMINGS, AdaptiveTimeout(TIMINGS))
    departure, now, said = Departure(host, rings, TIMINGS), 0.0, list[Action | Signal]()
    departure.leave(now, "its training program was killed")
    for _ in range(6):
        now = departure.deadline()
        said += departure.tick(now)
    assert sum(isinstance(step, WithoutSelf) for step in said) == 1
    assert sum(isinstance(step, Send) for step in said) == 6


def test_a_lead_that_leaves_is_not_in_the_view_that_it_proposes() -> None:
    """The other members miss its LEAVE frames, or receive its proposal before their own is sent (seed 740113). A lead
    that proposed itself would leave each new view again, without end.
    """
    lan, _ = training(hosts=3)
    lan.lose[wire.FrameType.LEAVE] = 1 << 30
    lan.at(TRAINING_S, lan.hosts[0].kill_program)
    ends_well(lan)
    assert {host.node.view.live for host in lan.hosts} == {frozenset({1, 2, 3})}  # it has come back


def test_a_lead_that_leaves_goes_on_alone_where_one_of_two_may() -> None:
    timings = Timings(alone=True)
    timeout = AdaptiveTimeout(timings)
    view = View(1, members_of(2), frozenset({1, 2}), 1)
    change, place = (
        ViewChange(view, 1, 1, timings, timeout, lambda: bytes(16)),
        Place(Standing(), {}),
    )
    steps = change.evict(0.0, place, frozenset({1}))
    while not (chosen := [step.successor for step in steps if isinstance(step, Chosen)]):
        assert change.deadline() < 3.0
        steps = change.tick(change.deadline(), place)
    assert chosen[0].live == frozenset({1})


@pytest.mark.parametrize("changes", [{"unit": -101}, {"quorum": -1}, {"quorum": 1 << 31}])
def test_a_decision_that_nobody_would_take_is_not_made(changes: dict[str, Any]) -> None:
    """The lead finds that out, and the job ends with it. Otherwise all would refuse it without end."""
    lan, _ = training(hosts=3)
    lan.run(lambda: False, TRAINING_S)
    node = lan.hosts[0].node
    assert node.leads and node.phase is not None
    with pytest.raises(WireError, match="out of range"):
        node.decide(lan.hosts[0].clock(), replace(node.phase, **changes))
