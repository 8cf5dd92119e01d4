# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job: its gradient on the way out, a training program that is silent or ends, and other views."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.job import LocalJob
from nicps.agent.program import Program as TrainingProgram
from nicps.agent.sources import ArenaSource, StreamSource
from nicps.dataplane.arena import Arena
from nicps.dataplane.maps import Accumulators
from nicps.protocol import Committed, Installed, SendFragments
from nicps.protocol.phase import Phase
from nicps.protocol.view import View

ROUND = 7


class Agent:
    """As much of one as a job needs to have a gradient sent; `said` is what it warns of."""

    def __init__(self, work: Path) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.settings = SimpleNamespace(work=work, adding=True)
        self.user = SimpleNamespace(uid=os.getuid(), gid=os.getgid())
        self.frames = SimpleNamespace(turns=0, sender=SimpleNamespace(again=0, waits=False))
        self.dataplane = SimpleNamespace(config={"view": 1}, count=lambda *_: 0)
        self.node = SimpleNamespace(number=1, offer=lambda *_: [], ring=object(), changing=False)
        self.node.view = SimpleNamespace(live={1, 2, 3})

    def act(self, actions: list[Any]) -> None:
        assert not actions

    def warn(self, text: str) -> None:
        self.said.append(text)

    log = warn

    def program_ready(self) -> None:
        pass


class Program:
    """The training program, which keeps what it is told."""

    arena: Arena | None = None

    def __init__(self) -> None:
        self.trained = 0
        self.has_ended = False
        self.told: list[dict[str, Any]] = []
        self.post = self.told.append

    def owes(self, duty: str) -> None:
        pass


class Job(LocalJob):
    """In a training phase of three."""

    def __init__(self, work: Path) -> None:
        self.host = Agent(work)
        super().__init__(self.host, "job")  # type: ignore[arg-type]
        self.told = Program()
        self.program = self.told  # type: ignore[assignment]
        self._phase = Phase(1, 1, wire.PhaseKind.TRAIN, ROUND, fragments=600, shares=(4, 4, 4))

    def offers(self, now: float, round_: int = ROUND) -> None:
        self.host.now = now
        self.offered(round_, 4, None, False)

    def sends(
        self, started: float, ended: float, first: int = 0, count: int = 256, again: bool = False
    ) -> None:
        self.sent(SendFragments(1, 1, ROUND, 4, ((first, count),), again, True), started, ended)

    def repairs(self, round_: int, *counts: int, add: bool = True) -> None:
        ranges = tuple((300 * k, count) for k, count in enumerate(counts))
        self.sent(SendFragments(1, 1, round_, 4, ranges, True, add), 0.0, 0.0)

    def waited(self, now: float) -> float:
        """Commit, and what the program is told of its waiting."""
        self.host.now = now
        assert self._phase is not None
        self.committed(Committed(self._phase, ROUND, {1: 4, 2: 4, 3: 4}, -20, -20, True))
        return float(self.told.told[-1]["seconds_waited"])


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
    job.repairs(ROUND, 3, add=False)
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
        self.program.on_message({"op": op, "round": ROUND, "digest": "", **values})

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


def ends(job: Job, code: int, said: str) -> list[str]:
    """What the node is told, of a program that ends before it has trained a round."""
    told: list[str] = []
    node = job.host.node
    node.leave = lambda now, reason: told.append(f"leaves: {reason}") or []
    node.fail = lambda now, reason: told.append(f"fails: {reason}") or []
    job.host.views = SimpleNamespace(depart=lambda reason: node.leave(0.0, reason))
    job.host.frames.sender.drop_fragments = lambda: None
    assert job.program is not None
    job.program_ended(job.program, code, said)
    return told


def test_a_program_that_is_killed_is_started_again(job: Job) -> None:
    started: list[bool] = []
    job.start_program = lambda: started.append(True) or True  # type: ignore[method-assign]
    assert ends(job, -9, "SIGKILL has ended it") == [
        "leaves: the training program ended: SIGKILL has ended it"
    ]
    assert started


def test_a_program_that_is_killed_again_and_again(job: Job) -> None:
    job._starts = 4
    assert ends(job, -9, "SIGKILL has ended it") == [
        "leaves: the training program ended: SIGKILL has ended it",
        "fails: the training program was killed, or stood still, 4 times in a row, without a round in between",
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


# ---- a change of the view


class Told(Program):
    """A training program that has built the model; `entered` are the phases that it is sent into."""

    ready = True

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[wire.PhaseKind] = []

    def enter(self, phase: Phase, first_round: int, blocks: int) -> None:
        self.entered.append(phase.kind)

    def view(self) -> None:
        pass

    forget_blocks = view


class Changes:
    """A host whose views change; what it does in the background is done when `works` is called.

    `answers` are its acknowledgements: a decision's number, and what it answers. `blocks` are those of the accumulators
    in use, which are the `used`-th.
    """

    def __init__(self, job: Job, runs: Path) -> None:
        self.job, self.host = job, job.host
        self.program = job.told = job.program = Told()  # type: ignore[assignment]
        self.answers: list[tuple[int, bytes]] = []
        self.waits: list[tuple[Callable[[], None], Callable[[], None]]] = []
        node = self.host.node
        node.name, node.mac, node.learners, node.open_round = "h1", bytes(6), frozenset(), ROUND
        self.host.loop = SimpleNamespace(background=lambda *work: self.waits.append(work))
        self.host.run_folder = lambda name: runs / name
        self.host.prepared = lambda number, answer=b"": self.answers.append((number, answer))
        plane = self.host.dataplane
        plane.mode, plane.counters = "native", dict
        plane.reserve = lambda blocks: Accumulators(blocks, -1, -1)
        self.blocks = self.used = 0
        plane.use = self._use

    def _use(self, accumulators: Accumulators) -> None:
        self.blocks = accumulators.blocks
        self.used += 1

    def learns(self) -> None:
        """This host has come back, and waits for the state."""
        self.host.node.learners = frozenset({1})
        self.host.node.members = [SimpleNamespace(name=f"h{k}") for k in (1, 2, 3)]

    def hand_out(self, number: int, fragments: int) -> None:
        """The state comes from the second host."""
        settings = {"purpose": "state", "source": 2, "bytes": 1440 * fragments, "index_bytes": 9}
        size = {"fragments": fragments, "last_fragments": fragments}
        self.decided(
            number, wire.PhaseKind.HANDOUT, shares=(0, 1, 0), **size, width=0, settings=settings
        )

    def decided(self, number: int, kind: wire.PhaseKind, **settings: Any) -> None:
        phase = Phase(number, number, kind, **settings)
        self.host.node.phase = phase
        self.job.prepare(phase)

    def back_to(self, number: int, kind: wire.PhaseKind, **settings: Any) -> None:
        """Another view is in force, in which that phase goes on."""
        phase = Phase(number, 1, kind, **{"shares": (4, 4, 4)} | settings)
        self.host.node.phase = phase
        self.job.installed(Installed(View(), 1, phase, True))

    def works(self) -> None:
        while self.waits:
            work, then = self.waits.pop(0)
            work()
            then()


@pytest.fixture
def changes(job: Job, tmp_path: Path) -> Changes:
    return Changes(job, tmp_path / "runs")


def test_a_view_changes_while_programs_save_at_the_end(changes: Changes) -> None:
    """A program that ends then has not failed; and it is not sent back into what it has left for good."""
    changes.decided(4, wire.PhaseKind.FINISH)
    changes.back_to(4, wire.PhaseKind.TEST)
    assert ends(changes.job, 0, "") == []
    changes.program.has_ended = True
    changes.decided(5, wire.PhaseKind.FINISH)
    changes.works()
    assert changes.program.entered == [wire.PhaseKind.FINISH]
    ((number, answer),) = changes.answers
    assert number == 5 and b"bytes" in answer


def test_what_is_kept_at_the_end_waits_for_who_asks(changes: Changes) -> None:
    changes.decided(4, wire.PhaseKind.FINISH)
    changes.back_to(4, wire.PhaseKind.TEST)
    ends(changes.job, 0, "")
    changes.works()
    assert not changes.answers
    changes.decided(5, wire.PhaseKind.FINISH)
    assert [number for number, _ in changes.answers] == [5]


def test_who_has_saved_and_ended_cannot_train_on(changes: Changes) -> None:
    """Where the next lead has not heard of the end, and goes on: rather an error than a round that never comes."""
    changes.decided(4, wire.PhaseKind.FINISH)
    changes.back_to(4, wire.PhaseKind.TEST)
    told = ends(changes.job, 0, "")
    changes.program.has_ended, changes.program.arena = True, object()
    changes.decided(5, wire.PhaseKind.TRAIN, shares=(4, 4, 4))
    changes.works()
    assert told == ["fails: the training program has saved and ended, and cannot train on"]
    assert not changes.answers


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


def test_who_learns_has_room_for_the_phase_that_goes_on(changes: Changes) -> None:
    """It was getting ready for the state when the view changed; who lacks fragments holds up all."""
    training = {"fragments": 600, "last_fragments": 600, "width": 16, "shares": (0, 4, 4)}
    changes.learns()
    changes.decided(3, wire.PhaseKind.TRAIN, **training)
    changes.works()
    assert changes.blocks == 300
    changes.hand_out(4, 80)
    changes.works()
    assert changes.blocks == 10
    changes.back_to(4, wire.PhaseKind.TRAIN, **training)
    assert changes.blocks == 300


def test_a_hand_out_that_goes_on_has_its_room_again(changes: Changes) -> None:
    changes.learns()
    changes.hand_out(3, 800)
    changes.works()
    training = {"fragments": 6, "last_fragments": 6, "width": 16, "shares": (0, 4, 4)}
    changes.decided(4, wire.PhaseKind.TRAIN, **training)
    changes.works()
    assert changes.blocks == 3
    changes.back_to(4, wire.PhaseKind.HANDOUT, fragments=800, last_fragments=800, shares=(0, 1, 0))
    assert changes.blocks == 100
    assert [number for number, _ in changes.answers] == [3, 4] and not changes.program.entered


@pytest.mark.parametrize("fragments", [2400, 80])
def test_a_hand_out_leaves_the_last_sum_alone(changes: Changes, fragments: int) -> None:
    """A slow program may still be reading it: from the accumulators before, whatever size they had."""
    training = {"fragments": 600, "last_fragments": 600, "width": 16}
    changes.back_to(3, wire.PhaseKind.TRAIN, **training)
    assert (changes.blocks, changes.used) == (300, 1)
    changes.learns()
    changes.hand_out(4, fragments)
    changes.works()
    assert (changes.blocks, changes.used) == (fragments // 8, 2)
    assert [number for number, _ in changes.answers] == [4]


def test_training_leaves_the_last_window_alone(changes: Changes) -> None:
    """It is on its way to the disk."""
    changes.learns()
    changes.hand_out(3, 2400)
    changes.works()
    written: list[int] = []
    changes.job.later(lambda: written.append(changes.used), lambda: None)
    training = {"fragments": 600, "last_fragments": 600, "width": 16, "shares": (0, 4, 4)}
    changes.decided(4, wire.PhaseKind.TRAIN, **training)
    assert [number for number, _ in changes.answers] == [3]
    changes.works()
    assert written == [1] and (changes.blocks, changes.used) == (300, 2)
    assert [number for number, _ in changes.answers] == [3, 4]


def test_a_hand_out_after_another_has_the_same_room(changes: Changes) -> None:
    changes.learns()
    for number in (3, 4):
        changes.hand_out(number, 2400)
        changes.works()
    assert changes.used == 1 and [number for number, _ in changes.answers] == [3, 4]


def test_nothing_is_offered_for_a_hand_out_that_the_view_has_ended(changes: Changes) -> None:
    """Its first round may be the one that is open in training now."""
    training = {"fragments": 600, "last_fragments": 600, "width": 16}
    offered: list[int] = []
    changes.learns()
    changes.host.node.number = 2
    changes.host.node.offer = lambda now, round_, samples: offered.append(round_) or []
    changes.job.handout.outgoing = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    changes.job.sends = lambda source: None  # type: ignore[assignment, method-assign, misc]
    changes.hand_out(3, 2400)
    changes.back_to(3, wire.PhaseKind.TRAIN, **training)
    changes.works()
    assert not offered and not changes.answers and changes.blocks == 300


def test_gradients_come_from_the_program_again(changes: Changes) -> None:
    """The lead was about to hand out its state when the view changed: what it sends next is not that."""
    job, arena = changes.job, Arena.create(600)
    changes.program.arena, changes.program.hurry = arena, lambda: None  # type: ignore[attr-defined]
    job._source = StreamSource(None, ROUND + 1)  # type: ignore[arg-type]
    changes.back_to(4, wire.PhaseKind.TRAIN)
    assert isinstance(job.source(), ArenaSource)
    arena.close()
