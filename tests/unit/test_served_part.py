# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job with parameter servers: what it makes, what it tells its program, and what it asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.actions import BeginServing, EnterPhase, Post, Settled, UseServed
from nicps.job.orders import BeginPull, BeginStep
from nicps.job.slow_work import FillPart, ReadPart, ReserveServed
from nicps.protocol import Committed, Offer, Phase, Pulled, Source, Stepped
from nicps.protocol.serving import Serving
from nicps.session import served_form as served
from nicps.session import shared_form as says
from tests.parts import LANES, Host, training

SHARES = {1: (0, 6, 6), 2: (6, 0, 6), 3: (6, 6, 0)}  # who serves, and who trains


def phase(server: int, number: int = 4, first_round: int = 3, staleness: bool = True) -> Phase:
    serving = Serving((server,), 6, staleness)
    settings = {"exchange": Exchange.SERVERS, "serving": serving, "shares": SHARES[server]}
    return training(number, first_round, **settings)


def prepared(host: Host, of: Phase) -> list[served.Serves]:
    """It gets ready for that phase, and so does its program; what that was told."""
    host.forget()
    host.decides(of)
    host.settle()
    host.hears(says.Prepared(of.number))
    host.settle(7)
    host.spot.phase_in_force = of
    return [post.message for post in host.found(Post) if isinstance(post.message, served.Serves)]


@pytest.fixture
def host() -> Host:
    made = Host()
    made.builds()
    return made


def commit(host: Host, of: Phase, round_: int) -> None:
    counted = {number: 1 for number, share in enumerate(of.shares, 1) if share}
    host.spot.open_round = round_ + 1
    host.do(host.part.commit(host.now, Committed(of, round_, counted, 0, 0)))


@pytest.mark.parametrize("staleness", [True, False])
def test_a_worker_has_a_store_and_is_told_of_it(host: Host, staleness: bool) -> None:
    """S3: whether staleness counts goes to the kernel."""
    (serves,) = prepared(host, phase(2, staleness=staleness))
    assert (serves.servers, serves.every, serves.room, serves.pushes) == ((2,), 6, 1200, 600)
    assert not serves.lanes and not host.found(FillPart)
    assert host.found(BeginServing) == [BeginServing(3, frozenset(), 1200, staleness, serves=False)]
    assert host.answers == [4] and len(host.found(EnterPhase)) == 1
    (again,) = prepared(host, phase(2, 5, 9, staleness))
    assert not again.room, "the store that it has mapped"


def test_a_server_is_filled_by_its_program_once(host: Host) -> None:
    (serves,) = prepared(host, phase(1))
    assert (serves.room, serves.first, serves.lanes) == (0, 0, LANES)
    assert host.answers == [4] and len(host.found(BeginServing)) == 1
    assert UseServed(7) in host.asked
    commit(host, phase(1), 3)
    assert host.found(Settled) == [Settled(3)]
    (again,) = prepared(host, phase(1, 5, 9))
    assert not again.lanes, "its part is the newest"


@pytest.mark.parametrize("commits", [True, False])
def test_a_server_that_has_worked_meanwhile_is_filled_anew(host: Host, commits: bool) -> None:
    """What it has is as old as its last time as a server, also if the other one is lost in the phase's first round."""
    prepared(host, phase(1))
    commit(host, phase(1), 3)
    prepared(host, phase(2, 5, 9))
    if commits:
        commit(host, phase(2), 9)
    (serves,) = prepared(host, phase(1, 6, 15))
    assert serves.lanes == LANES


def test_a_part_of_a_phase_that_never_came_is_no_part(host: Host) -> None:
    prepared(host, phase(1))  # and another lead decides otherwise
    prepared(host, phase(2, 5, 4))
    (serves,) = prepared(host, phase(1, 6, 15))
    assert serves.lanes == LANES


def test_another_part_of_a_phase_that_is_decided_again_is_filled(host: Host) -> None:
    """A lead that has not heard of the decision gives this host another rank, from the same round on."""
    two = {"exchange": Exchange.SERVERS, "shares": (0, 0, 12)}
    (serves,) = prepared(host, training(4, serving=Serving((2, 1), 6), **two))
    assert (serves.first, serves.lanes) == (LANES // 2, LANES // 2)
    (serves,) = prepared(host, training(5, serving=Serving((2, 1), 6), **two))
    assert not serves.lanes, "the same part"
    (serves,) = prepared(host, training(6, serving=Serving((1, 2), 6), **two))
    assert (serves.first, serves.lanes) == (0, LANES // 2)


def test_steps_and_what_comes_of_them(host: Host) -> None:
    prepared(host, phase(2))
    host.forget()
    host.hears(served.Step(3, 2))
    assert host.found(BeginStep) == [BeginStep(Offer(3, 2))]
    program = host.part.program
    assert program is not None
    action = Stepped(3, 9, 4, (2,))
    (post,) = host.part.served.note_stepped(host.now, program, action)
    assert isinstance(post, Post) and post.message == served.Stepped(3, 9, 4, (2,))


def test_a_worker_pulls_and_is_told_of_the_round_that_it_asked_for(host: Host) -> None:
    prepared(host, phase(2))
    host.forget()
    host.hears(served.Pull(3))
    assert host.found(BeginPull) == [BeginPull(3, ())]
    program = host.part.program
    assert program is not None
    (post,) = host.part.served.note_pulled(host.now, program, Pulled(8, 11))
    assert isinstance(post, Post) and post.message == served.Pulled(3, 11)


def test_a_server_that_trains_pulls_once_its_part_is_filled(host: Host) -> None:
    """Its program asks at once, and this host is in the phase only after that."""
    of = replace(phase(1), shares=(4, 4, 4))
    host.decides(of)
    host.settle()
    host.hears(says.Prepared(of.number))
    host.hears(served.Pull(3))
    assert not host.found(BeginPull) and not host.answers
    host.settle(7)
    assert host.answers == [4] and host.found(BeginPull) == [BeginPull(3, ())]
    program = host.part.program
    assert program is not None
    (post,) = host.part.served.note_pulled(host.now, program, Pulled(3, 11))
    assert isinstance(post, Post) and post.message == served.Pulled(3, 11), "all is in its store"


def test_a_server_reads_its_own_part(host: Host) -> None:
    prepared(host, phase(1))
    host.forget()
    host.hears(served.Pull(4))
    (begin,) = host.begun
    assert isinstance(begin.task, ReadPart) and not host.found(BeginPull)
    host.finish_task()
    assert [post.message for post in host.found(Post)] == [served.Pulled(4, 1, 0, LANES)]


def test_one_of_two_servers_pulls_the_others_part(host: Host) -> None:
    serving = Serving((1, 2), 6)
    settings = {"exchange": Exchange.SERVERS, "serving": serving, "shares": (0, 0, 12)}
    prepared(host, training(4, **settings))
    host.forget()
    host.hears(served.Pull(4))
    assert host.found(BeginPull) == [BeginPull(4, (Source(2, 600, 1200),))]


@pytest.mark.parametrize("what", ["the server has gone", "another phase"])
def test_a_pull_that_nobody_answers(host: Host, what: str) -> None:
    """The program is told, and waits no longer."""
    prepared(host, phase(2))
    if what == "another phase":
        test = training(6, 9, kind=wire.PhaseKind.TEST, shares=(1, 1, 1))
        host.decides(test)
        host.settle()
        host.spot.phase_in_force = test
    else:
        host.spot.view = replace(host.spot.view, live=frozenset({1, 3}), lead=1)
    host.forget()
    host.hears(served.Pull(3))
    assert [post.message for post in host.found(Post)] == [served.Pulled(3, 1, lost=True)]
    assert not host.found(BeginPull)


def test_a_pull_while_a_test_is_prepared(host: Host) -> None:
    """The phase in force has servers, which answer: the test waits until all have read the last round."""
    serving = Serving((1, 2), 6)
    settings = {"exchange": Exchange.SERVERS, "serving": serving, "shares": (0, 0, 12)}
    prepared(host, training(4, **settings))
    host.decides(training(6, 9, kind=wire.PhaseKind.TEST, shares=(1, 1, 1)))
    host.settle()
    host.forget()
    host.hears(served.Pull(8))
    assert host.found(BeginPull) == [BeginPull(8, (Source(2, 600, 1200),))]
    assert not [post for post in host.found(Post) if isinstance(post.message, served.Pulled)]


def test_a_pull_in_a_job_without_servers(host: Host) -> None:
    host.decides(training(4))
    host.settle()
    host.forget()
    assert not host.hears(served.Pull(3)) and not host.begun


def test_a_program_that_takes_the_place_of_another_gets_the_store(host: Host) -> None:
    prepared(host, phase(2))
    memory = host.part.served
    assert memory.message(phase(2), program=2).room == 1200
    assert memory.message(phase(2), program=2).room == 0
    assert not [begin for begin in host.begun if isinstance(begin.task, ReserveServed)]
