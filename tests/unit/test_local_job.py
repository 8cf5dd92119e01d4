# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job: its gradient on the way out, and a training program that is silent or ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.program import Program as TrainingProgram
from nicps.exchange import Exchange
from nicps.protocol import Installed
from nicps.protocol.phase import Phase
from nicps.protocol.view import View
from nicps.session.arena import Arena
from nicps.session.shared_form import FROM_PROGRAM
from tests.fake_agent import ROUND, Job, ends


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.records.close()


def test_all_parts_of_a_gradient_are_its_sending(job: Job) -> None:
    """A switch gets it in quanta; each of them is a sending of its own."""
    job.offers(10.0)
    job.sends(10.0, 11.0)
    job.sends(12.0, 13.5, 256)
    job.sends(14.0, 14.25, 512, 88)
    assert job.waited(15.0) == pytest.approx(5.0 - 2.75)


def test_what_is_sent_again_is_sending_too(job: Job) -> None:
    job.offers(10.0)
    job.sends(10.0, 11.0)
    job.sends(12.0, 12.5, again=True)
    assert job.waited(14.0) == pytest.approx(4.0 - 1.5)


def test_each_gradient_has_its_own_time(job: Job) -> None:
    job.offers(1.0, ROUND - 1)
    job.sends(1.0, 9.0)
    job.offers(10.0)
    job.sends(10.0, 11.0)
    assert job.waited(12.0) == pytest.approx(1.0)


def test_sums_that_do_not_come_are_told_once(job: Job) -> None:
    """One line an incident, which ends with the first round that needs nothing again; all fragments are counted."""
    job.offers(1.0)
    job.sends(1.0, 2.0)
    assert not job.host.said and job.finish.asked_again == 0
    for round_ in (7, 7, 8, 9, 11):
        job.repairs(round_, 3, 4)
    assert [text.split(":")[0] for text in job.host.said] == ["round 7", "round 11"]
    assert "sums of the switch have not come" in job.host.said[0]
    assert job.finish.asked_again == 5 * 7


def test_repairs_among_hosts_are_everyday(job: Job) -> None:
    job.repairs(ROUND, 3, exchange=Exchange.BROADCAST)
    assert not job.host.said and job.finish.asked_again == 0


# ---- a training program that says nothing (LocalJob.look)


class Silence:
    """A job whose training program (a real `Program`, without a process) is told and says things at times."""

    def __init__(self, job: Job, stall_s: float = 60.0) -> None:
        self.job, self.host = job, job.host
        self.ended: list[str] = []
        node = self.host.node
        node.view = SimpleNamespace(live={1, 2}, number=1, order=(1, 2), lead=2)
        node.open_round, node.read, node.progress = ROUND + 9, lambda *_: [], lambda *_: []
        self.host.frames.sender.waits = False
        self.program = job.program = Running(job, stall_s)
        job.program_ended = lambda program, code, said: self.ended.append(said)  # type: ignore[method-assign]

    def told(self, at: float, kind: wire.PhaseKind, heard: bool = True) -> None:
        self.host.now = at
        self.program.enter(Phase(9, 1, kind, ROUND, shares=(1, 1)), ROUND, 0)
        if heard:
            self.says(at, "prepared", number=9)

    def says(self, at: float, op: str, **values: Any) -> None:
        self.host.now = at
        raw = {"op": op, "round": ROUND, "digest": "", **values}
        self.program.on_message(FROM_PROGRAM.decode(raw))

    def offers(self, at: float) -> None:
        self.says(at, "offer", samples=1, unit=None, skip=False)

    def lasts(self, since: float) -> float | None:
        """After how many seconds of silence it is ended; None: never. The agent looks once a second."""
        self.job._looked = since
        for later in range(1, 2000):
            self.host.now = since + later
            self.job.look(self.host.now)
            if self.ended:
                return later - 1.0
        return None


class Running(TrainingProgram):
    has_ended = False  # type: ignore[assignment]

    def _make_arena(self) -> None:
        pass

    def close(self, message: str) -> None:
        self.has_ended = True


@pytest.fixture
def silence(job: Job) -> Silence:
    return Silence(job)


def ready(silence: Silence, at: float = 0.0) -> None:
    silence.says(at, "ready", lanes=10)


def test_a_program_that_does_not_start(silence: Silence) -> None:
    assert silence.lasts(0.0) == 300.0
    assert silence.ended == ["it has not moved for 300 s (the job's stall_s is 60)"]


def test_who_waits_for_a_majority_does_not_stand_still(silence: Silence) -> None:
    """A cut can last for hours; the program holds the state all that time, and a while after it, too."""
    ready(silence)
    silence.told(500.0, wire.PhaseKind.TRAIN)
    silence.host.node.changing = True
    assert silence.lasts(500.0) is None
    silence.host.node.changing = False
    assert silence.lasts(silence.host.now) == 60.0


def test_a_program_that_waits_for_us_may_be_silent(silence: Silence) -> None:
    ready(silence)
    assert silence.lasts(0.0) is None


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST])
def test_a_program_that_does_not_work(silence: Silence, kind: wire.PhaseKind) -> None:
    ready(silence)
    silence.told(500.0, kind)
    assert silence.lasts(500.0) == 60.0


@pytest.mark.parametrize("op", ["progress", "alive"])
def test_every_word_counts(silence: Silence, op: str) -> None:
    ready(silence)
    silence.told(0.0, wire.PhaseKind.TEST)
    silence.job.look(50.0)
    silence.says(51.0, op, samples=1)
    assert silence.lasts(51.0) == 60.0


def test_who_has_offered_waits_for_the_others(silence: Silence) -> None:
    ready(silence)
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.offers(1.0)
    assert silence.lasts(1.0) is None
    silence.program.owes("work")  # the commit
    assert silence.lasts(silence.host.now) == 60.0


def test_what_it_says_of_a_phase_before_is_no_answer(silence: Silence) -> None:
    ready(silence)
    silence.told(0.0, wire.PhaseKind.TEST, heard=False)
    silence.offers(1.0)
    assert silence.lasts(1.0) == 60.0


def test_a_round_that_is_run_again_is_offered_once(silence: Silence) -> None:
    """Its program hears of another phase, and at once of the same one again; the offer was on its way before that."""
    offered: list[int] = []
    silence.host.node.offer = lambda now, round_, *_: offered.append(round_) or []
    ready(silence)
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.told(1.0, wire.PhaseKind.TEST, heard=False)
    silence.told(1.0, wire.PhaseKind.TRAIN, heard=False)
    silence.offers(1.0)
    silence.says(1.0, "prepared", number=9)
    silence.offers(1.0)
    assert not offered
    silence.says(1.0, "prepared", number=9)
    silence.offers(1.0)
    assert offered == [ROUND]


def test_a_round_that_closed_without_a_program_is_run_again_with_it(job: Job) -> None:
    """It was on its way to another phase, and is sent back: all wait for its gradient now."""
    silence = Silence(job)
    arena = silence.program.arena = Arena.create(1)
    job.closed(ROUND)
    assert arena.closed == ROUND  # no more of it is computed
    train = Phase(9, 1, wire.PhaseKind.TRAIN, 1, shares=(1, 1, 1))
    job.host.node.open_round = ROUND
    job.installed(Installed(View(), 1, train, True))
    assert arena.closed < ROUND
    arena.close()


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST])
def test_after_a_round_comes_the_next_one(silence: Silence, kind: wire.PhaseKind) -> None:
    ready(silence)
    silence.told(0.0, kind)
    silence.offers(1.0)
    silence.says(2.0, "read")
    assert silence.lasts(2.0) == (60.0 if kind is wire.PhaseKind.TRAIN else None)


def test_a_gradient_that_all_wait_for(silence: Silence) -> None:
    ready(silence)
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.offers(1.0)
    silence.host.frames.sender.waits = True
    assert silence.lasts(1.0) == 3.0


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_state_that_is_not_saved_or_loaded(silence: Silence, what: str) -> None:
    ready(silence)
    silence.program.state(what)
    silence.offers(1.0)  # of the round that it has left
    assert silence.lasts(1.0) == 60.0


def test_a_program_that_does_not_end(silence: Silence) -> None:
    ready(silence)
    silence.told(0.0, wire.PhaseKind.FINISH)
    assert silence.lasts(0.0) == 300.0


def test_the_job_says_how_long(job: Job) -> None:
    silence = Silence(job, 7.0)
    assert silence.lasts(0.0) == 35.0
    assert silence.ended == ["it has not moved for 35 s (the job's stall_s is 7)"]


def test_a_host_that_trains_alone_holds_up_nobody(silence: Silence) -> None:
    ready(silence)
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.host.node.view.live = {1}
    assert silence.lasts(0.0) is None
    assert silence.host.said[0].startswith("the training program: it has not moved for 60 s")


def test_an_agent_that_stood_still_itself_listens_first(silence: Silence) -> None:
    """SIGSTOP of both, or a machine that was asleep."""
    ready(silence)
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.job.look(1.0)
    silence.job.look(500.0)
    assert not silence.ended
    assert silence.lasts(500.0) == 60.0


# ---- a training program that ends


def test_a_program_that_is_killed_is_started_again(job: Job) -> None:
    started: list[bool] = []
    job.start_program = lambda: started.append(True) or True  # type: ignore[method-assign]
    assert ends(job, -9, "SIGKILL has ended it") == [
        "leaves: h1: the training program ended: SIGKILL has ended it"
    ]
    assert started


def test_a_program_that_is_killed_again_and_again(job: Job) -> None:
    job._starts = 4
    assert ends(job, -9, "SIGKILL has ended it") == [
        "leaves: h1: the training program ended: SIGKILL has ended it",
        "fails: the training program was killed, or stood still, 4 times in a row, without a round in between; "
        "the last time: SIGKILL has ended it",
    ]


def test_a_program_that_cannot_be_started_again(job: Job) -> None:
    """Its files are spoilt, or there is no memory: that ends the job's part here, and not the agent."""

    def start_program() -> bool:
        raise OSError(12, "Cannot allocate memory")

    job.start_program = start_program  # type: ignore[method-assign]
    _, failed = ends(job, -9, "SIGKILL has ended it")
    assert failed.startswith("fails: the training program cannot be started again: ")
    assert "Cannot allocate memory" in failed


def test_a_program_that_ends_with_an_error_was_not_killed(job: Job) -> None:
    """Also where it stands by, or was killed often before: the reason is the error."""
    job._starts = 4
    assert ends(job, 1, "No module named 'torch'") == [
        "fails: the training program ended: No module named 'torch'"
    ]


def test_the_lead_names_its_own_host_too(job: Job) -> None:
    """It names the host that a FAIL frame comes from."""
    job.host.node.leads = True
    assert ends(job, 3, "exit status 3 in round 7, and it said nothing") == [
        "fails: h1: the training program ended: exit status 3 in round 7, and it said nothing"
    ]
