# SPDX-License-Identifier: Apache-2.0
"""Orders of the parts of a job to the node and to one another. Those to the host are in `nicps.job.actions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from nicps.job.actions import Action
from nicps.job.slow_work import StreamSize
from nicps.protocol import Joiner, Offer, Phase, Source
from nicps.protocol.plan import ChannelPlan

# ---- to the node


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """This host is ready for the decision of that number (`Node.prepared`)."""

    number: int
    answer: bytes = b""


@dataclass(frozen=True, slots=True)
class NeedRoom:
    """The model's size is known: so many fragments of lanes so wide, for a Linux switch (`Node.need_room`)."""

    fragments: int
    width: int


@dataclass(frozen=True, slots=True)
class MarkReady:
    """So many samples of the round are done (`Node.progress`, R13)."""

    round: int
    samples: int


@dataclass(frozen=True, slots=True)
class MarkRead:
    """The sum of that round has been read out (`Node.read`); `digest` is of the state after it, 0 for none.

    `channel`: whose round it is.
    """

    round: int
    digest: int = 0
    channel: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot go on here, and so at no host (`Node.fail`)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The user here cancels the job: its lead saves and stops it (`Node.cancel`)."""


@dataclass(frozen=True, slots=True)
class Decide:
    """The lead: let all members prepare this phase (`Node.decide`); `Course.decision_agreed` follows."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class CommitNext:
    """The lead: the next round of that channel may be committed (`Node.go_on`, R14); with `saves` it saves the state
    after that.
    """

    saves: bool = False
    channel: int = 0


@dataclass(frozen=True, slots=True)
class RebuildView:
    """The lead: take these hosts into the view (`Node.rebuild`, R20); `Course.view_installed` follows."""

    joiners: tuple[Joiner, ...]


@dataclass(frozen=True, slots=True)
class Evict:
    """The weights of these members differ from the rest: evict them (`Node.evict`)."""

    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class CallHosts:
    """The lead: call hosts on standby from now on for this job, or no more (`Node.call_hosts`)."""

    job: str
    calls: bool
    closed: bool


# ---- to one another


class Saving(Enum):
    """The reason why the training program saves its state."""

    STATE = "for hosts that come back (R20)"
    ALARM = "before the job is stopped (R22)"


@dataclass(frozen=True, slots=True)
class OpenHandOut:
    """The course: prepare a hand-out, "job", "files" or "state"; `Course.stream_opened` follows."""

    purpose: str


@dataclass(frozen=True, slots=True)
class SaveState:
    """The lead: let the training program here write its state; `StateSaved` follows, and `Course.model_saved`."""

    saving: Saving


@dataclass(frozen=True, slots=True)
class OfferStream:
    """The lead: this stream is handed out next."""

    purpose: str
    stream: int
    size: StreamSize


@dataclass(frozen=True, slots=True)
class PublishEvent:
    """The lead: publish an event to the job's submitter and watchers (docs/socket.md)."""

    event: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Warn:
    """This host: publish a warning that ends nothing to the operator and the watchers."""

    text: str


@dataclass(frozen=True, slots=True)
class ShowTrouble:
    """This host stands by in the middle of a job: as `Warn`, and in `nicps status`; `hook`: run the alarm's hook
    with it.
    """

    text: str
    hook: bool = False


@dataclass(frozen=True, slots=True)
class Depart:
    """R17: this host cannot go on now, and comes back.

    Attributes: `agreed`, the others agree on it; without a majority nobody can, and this host does not wait for that.
    """

    reason: str
    agreed: bool = True


@dataclass(frozen=True, slots=True)
class BeginStep:
    """With servers: the training program has a step, which `offer` is of. It is pushed, or offered."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class BeginPull:
    """With servers: the training program needs parameters, from these; all of them by default."""

    round: int
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class HandOutEnded:
    """A hand-out has ended here, and so everywhere."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class ModelBuilt:
    """The training program has built the model."""


@dataclass(frozen=True, slots=True)
class StateSaved:
    """The training program has written its state, or `error` is the reason why not."""

    saving: Saving
    error: str


@dataclass(frozen=True, slots=True)
class RoundJudged:
    """The training program has decided what follows a round: "continue", "test" or "end" (R14, R15).

    `saves`: if it is the lead's, it will write a checkpoint after the next round. "plan": as "continue", with `plan`.
    `channel`: of a group, whose round it is.
    """

    round: int
    what: str
    saves: bool = False
    plan: tuple[ChannelPlan, ...] = ()
    channel: int = 0


@dataclass(frozen=True, slots=True)
class Reported:
    """The training program's live progress."""

    values: Mapping[str, Any]


Order: TypeAlias = (
    Action
    | Acknowledge
    | Offer
    | NeedRoom
    | MarkReady
    | MarkRead
    | Fail
    | Cancel
    | Decide
    | CommitNext
    | RebuildView
    | Evict
    | CallHosts
    | OpenHandOut
    | SaveState
    | OfferStream
    | PublishEvent
    | Warn
    | ShowTrouble
    | Depart
    | BeginStep
    | BeginPull
    | HandOutEnded
    | ModelBuilt
    | StateSaved
    | RoundJudged
    | Reported
)
Orders: TypeAlias = list[Order]
