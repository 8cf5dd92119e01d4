# SPDX-License-Identifier: Apache-2.0
"""What a job's training program shares with its agent and the kernel, and who converts into it and reads from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nicps.errors import JobFailed
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.lanes import LaneFormat, Residual
from nicps.session.phases import Commit
from nicps.session.planned import MemberRounds
from nicps.session.reducers import AddingReducer, Reducer, Standing, StripedReducer


class Memory:
    """One job's.

    Args:
        format, residual: of a round's vector.
        arena, doorbell: by which the agent hears of what is converted.
        number: this member's.
        whole: a training step is one round, of the whole vector.

    Attributes: `arena`; `adding`, for exchanges in which lanes are multiples of a unit; `rounds`, for the others.
    """

    def __init__(
        self,
        format: LaneFormat,
        residual: Residual,
        arena: Arena,
        doorbell: int,
        number: int,
        *,
        whole: bool,
    ) -> None:
        self.arena = arena
        self.adding = AddingReducer(format, residual, arena, doorbell, number)
        self.rounds = MemberRounds(number, arena, doorbell)
        self._striped = StripedReducer(format, residual, self.rounds, number) if whole else None
        self._reducer: Reducer | None = None

    @property
    def reducer(self) -> Reducer:
        """Of the phase."""
        assert self._reducer is not None, (
            "this phase has several rounds a step, or servers, or call next_phase() first"
        )
        return self._reducer

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map the kernel's memory that comes with a message."""
        self.adding.map(message, fds)
        self.rounds.map(message, fds)
        if self._striped is not None:
            self._striped.map(message)

    def enter(self, phase: shared_form.Phase) -> None:
        """A phase begins."""
        self._reducer = self._striped if phase.exchange.absolute else self.adding
        if phase.exchange.served:
            self._reducer = None  # nobody reads a sum (`nicps.session.served`)
        if self._reducer is not None:
            self._reducer.enter(phase.unit, len(phase.shares), phase.exchange)

    def change_view(self, standing: Standing) -> None:
        """Another view is in force, or the phase that was entered last."""
        if self._reducer is not None:
            self._reducer.change_view(standing)

    def finish(self, commit: Commit) -> None:
        """A sum was read, or is not needed."""
        if self._reducer is not None:
            self._reducer.finish(commit)

    def drop(self) -> None:
        """The vector converted last is not counted, or not yet: the residual is what the rounds before have left."""
        if self._reducer is not None:
            self._reducer.drop()

    def forget(self) -> None:
        """Another member's state was loaded."""
        self.adding.forget()
        if self._striped is not None:
            self._striped.forget()


def is_whole(settings: Mapping[str, Any], *, several: bool, planned: bool) -> bool:
    """Whether a training step of a job with these settings is one round, of the whole vector.

    Args:
        several, planned: what a step of the training program here takes.

    Raises:
        JobFailed: it takes something else than a step of the job.
    """
    of_job = shared_form.is_planned(settings)
    if of_job is not planned:
        job, program = ("a plan", "none") if of_job else ("no plan", "one")
        keys = "priorities"
    elif (shared_form.has_steps(settings) or of_job) is not several:
        job, program = ("one round", "several") if several else ("several rounds", "one")
        keys = " or ".join(shared_form.SEVERAL_ROUNDS)
    else:
        return not several
    raise JobFailed(
        f"a step of this job takes {job}, and one of its training program {program} (settings {keys})"
    )
