# SPDX-License-Identifier: Apache-2.0
"""What an agent and its training program say of parameter servers (docs/servers.md), in the form `shared`.

Steps and parameters are in shared memory; these messages say when. They are part of `shared_form`'s two conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nicps import wire
from nicps.session.fields import (
    COUNT,
    FLAG,
    MOST_SAMPLES,
    ROUND,
    VIEW,
    Field,
    Message,
    listed,
    number,
    whole,
)
from nicps.session.messages import MEMBER

_NUMBER = whole(1, (1 << 32) - 1)  # of a step or a pull
_VERSION = VIEW
_SET = whole(0, 2)
_EVERY = whole(0, (1 << 31) - 1)
PULLED_WIDTH = 32  # bits of the lanes in which parameters are pulled, whatever is pushed


def second_begins(sets: Sequence[int]) -> int:
    """The first fragment of set 2 (B1). The fragment in which both sets meet belongs to set 1.

    Args:
        sets: numbers of each set, as the prepared job has them.
    """
    return -(-int(sets[0]) // wire.lanes_per_fragment(PULLED_WIDTH))


# ---- a training program to its agent


@dataclass(frozen=True, slots=True)
class Step(Message):
    """A step is in the own records. It is pushed, or it is offered to the synchronisation that is due: what follows is
    `stepped`, or the round's `committed`.
    """

    op: ClassVar[str] = "step"
    round: Annotated[int, Field(ROUND, "the open one")]
    samples: Annotated[int, Field(whole(1, MOST_SAMPLES), "samples that it comes from")]
    skip: Annotated[
        bool, Field(FLAG, "there is no step: the program waits for the end of the round")
    ] = False


@dataclass(frozen=True, slots=True)
class Pull(Message):
    """All parameters are wanted; `pulled` follows."""

    op: ClassVar[str] = "pull"
    round: Annotated[int, Field(ROUND, "the open one")]


# ---- an agent to its training program


@dataclass(frozen=True, slots=True)
class Serves(Message):
    """Which members serve in the training phase that comes next. Descriptors come in this order: with `room` the own
    records' and the store's, with `lanes` that of a memory file.

    The program writes its weights `first` to `first + lanes` into that file, as float32, before it is `prepared`.
    """

    op: ClassVar[str] = "serves"
    servers: Annotated[tuple[int, ...], Field(listed(MEMBER, "members"), "by rank")]
    every: Annotated[
        int, Field(_EVERY, "a synchronisation is due after so many pushes at a server; 0: none is")
    ]
    sets: Annotated[
        int, Field(COUNT, "the first fragment of the second set; 0: workers have no partners")
    ] = 0
    room: Annotated[int, Field(COUNT, "fragments in a new store; 0: the old one")] = 0
    pushes: Annotated[int, Field(COUNT, "fragments in new own records; 0: the old ones")] = 0
    first: Annotated[int, Field(COUNT, "the first parameter of the own part")] = 0
    lanes: Annotated[int, Field(COUNT, "parameters of the own part; 0: it is not filled here")] = 0
    own_set: Annotated[
        int, Field(_SET, "the set that comes first at this worker, of 2 (B3); 0: it is none")
    ] = 0


@dataclass(frozen=True, slots=True)
class Stepped(Message):
    """All servers have added the step."""

    op: ClassVar[str] = "stepped"
    round: Annotated[int, Field(ROUND, "the open one")]
    number: Annotated[int, Field(_NUMBER, "the step's")]
    version: Annotated[int, Field(_VERSION, "the highest that a server has told, with this step")]
    staleness: Annotated[
        tuple[int, ...],
        Field(listed(_VERSION, "whole numbers"), "how stale the step was at each server"),
    ]


@dataclass(frozen=True, slots=True)
class Pulled(Message):
    """All parameters are in the store. With `lanes` comes the descriptor of a memory file: the part of this host, which
    serves and does not train, as float32.
    """

    op: ClassVar[str] = "pulled"
    round: Annotated[int, Field(ROUND, "the open one")]
    number: Annotated[int, Field(_NUMBER, "the pull's")]
    first: Annotated[int, Field(COUNT, "the first parameter of the file")] = 0
    lanes: Annotated[int, Field(COUNT, "parameters in the file; 0: there is none")] = 0
    lost: Annotated[
        bool,
        Field(FLAG, "nothing has come, and nothing will: a server has gone, or no round is open"),
    ] = False


@dataclass(frozen=True, slots=True)
class NearLimit(Message):
    """A parameter of the own part has come so near the limits that no more steps are added to it: the job fails."""

    op: ClassVar[str] = "near_limit"
    index: Annotated[int, Field(COUNT, "where in the vector")]
    value: Annotated[float, Field(number(), "what it is")]
