# SPDX-License-Identifier: Apache-2.0
"""A training program that starts quickly: PyTorch's import costs seconds of processor time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nicps.startup import permanent

_COMPILER = "torch._dynamo"


class _Compiler(ModuleType):
    """Stands for PyTorch's compiler until somebody asks it to compile.

    Every optimizer imports it (over a second of CPU) only to tell it that its methods are not to be compiled, which
    goes without saying as long as nothing is.
    """

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Any:
        """Of PyTorch's own optimizers: as they are. Of anybody else: the real one."""
        if fn is not None and fn.__module__.startswith("torch.optim."):
            return fn
        return self._real().disable(fn, *args, **options)

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Nothing is compiled, so there is nothing to break."""

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            # `inspect` asks all modules for it, also in the middle of another import.
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return importlib.import_module(_COMPILER)


def import_torch() -> None:
    """Import PyTorch, but not its compiler until the job asks for it."""
    with permanent():
        import torch

        if _COMPILER not in sys.modules:
            sys.modules[_COMPILER] = torch._dynamo = _Compiler(_COMPILER)  # type: ignore[assignment]
