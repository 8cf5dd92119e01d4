# SPDX-License-Identifier: Apache-2.0
"""What a run goes on from: one file, written anew after each epoch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.dbn.settings import Settings
from trainer.dbn.vectors import Vector
from trainer.errors import FolderError, JobError
from trainer.whole import write_whole

NAME = "checkpoint.npz"
Row = dict[str, Any]


@dataclass
class State:
    """A run after an epoch. Phases and epochs count from 0; `epoch` is the next one."""

    settings: Settings
    data: str  # its digest
    place: str | None = None  # the folder that the data were read from
    phase: int = 0
    epoch: int = 0
    done: list[Vector] = field(
        default_factory=list
    )  # the RBMs that are trained, as they were after pre-training
    mean: Vector | None = None  # None: the phase has not begun
    previous: Vector | None = None  # the mean before
    rows: list[Row] = field(default_factory=list)  # one an epoch
    seconds: float = 0.0


def make(folder: Path) -> None:
    """The folder of a run.

    Raises:
        JobError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot make {folder}: {error.strerror}") from None


def unmake(folder: Path) -> None:
    """Take the folder of a run away, if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def save(state: State, folder: Path) -> None:
    """Write it; a file that was there stays whole until then.

    Raises:
        JobError: the file cannot be written.
    """
    vectors = {f"done{at}": vector for at, vector in enumerate(state.done)}
    for name in ("mean", "previous"):
        if (vector := getattr(state, name)) is not None:
            vectors[name] = vector
    told = {
        "settings": asdict(state.settings),
        "data": state.data,
        "place": state.place,
        "phase": state.phase,
        "epoch": state.epoch,
        "rows": state.rows,
        "seconds": state.seconds,
    }
    text = np.array(json.dumps(told))
    write_whole(folder / NAME, lambda file: np.savez(file, told=text, **vectors))


def load(folder: Path) -> State:
    """The state that was saved last.

    Raises:
        FolderError: there is none.
        JobError: it cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        raise FolderError(
            f"{folder} has no {NAME}: --resume names the folder of a run of `nicps dbn`"
        )
    try:
        if not zipfile.is_zipfile(path):
            raise JobError("it is damaged, or no checkpoint")
        with np.load(path, allow_pickle=False) as file:
            told = json.loads(str(file["told"]))
            vectors = {name: file[name] for name in file.files if name != "told"}
        told["settings"]["layers"] = tuple(told["settings"]["layers"])
        settings = Settings(**told.pop("settings"))
        done = [
            vectors[f"done{at}"] for at in range(sum(name.startswith("done") for name in vectors))
        ]
        return State(
            settings=settings,
            done=done,
            mean=vectors.get("mean"),
            previous=vectors.get("previous"),
            **told,
        )
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(zipfile.BadZipFile, JobError),
    ) as error:
        raise JobError(f"cannot read {path}: {error}") from None


def digest(vectors: Sequence[Vector]) -> str:
    """SHA-256 over vectors, in hexadecimal."""
    found = hashlib.sha256()
    for vector in vectors:
        found.update(vector.tobytes())
    return found.hexdigest()
