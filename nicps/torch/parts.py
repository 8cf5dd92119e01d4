# SPDX-License-Identifier: Apache-2.0
"""Parts of a step: parameters are updated part by part, as their sums arrive (docs/channels.md, P2 and P3).

`cut` deals out a model's parameters, `PartStep` makes an optimizer's step of some of them only, and `Parts` has the
parts that are on their way. It knows no network: the sum of each part is a future.

    parts = Parts(PartStep(optimizer), cut(named, cuts=[3, 7]))
    parts.offer(due)                # a part's gradients are whole; `due.future` is done once the mean is in their place
    parts.promise(settings)         # `step()`: what is on its way is updated with these hyper-parameters
    parts.wait([0])                 # part 0 is updated now, and perhaps others that have come
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from nicps.errors import JobFailed, UsageProblem

#: They update each tensor by itself, so a part's update has the bits of a whole step. A class that derives from one of
#: these may do otherwise.
OPTIMIZERS = (SGD, Adam, AdamW, RMSprop, Adagrad)
TYPES = (torch.float32, torch.float16, torch.bfloat16)
_REFUSED_SETTINGS = ("differentiable", "capturable")
_NARROW = (torch.float16, torch.bfloat16)
_NOT_COPIED = ("params", "param_names")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one round brings: some parameters, one behind the other in the vector of the part.

    Attributes: `index`, its place in the order in which the forward pass needs parts.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def size(self) -> int:
        """Numbers in its vector."""
        return sum(parameter.numel() for parameter in self.parameters)


def cut(named: Sequence[tuple[str, nn.Parameter]], cuts: Sequence[int]) -> tuple[Part, ...]:
    """Parts of parameters.

    Args:
        named: in the order in which the forward pass needs them.
        cuts: with how many parameters before it a new part begins, rising.

    Raises:
        UsageProblem: a part would be empty, or a parameter cannot be updated part by part.
    """
    ends = [0, *cuts, len(named)]
    if any(last <= first for first, last in pairwise(ends)):
        raise UsageProblem(
            f"cuts {list(cuts)} do not rise between 0 and {len(named)}, the number of parameters: each part needs one"
        )
    _check_parameters(named)
    return tuple(
        Part(index, *map(tuple, zip(*named[first:last], strict=True)))
        for index, (first, last) in enumerate(pairwise(ends))
    )


def _check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        if type(parameter) is not nn.Parameter:
            raise UsageProblem(
                f"{name} is a {type(parameter).__name__}: parts take plain nn.Parameters only"
            )
        if parameter.dtype not in TYPES:
            raise UsageProblem(
                f"parts take float32, float16 and bfloat16, and {name} is {parameter.dtype}"
            )
        if parameter.device.type != "cpu":
            raise UsageProblem(
                f"parts take parameters on the CPU, and {name} is on {parameter.device}"
            )
    spans = sorted((*_span(parameter), name) for name, parameter in named if parameter.numel())
    for (_, end, former), (begin, _, name) in pairwise(spans):
        if begin < end:
            raise UsageProblem(
                f"{former} and {name} share memory: make them one parameter, which several modules may have"
            )


def _span(parameter: nn.Parameter) -> tuple[int, int]:
    """The addresses between which it lies."""
    reach = sum((n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True))
    begin = parameter.data_ptr()
    return begin, begin + (reach + 1) * parameter.element_size()


# ---- an optimizer's step of some parameters


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyper-parameters as they were at a `step()`.

    Attributes: `groups`, of each parameter group, without the parameters; `group_of`, of a parameter, by its id.
    """

    groups: tuple[dict[str, Any], ...]
    group_of: dict[int, int]


class PartStep:
    """The step of an optimizer, of some of its parameters: by another one of the same class over the same state.

    Raises:
        UsageProblem: the optimizer's step is not known to be that of each parameter by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) not in OPTIMIZERS:
            known = ", ".join(each.__name__ for each in OPTIMIZERS)
            raise UsageProblem(
                f"{type(optimizer).__name__} cannot update parameters part by part: take one of {known}"
            )
        self._optimizer = optimizer
        _check_settings(optimizer)
        self._twin = copy.copy(optimizer)  # it shares the state, and has no hooks
        self._step: Callable[[Optimizer], object] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]

    def settings(self) -> Settings:
        """Those in force.

        Raises:
            UsageProblem: they do not allow updates part by part.
        """
        _check_settings(self._optimizer)
        groups = self._optimizer.param_groups
        return Settings(
            tuple(
                {key: copy.deepcopy(each) for key, each in group.items() if key not in _NOT_COPIED}
                for group in groups
            ),
            {id(each): index for index, group in enumerate(groups) for each in group["params"]},
        )

    @property
    def depends(self) -> bool:
        """Whether the bits of a parameter's update depend on which others are updated in the same call.

        SGD with `foreach=True` multiplies momenta one by one if a parameter of the call has none yet, and then rounds
        narrow types otherwise.
        """
        return any(
            group.get("foreach") and len({self._has_momentum(each) for each in group["params"]}) > 1
            for group in self._optimizer.param_groups
            if group.get("momentum") and isinstance(self._optimizer, SGD)
        )

    def _has_momentum(self, parameter: nn.Parameter) -> bool:
        return self._optimizer.state.get(parameter, {}).get("momentum_buffer") is not None

    def __call__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor],
        settings: Settings,
    ) -> None:
        """Update these. What each has as `grad` stays there."""
        groups = [{**group, "params": []} for group in settings.groups]
        for parameter in parameters:
            groups[settings.group_of[id(parameter)]]["params"].append(parameter)
        twin = self._twin
        twin.state = self._optimizer.state
        twin.param_groups = [group for group in groups if group["params"]]
        with apart():
            kept = [parameter.grad for parameter in parameters]
            try:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                self._step(twin)
            finally:
                for parameter, former in zip(parameters, kept, strict=True):
                    parameter.grad = former


def _check_settings(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for name in _REFUSED_SETTINGS:
            if group.get(name):
                raise UsageProblem(
                    f"{type(optimizer).__name__}({name}=True) cannot update parameters part by part: leave it out"
                )
        if group.get("fused") and isinstance(optimizer, SGD):
            _check_types(group["params"])


def _check_types(parameters: Sequence[nn.Parameter]) -> None:
    """Of SGD with `fused=True`.

    On the CPU PyTorch 2.13 computes the steps of narrow types register by register and does not write them. It reads
    momenta behind the end of their memory, too, so that what it writes there differs from member to member.
    """
    with torch._C.DisableTorchFunction():
        narrow = {str(each.dtype) for each in parameters if each.dtype in _NARROW}
    if narrow:
        raise UsageProblem(
            f"SGD(fused=True) leaves most numbers of {min(narrow)} as they are, in PyTorch on the CPU: leave fused=True"
            " out"
        )


@contextmanager
def apart() -> Iterator[None]:
    """Without what the thread has set for the code that it was in: inference mode, functions of tensors."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
        yield


# ---- parts on their way


@dataclass(slots=True, eq=False)
class Due:
    """A part on its way, from its last gradient to its update.

    Attributes: `places`, the gradients in the part's vector, float32, in each parameter's shape; `gradients`, the same
    in the parameters' own type: in the same memory, where that is float32. `future` is done once the means have taken
    the place of the gradients. `settings`, those of `step()`, once that has been called. `filled`: the means are
    `gradients`, and what a script makes of these counts.
    """

    part: Part
    places: list[torch.Tensor]
    gradients: list[torch.Tensor]
    future: Future[Any]
    settings: Settings | None = None
    filled: bool = False

    def fill(self) -> None:
        """Once the future is done, and before means are used: they become `gradients`, once.

        Raises:
            Exception: what the future has failed with.
        """
        if error := failure(self.future):
            raise error
        if self.filled:
            return
        with apart():
            for gradient, place in zip(self.gradients, self.places, strict=True):
                if gradient.dtype != place.dtype:
                    gradient.copy_(place)
        self.filled = True


def failure(future: Future[Any]) -> BaseException | None:
    """What a future that is done has failed with."""
    if future.cancelled():
        return JobFailed("the sum of a part was cancelled, so this step cannot be made")
    return future.exception()


class Parts:
    """All parts of a model, and where they are. A thread that waits carries the updates out, one at a time.

    A failure (of a sum, of an update) comes out of every call after it: the weights are between two steps then.

    Args:
        step: makes the update of a part.
        parts: in their order of need.
        promised: is called for each part that is promised, before another thread can update it.
        updated: is called in the thread that has carried out the update, before another thread sees its end.
        attend: waits until it is true, and is woken behind each future; otherwise the thread sleeps.

    Attributes: `waited` and `updating`, seconds so far in which threads have waited, and have updated.
    """

    def __init__(
        self,
        step: Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor], Settings], None],
        parts: Sequence[Part],
        promised: Callable[[Due], None] = lambda due: None,
        updated: Callable[[Due], None] = lambda due: None,
        attend: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._step, self._promised, self._updated = step, promised, updated
        self._attend = attend
        self.waited = self.updating = 0.0
        self._due: dict[int, Due] = {}
        self._lock = threading.RLock()  # with it a thread may update, and sees no half of an update
        self._updating = False
        self._changed = (
            threading.Condition()
        )  # a future is done; its thread must not wait for an update
        self._count = 0
        self._error: BaseException | None = None

    # ---- a failure

    def fail(self, error: BaseException) -> None:
        """From now on every call raises it; the first one counts."""
        if self._error is None:
            self._error = error
        self._note_change()

    def check(self) -> None:
        """Raise what has failed."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    # ---- from backward to `step()`

    def offer(self, due: Due) -> None:
        """A part's gradients are whole, and its sum is awaited."""
        with self._lock:
            self._due[due.part.index] = due
        due.future.add_done_callback(self._arrived)

    def _arrived(self, future: Future[Any]) -> None:
        if error := failure(future):
            self.fail(error)
        self._note_change()

    def _note_change(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def offered(self) -> list[Due]:
        """Parts that wait for their sum or for `step()`, in the order of need."""
        with self._lock:
            return [self._due[i] for i in sorted(self._due) if self._due[i].settings is None]

    def wait_for_sums(self) -> list[Due]:
        """Wait until those have their means. They stay where they are."""
        offered = self.offered()
        self._wait_until(lambda: all(due.future.done() for due in offered))
        for due in offered:
            due.fill()
        return offered

    def drop(self) -> None:
        """A whole step was made of what is offered."""
        with self._lock:
            self._due = {i: due for i, due in self._due.items() if due.settings is not None}

    def promise(self, settings: Settings) -> None:
        """`step()`: each part that is offered is updated with these, once its sum is there."""
        with self._lock:
            for due in self.offered():
                self._promised(due)
                due.settings = settings

    # ---- updates

    @property
    def waits(self) -> bool:
        """Whether a part is promised that is not updated."""
        with self._lock:
            return any(due.settings is not None for due in self._due.values())

    def wait(self, indices: Iterable[int] | None = None) -> None:
        """Wait until these parts (default: all) are updated, if `step()` was called for them.

        What has come meanwhile is updated too: first what is waited for, then in the order of need.
        """
        wanted = frozenset(range(len(self.parts)) if indices is None else indices)
        seen = -1
        while not self._advance(wanted):
            seen = self._wait_for_change(seen)

    def _advance(self, wanted: frozenset[int]) -> bool:
        """Carry out updates whose sums are there. Whether none of these parts waits for one any more."""
        with self._lock:
            if self._updating:
                return True  # this thread, in the optimizer's own code
            while True:
                self.check()
                waiting = [due for due in self._due.values() if due.settings is not None]
                if not any(due.part.index in wanted for due in waiting):
                    return True
                ready = [due for due in waiting if due.future.done()]
                if not ready:
                    return False
                self._update(min(ready, key=lambda d: (d.part.index not in wanted, d.part.index)))

    def _update(self, due: Due) -> None:
        if torch._C._are_functorch_transforms_active():
            raise UsageProblem(
                "torch.func reads parameters of a step that is not done: wait for it (`wait`) before the transform"
            )
        settings = self._due.pop(due.part.index).settings
        assert settings is not None
        self._updating, begun = True, time.monotonic()
        try:
            due.fill()
            self._step(due.part.parameters, due.gradients, settings)
        except BaseException as error:
            self.fail(error if isinstance(error, Exception) else _interrupted(due.part))
            raise
        finally:
            self._updating = False
            self.updating += time.monotonic() - begun
        self._updated(due)

    def _wait_for_change(self, seen: int) -> int:
        if self._attend is not None:
            self._attend(lambda: self._count != seen)
            return self._count
        begun = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen)
            self.waited += time.monotonic() - begun
            return self._count

    def _wait_until(self, done: Callable[[], bool]) -> None:
        seen = -1
        while True:
            self.check()
            if done():
                return
            seen = self._wait_for_change(seen)


def _interrupted(part: Part) -> JobFailed:
    return JobFailed(
        f"the update of {part.names[0]} was interrupted: the weights are between two steps"
    )
