# SPDX-License-Identifier: Apache-2.0
"""The actions of the life of a job at its host. They are carried out in order; their outcomes are events of `Life`.

Frames for the LAN are the node's (`nicps.protocol.Send`). Slow work is a `Task`, which a `BeginTask` numbers:
`Life.task_done` or `Life.task_failed` answers it. Tasks are done one after the other, in the order in which they began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from nicps.job.script import LaunchScript
from nicps.job.slow_work import Task
from nicps.job.under_way import UnderWay
from nicps.protocol import Committed, Narrow, Phase, Send, SendFragments, SendServed, View
from nicps.session import shared_form
from nicps.session.fields import Message

# ---- the LAN and the kernel


class Source(Enum):
    """The source of a fragment's payload."""

    PROGRAM = "the training program's memory"
    STREAM = "the stream that this host hands out"
    NOTHING = "nowhere: empty fragments only ask a switch for its sums"


@dataclass(frozen=True, slots=True)
class Transmit:
    """Broadcast fragments of this host's contribution; `Life.fragments_sent` once the kernel has them all."""

    fragments: SendFragments
    phase: Phase
    source: Source
    stream: int = 0  # used if that is the source


@dataclass(frozen=True, slots=True)
class TransmitServed:
    """Send fragments of this worker's step to a server, or questions for parameters."""

    fragments: SendServed
    phase: Phase


@dataclass(frozen=True, slots=True)
class DropFragments:
    """Drop the parts of this host's contributions that have not been sent; each `Transmit` counts as sent."""


@dataclass(frozen=True, slots=True)
class EnterView:
    """Let the kernel and the keys take frames of this view, in which this host has `number`."""

    view: View
    number: int


@dataclass(frozen=True, slots=True)
class LeaveView:
    """Let the kernel take no tokens and fragments until there is a view again."""


@dataclass(frozen=True, slots=True)
class CountFragments:
    """For the job's records: count the fragments of that round that the kernel has taken, in the view that it is in.

    `channel`: whose round it is.
    `listed`: with parameter servers, so many contributions are in each fragment of the own part; None without servers.
    """

    round: int
    listed: int | None = None
    channel: int = 0


@dataclass(frozen=True, slots=True)
class UseAccumulators:
    """Use the outcome of a `ReserveAccumulators`; the former ones are freed once no process reads them any more.

    `Life.room_made` follows.
    """

    accumulators: int


@dataclass(frozen=True, slots=True)
class DropAccumulators:
    """Free the outcome of a `ReserveAccumulators`, which is not needed."""

    accumulators: int


@dataclass(frozen=True, slots=True)
class RenewAccumulators:
    """Use new accumulators of so many blocks a bank at once, and new maps of stripes; 0: keep the present ones.

    `room`: fragments in a bank of own lanes and sums. The own stripe has no places then. `rooms`: the same by channel,
    where there are several.
    """

    blocks: int
    room: int = 0
    rooms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RetirePlaces:
    """The own stripe is another one, in a view that the kernel has just entered: it has no places until others are
    made.

    The training program keeps the content of the old ones.
    """


@dataclass(frozen=True, slots=True)
class UseServed:
    """The outcome of a `ReserveServed` or a `FillPart` comes into use; the former one goes."""

    served: int


@dataclass(frozen=True, slots=True)
class DropServed:
    """The outcome of a `FillPart` is not needed."""

    served: int


@dataclass(frozen=True, slots=True)
class BeginServing:
    """A phase with servers begins with that round. Nothing that a round has come to that was dropped counts any more.

    `forget`: members whose steps have low numbers again. `room`: fragments of parameters in the vector. `staleness`: a
    push counts by that. `serves`: this host serves in it.
    """

    first_round: int
    forget: frozenset[int]
    room: int
    staleness: bool
    serves: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """A round is committed with a list: what its steps come to is added to the own part's parameters from now on."""

    round: int


# ---- the training program


@dataclass(frozen=True, slots=True)
class StartProgram:
    """Run the job's training program, the `program`-th at this host: `python -m ENTRY run`, or the user's own.

    `adopts`: the program of a group. It runs already, and waits at the agent's socket or connects to it.
    """

    program: int
    entry: str
    network_access: bool
    adopts: bool = False


@dataclass(frozen=True, slots=True)
class EndProgram:
    """End it, in any state, and free the memory that is shared with it; no more messages of it are handled.

    `saved`: its state is saved, and it has a moment to write its residual beside that.
    """

    program: int
    reason: str
    saved: bool = False


@dataclass(frozen=True, slots=True)
class ShareArena:
    """Make the memory that a gradient of so many fragments is sent from, and give it to the program.

    A job that goes on from a checkpoint of the run `resumed`, with the digest `state`, gives it this host's residual of
    that run, too.
    """

    program: int
    fragments: int
    resumed: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class ShowNeed:
    """In the shared memory: set the number of samples that still make the quorum of the round (R13)."""

    program: int
    round: int
    samples: int


@dataclass(frozen=True, slots=True)
class ShowClosed:
    """In the shared memory: set that the round closes without this member."""

    program: int
    round: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer the program that has connected: send this message, and the folder of the job's files."""

    program: int
    message: shared_form.Welcome


@dataclass(frozen=True, slots=True)
class Post:
    """A message to the program (docs/socket.md); dropped if it has closed its connection."""

    program: int
    message: Message


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """Send the program a message for a phase of the network's.

    In the shared memory set its number as the newest phase, and reopen all rounds from its first one on. With `blocks`
    send the accumulators' descriptors.
    """

    program: int
    message: shared_form.Phase


# ---- files


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job has come to this host: make its working folder."""

    job: str


@dataclass(frozen=True, slots=True)
class CloseJob:
    """The job is over: once its programs are gone and the tasks that have begun are done, remove its files.

    `keep_records`: copy the records of agent and programs into the run's folder first. `saved`: copy the residual too,
    as the job's state is saved.
    """

    keep_records: bool = False
    saved: bool = False


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """For the job's time line, at once: an event at this host, while that round is open (docs/jobs.md)."""

    kind: str
    round: int
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NoteCommit:
    """For the job's time line: a training step, or a test, is committed here, with that round.

    `counted`: samples by member number. `rounds`: the number of rounds of the step; with a plan those of channel 0.
    """

    round: int
    test: bool
    counted: Mapping[int, int] = field(default_factory=dict)
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class NoteRound:
    """For the job's time line, and for counts by channel: a round of a step by a plan is committed here."""

    commit: Committed


@dataclass(frozen=True, slots=True)
class Receive:
    """Open the receiving end of a hand-out, in place of the former one.

    `collected_from`: a member whose records come; they go into the run's folder under that name. Otherwise files go
    into the working folder. `keep`: write the files; otherwise only hash the stream.
    """

    size: int
    index_bytes: int
    number: int
    members: int
    keep: bool
    collected_from: str = ""


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close a stream, from which nothing more is read."""

    stream: int


@dataclass(frozen=True, slots=True)
class RemoveState:
    """The state that was handed out has been loaded: remove its file, since the next one may be another."""


@dataclass(frozen=True, slots=True)
class CloseSubmission:
    """The job that was submitted here no longer needs its preparation: end the preparation, and remove its files."""

    submission: int


@dataclass(frozen=True, slots=True)
class GroupCalled:
    """The lead of a group under way calls hosts on standby: a program here may wait for that."""

    group: UnderWay


# ---- users


@dataclass(frozen=True, slots=True)
class Log:
    """One line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class Publish:
    """A message to the watchers and, if one was submitted here, to the submitter of that job (docs/socket.md)."""

    message: Message
    submission: int = 0


@dataclass(frozen=True, slots=True)
class RunHook:
    """R18, R22: run the user's command for an alarm."""

    reason: str


# ---- tasks


@dataclass(frozen=True, slots=True)
class BeginTask:
    """Begin this task."""

    ticket: int
    task: Task


Action: TypeAlias = (
    Send
    | Narrow
    | Transmit
    | TransmitServed
    | DropFragments
    | EnterView
    | LeaveView
    | CountFragments
    | UseAccumulators
    | DropAccumulators
    | RenewAccumulators
    | RetirePlaces
    | UseServed
    | DropServed
    | BeginServing
    | Settled
    | StartProgram
    | EndProgram
    | ShareArena
    | ShowNeed
    | ShowClosed
    | Welcome
    | Post
    | EnterPhase
    | OpenJob
    | CloseJob
    | NoteEvent
    | NoteCommit
    | NoteRound
    | Receive
    | CloseStream
    | RemoveState
    | CloseSubmission
    | GroupCalled
    | LaunchScript
    | Log
    | Publish
    | RunHook
    | BeginTask
)
