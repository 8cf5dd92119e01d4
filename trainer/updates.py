# SPDX-License-Identifier: Apache-2.0
"""Parameters are updated part by part, as their sums arrive, while the next forward pass runs (docs/channels.md, P3).

    updates.promise(sums)     # the step's parts are on their way; the next forward pass may begin
    ...                       # each module waits for its own parameters
    updates.wait()            # all are updated

Each is updated once, by the thread that computes, with the hyper-parameters that were in force at `promise`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from nicps.errors import UsageProblem
from nicps.torch.guarded import Hidden, wait_in_front, waiting_class
from nicps.torch.parts import Due, Part, PartStep, Settings, apart, failure
from nicps.torch.parts import Parts as PartsOnTheWay
from nicps.torch.pending import check_model, hook_at_step

if TYPE_CHECKING:
    from trainer.flows import Parts, Unit
    from trainer.training import Training

Attend = Callable[[Callable[[], bool]], None]
_DIGITS = 6  # of a second
_LEAST_S = 1e-4  # a shorter wait, or update, is not worth a line


class Span(NamedTuple):
    """Between two times on the clock the thread that computes has waited, or has updated.

    Attributes: `need`, the parameter that it needed, by its place; None: all of them, at the end of forward.
    """

    begun: float
    ended: float
    updates: bool
    need: int | None


class Updates:
    """Those of one model.

    Args:
        training: its model and its optimizer.
        units: what is updated at once: parameters by their place in the layout, and the pieces with their means. Those
            of no parameter have averaged buffers. In the order in which the forward pass needs them.
        attend: as that of `nicps.torch.parts.Parts`.

    Attributes: `waited` and `updating`, seconds since `promise` in which the thread that computes has waited, and has
    updated; `spans`, when that was; `needed`, when a parameter was used first, on the clock, less these seconds.

    Raises:
        UsageProblem: the model or the optimizer cannot be updated part by part.
    """

    def __init__(
        self,
        training: Training,
        units: Sequence[Unit],
        attend: Attend,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._training, self._model, self._optimizer = training, training.model, training.optimizer
        self._attend, self._clock = attend, clock
        check_model(self._model.model)
        self._update = PartStep(self._optimizer)
        self._hidden = Hidden(self._wait_for)
        self._buffer = waiting_class(Tensor, self._wait_for)
        self._part_of: dict[int, int] = {}  # of tensors, by their ids
        self._unit_of: dict[int, int] = {}  # of parameters by their place; of the buffers
        self._parts: list[Part] = []
        self._gradients: list[list[Tensor]] = []
        self._pieces = [unit.pieces for unit in units]
        for index, unit in enumerate(units):
            own = [self._model.in_vector[at] for at in unit.parameters]
            self._parts.append(Part(index, unit.names, tuple(parameter for parameter, _ in own)))
            self._gradients.append([gradient for _, gradient in own])
            places = unit.parameters or (len(self._model.in_vector),)
            self._unit_of |= dict.fromkeys(places, index)
            for at, (parameter, _) in zip(unit.parameters, own, strict=True):
                self._part_of[id(parameter)] = at
            if not own:
                self._part_of |= dict.fromkeys(map(id, self._model.averaged), places[0])
        self._way = PartsOnTheWay(self._carry_out, self._parts)
        self._carried = 0
        self.waited = self.updating = 0.0
        self.needed: dict[int, float] = {}
        self.spans: list[Span] = []
        self._need: int | None = None
        self._hooks = list(wait_in_front(self._model.model, self._part_of, self._wait_for_parts))

    @property
    def whole(self) -> bool:
        """This step must be a whole one: a hook must come before any forward pass."""
        return bool(hook_at_step(self._optimizer))

    @property
    def begun(self) -> bool:
        """Some parameters are updated already: where the step ends here, the weights are between two steps."""
        return self._carried > 0

    def promise(self, sums: Sequence[Future[None]]) -> None:
        """The step's parts are on their way: from now on what reads a parameter waits for its update.

        Args:
            sums: of the pieces, done once the mean is in the vector.
        """
        self._carried, self.waited, self.updating = 0, 0.0, 0.0
        self.needed.clear()
        self.spans.clear()
        self._way = PartsOnTheWay(
            self._carry_out, self._parts, self._hide, self._updated, self._wait_until
        )
        for part, gradients, pieces in zip(self._parts, self._gradients, self._pieces, strict=True):
            whole = _all_of([sums[piece] for piece in pieces])
            self._way.offer(Due(part, gradients, gradients, whole))
        self._way.promise(self._update.settings())
        optimizer: Any = self._optimizer
        optimizer._opt_called = True  # what a scheduler looks for

    def wait(self) -> None:
        """Wait until everything is updated.

        Raises:
            nicps.steps.StepEnded: the phase has ended before.
            NicpsError: as the session raises it.
        """
        self._need = None
        self._way.wait()

    def describe_spans(self, parts: Parts) -> dict[str, list[list[Any]]]:
        """For metrics.jsonl, since `promise`: `waits` (from, to, the module that needed its parameters, their channel)
        and `updates` (from, to), on the clock.

        Args:
            parts: those of the step.
        """
        waits, updates = list[list[Any]](), list[list[Any]]()
        for span in self.spans:
            moments = [round(span.begun, _DIGITS), round(span.ended, _DIGITS)]
            if span.updates:
                updates.append(moments)
            else:
                waits.append([*moments, *_needs(parts, span.need)])
        return {"waits": waits, "updates": updates}

    def drop(self) -> None:
        """Nothing more is updated of this step."""
        for part in self._parts:
            self._hidden.show(part.parameters)
            self._show(part)
        self._way = PartsOnTheWay(self._carry_out, self._parts)

    def close(self) -> None:
        """Modules wait no more."""
        for hook in self._hooks:
            hook.remove()

    # ---- what waits

    def _wait_for_parts(self, places: Collection[int]) -> None:
        now = self._clock() - self.waited - self.updating
        for place in places:
            self.needed.setdefault(place, now)
        self._need = min(places, default=None)
        self._way.wait({self._unit_of[place] for place in places})

    def _wait_for(self, tensors: Sequence[Tensor]) -> None:
        self._wait_for_parts([self._part_of[id(tensor)] for tensor in tensors])

    def _wait_until(self, done: Callable[[], bool]) -> None:
        begun = self._clock()
        try:
            self._attend(done)
        finally:
            self.waited += self._note(begun, updates=False)

    def _note(self, begun: float, *, updates: bool) -> float:
        """It ends now; its seconds."""
        ended = self._clock()
        if ended - begun >= _LEAST_S:
            self.spans.append(Span(begun, ended, updates, self._need))
        return ended - begun

    # ---- an update

    def _hide(self, due: Due) -> None:
        self._hidden.hide(due.part.parameters)
        if not due.part.parameters:
            for buffer in self._model.averaged:
                buffer.__class__ = self._buffer
        for parameter in due.part.parameters:
            parameter.grad = None

    def _carry_out(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], settings: Settings
    ) -> None:
        begun = self._clock()
        try:
            self._update_now(parameters, gradients, settings)
        finally:
            self.updating += self._note(begun, updates=True)

    def _update_now(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], settings: Settings
    ) -> None:
        if not parameters:
            with apart():
                self._model.move_buffers()
            return
        self._hidden.show(parameters)
        with self._training.job.blame("optimizer"):
            self._update(parameters, gradients, settings)
        with apart(), torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                gradient.zero_()
                parameter.grad = gradient

    def _updated(self, due: Due) -> None:
        self._carried += 1
        self._show(due.part)

    def _show(self, part: Part) -> None:
        self._hidden.give_back(part.parameters)
        if not part.parameters:
            for buffer in self._model.averaged:
                if type(buffer) is self._buffer:
                    buffer.__class__ = Tensor


def _needs(parts: Parts, place: int | None) -> tuple[str, int | None]:
    """A parameter's module, and its least urgent channel."""
    if place is None:
        return "", None
    if place >= len(parts.names):
        return "averaged buffers", parts.pieces[-1].channel
    module = parts.names[place].rpartition(".")[0] or parts.names[place]
    return module, min(piece.channel for piece in parts.pieces_of[place])


def _all_of(sums: Sequence[Future[None]]) -> Future[None]:
    """Done once all are, and failed with the first failure."""
    if len(sums) == 1:
        return sums[0]
    whole, lock, left = Future[None](), threading.Lock(), len(sums)

    def note(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        errors = [error for each in sums if (error := failure(each)) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(None)

    for each in sums:
        each.add_done_callback(note)
    return whole


def updates_of(training: Training, units: Sequence[Unit], attend: Attend) -> Updates | str:
    """Those of a model, or why there are none."""
    try:
        return Updates(training, units, attend)
    except UsageProblem as problem:
        return str(problem)
