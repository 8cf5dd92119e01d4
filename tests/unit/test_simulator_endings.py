# SPDX-License-Identifier: Apache-2.0
"""Who is not there when a job ends hears of it; who cannot go on is heard, whoever leads, and is not waited for."""

from __future__ import annotations

import math

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Action, Joiner, NodeState, Prepare
from tests.simulator import schedules
from tests.simulator.checks import Checks
from tests.simulator.drill import TRAINING_S, ends_well, job, run, training
from tests.simulator.host import Host

pytestmark = pytest.mark.unit

ERROR = "the training program ended: it ended with an error"


@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("name", ["h1", "h3"])
def test_who_was_struck_off_before_the_end_learns_of_it(name: str, well: bool) -> None:
    """It stood still while the others came to the end, and told nobody any more; it asks."""
    lan, _ = training()
    host = next(h for h in lan.hosts if h.node.name == name)
    lan.at(TRAINING_S, host.pause)
    if not well:
        lan.at(TRAINING_S + 1.0, lan.hosts[1].break_program)
    lan.at(TRAINING_S + 30.0, host.resume)
    lan.trouble(TRAINING_S + 30.0)
    outcome = schedules.finish(lan)
    assert outcome.what == ("done" if well else "stopped")
    assert host.node.ended and host.job_over == "the job has ended"
    assert host.node._host.ending is (wire.Ending.DONE if well else wire.Ending.ENDED)
    assert host.node.deadline() == math.inf, "it asks no more"


def test_who_leaves_as_all_save_learns_of_the_end() -> None:
    """Its training program is killed then. It is evicted, and nobody calls it back any more."""
    lan, _ = training()
    host = lan.hosts[2]

    def killed(at: Host, action: Action) -> bool:
        saves = isinstance(action, Prepare) and action.phase.kind is wire.PhaseKind.FINISH
        if at is host and saves:
            host.kill_program()
        return at is host and saves

    lan.moments.append(killed)
    ends_well(lan)
    assert host.node.ended and host.job_over == "the job has ended"


def test_who_departs_says_so_itself_in_the_end() -> None:
    """Not that it was not heard: it was, and the others have gone on as it asked."""
    lan, _ = training()
    host = lan.hosts[2]
    lan.at(TRAINING_S, lambda: host.do(host.machine.leave(host.clock())))
    publisher = host.machine.roles.publisher
    assert lan.run(lambda: bool(publisher.trouble), TRAINING_S + 5.0)
    assert publisher.trouble == "standing by: h3 has left the network"


def test_a_member_that_cannot_go_on_comes_to_lead() -> None:
    """Its training program ends with an error just as the lead dies, which it would have told."""
    lan, _ = training(hosts=4)
    lan.at(TRAINING_S, lan.hosts[0].kill)
    lan.at(TRAINING_S + 0.05, lan.hosts[1].break_program)
    outcome = schedules.finish(lan)
    assert (outcome.what, outcome.why) == ("stopped", ERROR)


def test_who_declines_on_standby_is_not_waited_for() -> None:
    """Its new training program ends with an error once it has answered a call; the lead acts on the answer later."""
    lan, _ = job(hosts=4, rounds=6, compute_s=4.0)
    first, last = lan.hosts[0], lan.hosts[3]

    def declines() -> None:
        lead = first.machine.roles.lead
        waits = lead is not None and lead.course.joiners.waiting.get(last.mac)
        if last.node.state is NodeState.STANDBY and waits and waits.stage is wire.Stage.WAITING:
            last.break_program()
            taken.append(first.node.view.number)
        else:
            lan.at(lan.now + 0.001, declines)

    taken: list[int] = []
    lan.at(1.2, last.kill_program)
    lan.at(1.201, declines)
    ends_well(lan)
    assert taken and last.declined
    assert last.node.ended, "its user may wait for the end"


def test_a_majority_that_needs_who_has_declined_has_it() -> None:
    """Of two hosts the other is taken in again; it is in the list, and has to agree that it goes."""
    lan, _ = job(hosts=2, rounds=12, compute_s=1.0)
    first, last = lan.hosts
    old = first.node.rebuild

    def rebuilds(now: float, joiners: tuple[Joiner, ...]) -> list[Action]:
        if joiners:
            last.break_program()
        return old(now, joiners)

    first.node.rebuild = rebuilds  # type: ignore[method-assign]
    lan.at(2.2, last.kill_program)
    ends_well(lan)
    assert last.declined


def test_who_was_cut_off_learns_of_the_end_though_another_job_has_begun() -> None:
    """The others have ended the job, and are in another network; it is not in their list any more."""
    lan, _ = training()
    first, last = lan.hosts[0], lan.hosts[4]
    lan.at(TRAINING_S, lambda: lan.cut([frozenset({4}), frozenset(range(4))]))
    assert lan.run(lambda: all(host.node.ended for host in lan.hosts[:4]), 60.0)
    lan.checks = Checks(lan)
    first.submit()
    assert lan.run(lambda: all(host.node.view.number > 2 for host in lan.hosts[:4]), lan.now + 10.0)
    assert not first.node.view.number_of(last.mac)
    lan.cut([])
    assert lan.run(lambda: last.node.ended, lan.now + 10.0)


def test_where_nobody_else_is_left_a_program_that_is_killed_ends_the_job() -> None:
    lan, _ = training(hosts=2)
    lan.at(TRAINING_S, lan.hosts[1].kill_program)
    lan.at(TRAINING_S + 0.1, lan.hosts[0].kill_program)
    outcome = schedules.finish(lan)
    assert (outcome.what, outcome.why) == (
        "stopped",
        "h1: the training program ended: it was killed",
    )


def test_a_model_that_is_tampered_with_before_its_first_round_stops_the_job() -> None:
    """All are asked to train from the same model; nobody can say yet which of two is damaged."""
    lan, _ = job(hosts=3)

    def tamper(host: Host, action: Action) -> bool:
        program = host.process
        if host is not lan.hosts[1] or program is None or program.attached:
            return False
        host.tamper()
        return True

    lan.moments.append(tamper)
    outcome = schedules.finish(lan)
    assert outcome.what == "stopped" and "the model built here differs" in outcome.why
    assert not lan.moments, "the moment has never come"


@pytest.mark.parametrize("seed", [404170, 406146])
def test_a_lead_pauses_after_it_has_stopped_the_job(seed: int) -> None:
    """A model was tampered with; when the lead goes on, the program that had it has ended."""
    assert run(range(seed, seed + 1))


def test_a_lead_whose_model_was_tampered_with_is_killed_as_it_has_decided_on_the_first_round() -> (
    None
):
    """The models of all others agree, but not with what it has decided: the next lead stops the job for that."""
    assert run(range(1524310, 1524311)) == {"stopped": 1}


def test_the_program_that_says_its_last_word_is_not_the_next_one() -> None:
    """A kill comes while the agent takes a program's word; the next program has been started, and goes on."""
    assert run(range(502401, 502402))


def test_a_host_that_knows_of_the_end_comes_to_lead() -> None:
    """It had promised the view before it heard that the job was over. One member still trains."""
    seed = 1300761
    assert run(range(seed, seed + 1), exchange=Exchange.STRIPES) == {"stopped": 1}
