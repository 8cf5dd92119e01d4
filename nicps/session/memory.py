# SPDX-License-Identifier: Apache-2.0
"""What a job's training program shares with its agent and the kernel, and who converts into it and reads from it."""

from __future__ import annotations

from collections.abc import Iterator

from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.lanes import LaneFormat, Residual
from nicps.session.phases import Commit
from nicps.session.planned import PlannedRounds
from nicps.session.reducers import AddingReducer, Reducer, Standing, StripedReducer
from nicps.session.sized import SizedRounds


class Memory:
    """One job's.

    Args:
        format, residual: of a round's vector.
        arena, doorbell: by which the agent hears of what is converted.
        number: this member's.
        several: a training step takes several rounds, each of a size of its own.
        planned: it takes those of a plan.

    Attributes: `arena`; `adding`, for exchanges in which lanes are multiples of a unit; `striped`, for the others, or
    in its place `sized` or `planned`.
    """

    def __init__(
        self,
        format: LaneFormat,
        residual: Residual,
        arena: Arena,
        doorbell: int,
        number: int,
        *,
        several: bool,
        planned: bool = False,
    ) -> None:
        self.arena = arena
        with_all = format, residual, arena, doorbell, number
        self.adding = AddingReducer(*with_all)
        self.striped = None if several or planned else StripedReducer(*with_all)
        self.sized = SizedRounds(number, arena, doorbell) if several else None
        self.planned = PlannedRounds(number, arena, doorbell) if planned else None
        self._reducer: Reducer | None = None

    @property
    def reducer(self) -> Reducer:
        """Of the phase."""
        assert self._reducer is not None, (
            "this phase has rounds of any size, or servers, or call next_phase() first"
        )
        return self._reducer

    @property
    def rounds(self) -> SizedRounds:
        """Of a step that takes several."""
        assert self.sized is not None, "only of a job whose steps take several rounds"
        return self.sized

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map the kernel's memory that comes with a message."""
        self.adding.map(message, fds)
        for each in (self.striped, self.sized, self.planned):
            if each is not None:
                each.map(message, fds)

    def enter(self, phase: shared_form.Phase) -> None:
        """A phase begins."""
        self._reducer = self.striped if phase.exchange.absolute else self.adding
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
        if self.striped is not None:
            self.striped.forget()
