# SPDX-License-Identifier: Apache-2.0
"""Where a job's figures go beside its metrics: TensorBoard, or a class of the job's own (setting `trackers`).

Only the lead writes there. A tracker that fails is a warning, and training goes on without it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from nicps.extras import missing_extra
from trainer.errors import JobError
from trainer.settings import Settings, flat

TENSORBOARD = "tensorboard"


class Tracker(Protocol):
    """What takes a run's figures."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures by name, after `step` rounds of training."""

    def close(self) -> None:
        """Nothing more comes."""


#: Makes a tracker of a folder, which may not be there yet, the job's name, and its settings by key.
Maker: TypeAlias = Callable[[Path, str, Mapping[str, Any]], Tracker]


class TensorBoard:
    """Event files that TensorBoard shows, in FOLDER/tensorboard."""

    def __init__(self, folder: Path, job: str, settings: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / TENSORBOARD), flush_secs=10)
        self._writer.add_text("settings", f"{job}: {json.dumps(dict(settings))}", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar for each figure."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """All is in the files."""
        self._writer.close()


class Trackers:
    """The trackers that a job's settings name. They are opened by the first figures.

    Args:
        out: the folder for what this member leaves of the run, where `tracker_dir` names none.
        warn: takes one line.
    """

    def __init__(
        self, settings: Settings, job: str, out: Path, warn: Callable[[str], None]
    ) -> None:
        self._settings, self._job, self._out, self._warn = settings, job, out, warn
        self._open: dict[str, Tracker] | None = None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Give the figures to all of them; what is no number is left out."""
        if self._open is None:
            self._open = dict(self._opened())
        figures = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, figures)
            except Exception as error:
                del self._open[name]
                self._give_up(name, error)

    def close(self) -> None:
        """Close those that are open."""
        opened, self._open = self._open or {}, None
        for name, tracker in opened.items():
            try:
                tracker.close()
            except Exception as error:
                with contextlib.suppress(Exception):  # the agent may have gone
                    self._give_up(name, error)

    def _opened(self) -> Iterator[tuple[str, Tracker]]:
        folder = self._out
        if self._settings.tracker_dir:
            run = f"{self._job}-{time.strftime('%Y%m%d-%H%M%S')}"
            folder = Path(self._settings.tracker_dir) / run
        for name in names(self._settings):
            try:
                yield name, find(name)(folder, self._job, flat(self._settings))
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        text = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        self._warn(f"tracker {name} has failed, and gets nothing more: {' '.join(text.split())}")


def names(settings: Settings) -> list[str]:
    """The trackers that the settings name."""
    return [name for part in (settings.trackers or "").split(",") if (name := part.strip())]


def find(name: str) -> Maker:
    """What makes the tracker of that name: "tensorboard", or "module:Class" of a module that the job brings.

    Raises:
        JobError: there is no such tracker.
        EnvironmentProblem: a package of an extra is missing.
    """
    module, _, made = name.partition(":")
    try:
        if name == TENSORBOARD:
            importlib.import_module("tensorboardX")
            return TensorBoard
        if not made:
            raise JobError(
                f"setting trackers names {name!r}; it must be {TENSORBOARD} or module:Class"
            )
        maker = getattr(importlib.import_module(module), made)
    except ModuleNotFoundError as error:
        raise missing_extra(error) or JobError(f"setting trackers: {error}") from None
    except AttributeError:
        raise JobError(f"setting trackers: module {module} has no {made}") from None
    if not callable(maker):
        raise JobError(f"setting trackers: {name} is not a class")
    return maker  # type: ignore[no-any-return]


def check(settings: Settings) -> None:
    """Look for all trackers, on the host that starts the job.

    Raises:
        JobError, EnvironmentProblem: as `find`.
    """
    for name in names(settings):
        find(name)
