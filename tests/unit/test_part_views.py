# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job while the view changes: its training program, its accumulators, and what it hands out."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.job.accumulators import Memory
from nicps.job.actions import (
    CloseStream,
    DropAccumulators,
    EndProgram,
    EnterPhase,
    Post,
    Receive,
    RenewAccumulators,
    StartProgram,
    UseAccumulators,
)
from nicps.job.orders import Acknowledge, Depart, Fail, HandOutEnded, MarkRead
from nicps.job.slow_work import (
    KeepRecords,
    OpenStream,
    ReserveAccumulators,
    Settle,
    StoreWindow,
    StreamSize,
)
from nicps.protocol import Committed, Offer
from nicps.session import shared_form as says
from tests.parts import LANES, ROUND, Host, hand_out, training

pytestmark = pytest.mark.unit

FINISH = training(4, kind=wire.PhaseKind.FINISH, shares=())


@pytest.fixture
def host() -> Host:
    host = Host()
    host.builds()
    return host


def learns(host: Host) -> None:
    """It has come back, and waits for the state."""
    host.spot.learners = frozenset({1})


def blocks(host: Host) -> int:
    """Of a bank of the accumulators in use."""
    return host.part.accumulators.memory.blocks


def used(host: Host) -> int:
    """How often others came into use."""
    return len(host.found(UseAccumulators)) + len(host.found(RenewAccumulators))


def program_ends(host: Host, code: int = 0) -> None:
    assert host.part.program is not None
    host.do(host.part.note_ended(host.now, host.part.program.number, code, ""))


def keep_records(host: Host) -> None:
    """They are in the run's folder, and open."""
    assert isinstance(host.finish_task(["agent.json"]), KeepRecords)
    assert isinstance(host.finish_task(StreamSize(99, 5)), OpenStream)


# ---- the end


def test_a_view_changes_while_programs_save_at_the_end(host: Host) -> None:
    """A program that ends then has not failed; and it is not sent back into what it has left for good."""
    host.decides(FINISH)
    host.goes_on(training(4, kind=wire.PhaseKind.TEST))
    host.forget()
    program_ends(host)
    host.decides(training(5, kind=wire.PhaseKind.FINISH, shares=()))
    keep_records(host)
    assert not host.found(EnterPhase) and not host.found(Fail)
    assert host.found(Acknowledge) == [Acknowledge(5, b'{"bytes": 99, "index_bytes": 5}')]


def test_what_is_kept_at_the_end_waits_for_who_asks(host: Host) -> None:
    host.decides(FINISH)
    host.goes_on(training(4, kind=wire.PhaseKind.TEST))
    program_ends(host)
    keep_records(host)
    assert not host.answers
    host.decides(training(5, kind=wire.PhaseKind.FINISH, shares=()))
    host.finish_task(StreamSize(99, 5))
    assert host.answers == [5]


def test_a_decision_that_is_made_again_opens_the_records_once(host: Host) -> None:
    """What was opened for the decision before would be closed while it is handed out."""
    host.decides(FINISH)
    program_ends(host)
    keep_records(host)
    host.forget()
    for number in (5, 6):
        host.decides(training(number, kind=wire.PhaseKind.FINISH, shares=()))
    first, second = (begin.task for begin in host.begun)
    assert isinstance(first, OpenStream) and isinstance(second, OpenStream)
    host.finish_task(StreamSize(99, 5))
    assert not host.answers and host.found(CloseStream) == [CloseStream(first.stream)]
    host.finish_task(StreamSize(99, 5))
    assert host.answers == [6] and host.part.hand_out.outgoing == second.stream


def test_records_that_cannot_be_kept_end_the_job(host: Host) -> None:
    host.decides(FINISH)
    program_ends(host)
    begin = host.begun.pop()
    host.do(host.tasks.fail(host.now, begin.ticket, "metrics.jsonl: row 2 lacks a round"))
    assert host.found(Fail) == [Fail("metrics.jsonl: row 2 lacks a round")]
    assert not host.answers


def test_who_has_saved_and_ended_cannot_train_on(host: Host) -> None:
    """Where the next lead has not heard of the end, and goes on: rather an error than a round that never comes."""
    host.decides(FINISH)
    host.goes_on(training(4, kind=wire.PhaseKind.TEST))
    program_ends(host)
    keep_records(host)
    host.forget()
    host.decides(training(5))
    host.settle()
    text = "the training program has saved and ended, and cannot train on"
    assert host.found(Fail) == [Fail(text)]
    assert not host.answers


def test_a_host_without_the_state_has_nothing_to_collect(host: Host) -> None:
    """Its training program ends, and is not asked for anything."""
    learns(host)
    host.decides(FINISH)
    assert host.found(EndProgram) and host.part.program is None
    assert host.found(Acknowledge) == [Acknowledge(4, b'{"bytes": 0, "index_bytes": 0}')]


# ---- accumulators


def test_who_learns_has_room_for_the_phase_that_goes_on(host: Host) -> None:
    """It was getting ready for the state when the view changed; who lacks fragments holds up all."""
    learns(host)
    phase = training(3, shares=(0, 4, 4))
    host.decides(phase)
    host.settle()
    assert blocks(host) == 300
    host.decides(hand_out(4, 80))
    host.settle()
    assert blocks(host) == 10
    host.goes_on(phase)
    assert blocks(host) == 300


def test_a_hand_out_that_goes_on_has_its_room_again(host: Host) -> None:
    learns(host)
    phase = hand_out(3, 800)
    host.decides(phase)
    host.settle()
    host.decides(training(4, shares=(0, 4, 4), fragments=6, last_fragments=6))
    host.settle()
    assert blocks(host) == 3
    host.forget()
    host.goes_on(phase)
    assert blocks(host) == 100
    assert not host.answers and not host.found(EnterPhase)


@pytest.mark.parametrize("fragments", [2400, 80])
def test_a_hand_out_leaves_the_last_sum_alone(host: Host, fragments: int) -> None:
    """A slow program may still be reading it: from the accumulators before, whatever size they had."""
    host.goes_on(training(3))
    assert (blocks(host), used(host)) == (300, 1)
    learns(host)
    host.decides(hand_out(4, fragments))
    host.settle()
    assert (blocks(host), used(host)) == (fragments // 8, 2)
    assert host.answers == [4]


def test_training_leaves_the_last_window_alone(host: Host) -> None:
    """It is on its way to the disk: tasks are done in their order."""
    learns(host)
    phase = hand_out(3, 2400)
    host.decides(phase)
    host.settle()
    host.do(host.part.commit(host.now, Committed(phase, ROUND + 1, {2: 1}, 0, 0)))
    host.decides(training(4, shares=(0, 4, 4)))
    assert host.answers == [3] and used(host) == 1
    assert [type(begin.task) for begin in host.begun] == [StoreWindow, ReserveAccumulators]
    host.finish_task()
    host.finish_task(1)
    assert (blocks(host), used(host)) == (300, 2)
    assert host.answers == [3, 4]


def test_a_hand_out_after_another_has_the_same_room(host: Host) -> None:
    learns(host)
    for number in (3, 4):
        host.decides(hand_out(number, 2400))
        host.settle()
    assert used(host) == 1 and host.answers == [3, 4]


def test_room_for_a_phase_that_does_not_come_is_given_back(host: Host) -> None:
    host.decides(training(3, shares=(0, 4, 4)))
    host.decides(hand_out(4, 80))
    assert isinstance(host.finish_task(77), ReserveAccumulators)
    assert host.found(DropAccumulators) == [DropAccumulators(77)] and not host.answers
    host.settle()
    assert host.answers == [4] and blocks(host) == 10


def test_nobody_enters_a_phase_that_was_lost_meanwhile(host: Host) -> None:
    """The program is killed while there is no room yet; the next one is no member of that phase."""
    host.decides(training(3))
    assert isinstance(host.finish_task(), Settle)
    program_ends(host, -9)
    host.hears(says.Ready(600 * 720, "d0"))
    host.forget()
    host.finish_task(1)
    assert used(host) == 1 and not host.found(EnterPhase)


# ---- what is handed out


def test_nothing_is_offered_for_a_hand_out_that_the_view_has_ended(host: Host) -> None:
    """Its first round may be the one that is open in training now."""
    host.spot.number = 2
    host.part.hand_out.outgoing = 5
    host.decides(hand_out(3, 2400, source=2))
    host.goes_on(training(3))
    host.settle()
    assert not host.found(Offer) and not host.answers and blocks(host) == 300


def test_a_source_offers_one_window_after_the_other(host: Host) -> None:
    host.spot.number = 2
    host.part.hand_out.outgoing = 5
    phase = hand_out(3, 2400, source=2)
    host.decides(phase)
    host.settle()
    assert host.found(Offer) == [Offer(ROUND + 1, 1)]
    assert host.part.hand_out.stream_of(phase) == 5


def test_gradients_come_from_the_program_again(host: Host) -> None:
    """The lead was about to hand out its state when the view changed: what it sends next is not that."""
    phase = host.trains()
    host.spot.number = 2
    host.part.hand_out.outgoing = 5
    state = hand_out(4, 80, source=2)
    host.decides(state)
    host.goes_on(phase)
    assert host.part.hand_out.stream_of(state) == 5, "each phase has its own source"


@pytest.mark.parametrize("why", ["evicted", "handed out again"])
def test_a_stream_that_is_not_handed_out_is_closed(host: Host, why: str) -> None:
    host.part.hand_out.outgoing = 5
    orders = host.part.stand_by("h3 left") if why == "evicted" else host.part.hand_out.offer(6)
    host.do(orders)
    assert host.found(CloseStream) == [CloseStream(5)]
    assert host.part.hand_out.outgoing == (0 if why == "evicted" else 6)


def test_a_phase_that_is_repaired_sends_nothing_of_a_stream_that_was_withdrawn(host: Host) -> None:
    """A host that has died was to have its records; the next lead offers its own, and the phase before is in force."""
    host.spot.number = 2
    host.part.hand_out.outgoing = 5
    phase = hand_out(3, 2400, source=2)
    host.decides(phase)
    host.settle()
    host.do(host.part.hand_out.offer(6))
    assert host.part.hand_out.stream_of(phase) == 0


def test_the_end_of_a_hand_out_leaves_the_next_one_alone(host: Host) -> None:
    """Its last window comes to the disk once the view has changed and something else is to be handed out."""
    host.spot.number = 2
    host.part.hand_out.outgoing = 5
    phase = hand_out(3, 80, source=2)
    host.decides(phase)
    host.settle()
    host.do(host.part.commit(host.now, Committed(phase, ROUND + 1, {2: 1}, 0, 0)))
    host.do(host.part.hand_out.offer(6))
    host.forget()
    host.settle()
    assert host.found(MarkRead) == [MarkRead(ROUND + 1)]
    assert host.part.hand_out.outgoing == 6 and not host.found(CloseStream)


def test_a_window_stored_for_a_job_that_is_over_is_for_nothing(host: Host) -> None:
    learns(host)
    phase = hand_out(3, 80)
    host.decides(phase)
    host.settle()
    host.do(host.part.commit(host.now, Committed(phase, ROUND + 1, {2: 1}, 0, 0)))
    host.part.close("the job is done")
    host.forget()
    host.settle()
    assert not host.asked


@pytest.mark.parametrize(
    ("purpose", "has_job", "learner", "leads", "keeps"),
    [
        ("job", False, False, False, True),
        ("job", True, False, False, False),
        ("files", False, True, False, True),
        ("files", True, False, False, False),
        ("state", True, True, False, True),
        ("state", True, False, False, False),
        ("collect", True, False, True, True),
        ("collect", True, False, False, False),
    ],
)
def test_who_keeps_what_is_handed_out(
    purpose: str, has_job: bool, learner: bool, leads: bool, keeps: bool
) -> None:
    """The others only hash it."""
    host = Host()
    if has_job:
        host.has_job()
    host.spot.leads = leads
    if learner:
        learns(host)
    host.decides(hand_out(3, 80, purpose=purpose))
    (receive,) = host.found(Receive)
    assert receive.keep is keeps
    assert receive.collected_from == ("h2" if purpose == "collect" else "")


# ---- the state (R20)


def test_a_learner_loads_the_state_and_trains() -> None:
    host = Host()
    host.builds()
    learns(host)
    state = hand_out(3, 80)
    host.decides(state)
    host.settle()
    host.do(host.part.commit(host.now, Committed(state, ROUND + 1, {2: 1}, 0, 0)))
    host.forget()
    host.settle()
    assert host.found(HandOutEnded) == [HandOutEnded(state)]
    host.decides(training(4, settings={"handout": "files", "model": "d9"}))
    host.settle()
    (load,) = host.found(Post)
    assert isinstance(load.message, says.Phase) and load.message.kind == "load" and not host.answers
    host.forget()
    host.hears(says.Prepared(load.message.number))
    host.hears(says.Loaded(load.message.number, "d9"))
    host.settle()
    (entered,) = host.found(EnterPhase)
    host.hears(says.Prepared(entered.message.number))
    assert host.answers == [4]


def test_a_state_that_is_not_the_others_is_handed_out_once_more() -> None:
    host = Host()
    host.builds()
    learns(host)
    host.decides(training(4, settings={"handout": "files", "model": "d9"}))
    host.settle()
    assert len(host.found(Depart)) == 1 and not host.answers


@pytest.mark.parametrize(
    ("settings", "said_"),
    [
        ({"handout": "other", "model": "d0"}, "what was handed out has arrived damaged"),
        ({"handout": "files", "model": "d9"}, "the model built here differs from the lead's"),
    ],
)
def test_what_differs_before_the_first_round(settings: dict[str, str], said_: str) -> None:
    host = Host()
    host.builds()
    host.decides(training(2, settings=settings))
    host.settle()
    (failed,) = host.found(Fail)
    assert failed.reason.startswith(said_) and not host.answers


# ---- a training program that was lost, at a host that the others have not heard departing yet


def loses_its_program(host: Host) -> None:
    """In a test; the next one has built the model, with the weights that the job began with."""
    host.trains(training(3, kind=wire.PhaseKind.TEST))
    program_ends(host, -9)
    host.hears(says.Ready(LANES, "d9"))
    host.forget()


def test_a_new_program_takes_no_part_without_the_state(host: Host) -> None:
    """Neither in the round that is open, nor in the phase that is decided on, nor in a view that goes on with it."""
    loses_its_program(host)
    assert host.part.phase is not None
    host.commits(host.part.phase)
    assert host.found(MarkRead) and not host.found(Post)
    host.goes_on(host.part.phase)
    host.decides(training(4))
    host.settle()
    assert not host.answers and not host.found(EnterPhase) and not host.found(Fail)


def test_a_new_program_has_nothing_to_save_at_the_end(host: Host) -> None:
    loses_its_program(host)
    host.decides(FINISH)
    assert not host.found(EnterPhase) and host.found(EndProgram)
    assert host.answers == [4]


# ---- a decision that does not come


def test_a_phase_that_waits_for_the_disk_gives_way_to_a_hand_out(host: Host) -> None:
    """Training was decided, and then a hand-out, before the disk was done with what training waits for."""
    host.decides(training(3))
    host.decides(hand_out(4))
    host.settle()
    assert host.answers == [4] and not host.found(EnterPhase)


def test_a_view_without_a_phase_takes_back_what_was_decided(host: Host) -> None:
    host.decides(training(3))
    host.goes_on(None)
    host.decides(hand_out(4))
    host.settle()
    assert host.answers == [4] and not host.found(EnterPhase)


def test_a_state_that_is_saved_late_excuses_no_work(host: Host) -> None:
    """The program has been sent into a phase since it was told to save: it owes that one's round."""
    program = host.part.program
    assert program is not None
    host.do(program.change_state(0.0, "save", host.spot))
    number = host.found(Post)[-1].message.number
    host.do(program.enter(0.0, training(3), ROUND, Memory(), host.spot))
    host.hears(says.Saved(number, 3, "d1", ""))
    assert program.duty == "work"


@pytest.mark.parametrize("code", [-9, 1])
def test_a_gateway_that_is_killed_is_like_a_program_that_is(host: Host, code: int) -> None:
    """The host departs, and comes back with another one. One that fails by itself ends the job."""
    program = host.part.program
    assert program is not None
    host.do(host.part.note_gateway_ended(0.0, program.number, code, "SIGKILL has ended it"))
    assert bool(host.found(Depart)) == bool(host.found(StartProgram)) == (code < 0)
    assert bool(host.found(Fail)) == (code > 0)
