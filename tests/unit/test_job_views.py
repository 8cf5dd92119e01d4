# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job while the view changes: its training program, its accumulators, and what it hands out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nicps import wire
from nicps.agent.sources import ArenaSource, StreamSource
from nicps.errors import JobFailed
from nicps.protocol.phase import Phase
from nicps.session.arena import Arena
from tests.fake_agent import ROUND, Changes, Job, ends


@pytest.fixture
def changes(tmp_path: Path) -> Iterator[Changes]:
    job = Job(tmp_path)
    yield Changes(job, tmp_path / "runs")
    job.records.close()


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


def test_what_is_demanded_of_records_is_checked_where_they_are_written(changes: Changes) -> None:
    """Not at the lead, after all have been collected."""
    changes.leaves('{"round": 6, "weights_sha256": ""}\n{"round": 7, "loss": 0.5}\n')
    changes.decided(4, wire.PhaseKind.FINISH)
    ends(changes.job, 0, "")
    with pytest.raises(
        JobFailed, match=r'^metrics\.jsonl: row 2: "weights_sha256" is missing; it must be a text$'
    ):
        changes.works()
    assert not changes.answers


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


@pytest.mark.parametrize("why", ["struck off", "handed out again"])
def test_a_stream_is_closed_by_the_thread_that_reads_it(changes: Changes, why: str) -> None:
    """It may be hashing a window just then."""
    job, closed = changes.job, list[str]()
    changes.host.frames.sender.drop_fragments = changes.host.frames.drop_fragments = list
    job.handout.outgoing = SimpleNamespace(close=lambda: closed.append("out"))  # type: ignore[assignment]
    if why == "struck off":
        job.struck()
    else:
        job.handout.offer(SimpleNamespace())  # type: ignore[arg-type]
    assert not closed
    changes.works()
    assert closed == ["out"]


def test_the_end_of_a_hand_out_leaves_the_next_one_alone(changes: Changes) -> None:
    """Its last window comes to the disk once the view has changed and something else is to be handed out."""
    handout, coming = changes.job.handout, SimpleNamespace()
    handout.outgoing = coming  # type: ignore[assignment]
    changes.host.node.read, changes.host.handed_out = lambda *_: [], lambda _: None
    source = SimpleNamespace(name="h1")
    changes.host.node.members = [source]
    phase = Phase(3, 1, wire.PhaseKind.HANDOUT, settings={"source": 1, "purpose": "state"})
    stream = SimpleNamespace(finish=lambda: "", keep=False)
    handout._stored(phase, stream, ROUND, True, SimpleNamespace())  # type: ignore[arg-type]
    assert handout.outgoing is coming
