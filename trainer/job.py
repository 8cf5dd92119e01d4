# SPDX-License-Identifier: Apache-2.0
"""A job's `job.py`, loaded: its functions, called so that an error in them names its line.

User code is imported here, in an unprivileged process, and nowhere else.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from nicps.errors import NicpsError, UsageProblem
from nicps.extras import missing_extra
from nicps.steps import StepEnded
from trainer.errors import JobError, SettingError
from trainer.settings import Settings, State, check, implied, merge

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Batch = dict[str, Tensor]

REQUIRED = ("model", "loss", "data", "optimizer", "success")
MODULE = "nicps_job"


class Job:
    """A loaded job folder.

    Attributes: `name` (the folder's), `folder`, `settings` (with the overrides in; the module's own
    `settings` is replaced by them, so that its functions see them).
    """

    def __init__(self, folder: Path, module: ModuleType, settings: Settings, name: str) -> None:
        self.folder = folder
        self.name = name
        self._module = module
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """These are the settings from now on."""
        self.settings = settings
        self._module.__dict__["settings"] = settings

    def blame(self, function: str) -> Blame:
        """A context in which an exception is the job's, in `function`, and becomes a JobError."""
        return Blame(self.folder, f"{function}()")

    def data(self, path: str | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The training and the test set, as NumPy arrays by field name."""
        with self.blame("data"):
            sets = self._module.data(path)
        if not (isinstance(sets, tuple) and len(sets) == 2):
            raise JobError(f"{self._where('data')} must return two sets: train, test")
        return sets

    def model(self) -> nn.Module:
        """The model, built under the settings' seed: the same on every host."""
        import torch
        from torch import nn

        torch.manual_seed(self.settings.seed)
        with self.blame("model"):
            model = self._module.model()
        if not isinstance(model, nn.Module):
            raise JobError(f"{self._where('model')} must return a torch.nn.Module, not {model!r}")
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch's samples, a scalar with a gradient."""
        with self.blame("loss"):
            loss: Tensor = self._module.loss(model, batch)
        if not hasattr(loss, "backward") or loss.dim() != 0:
            raise JobError(
                f"{self._where('loss')} must return a tensor with one value, the mean loss "
                f"over the samples"
            )
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to the parameters'."""
        with self.blame("loss"):
            loss.backward()  # type: ignore[no-untyped-call]

    def success(self, model: nn.Module, batch: Batch) -> tuple[int, int]:
        """How many of the batch's samples succeeded and failed (R15)."""
        with self.blame("success"):
            verdicts: Tensor = self._module.success(model, batch)
        size = len(next(iter(batch.values())))
        if str(getattr(verdicts, "dtype", "")) != "torch.bool" or tuple(verdicts.shape) != (size,):
            raise JobError(
                f"{self._where('success')} must return one boolean a sample: a torch.bool tensor "
                f"of shape ({size},)"
            )
        succeeded = int(verdicts.sum())
        return succeeded, size - succeeded

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters."""
        import torch

        with self.blame("optimizer"):
            optimizer = self._module.optimizer(list(parameters))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(f"{self._where('optimizer')} must return a torch.optim.Optimizer")
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer, rounds: int | None) -> Any:
        """The learning rate's scheduler, stepped after every round; None where the job has none."""
        if not hasattr(self._module, "scheduler"):
            return None
        with self.blame("scheduler"):
            return self._module.scheduler(optimizer, rounds)

    def branches(self, model: nn.Module) -> list[list[str]] | None:
        """B1: names of modules, a list for each parallel branch; None where the job does not name them."""
        if not hasattr(self._module, "branches"):
            return None
        with self.blame("branches"):
            lists = self._module.branches(model)
        shaped = isinstance(lists, list | tuple) and all(
            isinstance(of, list | tuple) for of in lists
        )
        if not (shaped and all(isinstance(name, str) for of in lists for name in of)):
            raise JobError(
                f"{self._where('branches')} must return lists of module names, one for each branch"
            )
        return [list(of) for of in lists]

    def done(self, state: State, records: int) -> bool:
        """R14: whether the planned rounds are over, or the job's own `done` says so."""
        planned = self.settings.planned_rounds(records)
        if planned is not None and state.round >= planned:
            return True
        if not hasattr(self._module, "done"):
            return False
        with self.blame("done"):
            return bool(self._module.done(state))

    def _where(self, function: str) -> str:
        return f"job.py: {function}()"


class Blame(AbstractContextManager[None]):
    """Turns exceptions of user code into a JobError: type, message, file:line, function."""

    def __init__(self, folder: Path, during: str) -> None:
        self._folder = folder
        self._during = during

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, JobError) or not isinstance(error, Exception | SystemExit):
            return
        # What a module's wait has raised, in front of its forward pass.
        if isinstance(error, StepEnded | NicpsError) and not isinstance(error, UsageProblem):
            return
        if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error)):
            raise missing from error
        raise JobError(describe(error, self._folder, self._during)) from error


def describe(error: BaseException, folder: Path, during: str) -> str:
    """One line: `ValueError: no such thing (job.py:12, in loss())`."""
    place = during
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(folder):
            inside = "" if frame.name.strip("<>") == "module" else f", in {frame.name}()"
            place = f"{Path(frame.filename).relative_to(folder)}:{frame.lineno}{inside}"
            break
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        place = f"{Path(error.filename).name}:{error.lineno}"
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{type(error).__name__}: {message} ({place})" if message else f"{error!r} ({place})"


def load(folder: Path, overrides: Mapping[str, Any], name: str | None = None) -> Job:
    """Import FOLDER/job.py and merge `overrides` into its settings.

    Args:
        name: what the job is called; the folder's name by default.

    Raises:
        JobError: no job.py, a name missing in it, an exception in it, or a wrong setting in it.
        SettingError: one of the overrides is wrong.
        OSError: it cannot be read.
    """
    folder = folder.resolve()
    path = folder / "job.py"
    if not path.is_file():
        raise JobError(f"no job.py in {folder}: a job is a folder with a job.py (docs/jobs.md)")
    path.open("rb").close()  # who cannot read it has made no mistake in it
    sys.dont_write_bytecode = True
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # for the modules beside job.py
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses and type hints look it up there
    with Blame(folder, "job.py"):
        spec.loader.exec_module(module)
    absent = [item for item in REQUIRED if not callable(getattr(module, item, None))]
    if absent:
        raise JobError(f"{path}: no function {', '.join(absent)} (docs/jobs.md has an example)")
    settings = getattr(module, "settings", None)
    if not isinstance(settings, Settings):
        raise JobError(f"{path}: no `settings = Settings(...)` (docs/jobs.md has an example)")
    check(implied(settings))
    try:
        merged = merge(settings, overrides)
    except JobError as error:
        raise SettingError(str(error)) from None
    if merged.epochs is None and merged.rounds is None and not hasattr(module, "done"):
        raise JobError(f"{path}: no end: set `epochs` or `rounds` in settings, or define done()")
    return Job(folder, module, merged, name or folder.name)
