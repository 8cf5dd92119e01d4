# SPDX-License-Identifier: Apache-2.0
"""The order in which a training step needs a model's tensors: that of their first use in the forward pass (P2).

The first use is seen where PyTorch's functions are called. So it is found for modules that are called twice, for
parameters that several modules share, and for those that a module takes from another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def order_of_need(model: nn.Module, run: Callable[[nn.Module], object]) -> list[str]:
    """Names of all parameters and buffers: first those that `run` uses, by their first use, then the others.

    Of what is used by the same call, and of what is not used at all, the model's own order counts. A parameter that has
    several names has the first of them.

    Args:
        run: calls the model on some samples.
    """
    named: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        named.setdefault(id(tensor), name)
    uses = Uses(named)
    with uses:
        run(model)
    return [*uses.order, *(name for name in named.values() if name not in uses.seen)]


class Uses(TorchFunctionMode):
    """Sees every call of PyTorch's functions.

    Args:
        named: tensors that are looked for, by their ids.

    Attributes: `order`, `seen`: the names of those that were used.
    """

    def __init__(self, named: dict[int, str]) -> None:
        super().__init__()
        self._named = named
        self._places = {name: at for at, name in enumerate(named.values())}
        self.order: list[str] = []
        self.seen: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # a shape or a device is no use
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            fresh = {self._named[id(t)] for t in given if id(t) in self._named} - self.seen
            self.order += sorted(fresh, key=self._places.__getitem__)
            self.seen |= fresh
        return func(*args, **kwargs)
