# SPDX-License-Identifier: Apache-2.0
"""Slow work of the life of a job, which the agent's thread does: the kinds of tasks, and what comes of them.

A `BeginTask` (`nicps.job.actions`) numbers a task; `nicps.job.tasks` says what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from nicps.job.serving import PartOf


class Folder(Enum):
    """A folder for files."""

    PREPARED = "what the preparation of a submitted job has left"
    WORK = "the job's working folder at this host"
    KEPT = "this host's part of the run's folder"


@dataclass(frozen=True, slots=True)
class Settle:
    """Do nothing. It is done after all tasks that began before; files that were handed out are on the disk then."""


@dataclass(frozen=True, slots=True)
class ReserveAccumulators:
    """Make accumulators of so many blocks a bank, if any; the outcome is a number for them, or `StripesRefused`.

    `room`: fragments in a bank of own lanes and sums, which stripes need; `places`: blocks in a bank of the own stripe.
    0: make none. `rooms`, `stripes`: the same by channel, where there are several.
    """

    blocks: int
    room: int = 0
    places: int = 0
    rooms: tuple[int, ...] = ()
    stripes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StripesRefused:
    """The outcome of a `ReserveAccumulators` with `room`: this host's kernel refuses the program for stripes."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReserveServed:
    """Load the program of parameter servers, and make a store of `room` fragments of parameters and own lanes of
    `pushes` fragments, if any; `own`: also the program of servers that train. The outcome is a number for the store, or
    `StripesRefused`.
    """

    room: int
    pushes: int
    own: bool = False


@dataclass(frozen=True, slots=True)
class FillPart:
    """Make the own part out of the weights that the training program has given; the outcome is a number for it."""

    part: PartOf


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Read the own part for the training program: the next `Pulled` that is posted has it."""

    part: PartOf


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open files for a hand-out; the outcome is a `StreamSize`."""

    stream: int
    folder: Folder
    files: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StreamSize:
    """The length of a stream, and its index."""

    size: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class StoreWindow:
    """Store `size` bytes of a hand-out: from the round's bank, or at its source out of `stream`.

    The outcome is a `Stored` of the last window, otherwise None. `reads_job`: a job was handed out, whose
    `prepared.json` is then read.
    """

    round: int
    window: int
    fragments: int
    size: int
    last: bool
    stream: int
    reads_job: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """All of a hand-out is on the disk: the stream's digest, and the job's `prepared.json` if it was to be read."""

    digest: str
    prepared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeepCheckpoint:
    """Copy that state of the training program into the run's folder, with the files that `nicps resume` needs."""

    name: str


@dataclass(frozen=True, slots=True)
class KeepResidual:
    """Copy the training program's residual into the run's folder, beside the checkpoint."""


@dataclass(frozen=True, slots=True)
class KeepRecords:
    """Copy the training program's files, and this host's facts, into the run's folder.

    The outcome is the names of the files that the lead collects. `last_round`: no record can be of a later one.
    """

    facts: Mapping[str, Any]
    last_round: int


@dataclass(frozen=True, slots=True)
class MakeResult:
    """Summarise the run of these hosts; the outcome is the result, which is left in the run's folder with the model."""

    job: str
    names: Sequence[str]
    last_round: int
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DrawReport:
    """Draw the run: `python -m ENTRY report`."""

    job: str
    entry: str


Task: TypeAlias = (
    Settle
    | ReserveAccumulators
    | ReserveServed
    | FillPart
    | ReadPart
    | OpenStream
    | StoreWindow
    | KeepCheckpoint
    | KeepResidual
    | KeepRecords
    | MakeResult
    | DrawReport
)
