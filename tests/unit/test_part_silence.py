# SPDX-License-Identifier: Apache-2.0
"""A training program that says nothing: what it owes, what excuses it, and when it is ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job import Life, LifeSettings
from nicps.job.accumulators import Memory
from nicps.job.actions import EndProgram, EnterPhase, ShowClosed
from nicps.job.orders import RoundJudged, Warn
from nicps.job.part import Part
from nicps.protocol import Offer
from nicps.session import shared_form as says
from tests.parts import ROUND, Host, training
from tests.ring_parts import START, enter_ring, ring_of
from tests.rooms import MAC, NoKernel

pytestmark = pytest.mark.unit


class Silence:
    """A host whose training program is told and says things at times."""

    def __init__(self, stall_s: float = 60.0) -> None:
        self.host = Host()
        self.host.settings["stall_s"] = stall_s
        self.host.has_job()
        self.awaited = False

    @property
    def part(self) -> Part:
        return self.host.part

    @property
    def ended(self) -> list[str]:
        return [order.reason for order in self.host.found(EndProgram)]

    def told(self, at: float, kind: wire.PhaseKind, heard: bool = True) -> None:
        """The program is sent into a phase."""
        program, host = self.part.program, self.host
        assert program is not None
        host.now = at
        host.do(program.enter(at, training(9, ROUND, kind=kind), ROUND, Memory(), host.spot))
        if heard:
            self.says(at, says.Prepared(9))

    def says(self, at: float, message: says.FromProgram) -> None:
        self.host.now = at
        self.host.hears(message)

    def builds(self, at: float = 0.0) -> None:
        self.says(at, says.Ready(10, "d0"))

    def offers(self, at: float) -> None:
        self.says(at, says.Offer(ROUND, 1, None, False))

    def reads(self, at: float) -> None:
        self.says(at, says.Read(ROUND, ""))

    def tick(self, at: float) -> None:
        self.host.now = at
        self.host.do(self.part.tick(at, self.awaited))

    def lasts(self, since: float) -> float | None:
        """After how many seconds of silence it is ended; None: never. The agent ticks once a second."""
        self.part.programs._ticked = since
        for later in range(1, 2000):
            self.tick(since + later)
            if self.ended:
                return later - 1.0
        return None


@pytest.fixture
def silence() -> Silence:
    return Silence()


def test_a_program_that_does_not_start(silence: Silence) -> None:
    assert silence.lasts(0.0) == 300.0
    assert silence.ended == ["it has not moved for 300 s (the job's stall_s is 60)"]


def test_a_program_that_starts_owes_no_gradient_of_the_one_before(silence: Silence) -> None:
    """That one was killed in the middle of its gradient, as the view was changing: this host departs in the next."""
    silence.awaited = True
    assert silence.lasts(0.0) == 300.0
    assert silence.ended == ["it has not moved for 300 s (the job's stall_s is 60)"]


def test_who_waits_for_a_majority_does_not_stand_still(silence: Silence) -> None:
    """A cut can last for hours; the program holds the state all that time, and a while after it, too."""
    silence.builds()
    silence.told(500.0, wire.PhaseKind.TRAIN)
    silence.host.spot.changing = True
    assert silence.lasts(500.0) is None
    silence.host.spot.changing = False
    assert silence.lasts(silence.host.now) == 60.0


def test_a_program_that_waits_for_us_may_be_silent(silence: Silence) -> None:
    silence.builds()
    assert silence.lasts(0.0) is None


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST])
def test_a_program_that_does_not_work(silence: Silence, kind: wire.PhaseKind) -> None:
    silence.builds()
    silence.told(500.0, kind)
    assert silence.lasts(500.0) == 60.0


@pytest.mark.parametrize("word", [says.Progress(ROUND, 1), says.Alive()], ids=["progress", "alive"])
def test_every_word_counts(silence: Silence, word: says.FromProgram) -> None:
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TEST)
    silence.tick(50.0)
    silence.says(51.0, word)
    assert silence.lasts(51.0) == 60.0


def test_who_has_offered_waits_for_the_others(silence: Silence) -> None:
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.offers(1.0)
    assert silence.lasts(1.0) is None
    silence.host.commits(training(9), at=silence.host.now)
    assert silence.lasts(silence.host.now) == 60.0


def test_what_it_says_of_a_phase_before_is_no_answer(silence: Silence) -> None:
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TEST, heard=False)
    silence.offers(1.0)
    assert silence.lasts(1.0) == 60.0


def test_a_round_that_is_run_again_is_offered_once(silence: Silence) -> None:
    """Its program hears of another phase, and at once of the same one again; the offer was on its way before that."""
    host = silence.host
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.told(1.0, wire.PhaseKind.TEST, heard=False)
    silence.told(1.0, wire.PhaseKind.TRAIN, heard=False)
    silence.offers(1.0)
    silence.says(1.0, says.Prepared(9))
    silence.offers(1.0)
    assert not host.found(Offer)
    silence.says(1.0, says.Prepared(9))
    silence.offers(1.0)
    assert [offer.round for offer in host.found(Offer)] == [ROUND]


def test_a_round_that_closed_without_a_program_is_run_again_with_it() -> None:
    """It was on its way to another phase, and is sent back: all wait for its gradient now."""
    host = Host()
    phase = host.trains()
    host.do(host.part.show_closed(ROUND))
    assert [closed.round for closed in host.found(ShowClosed)] == [ROUND]
    host.goes_on(phase)
    (entered,) = host.found(EnterPhase)
    assert entered.message.first_round == ROUND, (
        "the agent opens that round again in the shared memory"
    )


@pytest.mark.parametrize("leads", [False, True])
def test_a_round_that_closed_without_it_excuses_no_sum(silence: Silence, leads: bool) -> None:
    """It owes the round before still: that it reads the sum, and if it leads that it judges it (R14)."""
    silence.host.spot.leads = leads
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.offers(1.0)
    silence.host.commits(training(9), at=1.0)
    silence.host.do(silence.part.show_closed(ROUND + 1))
    assert silence.part.program is not None and silence.part.program.silent_at(False) == 61.0
    silence.reads(2.0)
    if leads:
        assert silence.part.program.silent_at(False) == 62.0
        silence.says(3.0, says.Decide(ROUND, "continue"))
    assert silence.lasts(3.0) is None


@pytest.mark.parametrize("leads", [False, True])
def test_a_round_closes_as_its_program_works(silence: Silence, leads: bool) -> None:
    """It has read the sum before: a lead's program may have that to judge, another has nothing to do."""
    silence.host.spot.leads = leads
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.host.commits(training(9), at=1.0)
    silence.reads(2.0)
    silence.host.do(silence.part.show_closed(ROUND + 1))
    assert silence.lasts(2.0) == (60.0 if leads else None)


def test_a_sum_excuses_no_later_one(silence: Silence) -> None:
    """Two sums wait for a slow program. It reads the first, the round after both closes without it."""
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    for round_ in (ROUND, ROUND + 1):
        silence.host.commits(training(9), at=1.0, round_=round_)
    silence.reads(2.0)
    silence.host.do(silence.part.show_closed(ROUND + 2))
    assert silence.lasts(2.0) == 60.0


def test_a_judgement_excuses_no_later_one(silence: Silence) -> None:
    silence.host.spot.leads = True
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    for round_ in (ROUND, ROUND + 1):
        silence.host.commits(training(9), at=1.0, round_=round_)
    silence.reads(2.0)
    silence.says(2.0, says.Read(ROUND + 1, ""))
    silence.says(2.0, says.Decide(ROUND, "continue"))
    silence.offers(2.0)
    assert silence.lasts(2.0) == 60.0


@pytest.mark.parametrize(("round_", "limit"), [(ROUND - 1, 60.0), (ROUND, None)])
def test_a_decision_that_is_said_again_excuses_nothing(
    silence: Silence, round_: int, limit: float | None
) -> None:
    """The lead's program has decided on another plan, or a test, which may have been swallowed by a view: it says so
    again as the next phase begins, and works in that one."""
    silence.host.spot.leads = True
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN, heard=False)
    silence.says(0.0, says.Decide(round_, "test"))
    silence.says(0.0, says.Prepared(9))
    assert silence.lasts(0.0) == limit


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST])
def test_a_round_of_the_phase_before_excuses_nothing(
    silence: Silence, kind: wire.PhaseKind
) -> None:
    """Its ring hears that the round has closed once the program is told of another phase."""
    silence.builds()
    silence.told(0.0, kind)
    silence.host.do(silence.part.show_closed(ROUND - 1))
    assert silence.lasts(0.0) == 60.0


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST])
def test_after_a_round_comes_the_next_one(silence: Silence, kind: wire.PhaseKind) -> None:
    silence.builds()
    silence.told(0.0, kind)
    silence.offers(1.0)
    silence.reads(2.0)
    assert silence.lasts(2.0) == (60.0 if kind is wire.PhaseKind.TRAIN else None)


def test_a_gradient_that_all_wait_for(silence: Silence) -> None:
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.offers(1.0)
    silence.awaited = True
    assert silence.lasts(1.0) == 3.0


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_state_that_is_not_saved_or_loaded(silence: Silence, what: str) -> None:
    silence.builds()
    assert silence.part.program is not None
    silence.host.do(silence.part.program.change_state(0.0, what, silence.host.spot))
    silence.offers(1.0)  # of the round that it has left
    assert silence.lasts(1.0) == 60.0


def test_a_program_that_does_not_end(silence: Silence) -> None:
    silence.builds()
    silence.told(0.0, wire.PhaseKind.FINISH)
    assert silence.lasts(0.0) == 300.0


def test_the_job_says_how_long() -> None:
    silence = Silence(7.0)
    assert silence.lasts(0.0) == 35.0
    assert silence.ended == ["it has not moved for 35 s (the job's stall_s is 7)"]


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST])
def test_a_host_that_trains_alone_holds_up_nobody(silence: Silence, kind: wire.PhaseKind) -> None:
    """Neither as it works, nor as its test is to be judged."""
    silence.host.spot.leads = True
    silence.builds()
    silence.told(0.0, kind)
    if kind is wire.PhaseKind.TEST:
        silence.host.commits(training(9), at=0.0)
        silence.reads(0.0)
    silence.host.spot.view = replace(silence.host.spot.view, live=frozenset({1}))
    assert silence.lasts(0.0) is None
    text = silence.host.found(Warn)[0].text
    assert text.startswith("the training program: it has not moved for 60 s")


def test_an_agent_that_stood_still_itself_listens_first(silence: Silence) -> None:
    """SIGSTOP of both, or a machine that was asleep."""
    silence.builds()
    silence.told(0.0, wire.PhaseKind.TRAIN)
    silence.tick(1.0)
    silence.tick(500.0)
    assert not silence.ended
    assert silence.lasts(500.0) == 60.0


@pytest.mark.parametrize("kind", [wire.PhaseKind.TRAIN, wire.PhaseKind.TEST])
@pytest.mark.parametrize("judges", [True, False])
def test_a_new_leads_program_owes_a_judgement(judges: bool, kind: wire.PhaseKind) -> None:
    """It has offered, and could be silent: now the next round waits for its word about the last one."""
    silence = Silence()
    host = silence.host
    host.spot.open_round = ROUND
    phase = host.trains(training(first_round=3, kind=kind))
    silence.offers(1.0)
    host.spot.leads = True
    host.goes_on(phase, again=False)
    if judges:
        silence.says(2.0, says.Decide(ROUND - 1, "continue"))
        assert host.found(RoundJudged)
    assert silence.lasts(host.now) == (None if judges else 60.0)


@pytest.mark.parametrize("why", ["the first round", "led before"])
def test_a_lead_that_has_judged_owes_no_more(why: str) -> None:
    """In a phase's first round the next one has said all; and in a view with another key the lead is the same."""
    silence = Silence()
    host = silence.host
    host.spot.leads = why == "led before"
    phase = host.trains(training(first_round=ROUND if why == "the first round" else 3))
    silence.offers(1.0)
    host.spot.leads = True
    host.goes_on(phase, again=False)
    assert silence.lasts(host.now) is None


class Unconverted(NoKernel):
    """No lane of this host's gradient is converted."""

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("prepares", "queued", "ends"),
    [(False, False, True), (True, False, False), (True, True, True)],
    ids=["in a phase", "prepares another one", "fragments wait in its own queue"],
)
def test_nobody_waits_for_lanes_while_another_phase_is_prepared(
    prepares: bool, queued: bool, ends: bool
) -> None:
    """The plan of the phase to come has other areas: what was converted for the open round is gone with the old ones,
    though the program has done its part."""
    silence = Silence()
    silence.builds(START)
    silence.told(START, wire.PhaseKind.TRAIN)
    silence.offers(START)
    silence.tick(START)
    silence.tick(START + 2.0)
    ring = ring_of(2, Exchange.STRIPES, receiver=Unconverted())
    ring.offer(START, Offer(1, 4, unit=-20, conversion=7))
    life = Life(MAC, LifeSettings("h2", "nicps"), NoKernel(), lambda: 1)
    enter_ring(life.node, 2, ring)
    life.node._decisions.phase = training(number=4) if prepares else ring.phase
    life.roles.part = silence.part
    actions = life.tick(START + 4.0, awaited=queued)
    assert any(isinstance(action, EndProgram) for action in actions) is ends
