# SPDX-License-Identifier: Apache-2.0
"""What an agent and its training program say in the form `shared` (`nicps.client.Session`): the one definition.

Gradients and sums are in shared memory; these messages say when. They belong to one version of nicps: both sides come
from the same installation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from nicps.exchange import Exchange
from nicps.session.fields import (
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
    Kind,
    Message,
    by_number,
    choice,
    listed,
    nullable,
    number,
    record,
    whole,
)
from nicps.session.messages import MEMBER, NO_MEMBER, Error
from nicps.session.served_form import NearLimit, Pull, Pulled, Serves, Step, Stepped
from nicps.wire import MAX_CHANNELS

MOST_LANES = 1 << 33
LEAST_UNIT, MOST_UNIT = -120, 126

PHASE = whole(0, (1 << 32) - 1)
UNIT = whole(LEAST_UNIT, MOST_UNIT)
CONVERSION = whole(0, (1 << 32) - 1)
UNIT_IN_FORCE = whole(-128, 127)  # as the token carries it
_NAME = choice("broadcast", "stripes", "switch", "linux-switch", "servers")
EXCHANGE = Kind(
    _NAME.text, lambda value: Exchange.named(_NAME.read(value)), lambda exchange: exchange.name
)
#: Settings by which a job's training steps take several rounds: factors of low rank, and gradients in buckets.
SEVERAL_ROUNDS = ("rank", "bucket_mb")
DECISIONS = ("continue", "test", "end")
CHANNEL = whole(0, MAX_CHANNELS - 1)


def has_steps(settings: Mapping[str, Any]) -> bool:
    """Whether a job's training steps take several rounds, each of a size of its own."""
    return not is_planned(settings) and any(settings.get(key) for key in SEVERAL_ROUNDS)


def is_planned(settings: Mapping[str, Any]) -> bool:
    """Whether a job's training steps take the rounds of a plan, on several channels (docs/channels.md)."""
    return bool(settings.get("priorities")) and not is_served(settings)


def is_served(settings: Mapping[str, Any]) -> bool:
    """Whether a job with these settings has parameter servers."""
    return str(settings.get("system", "R")) != "R"


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """The plan of one channel: its rounds in a training step."""

    urgency: Annotated[int, Field(whole(0, 7), "its rank on the wire; a larger number goes first")]
    rounds: Annotated[
        tuple[int, ...],
        Field(
            listed(whole(1), "whole numbers"),
            "fragments of each of its rounds, in order; of a group, of its largest round",
        ),
    ]


@dataclass(frozen=True, slots=True)
class PhaseChannel(ChannelPlan):
    """A channel of a phase that begins, or goes on."""

    open: Annotated[int, Field(ROUND, "its open round")]


PLAN = listed(record(ChannelPlan), "objects")


# ---- a training program to its agent


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The model is built."""

    op: ClassVar[str] = "ready"
    lanes: Annotated[int, Field(whole(1, MOST_LANES), "float32 values of a round's vector")]
    digest: Annotated[str, Field(DIGEST, "of model and state; the same on all members")]
    channels: Annotated[
        tuple[ChannelPlan, ...],
        Field(PLAN, "of a job with `priorities`: the first plan of a step, by channel"),
    ] = ()


@dataclass(frozen=True, slots=True)
class Prepared(Message):
    """The program is in the phase of that number."""

    op: ClassVar[str] = "prepared"
    number: Annotated[int, Field(PHASE, "the phase's")]


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """A micro-batch is done."""

    op: ClassVar[str] = "progress"
    round: Annotated[int, Field(ROUND, "the open one")]
    samples: Annotated[int, Field(SAMPLES, "samples of the round so far")]


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """The program has a gradient, and converts it into the arena."""

    op: ClassVar[str] = "offer"
    round: Annotated[int, Field(ROUND, "the open one; by a plan, also the one after it")]
    samples: Annotated[int, Field(whole(1, MOST_SAMPLES), "samples that it is the sum over")]
    unit: Annotated[
        int | None,
        Field(
            nullable(UNIT),
            "log2 of the unit asked for in the next round; in stripes the gradient's exponent, or more",
        ),
    ]
    skip: Annotated[bool, Field(FLAG, "the gradient is too large for the unit of its round")]
    conversion: Annotated[
        int, Field(CONVERSION, "in stripes, of the records that are offered; otherwise 0")
    ] = 0
    channel: Annotated[int, Field(CHANNEL, "whose round it is")] = 0


@dataclass(frozen=True, slots=True)
class Read(Message):
    """The sum of a round has been read and applied."""

    op: ClassVar[str] = "read"
    round: Annotated[int, Field(ROUND, "that round")]
    digest: Annotated[str, Field(DIGEST, "of the state after it; empty where there is none")]
    channel: Annotated[int, Field(CHANNEL, "whose round it is")] = 0


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """The state file is complete, or `error` says why it is not."""

    op: ClassVar[str] = "saved"
    number: Annotated[int, Field(PHASE, "the phase's")]
    round: Annotated[int, Field(ROUND, "rounds that have been trained")]
    digest: Annotated[str, Field(DIGEST, "of the state")]
    error: Annotated[str, Field(TEXT, "why nothing is saved")] = ""


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """The state file has been read."""

    op: ClassVar[str] = "loaded"
    number: Annotated[int, Field(PHASE, "the phase's")]
    digest: Annotated[str, Field(DIGEST, "of the state that the program has now")]


@dataclass(frozen=True, slots=True)
class Checkpoint(Message):
    """The checkpoint is written anew, or `error` says why it is not."""

    op: ClassVar[str] = "checkpoint"
    round: Annotated[int, Field(ROUND, "rounds that have been trained")]
    error: Annotated[str, Field(TEXT, "why nothing is written")] = ""


@dataclass(frozen=True, slots=True)
class Residual(Message):
    """`residual.npz` is written into the working folder; or `error` says why not, or why the former one is dropped."""

    op: ClassVar[str] = "residual"
    error: Annotated[str, Field(TEXT, "in one line")] = ""


@dataclass(frozen=True, slots=True)
class Decide(Message):
    """What this member would do after a round (R14)."""

    op: ClassVar[str] = "decide"
    round: Annotated[int, Field(ROUND, "the round that is committed")]
    what: Annotated[
        str,
        Field(
            choice(*DECISIONS, "more", "admit", "plan"),
            'what comes next; "more": of the same step, another round; "admit": of a group, hosts that wait; "plan":'
            " as `continue`, with another plan, or with other channels of a group",
        ),
    ]
    checkpoint: Annotated[
        bool, Field(FLAG, "as the lead it will write a checkpoint after the next round")
    ] = False
    channels: Annotated[tuple[ChannelPlan, ...], Field(PLAN, "that plan, by channel")] = ()
    channel: Annotated[int, Field(CHANNEL, "of a group: whose round it is")] = 0


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Live progress for whoever watches the job."""

    op: ClassVar[str] = "report"
    values: Annotated[
        Mapping[str, Any], Field(OBJECT, "what is shown; `warning` is shown as a warning")
    ]


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """The program is at work."""

    op: ClassVar[str] = "alive"


@dataclass(frozen=True, slots=True)
class Fail(Message):
    """The job cannot go on here; the agent stops it everywhere."""

    op: ClassVar[str] = "fail"
    message: Annotated[str, Field(TEXT, "why, in one line")]


FromProgram: TypeAlias = (
    Ready
    | Prepared
    | Progress
    | Offer
    | Read
    | Saved
    | Loaded
    | Checkpoint
    | Residual
    | Decide
    | Report
    | Alive
    | Fail
    | Step
    | Pull
)
FROM_PROGRAM: Conversation[FromProgram] = Conversation(
    "the agent",
    *(Ready, Prepared, Progress, Offer, Read, Saved, Loaded),
    *(Checkpoint, Residual, Decide, Report, Alive, Fail),
    *(Step, Pull),
)


# ---- an agent to its training program


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the network."""

    number: Annotated[int, Field(MEMBER, "its number")]
    name: Annotated[str, Field(TEXT, "its host's name")]


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The program is attached."""

    op: ClassVar[str] = "welcome"
    number: Annotated[int, Field(MEMBER, "this member's")]
    members: Annotated[tuple[Member, ...], Field(listed(record(Member), "members"), "the list")]
    name: Annotated[str, Field(TEXT, "this host's name")]
    lead: Annotated[int, Field(NO_MEMBER, "the member that acts as node 1 (R22)")]
    settings: Annotated[Mapping[str, Any], Field(OBJECT, "the job's settings")]
    workdir: Annotated[str, Field(TEXT, "where the files are")]
    view: Annotated[int, Field(VIEW, "the view in force")]


@dataclass(frozen=True, slots=True)
class Store(Message):
    """Of a group: with it comes a connection to the store that its members share (`nicps.session.store_form`)."""

    op: ClassVar[str] = "store"


@dataclass(frozen=True, slots=True)
class Arena(Message):
    """The memory that gradients go out from. With it come its descriptor and the doorbell's.

    With `state` comes that of this host's residual file (`nicps.session.residual_file`).
    """

    op: ClassVar[str] = "arena"
    fragments: Annotated[int, Field(COUNT, "fragments that it has room for")]
    state: Annotated[
        str, Field(DIGEST, "of the state that the job is resumed from; empty: there is no file")
    ] = ""


@dataclass(frozen=True, slots=True)
class Direct(Message):
    """Of a group: what a program needs for direct calls (docs/direct.md). Descriptors come in this order: the desks,
    the numbers, the interface, and for each channel that there can be the ring that wakes its thread.
    """

    op: ClassVar[str] = "direct"
    share: Annotated[
        float, Field(number(), "of the time, that urgent calls may take beside less urgent rounds")
    ]


@dataclass(frozen=True, slots=True)
class Phase(Message):
    """What comes next. Descriptors come in this order: with `blocks` the accumulators' and the slots', with `room` the
    own records' and the sums', with `places` the remainders'.
    """

    op: ClassVar[str] = "phase"
    kind: Annotated[str, Field(choice("train", "test", "save", "load", "end"), "what to do")]
    first_round: Annotated[int, Field(ROUND, "the first round of the phase")]
    number: Annotated[int, Field(PHASE, "the phase's")]
    unit: Annotated[
        int, Field(UNIT_IN_FORCE, "log2 of what the first round's numbers are multiples of")
    ]
    shares: Annotated[
        tuple[int, ...], Field(listed(SAMPLES, "whole numbers"), "samples of a round, by member")
    ]
    exchange: Annotated[Exchange, Field(EXCHANGE, "how the sums are made")]
    view: Annotated[int, Field(VIEW, "the view in force")]
    live: Annotated[tuple[int, ...], Field(listed(MEMBER, "members"), "who is in the view")]
    lead: Annotated[int, Field(NO_MEMBER, "the member that acts as node 1 (R22)")]
    blocks: Annotated[
        int, Field(COUNT, "blocks in a bank of new accumulators; 0: the old ones")
    ] = 0
    room: Annotated[
        int, Field(COUNT, "fragments in a bank of new own records and sums; 0: the old ones")
    ] = 0
    places: Annotated[
        int, Field(COUNT, "blocks in a bank of the own stripe's new places; 0: the old ones")
    ] = 0
    channels: Annotated[
        tuple[PhaseChannel, ...],
        Field(
            listed(record(PhaseChannel), "objects"),
            "the plan, in a phase with several channels, or several planned rounds a step; none: one channel",
        ),
    ] = ()
    stripes: Annotated[
        tuple[int, ...],
        Field(listed(COUNT, "whole numbers"), "of several channels: the parts of `places`"),
    ] = ()


@dataclass(frozen=True, slots=True)
class View(Message):
    """Hosts have come or gone; the phase goes on. With `places` comes the remainders' descriptor."""

    op: ClassVar[str] = "view"
    view: Annotated[int, Field(VIEW, "the view in force")]
    live: Annotated[tuple[int, ...], Field(listed(MEMBER, "members"), "who is in the view")]
    lead: Annotated[int, Field(NO_MEMBER, "the member that acts as node 1 (R22)")]
    round: Annotated[int, Field(ROUND, "the open round")]
    places: Annotated[
        int, Field(COUNT, "blocks in a bank of the own stripe's new places; 0: the old ones")
    ] = 0
    stripes: Annotated[
        tuple[int, ...],
        Field(listed(COUNT, "whole numbers"), "of several channels: the parts of `places`"),
    ] = ()


@dataclass(frozen=True, slots=True)
class Committed(Message):
    """All members have the round's sum."""

    op: ClassVar[str] = "committed"
    round: Annotated[int, Field(ROUND, "that round")]
    counted: Annotated[
        Mapping[int, int], Field(by_number(SAMPLES, "an object"), "samples by member number")
    ]
    unit: Annotated[int, Field(UNIT_IN_FORCE, "log2 of what its numbers are multiples of")]
    next_unit: Annotated[int, Field(UNIT_IN_FORCE, "the same, of the next round")]
    exchange: Annotated[Exchange, Field(EXCHANGE, "how the sum was made")]
    seconds_waited: Annotated[
        float, Field(number(), "from this member's offer to the commit, without its own sending")
    ]
    view: Annotated[int, Field(VIEW, "the view under which the sum was made")] = 0
    aggregators: Annotated[
        tuple[int, ...],
        Field(
            listed(NO_MEMBER, "members"),
            "in stripes, by their ranks; 0 is a Linux switch",
        ),
    ] = ()
    checkpoint: Annotated[
        bool, Field(FLAG, "the lead writes a checkpoint of the state after it (R22)")
    ] = False
    channel: Annotated[int, Field(CHANNEL, "whose round it is")] = 0
    seconds_listed: Annotated[
        float, Field(number(), "from this member's offer until all others had offered")
    ] = 0.0


@dataclass(frozen=True, slots=True)
class Keep(Message):
    """No majority is left: save the state, and answer with `checkpoint`."""

    op: ClassVar[str] = "keep"


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """The job was stopped."""

    op: ClassVar[str] = "abort"
    message: Annotated[str, Field(TEXT, "why, in one line")]
    saved: Annotated[
        bool, Field(FLAG, "its state is saved (R22): the program has a moment for its residual")
    ] = False


@dataclass(frozen=True, slots=True)
class Late(Message):
    """The group is under way: the program comes into it with `group` and `late`. The connection ends."""

    op: ClassVar[str] = "late"
    members: Annotated[int, Field(MEMBER, "in the group's list, with those that are lost")]


FromAgent: TypeAlias = (
    Error
    | Welcome
    | Store
    | Arena
    | Direct
    | Phase
    | View
    | Committed
    | Keep
    | Abort
    | Late
    | Serves
    | Stepped
    | Pulled
    | NearLimit
)
FROM_AGENT: Conversation[FromAgent] = Conversation(
    "a training program",
    *(Error, Welcome, Store, Arena, Direct, Phase, View, Committed, Keep, Abort, Late),
    *(Serves, Stepped, Pulled, NearLimit),
)
