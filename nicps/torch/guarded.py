# SPDX-License-Identifier: Apache-2.0
"""Tensors, and an optimizer's state, that wait before their value is used (docs/channels.md, "Pending"); and an
optimizer's step, in whose place another function is called.
"""

from __future__ import annotations

import copy
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_GETTERS = """grad grad_fn shape dtype device layout ndim requires_grad is_leaf is_sparse is_cuda is_cpu is_meta
is_quantized is_mkldnn is_nested itemsize nbytes _version"""
_METHODS = """size dim numel nelement ndimension element_size is_floating_point is_complex
get_device"""
_Tensor: Any = torch.Tensor
#: What a scheduler looks for at an optimizer's `step`.
SCHEDULED = "_wrapped_by_lr_sched"
#: What is known of a tensor whatever its value; and a gradient may be put in place of another one at once.
_NEEDS_NO_VALUE = {
    *(getattr(_Tensor, name).__get__ for name in _GETTERS.split()),
    *(getattr(_Tensor, name) for name in _METHODS.split()),
    *(_Tensor.grad.__set__, _Tensor.grad.__delete__),
}


def waiting_class(base: type[Any], wait: Callable[[Sequence[torch.Tensor]], None]) -> type[Any]:
    """A class of tensors that wait before their value is used.

    Args:
        base: the class that they have before, and afterwards.
        wait: gets those of them that are used, and gives them their class back.
    """

    class Waiting(base):  # type: ignore[misc]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            if func in _NEEDS_NO_VALUE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **named)
            wait([*_found(cls, (args, named))])
            return func(*args, **named)

        def __deepcopy__(self, memo: Any) -> Any:
            wait([self])
            return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            wait([self])
            return self.__reduce_ex__(protocol)

    Waiting.__name__ = Waiting.__qualname__ = f"Pending{base.__name__}"
    return Waiting


def _found(kind: type[Any], value: Any) -> Iterator[torch.Tensor]:
    """Tensors of that class in what a function is called with."""
    if type(value) is kind:
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _found(kind, each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _found(kind, each)


class Hidden:
    """Parameters that are pending, from `hide` to `show` and `give_back`.

    Args:
        wait: gets those that are used, and returns once they are updated.

    Attributes: `kind`, their class meanwhile.
    """

    def __init__(self, wait: Callable[[Sequence[torch.Tensor]], None]) -> None:
        self.kind = waiting_class(nn.Parameter, wait)
        self._values: dict[int, torch.Tensor] = {}

    def hide(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on these are pending. What reads one without Python gets NaN, and no value that is not final."""
        for parameter in parameters:
            self._values[id(parameter)] = parameter.data
            nowhere = torch.full((), torch.nan, dtype=parameter.dtype, device="cpu")
            parameter.__class__ = self.kind
            with torch._C.DisableTorchFunctionSubclass():
                parameter.data = nowhere.expand(parameter.shape)

    def show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Their memory is within reach again: they are updated next."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                if (value := self._values.pop(id(parameter), None)) is not None:
                    parameter.data = value

    def give_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """They have their class again."""
        for parameter in parameters:
            if type(parameter) is self.kind:
                parameter.__class__ = nn.Parameter


def wait_in_front(
    model: nn.Module, part_of: Mapping[int, int], wait: Callable[[Sequence[int]], None]
) -> Iterator[Any]:
    """Let each module wait in front of its forward pass, and give the hooks.

    Args:
        part_of: the part of a parameter or buffer, by its id.
        wait: gets the parts of the module's own ones; in `eval` mode, where a module may read its children's parameters
            by a faster way of its own, of all below it.
    """
    for module in model.modules():
        own, below = (
            tuple(
                {
                    part_of[id(each)]
                    for each in (*module.parameters(deep), *module.buffers(deep))
                    if id(each) in part_of
                }
            )
            for deep in (False, True)
        )
        if below:
            hook = WaitingHook(partial(_wait_for, wait, own, below))
            yield module.register_forward_pre_hook(hook, prepend=True)


def _wait_for(
    wait: Callable[[Sequence[int]], None],
    own: Sequence[int],
    below: Sequence[int],
    module: nn.Module,
) -> None:
    wait(own if module.training else below)


class WaitingHook:
    """A module's hook that waits. A copy of the module has one that does nothing, as has a saved module."""

    def __init__(self, wait: Callable[[nn.Module], None] = lambda module: None) -> None:
        self._wait = wait

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._wait(module)

    def __reduce__(self) -> Any:
        return WaitingHook, ()


class WaitingState(defaultdict[Any, Any]):
    """An optimizer's state that waits before it is read."""

    def __init__(self, state: Mapping[Any, Any], wait: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._wait = wait

    def sort(self, keys: Iterable[Any]) -> None:
        """Put what is there into that order: a whole step would have made it so."""
        found = self.plain()
        dict.clear(self)
        dict.update(self, {key: found.pop(key) for key in keys if key in found})
        dict.update(self, found)

    def plain(self) -> defaultdict[Any, Any]:
        """The same, without waiting."""
        return defaultdict(dict, dict.items(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._wait()
        return self.plain().__reduce_ex__(protocol)


def _guarded(name: str) -> Any:
    method = getattr(defaultdict, name)

    def call(self: WaitingState, *args: Any, **options: Any) -> Any:
        self._wait()
        return method(self, *args, **options)

    return call


_READING = """__getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ __eq__ __repr__ __or__ __ior__
__reversed__ get items keys values pop popitem clear copy setdefault update"""
for _name in _READING.split():
    setattr(WaitingState, _name, _guarded(_name))


class ReplacedStep:
    """An optimizer's `step`, in whose place another function is called with the closure.

    Attributes: `whole`, what it was before.
    """

    def __init__(
        self, optimizer: Optimizer, call: Callable[[Callable[[], Any] | None], Any]
    ) -> None:
        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return call(closure)

        self._optimizer, self.whole = optimizer, optimizer.step
        # What a scheduler looks for at the function that it has put there is at this one too.
        if hasattr(optimizer.step, SCHEDULED):
            setattr(step, SCHEDULED, True)
        self._own = types.MethodType(step, optimizer)
        optimizer.step = self._own  # type: ignore[method-assign]

    def put_back(self) -> None:
        """The optimizer has its own again, unless a third one has been put there."""
        if self._optimizer.__dict__.get("step") is self._own:
            self._optimizer.step = self.whole  # type: ignore[method-assign]
            if not hasattr(self.whole, SCHEDULED):
                del self._optimizer.step
