# SPDX-License-Identifier: Apache-2.0
"""Pending parameters: `optimizer.step()` returns at once, and code that touches a parameter waits for its update.

    steps = PendingSteps(model, optimizer, cut(named, cuts), offer)  # the training loop stays as it is
    ...
    steps.close()

`offer(part, vector)` gets a part's gradients, float32, one behind the other, once they are whole. Its future is done
when the means have taken their place. docs/channels.md ("In scripts", P3) says what waits for what, and what is
refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from nicps.errors import UsageProblem
from nicps.torch.guarded import (
    SCHEDULED,
    Hidden,
    ReplacedStep,
    WaitingHook,
    WaitingState,
    wait_in_front,
    waiting_class,
)
from nicps.torch.parts import Due, Part, Parts, PartStep

Offer = Callable[[Part, torch.Tensor], Future[Any]]

#: Models whose forward pass reads parameters without Python, or whose gradients another one averages.
_REFUSED_MODULES = {
    "OptimizedModule": "compiled",
    "ScriptModule": "scripted",
    "DataParallel": "a DataParallel",
    "DistributedDataParallel": "a DistributedDataParallel",
    "FullyShardedDataParallel": "a FullyShardedDataParallel",
}
_STEPPED_AT = "_nicps_stepped_at"  # of a gradient that a step has used: its version then


class PendingSteps:
    """The steps of an optimizer whose gradients are averaged part by part.

    Args:
        model: its modules wait in front of their forward pass, each for its own parameters.
        parts: all parameters of the optimizer that require a gradient, in the order of need.
        offer: the source of sums.
        stepped: is called at the end of each `step()`.

    Attributes: `syncs`, it is not in `no_sync`: backward passes exchange gradients.

    Raises:
        UsageProblem: the model or the optimizer cannot be updated part by part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parts: Sequence[Part],
        offer: Offer,
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self._update = PartStep(optimizer)
        self._hidden = Hidden(self._wait_for)
        self._parts = Parts(self._show_and_update, parts, self._hide, self._updated)
        self._offer, self._optimizer, self._stepped = offer, optimizer, stepped
        self._place = {
            id(each): (part, at) for part in parts for at, each in enumerate(part.parameters)
        }
        check_model(model)
        check_cover(model, optimizer, self._place.keys())
        _check_step(optimizer)
        self._gathered: dict[int, dict[int, torch.Tensor]] = {}  # of each part, by parameter
        self._local = False  # gradients of `no_sync` are there, and no others
        self._touched, self._closed = False, False
        self.syncs = True
        self._warned: set[str] = set()
        self._sorted = 0  # so many entries of the optimizer's state are in its parameters' order
        self._gradient = waiting_class(
            torch.Tensor, lambda _: self._wait_for_gradients("reads a gradient")
        )
        part_of = {each: part.index for each, (part, _) in self._place.items()}
        self._hooks: list[Any] = [
            *wait_in_front(model, part_of, self._parts.wait),
            *self._of_states(model, optimizer),
        ]
        for each in self._parameters():
            self._hooks.append(each.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]
        self._replaced = ReplacedStep(optimizer, self._step)
        self._whole_step = self._replaced.whole
        self._guard_state(optimizer)

    # ---- what a script calls

    def wait(self) -> None:
        """Wait until all parameters are updated, if `step()` was called."""
        self._parts.wait()

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds so far in which threads have waited for parts, and have updated them."""
        return self._parts.waited, self._parts.updating

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in it add gradients up here. The first one after it exchanges the sum."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def close(self) -> None:
        """Wait, and leave model and optimizer as they were, also if that fails: it raises what has failed then."""
        if self._closed:
            return
        self._closed = True
        try:
            self._parts.wait()
            self._parts.wait_for_sums()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hidden.show(self._parameters())
            self._hidden.give_back(self._parameters())
            self._plain(each.grad for each in self._parameters())
            self._optimizer.state = self._optimizer.state.plain()  # type: ignore[attr-defined]
            self._replaced.put_back()

    # ---- hooks

    def _guard_state(self, optimizer: Optimizer) -> None:
        optimizer.state = WaitingState(optimizer.state, self.wait)

    def _of_states(self, model: Any, optimizer: Optimizer) -> Iterator[Any]:
        def wait(*_: Any) -> None:
            self._parts.wait()

        yield model.register_state_dict_pre_hook(WaitingHook(wait))
        yield model.register_load_state_dict_pre_hook(WaitingHook(wait))
        yield optimizer.register_state_dict_pre_hook(wait)
        yield optimizer.register_load_state_dict_pre_hook(wait)
        yield optimizer.register_load_state_dict_post_hook(self._guard_state)

    # ---- gradients

    def _take(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is there: what autograd calls."""
        part, at = self._place[id(parameter)]
        gradient = parameter.grad
        assert gradient is not None
        if reason := self._refusal(parameter, gradient, part):
            error = UsageProblem(f"{part.names[at]}: {reason}")
            self._parts.fail(error)
            raise error
        if not self.syncs:
            self._local = True
            return
        gathered = self._gathered.setdefault(part.index, {})
        gathered[at] = gradient
        if len(gathered) == len(part.parameters):
            self._offer_part(part, [gathered.pop(i) for i in range(len(part.parameters))])

    def _refusal(self, parameter: nn.Parameter, gradient: torch.Tensor, part: Part) -> str:
        at = self._place[id(parameter)][1]
        if type(parameter) is self._hidden.kind:
            return (
                "a gradient of the step before came before its update: run the forward pass again"
            )
        if gradient.layout is not torch.strided:
            return "its gradient is sparse, and parts take dense ones only"
        if gradient.requires_grad:
            return "create_graph=True is not possible with parts, whose gradients are means"
        if getattr(gradient, _STEPPED_AT, None) == gradient._version - 1:
            return (
                "a gradient was added to the mean of the step before: call zero_grad() after step()"
            )
        due = next((each for each in self._parts.offered() if each.part is part), None)
        if due and (self._touched or gradient is not due.gradients[at]):
            self._skip()
        elif due or at in self._gathered.get(part.index, {}):
            return (
                "it has a second gradient before step(): use no_sync() in all backward passes but the last one, and"
                " no parameter twice in a model with reentrant checkpoints"
            )
        return ""

    def _skip(self) -> None:
        """The script has dropped the gradients of a backward pass without a step, as a loss scaler does."""
        self._settle()
        self._parts.drop()
        self._touched = False

    def _offer_part(self, part: Part, found: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            vector = torch.empty(part.size, dtype=torch.float32, device="cpu")
            places, gradients, at = [], [], 0
            for parameter, gradient in zip(part.parameters, found, strict=True):
                # The strides are the gradient's, so that an update has the bits that it has with that.
                stride = torch.empty_like(gradient, device="meta").stride()
                place = vector.as_strided(gradient.shape, stride, at)
                place.copy_(gradient)
                at += gradient.numel()
                same = place.data if gradient.dtype == place.dtype else torch.empty_like(gradient)
                parameter.grad = same.as_subclass(self._gradient)
                places.append(place)
                gradients.append(parameter.grad)
        self._local = False
        try:
            future = self._offer(part, vector)
        except BaseException as error:
            self._parts.fail(error)
            raise
        self._parts.offer(Due(part, places, gradients, future))

    def _wait_for_gradients(self, why: str) -> None:
        """Somebody needs means: those of a step that is promised, or else of the next one, which is whole then."""
        self._warn(why)
        self._parts.wait()
        if offered := self._settle():
            self._touched = True
            _mark(gradient for due in offered for gradient in due.gradients)

    def _settle(self) -> list[Due]:
        """Wait for the sums of all parts. From now on what the parameters have as `grad` are plain tensors."""
        self._check_all_are_there()
        offered = self._parts.wait_for_sums()
        for due in offered:
            self._plain(due.gradients)
        return offered

    def _check_all_are_there(self) -> None:
        offered = {due.part.index for due in self._parts.offered()}
        if not offered and not any(self._gathered.values()):
            return
        missing = [
            name
            for part in self._parts.parts
            if part.index not in offered
            for at, name in enumerate(part.names)
            if at not in self._gathered.get(part.index, {})
        ]
        if missing:
            error = UsageProblem(
                f"{missing[0]} has no gradient in this step ({len(missing)} parameters have none): all must have one"
                " after the backward pass, also with find_unused_parameters; call requires_grad_(False) for the others"
                " before nicps.torch.overlap, or in a job's model()"
            )
            self._parts.fail(error)
            raise error

    # ---- `step()`

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        found = self._make_step(closure)
        if not self._closed:  # else something that was put in front of `step` later still calls it
            self._stepped()
        return found

    def _make_step(self, closure: Callable[[], Any] | None) -> Any:
        optimizer: Any = self._optimizer
        optimizer._opt_called = True  # what a scheduler looks for
        if self._closed:
            return self._whole_step(closure)
        if closure is not None and not hook_at_step(optimizer):
            # As an optimizer calls it; its forward pass waits for what it needs.
            with torch.enable_grad():
                found = closure()
            self._make_step(None)
            return found
        self._parts.wait()
        self._check_groups()
        if closure is not None:
            return self._make_whole(partial(self._run, closure))
        self._check_all_are_there()
        offered = self._parts.offered()
        if self._local and any(each.grad is not None for each in self._parameters()):
            raise UsageProblem(
                "step() after no_sync() only: these gradients were not averaged over the members"
            )
        if reason := self._whole_because(offered):
            self._warn(reason)
            return self._make_whole()
        if not offered or all(due.future.done() for due in offered):
            return self._make_whole()
        self._parts.promise(self._update.settings())
        return None

    def _run(self, closure: Callable[[], Any]) -> Any:
        found = closure()
        self._settle()
        return found

    def _whole_because(self, offered: Iterable[Due]) -> str:
        """Why all sums must be there before anything is updated."""
        if hook := hook_at_step(self._optimizer):
            return f"has {hook}"
        if self._update.depends:
            return "has left a parameter without momentum, which SGD's foreach must update with all others"
        if self._touched:
            return "reads a gradient"
        for due in offered:
            for parameter, gradient in zip(due.part.parameters, due.gradients, strict=True):
                if parameter.grad is not gradient:
                    return "changes a gradient"
        return ""

    def _make_whole(self, closure: Callable[[], Any] | None = None) -> Any:
        self._settle()
        found = self._whole_step() if closure is None else self._whole_step(closure)
        self._parts.drop()
        _mark(parameter.grad for parameter in self._parameters())
        self._touched = False
        return found

    def _check_groups(self) -> None:
        known, found = set(self._place), _trained(self._optimizer)
        if found.keys() != known:
            raise UsageProblem(
                f"the optimizer has {len(found)} parameters that require a gradient, and had {len(known)} at first:"
                " a script closes the handle of nicps.torch.overlap, and calls overlap again"
            )

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(
                f"nicps: the script {why}, so this step waits for all sums, and the next forward pass does not"
                " overlap with them",
                stacklevel=4,
            )

    # ---- pending tensors

    def _wait_for(self, tensors: Sequence[torch.Tensor]) -> None:
        self._parts.wait({self._place[id(tensor)][0].index for tensor in tensors})

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for part in self._parts.parts for parameter in part.parameters)

    def _hide(self, due: Due) -> None:
        self._hidden.hide(due.part.parameters)

    def _show_and_update(self, parameters: Sequence[nn.Parameter], *rest: Any) -> None:
        self._hidden.show(parameters)
        self._update(parameters, *rest)

    def _updated(self, due: Due) -> None:
        self._hidden.give_back(due.part.parameters)
        self._plain(due.gradients)
        _mark(due.gradients)
        state: Any = self._optimizer.state
        if not self._parts.waits and len(state) != self._sorted:
            state.sort(each for group in self._optimizer.param_groups for each in group["params"])
            self._sorted = len(state)

    def _plain(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for gradient in gradients:
            if type(gradient) is self._gradient:
                gradient.__class__ = torch.Tensor


def _mark(gradients: Iterable[torch.Tensor | None]) -> None:
    """A step has used these. One that is only added to afterwards was not set to zero."""
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, _STEPPED_AT, gradient._version)


def hook_at_step(optimizer: Optimizer) -> str:
    """What is called at `step()`, and must find all parameters updated; empty if there is nothing."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "a hook at the optimizer's step"
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return "a hook at the steps of all optimizers"
    return ""


# ---- what is refused


def check_model(model: nn.Module) -> None:
    """Refuse a model whose forward pass cannot be made to wait.

    Raises:
        UsageProblem: with the module and the reason.
    """
    for name, module in model.named_modules():
        where = f"module {name}" if name else "the model"
        for kind in type(module).__mro__:
            if what := _REFUSED_MODULES.get(kind.__name__):
                raise UsageProblem(f"{where} is {what}: parts take the module itself")
        if module._compiled_call_impl is not None:
            raise UsageProblem(f"{where} is compiled: parts take the module itself")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageProblem(f"{where} has sparse gradients: leave sparse=True out")


def _check_step(optimizer: Optimizer) -> None:
    if "step" in optimizer.__dict__ and not hasattr(optimizer.step, SCHEDULED):
        raise UsageProblem(
            "the optimizer's `step` was replaced by another function: call nicps.torch.overlap before that, and once"
            " for each optimizer"
        )


def _trained(optimizer: Optimizer) -> dict[int, torch.Tensor]:
    found = (each for group in optimizer.param_groups for each in group["params"])
    return {id(each): each for each in found if each.requires_grad}


def check_cover(model: nn.Module, optimizer: Optimizer, place: Set[int]) -> None:
    """Refuse parts that do not have what the optimizer trains of the model, by the ids of all their parameters.

    Raises:
        UsageProblem: with the parameter and the reason.
    """
    trained = _trained(optimizer)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            raise UsageProblem(
                f"{name} is not in the optimizer: add it, or call requires_grad_(False)"
            )
        if (id(parameter) in trained) != (id(parameter) in place):
            raise UsageProblem(
                f"{name} must be in a part, as all parameters that are trained, and no other one"
            )
    if trained.keys() != place:
        raise UsageProblem(
            f"the parts have {len(place)} parameters, and the optimizer {len(trained)} that require a gradient: parts"
            " need the same ones"
        )
