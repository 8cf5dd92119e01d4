# SPDX-License-Identifier: Apache-2.0
"""Training steps of several rounds: what agents count, what a lead decides in their middle, and a program's session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.agent.tally import BOUNDS, Tally
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.actions import NoteCommit, NoteRound
from nicps.job.course import Course
from nicps.job.orders import CommitNext, SaveState, Saving
from nicps.job.plan import Plan
from nicps.job.program import Program
from nicps.job.steps import Steps
from nicps.protocol import Phase
from nicps.protocol.actions import Answered, Committed
from nicps.protocol.admission import Joiner
from nicps.protocol.plan import ChannelPlan
from nicps.protocol.serving import Serving
from nicps.session import reducers
from nicps.session.lanes import LaneFormat
from nicps.session.shared_form import has_steps
from nicps.steps import Step, StepEnded, room_of
from tests.ring_parts import START, VIEW
from tests.unit.test_tally import MEMBERS
from tests.unit.test_trainer_session import Agent

pytestmark = pytest.mark.unit

SETTINGS = {"batch": 30, "lane": "i32", "quorum": 1.0, "rank": 2}
PLAN = Plan.of("job", SETTINGS, Exchange.STRIPES)
PHASE = replace(PLAN.training(VIEW, 5, VIEW.live, 6, -40, Exchange.STRIPES), number=1)


# ---- the plan


def test_a_job_with_rank_trains_in_sized_rounds_of_all_members() -> None:
    assert PHASE.sized and not PHASE.feedback and PHASE.quorum == (1 << 31) - 1
    assert PHASE.shares == (10, 10, 10)
    PHASE.check(len(VIEW.members))
    believes = Plan.of(
        "job", {**SETTINGS, "exchange": "auto"}, Exchange.STRIPES, believes_switch=True
    )
    assert not believes.tries_switch
    assert not has_steps({}) and not has_steps({"rank": None}) and has_steps({"rank": 1})


@pytest.mark.parametrize("own", [Exchange.BROADCAST, Exchange.SWITCH])
def test_its_exchange_is_stripes(own: Exchange) -> None:
    """Also where this host believes a P4 switch."""
    assert Plan.choose({**SETTINGS, "exchange": "auto"}, own) == Exchange.STRIPES
    assert Plan.choose({**SETTINGS, "exchange": "stripes"}, own) == Exchange.STRIPES
    with pytest.raises(
        JobFailed, match="exchange is switch, and with rank or bucket_mb it must be stripes"
    ):
        Plan.choose({**SETTINGS, "exchange": "switch"}, own)


# ---- the lead, in the middle of a step


class Node:
    view, live, learners, leads = VIEW, VIEW.live, frozenset[int](), True
    open_round, phase_in_force, phase = 7, PHASE, PHASE
    highest_round, between_steps = 7, True


def course() -> Course:
    made = Course(PLAN, Node())  # type: ignore[arg-type]
    made.fragments = 6
    return made


def test_hosts_and_alarms_wait_for_the_end_of_a_step() -> None:
    lead = course()
    lead.raise_alarm("h2 left")
    assert lead.round_judged(6, "more") == [CommitNext(False)]
    assert lead.round_judged(6, "continue") == [SaveState(Saving.ALARM)]
    lead = course()
    joiner = Joiner(bytes([2, 0, 0, 0, 0, 9]), "h9", 1)
    lead.host_answered(Answered(joiner, 2, wire.Stage.WAITING))
    assert lead.round_judged(6, "more") == [CommitNext(False)]
    assert lead.round_judged(6, "continue") != [CommitNext(False)]


def test_a_round_that_is_judged_late_opens_nothing() -> None:
    assert course().round_judged(5, "more") == []


def test_factors_have_no_other_exchange() -> None:
    (stop,) = course().exchange_fails(Exchange.STRIPES)
    assert "which rank and bucket_mb need" in stop.phase.settings["message"]  # type: ignore[union-attr]
    assert stop.phase.kind is wire.PhaseKind.STOP  # type: ignore[union-attr]


def test_a_lead_that_says_more_has_its_next_vector_to_give() -> None:
    """It is no end of its work, as a test would be."""
    program = Program(1, 60.0, START)
    program.give_duty(START, "work")
    program.note_judged(0, "more")
    assert program.duty == "work"
    program.note_judged(0, "test")
    assert program.duty == ""


# ---- what is counted


def committed(round_: int, *members: int, phase: Phase = PHASE, fragments: int = 3) -> Committed:
    samples = wire.sized_samples(fragments, 7) if phase.sized else 9
    counted = dict.fromkeys(members, samples)
    return Committed(phase, round_, counted, -40, -40, Exchange.STRIPES)


def test_a_step_is_counted_once_its_last_sum_is_applied() -> None:
    steps = Steps()
    for round_ in (5, 6):
        assert steps.commit(committed(round_, 1, 2, 3), mine=True, several=True) == []
    assert steps.read(5, "") == steps.read(5, "d") == [] and steps.trained == 0
    assert steps.read(6, "d") == [NoteCommit(6, False, {1: 10, 2: 10, 3: 10}, 2)]
    assert steps.trained == 1 and steps.read(6, "d") == []
    # The remaining members repeat one round. The host that missed the last round starts again from their state.
    for round_ in (7, 8, 9):
        steps.commit(
            committed(round_, *((1, 2, 3) if round_ == 7 else (1, 3))), mine=True, several=True
        )
    assert steps.read(9, "d") == [NoteCommit(9, False, {1: 10, 3: 10}, 3)]
    steps.commit(committed(10, 1, 2, 3), mine=True, several=True)
    steps.forget_part()
    steps.commit(committed(11, 1, 2, 3), mine=True, several=True)
    assert steps.read(11, "d") == [NoteCommit(11, False, {1: 10, 2: 10, 3: 10}, 1)]


def test_with_servers_samples_are_those_of_all_steps() -> None:
    """What is counted there are steps, each of its worker's share."""
    served = replace(PHASE, sized=False, serving=Serving((3,), 64))
    commit = replace(committed(5, 1, phase=served), counted={1: 4, 2: 3})
    assert Steps().commit(commit, mine=True, several=False) == [
        NoteCommit(5, False, {1: 40, 2: 30})
    ]


def test_a_step_of_one_round_is_counted_with_its_commit() -> None:
    steps, phase = Steps(), replace(PHASE, sized=False)
    assert steps.commit(committed(5, 1, 2, phase=phase), mine=True, several=False) == [
        NoteCommit(5, False, {1: 9, 2: 9})
    ]
    assert steps.commit(committed(6, 1, phase=phase), mine=False, several=False)
    assert steps.trained == 1 and steps.read(6, "d") == []
    test = replace(phase, kind=wire.PhaseKind.TEST)
    assert steps.commit(committed(7, 1, phase=test), mine=True, several=True)[0].test
    assert steps.trained == 1


def test_rounds_of_a_plan_are_noted_one_by_one() -> None:
    """The step counts with the last round of channel 0, once that is applied."""
    plans = ChannelPlan(0, 3, (3,)), ChannelPlan(1, 2, (2,))
    phase = replace(PHASE, sized=False, channels=plans)
    steps, commits = Steps(), [committed(5, 1, 2, phase=phase)]
    commits.append(replace(commits[0], channel=1))
    for commit in commits:
        assert steps.commit(commit, mine=True, several=True) == [NoteRound(commit)]
    assert steps.read(5, "") == []
    assert steps.read(5, "d") == [NoteCommit(5, False, {1: 9, 2: 9}, 1)]
    assert steps.commit(commits[0], mine=False, several=True) == [NoteRound(commits[0])]
    assert steps.read(5, "d") == [] and steps.trained == 1


def test_rounds_of_a_group_with_channels_are_noted_on_each() -> None:
    """`nicps top` has rates of channels: of a script with overlap all gradients are on those above 0."""
    plans = ChannelPlan(0, 3, (3,)), ChannelPlan(1, 2, (2,))
    phase = replace(PHASE, channels=plans)
    assert phase.sized and not phase.planned
    steps, first = Steps(), committed(5, 1, 2, phase=phase)
    second = replace(first, channel=1)
    assert steps.commit(first, mine=True, several=False) == [
        NoteRound(first),
        NoteCommit(5, False, {}),
    ]
    assert steps.commit(second, mine=True, several=False) == [NoteRound(second)]
    assert steps.trained == 1


def test_a_step_counts_though_the_others_have_gone_on_without_this_host() -> None:
    """Its program has read all of the step. While it is in the next forward pass, the others close the next step."""
    plans = ChannelPlan(0, 3, (3, 3)), ChannelPlan(1, 2, (2,))
    phase = replace(PHASE, sized=False, channels=plans)
    steps = Steps()
    for channel, round_ in ((0, 5), (1, 5), (0, 6), (0, 7), (1, 6)):
        commit = replace(committed(round_, 1, 2, phase=phase), channel=channel)
        steps.commit(commit, mine=True, several=True)
    assert steps.read(6, "d") == [NoteCommit(6, False, {1: 9, 2: 9}, 2)]
    steps.commit(committed(8, 1, phase=phase), mine=True, several=True)
    assert steps.read(7, "") == []
    assert steps.read(8, "e") == [NoteCommit(8, False, {1: 9}, 2)] and steps.trained == 2
    steps.commit(committed(10, 1, phase=phase), mine=True, several=True)
    steps.forget_part()
    assert steps.read(10, "f") == [] and steps.trained == 2


def test_fragments_that_the_kernels_have_taken() -> None:
    assert committed(5, 1, 2, fragments=4).fragments == 4
    assert (
        replace(committed(5), counted={1: 1, 2: 2}).fragments == 0
    )  # they have called different things
    assert committed(5, 1, phase=replace(PHASE, sized=False)).fragments == 6


def test_a_step_is_as_long_as_the_time_since_the_one_before() -> None:
    tally = Tally(0.0)
    for now, round_ in (
        (1.0, 6),
        (1.03, 8),
        (9.0, 20),
    ):  # hosts were taken back before the last one
        tally.note_commit(now, NoteCommit(round_, False, {1: 10}, 2), MEMBERS)
    assert (tally.rounds, tally.samples, sum(tally.round_counts)) == (3, 30, 1)
    assert tally.round_counts[BOUNDS.index(0.05)] == 1


def test_a_step_on_several_channels_is_as_long_as_the_time_since_the_one_before() -> None:
    plans = ChannelPlan(0, 3, (3, 3)), ChannelPlan(1, 2, (2,))
    phase = replace(PHASE, sized=False, channels=plans)
    steps, tally = Steps(), Tally(0.0)
    for now, last in ((1.0, 6), (1.03, 8)):
        for commit in (
            committed(last - 1, 1, phase=phase),
            committed(last, 1, phase=phase),
            replace(committed(last // 2, 1, phase=phase), channel=1),
        ):
            steps.commit(commit, mine=True, several=True)
        (noted,) = steps.read(last, "d")
        tally.note_commit(now, noted, MEMBERS)
    assert sum(tally.round_counts) == 1 and tally.round_counts[BOUNDS.index(0.05)] == 1


# ---- a program's session


@pytest.mark.parametrize("rank", [None, 2])
def test_a_program_that_does_not_know_the_jobs_rank(rank: int | None) -> None:
    agent = Agent(2)
    try:
        agent.session.settings["rank"] = rank
        residual = None if rank else np.zeros(3, np.float32)
        said = "several rounds, and .* program one" if rank else "one round, and .* program several"
        with pytest.raises(JobFailed, match=f"a step of this job takes {said}"):
            agent.session.ready(720, "d", residual=residual)
    finally:
        agent.close()


@pytest.mark.parametrize(("kind", "numbers"), [("bucket_mb", 5000), ("rank", 720)])
def test_loops_are_compiled_for_all_numbers_of_a_step(
    monkeypatch: pytest.MonkeyPatch, kind: str, numbers: int
) -> None:
    """However short its rounds are; of factors, which are not those numbers, for those of the longest round."""

    class Asked(Exception):
        pass

    def loops_for(format: LaneFormat) -> None:
        raise Asked(format.lanes)

    agent = Agent(2)
    monkeypatch.setattr(reducers, "loops_for", loops_for)
    try:
        agent.session.settings[kind] = 1
        with pytest.raises(Asked, match=rf"^{numbers}$"):
            agent.session.ready(720, "d", residual=np.zeros(5000, np.float32))
    finally:
        agent.close()


class Session:
    """What a step asks of a session: rounds that are committed with these members, None: the phase ends."""

    number = 1

    def __init__(self, *rounds: dict[int, int] | None, saves: int = 0) -> None:
        self.rounds, self.saves = list(rounds), saves
        self.said: list[tuple[Any, ...]] = []

    def exchange(self, round_: int, vector: Any, call: int) -> Any:
        self.said.append(("offer", round_))
        members = self.rounds.pop(0)
        if members is None:
            return None
        phase = replace(PHASE, shares=(10, 10, 10))
        found = committed(round_, *members, phase=phase)
        return type(
            "Committed",
            (),
            {
                "round": round_,
                "counted": members,
                "unit": -40,
                "seconds_waited": 0.25,
                "exchange": found.exchange,
                "view": 3,
                "aggregators": (1, 2),
                "checkpoint": round_ == self.saves,
            },
        )

    def decide(self, round_: int, what: str) -> None:
        self.said.append((what, round_))

    def applied(self, commit: Any) -> None:
        assert not commit.checkpoint, "a residual is kept of whole steps only"
        self.said.append(("read", commit.round))


def step(session: Session, room: int = 360) -> Step:
    from nicps.client import Phase as ToDo

    phase = ToDo("train", 5, 1, (10, 20, 0, 30), Exchange.STRIPES)
    return Step(session, phase, 5, room)  # type: ignore[arg-type]


def test_a_round_is_judged_and_read_before_the_next_one_is_offered() -> None:
    session = Session({1: 9, 2: 9}, {1: 9, 2: 9}, {1: 9}, saves=5)
    made = step(session)
    for what in "PQR":
        made.add(np.ones(4, np.float32), what)
    offers = [("offer", 5), ("more", 5), ("read", 5), ("offer", 6), ("more", 6), ("read", 6)]
    assert session.said == [*offers, ("offer", 7)]
    commit = made.commit
    assert commit is not None and commit.round == 7 and commit.counted == {1: 10}
    assert commit.samples == 10 and commit.checkpoint and commit.seconds_waited == 0.75


def test_a_vector_of_several_rounds_begins_again_when_a_member_is_lost_in_it() -> None:
    """So that all of it is over the same members."""
    session = Session({1: 9, 2: 9, 4: 9}, {1: 9, 4: 9}, {1: 9, 4: 9}, {1: 9, 4: 9})
    made = step(session)
    made.add(np.ones(600, np.float32), "P")
    assert [said for said in session.said if said[0] == "offer"] == [
        ("offer", k) for k in (5, 6, 7, 8)
    ]
    assert made.commit is not None and made.commit.counted == {1: 10, 4: 30}


def test_a_phase_ends_before_the_step() -> None:
    with pytest.raises(StepEnded):
        step(Session(None)).add(np.ones(3, np.float32), "P")


def test_programs_that_exchange_different_things() -> None:
    with pytest.raises(
        JobFailed, match="round 5: the members' training programs exchange different"
    ):
        step(Session({1: 9, 2: 8})).add(np.ones(3, np.float32), "P")


def test_room_of_a_round() -> None:
    assert room_of(1, 361) == 720
    assert room_of(100_000_000) == wire.MOST_SIZED * 360
