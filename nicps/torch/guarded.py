# SPDX-License-Identifier: Apache-2.0
"""Tensors, and an optimizer's state, that wait before their value is used (docs/channels.md, "Pending")."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_GETTERS = """grad grad_fn shape dtype device layout ndim requires_grad is_leaf is_sparse is_cuda is_cpu is_meta
is_quantized is_mkldnn is_nested itemsize nbytes _version"""
_METHODS = """size dim numel nelement ndimension element_size is_floating_point is_complex
get_device"""
_Tensor: Any = torch.Tensor
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
