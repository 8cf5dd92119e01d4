# SPDX-License-Identifier: Apache-2.0
"""What a training program and its gateway say in the form `json`: the one definition, version 1.

The program asks, and the gateway answers each message with one message, in order. docs/socket.md has its tables from
here (`python -m nicps.wiregen`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from nicps.session.fields import (
    ANYTHING,
    COUNT,
    DIGEST,
    FLAG,
    MOST_SAMPLES,
    OBJECT,
    ROUND,
    SAMPLES,
    TEXT,
    VIEW,
    Conversation,
    Field,
    Message,
    by_number,
    choice,
    constant,
    listed,
    nullable,
    record,
    whole,
)
from nicps.session.messages import MEMBER, VERSION, Error, Ok
from nicps.session.shared_form import DECISIONS, PHASE

MOST_TALLY = (1 << 31) - 1  # a lane on the wire

OPEN_ROUND = whole(1, MOST_SAMPLES)
TALLY = whole(0, MOST_TALLY)


# ---- getting ready


@dataclass(frozen=True, slots=True)
class Attach(Message):
    """Be the training program. The agent takes this message, and gives the connection to the gateway."""

    op: ClassVar[str] = "attach"
    form: Annotated[str, Field(constant("json"), "this form")]
    version: Annotated[int, Field(whole(VERSION, VERSION), "of these messages")] = VERSION


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The program is attached."""

    op: ClassVar[str] = "welcome"
    version: Annotated[int, Field(whole(VERSION, VERSION), "of these messages")]
    number: Annotated[int, Field(MEMBER, "this member's number, from 1")]
    members: Annotated[int, Field(MEMBER, "how many members there are")]
    name: Annotated[str, Field(TEXT, "this host's name")]
    view: Annotated[int, Field(VIEW, "the number of the list in force")]
    lead: Annotated[bool, Field(FLAG, "whether this member acts as node 1 (R22)")]
    settings: Annotated[Mapping[str, Any], Field(OBJECT, "the job's settings")]
    workdir: Annotated[str, Field(TEXT, "the folder with the files")]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of a round's vector."""

    name: Annotated[str, Field(TEXT, "its name")]
    shape: Annotated[tuple[int, ...], Field(listed(COUNT, "whole numbers"), "its shape")]


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The model is built."""

    op: ClassVar[str] = "ready"
    parameters: Annotated[
        tuple[Parameter, ...],
        Field(
            listed(record(Parameter), "objects"), "every entry of a round's vector, in its order"
        ),
    ]
    digest: Annotated[str, Field(DIGEST, "of model and state, the same on all members")]


@dataclass(frozen=True, slots=True)
class Next(Message):
    """What comes next? The answer comes when the network has got that far."""

    op: ClassVar[str] = "next"


@dataclass(frozen=True, slots=True)
class Phase(Message):
    """What comes next."""

    op: ClassVar[str] = "phase"
    kind: Annotated[
        str,
        Field(
            choice("train", "test", "save", "load", "end"),
            "`train`: rounds from `first_round` on; `test`: that one round; `save`, `load`: see below",
        ),
    ]
    first_round: Annotated[int, Field(ROUND, "the first round of the phase")]
    number: Annotated[int, Field(PHASE, "the number of the phase")]
    shares: Annotated[
        tuple[int, ...],
        Field(
            listed(SAMPLES, "whole numbers"),
            "the members' parts of a round by number, in samples; 0: that member is not counted",
        ),
    ]
    view: Annotated[int, Field(VIEW, "the number of the list in force")]
    live: Annotated[tuple[int, ...], Field(listed(MEMBER, "members"), "the members that are in")]
    lead: Annotated[bool, Field(FLAG, "whether this member acts as node 1 (R22)")]


# ---- a training round


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """A micro-batch is done."""

    op: ClassVar[str] = "progress"
    round: Annotated[int, Field(OPEN_ROUND, "the open round")]
    samples: Annotated[int, Field(SAMPLES, "samples of the round so far")]


@dataclass(frozen=True, slots=True)
class State(Message):
    """How far the round is."""

    op: ClassVar[str] = "state"
    round: Annotated[int, Field(OPEN_ROUND, "the open round")]
    need: Annotated[
        int | None,
        Field(
            nullable(COUNT),
            "samples of this member that are still enough for the quorum; null as long as no member has contributed",
        ),
    ]
    closed: Annotated[bool, Field(FLAG, "the round closes without this member: stop computing")]


@dataclass(frozen=True, slots=True)
class Contribute(Message):
    """This member's gradient. A member contributes at most once a round."""

    op: ClassVar[str] = "contribute"
    round: Annotated[int, Field(OPEN_ROUND, "the open round")]
    gradient: Annotated[
        Any,
        Field(
            ANYTHING,
            "the **sum** over `samples` samples, at most the member's share, as in"
            " [gradient-json.md](gradient-json.md)",
        ),
    ]


@dataclass(frozen=True, slots=True)
class Wait(Message):
    """Is the round committed? The answer comes when it is, or when the phase is over."""

    op: ClassVar[str] = "wait"
    round: Annotated[int, Field(OPEN_ROUND, "the open round")]


@dataclass(frozen=True, slots=True)
class Committed(Message):
    """Every member has the round's sum."""

    op: ClassVar[str] = "committed"
    round: Annotated[int, Field(OPEN_ROUND, "that round")]
    samples: Annotated[int, Field(COUNT, "samples that were counted (n in R12)")]
    counted: Annotated[
        Mapping[int, int],
        Field(by_number(SAMPLES, "an object"), "samples of each counted member, by its number"),
    ]
    gradient: Annotated[
        Any, Field(ANYTHING, "the sum over the counted members; null where none was counted")
    ]
    view: Annotated[int, Field(VIEW, "the number of the list in force")]
    live: Annotated[tuple[int, ...], Field(listed(MEMBER, "members"), "the members that are in")]
    lead: Annotated[bool, Field(FLAG, "whether this member acts as node 1 (R22)")]
    checkpoint: Annotated[
        bool, Field(FLAG, "once it has applied the sum, the lead is to write a checkpoint")
    ] = False


@dataclass(frozen=True, slots=True)
class Discarded(Message):
    """The phase has ended before the round was committed. Nothing of the round counts; ask for the `next` phase."""

    op: ClassVar[str] = "discarded"
    round: Annotated[int, Field(OPEN_ROUND, "that round")]


@dataclass(frozen=True, slots=True)
class Applied(Message):
    """The weights are updated. The program says so after every `committed`."""

    op: ClassVar[str] = "applied"
    round: Annotated[int, Field(OPEN_ROUND, "the committed round")]
    digest: Annotated[str, Field(DIGEST, "of the state, which must be the same on all members")]


# ---- state


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """The answer to the phase `save`: `workdir`/state.npz is written, or `error` says why it is not."""

    op: ClassVar[str] = "saved"
    number: Annotated[int, Field(PHASE, "the number of the phase")]
    round: Annotated[int, Field(ROUND, "rounds that have been trained")]
    digest: Annotated[str, Field(DIGEST, "of the state")]
    error: Annotated[str, Field(TEXT, "why it is not written")] = ""


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """The answer to the phase `load`: what was in `workdir`/state.npz is this member's state now.

    The member is counted only if the digest is right.
    """

    op: ClassVar[str] = "loaded"
    number: Annotated[int, Field(PHASE, "the number of the phase")]
    digest: Annotated[str, Field(DIGEST, "of the state")]


@dataclass(frozen=True, slots=True)
class Checkpoint(Message):
    """`workdir`/checkpoint.npz is written anew.

    Only the lead says so: after a round whose `committed` says `checkpoint`, and at the end.
    """

    op: ClassVar[str] = "checkpoint"
    round: Annotated[int, Field(ROUND, "rounds that have been trained")]


# ---- a test round, and the end


@dataclass(frozen=True, slots=True)
class Tally(Message):
    """What this member's part of the test records came to."""

    op: ClassVar[str] = "tally"
    round: Annotated[int, Field(OPEN_ROUND, "the open round")]
    succeeded: Annotated[int, Field(TALLY, "records with the right answer")]
    failed: Annotated[int, Field(TALLY, "records with a wrong one")]


@dataclass(frozen=True, slots=True)
class Tallied(Message):
    """What the test records of all members came to (R15)."""

    op: ClassVar[str] = "tallied"
    round: Annotated[int, Field(OPEN_ROUND, "that round")]
    succeeded: Annotated[int, Field(COUNT, "records with the right answer")]
    failed: Annotated[int, Field(COUNT, "records with a wrong one")]
    view: Annotated[int, Field(VIEW, "the number of the list in force")]
    live: Annotated[tuple[int, ...], Field(listed(MEMBER, "members"), "the members that are in")]
    lead: Annotated[bool, Field(FLAG, "whether this member acts as node 1 (R22)")]


@dataclass(frozen=True, slots=True)
class Decide(Message):
    """What this member would do next (R14). Every member says so after **every** round; only the lead's word counts.

    Whoever becomes the lead is heard then. After a test, and as the lead after `test`, ask for the `next` phase; the
    others go on until the phase is over.
    """

    op: ClassVar[str] = "decide"
    round: Annotated[int, Field(OPEN_ROUND, "the round that was committed")]
    what: Annotated[str, Field(choice(*DECISIONS), "what comes next")]
    checkpoint: Annotated[
        bool,
        Field(FLAG, "`checkpoint_s` is over: as the lead it writes one after the next round"),
    ] = False


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Live progress. It is shown on the host that submitted if it comes from the lead."""

    op: ClassVar[str] = "report"
    values: Annotated[
        Mapping[str, Any], Field(OBJECT, "what is shown; a value called `warning` is shown as one")
    ]


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """The program is at work.

    It says so where it has nothing else to say for longer than the job's `stall_s` ([jobs.md](jobs.md)): after that
    time without a word the agent starts the program again.
    """

    op: ClassVar[str] = "alive"


@dataclass(frozen=True, slots=True)
class Fail(Message):
    """The program cannot go on. The job is stopped everywhere."""

    op: ClassVar[str] = "fail"
    message: Annotated[str, Field(TEXT, "why, in one line")]


Request: TypeAlias = (
    Ready
    | Next
    | Progress
    | Contribute
    | Wait
    | Applied
    | Saved
    | Loaded
    | Checkpoint
    | Tally
    | Decide
    | Report
    | Alive
    | Fail
)
REQUESTS: Conversation[Request] = Conversation(
    "the gateway",
    *(Ready, Next, Progress, Contribute, Wait, Applied, Saved, Loaded, Checkpoint),
    *(Tally, Decide, Report, Alive, Fail),
)
Reply: TypeAlias = Ok | Error | Welcome | Phase | State | Committed | Discarded | Tallied
REPLIES: Conversation[Reply] = Conversation(
    "a training program", Ok, Error, Welcome, Phase, State, Committed, Discarded, Tallied
)
#: What answers a message, besides an error.
ANSWERS: dict[type[Message], tuple[type[Message], ...]] = {
    Attach: (Welcome,),
    Ready: (Ok,),
    Next: (Phase,),
    Progress: (State,),
    Contribute: (Ok,),
    Wait: (Committed, Discarded),
    Applied: (Ok,),
    Saved: (Ok,),
    Loaded: (Ok,),
    Checkpoint: (Ok,),
    Tally: (Tallied, Discarded),
    Decide: (Ok,),
    Report: (Ok,),
    Alive: (Ok,),
    Fail: (),
}
