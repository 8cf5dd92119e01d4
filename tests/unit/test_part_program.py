# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job: its gradient on the way out, and a training program that ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.actions import (
    CountFragments,
    DropFragments,
    EnterPhase,
    Post,
    ShowNeed,
    StartProgram,
)
from nicps.job.orders import Depart, Fail, MarkRead, Warn
from nicps.protocol import Committed, Offer
from nicps.session import shared_form as says
from tests.parts import LANES, ROUND, Host, training

pytestmark = pytest.mark.unit


@pytest.fixture
def host() -> Host:
    """In a training phase of three."""
    host = Host()
    host.trains()
    return host


def waited(host: Host, at: float) -> float:
    """Commit, and what the program is told of its waiting."""
    host.forget()
    assert host.part.phase is not None
    host.commits(host.part.phase, at=at)
    (post,) = host.found(Post)
    assert isinstance(post.message, says.Committed)
    return float(post.message.seconds_waited)


def test_all_parts_of_a_gradient_are_its_sending(host: Host) -> None:
    """A switch gets it in quanta; each of them is a sending of its own."""
    host.offers(at=10.0)
    host.sends(10.0, 11.0)
    host.sends(12.0, 13.5, ((256, 256),))
    host.sends(14.0, 14.25, ((512, 88),))
    assert waited(host, 15.0) == pytest.approx(5.0 - 2.75)


def test_what_is_sent_again_is_sending_too(host: Host) -> None:
    host.offers(at=10.0)
    host.sends(10.0, 11.0)
    host.sends(12.0, 12.5, repair=True)
    assert waited(host, 14.0) == pytest.approx(4.0 - 1.5)


def test_each_gradient_has_its_own_time(host: Host) -> None:
    host.offers(ROUND - 1, at=1.0)
    host.sends(1.0, 9.0)
    host.offers(at=10.0)
    host.sends(10.0, 11.0)
    assert waited(host, 12.0) == pytest.approx(1.0)


def test_sums_that_do_not_come_are_told_once(host: Host) -> None:
    """One line an incident, which ends with the first round that needs nothing again; all fragments are counted."""
    host.offers(at=1.0)
    host.sends(1.0, 2.0)
    assert not host.found(Warn) and host.part.finish.asked_again == 0
    for round_ in (7, 7, 8, 9, 11):
        host.sends(0.0, 0.0, ((0, 3), (300, 4)), round_=round_, repair=True)
    warnings = [warning.text for warning in host.found(Warn)]
    assert [text.split(":")[0] for text in warnings] == ["round 7", "round 11"]
    assert "sums of the switch have not come" in warnings[0]
    assert host.part.finish.asked_again == 5 * 7


def test_repairs_among_hosts_are_everyday(host: Host) -> None:
    host.sends(0.0, 0.0, ((0, 3),), repair=True, exchange=Exchange.BROADCAST)
    assert not host.found(Warn) and host.part.finish.asked_again == 0


def test_what_the_kernel_has_taken_is_counted_in_the_view_of_the_round(host: Host) -> None:
    """With a switch a sum a fragment, from each other member otherwise; a hand-out's fragments are not counted."""
    assert host.part.phase is not None
    host.commits(host.part.phase)
    assert host.found(CountFragments) == [CountFragments(ROUND)]
    assert host.part.finish.expected == 600


def test_rounds_are_counted_by_the_exchange_that_made_their_sums(host: Host) -> None:
    """Those of training, in which somebody is counted."""
    phase = host.part.phase
    assert phase is not None
    host.commits(phase)
    both = Committed(phase, ROUND + 1, {1: 4, 2: 4}, -20, -20, Exchange.STRIPES)
    for commit in (both, replace(both, round=ROUND + 2), replace(both, counted={})):
        host.part.finish.note_commit(commit)
    test = replace(both, phase=training(kind=wire.PhaseKind.TEST))
    host.part.finish.note_commit(test)
    assert host.part.finish.exchanges == {"switch": 1, "stripes": 2}


# ---- a training program that ends


def ends(host: Host, code: int, last: str) -> list[str]:
    """What follows for the network and the program."""
    host.forget()
    assert host.part.program is not None
    host.do(host.part.note_ended(host.now, host.part.program.number, code, last))
    assert isinstance(host.asked[0], DropFragments), "the rest of its gradient will not come"
    texts = {Depart: "leaves", Fail: "fails"}
    return [
        f"{texts[type(order)]}: {order.reason}"
        for order in host.asked
        if isinstance(order, Depart | Fail)
    ]


@pytest.fixture
def fresh() -> Host:
    """Its first training program has not trained yet."""
    host = Host()
    host.builds()
    return host


def test_a_program_that_is_killed_is_started_again(fresh: Host) -> None:
    assert ends(fresh, -9, "SIGKILL has ended it") == [
        "leaves: h1: the training program ended: SIGKILL has ended it"
    ]
    assert [start.program for start in fresh.found(StartProgram)] == [2]


def test_a_program_that_is_killed_again_and_again(fresh: Host) -> None:
    for _ in range(3):
        ends(fresh, -9, "SIGKILL has ended it")
        assert fresh.found(StartProgram)
    assert ends(fresh, -9, "SIGKILL has ended it") == [
        "leaves: h1: the training program ended: SIGKILL has ended it",
        "fails: the training program was killed, or stood still, 4 times in a row, without a round in between; "
        "the last time: SIGKILL has ended it",
    ]
    assert not fresh.found(StartProgram) and fresh.part.stage is None


def test_a_program_that_cannot_be_started_again(fresh: Host) -> None:
    """Its files are spoilt, or there is no memory: that ends the job's part here, and not the agent."""
    ends(fresh, -9, "SIGKILL has ended it")
    fresh.do(fresh.part.programs.note_unstarted(2, "Cannot allocate memory"))
    (failed,) = fresh.found(Fail)
    assert failed.reason == ("the training program cannot be started again: Cannot allocate memory")


def test_a_program_that_ends_with_an_error_was_not_killed(fresh: Host) -> None:
    """Also where it stands by, or was killed often before: the reason is the error."""
    for _ in range(3):
        ends(fresh, -9, "SIGKILL has ended it")
    assert ends(fresh, 1, "No module named 'torch'") == [
        "fails: the training program ended: No module named 'torch'"
    ]


def test_the_lead_names_its_own_host_too(fresh: Host) -> None:
    """It names the host that a FAIL frame comes from."""
    fresh.spot.leads = True
    assert ends(fresh, 3, "exit status 3 in round 7, and it said nothing") == [
        "fails: h1: the training program ended: exit status 3 in round 7, and it said nothing"
    ]


def test_a_round_in_between_makes_up_for_a_start() -> None:
    """Only programs that are lost without having trained are given up."""
    host = Host()
    for _ in range(6):
        phase = host.trains()
        host.commits(phase)
        ends(host, -9, "SIGKILL has ended it")
        assert host.found(StartProgram)


def test_an_old_programs_end_is_no_news(fresh: Host) -> None:
    """Its process is gone after another one was started."""
    ends(fresh, -9, "SIGKILL has ended it")
    fresh.forget()
    fresh.do(fresh.part.note_ended(fresh.now, 1, 1, "an error"))
    assert not fresh.asked


def test_when_a_program_ended_is_told(fresh: Host) -> None:
    assert fresh.part.programs.moment == " before its first round"
    fresh.trains()
    assert fresh.part.programs.moment == f" in round {ROUND}"
    fresh.decides(training(4, kind=wire.PhaseKind.FINISH))
    assert fresh.part.programs.moment == " after the last round"


def test_what_is_enough_is_told_anew_in_another_view(host: Host) -> None:
    """In the view before, others had contributed; the round is run again, and nobody has yet."""
    host.do(host.part.show_need(ROUND, 3))
    host.forget()
    assert host.part.phase is not None
    host.goes_on(host.part.phase, again=False)
    assert host.found(ShowNeed) == [ShowNeed(1, 0, 0)]


# ---- a program that is not ready yet


@pytest.fixture
def starting(host: Host) -> Host:
    """In training, with another program than the one that was killed; it has not connected yet."""
    assert host.part.program is not None
    host.do(host.part.note_ended(1.0, host.part.program.number, -9, "killed"))
    host.forget()
    return host


def test_a_view_does_not_enter_a_program_that_is_not_ready(starting: Host) -> None:
    """It would hear of no phase, and all that it offers later would count as of an earlier one."""
    program, phase = starting.part.program, starting.part.phase
    assert program is not None and phase is not None
    starting.goes_on(phase)
    assert not starting.found(EnterPhase) and not starting.found(Post)
    assert program.duty == "start"
    starting.hears(says.Ready(LANES, "d0"))
    starting.decides(training(9))
    starting.settle()
    starting.hears(says.Prepared(9))
    starting.offers()
    assert starting.found(Offer) == [Offer(ROUND, 4, None, False)]


def test_a_commit_waits_for_no_program_that_is_not_ready(starting: Host) -> None:
    """The program has trained nothing, and has nothing to read."""
    programs, phase = starting.part.programs, starting.part.phase
    assert programs.current is not None and phase is not None
    starting.commits(phase, at=1.1)
    assert starting.found(MarkRead) == [MarkRead(ROUND)] and not starting.found(Post)
    assert programs.current.duty == "start"
    for _ in range(2):
        number = programs.current.number
        starting.do(starting.part.note_ended(2.0, number, -9, "killed"))
    assert programs.can_start is False
