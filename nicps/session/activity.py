# SPDX-License-Identifier: Apache-2.0
"""What an agent has counted since it began, and the members that a round waits for: the part of the status that
`nicps top` and the metrics show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nicps.session.fields import (
    COUNT,
    FLAG,
    TEXT,
    Field,
    choice,
    listed,
    nullable,
    number,
    record,
    whole,
)
from nicps.wire import MAX_CHANNELS, MAX_MEMBERS

_PART = number(0)
#: What rounds wait for (`nicps.protocol.signals.Late`).
SLOW_WHATS = ("gradient", "sums", "mark")


@dataclass(frozen=True, slots=True)
class Seconds:
    """A distribution of times."""

    bounds: Annotated[
        tuple[float, ...], Field(listed(number(), "numbers"), "upper ends of the classes, rising")
    ]
    counts: Annotated[
        tuple[int, ...],
        Field(
            listed(COUNT, "numbers"), "how many there are in each class; one more, for all above"
        ),
    ]
    sum: Annotated[float, Field(number(0), "all of them together")]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the kernel has counted at the interface, of all protocols."""

    received_bytes: Annotated[int, Field(COUNT, "bytes that came")]
    received_frames: Annotated[int, Field(COUNT, "frames that came")]
    sent_bytes: Annotated[int, Field(COUNT, "bytes that left")]
    sent_frames: Annotated[int, Field(COUNT, "frames that left")]


@dataclass(frozen=True, slots=True)
class MemberActivity:
    """What this host has to do with a member of the list."""

    number: Annotated[int, Field(whole(1, MAX_MEMBERS), "its place in the list")]
    awaited: Annotated[
        bool, Field(FLAG, "whether the open round waits for it, while others are done")
    ]
    samples: Annotated[int, Field(COUNT, "its samples that were counted in training rounds")]
    asked: Annotated[
        int, Field(COUNT, "fragments that it should have sent here, and was asked for again")
    ]
    resent: Annotated[
        int, Field(COUNT, "fragments that this host has sent again to it, and to it alone")
    ]


@dataclass(frozen=True, slots=True)
class SlowActivity:
    """A host, or a Linux switch, that the rounds of training wait for much longer than for the others."""

    number: Annotated[
        int, Field(whole(0, MAX_MEMBERS), "its place in the list; 0 is a Linux switch")
    ]
    part: Annotated[
        float, Field(_PART, "in this part of the time of the last seconds rounds waited for it")
    ]
    what: Annotated[
        str,
        Field(
            choice(*SLOW_WHATS),
            "mostly for this: `gradient`, its own; `sums`, those of its stripe, or of the switch; `mark`, as it lacks"
            " something that others have",
        ),
    ]


#: What a host does in the open round of a channel.
ROUND_STATES = ("open", "offered", "sums", "marked", "done")


@dataclass(frozen=True, slots=True)
class ChannelActivity:
    """A channel of the training phase that is in force (docs/channels.md)."""

    number: Annotated[int, Field(whole(0, MAX_CHANNELS - 1), "its number")]
    urgency: Annotated[int, Field(whole(0, 7), "its rank on the wire; a larger number goes first")]
    step: Annotated[int, Field(COUNT, "the training step that is under way, from 0 in the phase")]
    round: Annotated[int, Field(COUNT, "its open round")]
    place: Annotated[int, Field(COUNT, "which one of its rounds of a step that is, from 0")]
    places: Annotated[int, Field(whole(1), "its rounds of a step")]
    state: Annotated[
        str,
        Field(
            choice(*ROUND_STATES),
            "of that round at this host: `open`, not offered; `offered`, but not all members have; `sums`, which are"
            " on their way; `marked`, all sums are here; `done`, all rounds of this step are committed",
        ),
    ]
    awaits: Annotated[
        tuple[int, ...],
        Field(
            listed(whole(1, MAX_MEMBERS), "numbers"),
            "the members that the open round waits for, while others are done",
        ),
    ]
    rounds: Annotated[int, Field(COUNT, "rounds of that number that were committed, in all jobs")]
    bytes: Annotated[int, Field(COUNT, "bytes of a gradient, as they are sent, in these rounds")]


@dataclass(frozen=True, slots=True)
class Activity:
    """Counted since the agent began, unless it says otherwise."""

    uptime_s: Annotated[float, Field(number(0), "seconds since the agent began")]
    exchange: Annotated[
        str, Field(TEXT, "how the open round becomes one sum (docs/jobs.md); empty without one")
    ]
    lane: Annotated[
        str, Field(TEXT, "the integers on the wire: `i32`, `i16`, `i8`; empty without a round")
    ]
    rounds: Annotated[int, Field(COUNT, "training rounds that were committed")]
    tests: Annotated[int, Field(COUNT, "tests that were committed (R15)")]
    samples: Annotated[int, Field(COUNT, "samples that were counted in training rounds")]
    round_seconds: Annotated[
        Seconds, Field(record(Seconds), "from one commit to the next, in one phase of training")
    ]
    views: Annotated[int, Field(COUNT, "member lists that came into force")]
    evictions: Annotated[
        int, Field(COUNT, "members that were in a list and not in the next one (R17, R18)")
    ]
    returns: Annotated[int, Field(COUNT, "members that came back or were new (R20)")]
    parked: Annotated[bool, Field(FLAG, "whether the token rests at this host")]
    frames_sent: Annotated[int, Field(COUNT, "frames that this agent has sent, fragments included")]
    fragments_resent: Annotated[int, Field(COUNT, "fragments that were sent again")]
    fragments_asked: Annotated[int, Field(COUNT, "fragments that this host has asked for again")]
    members: Annotated[
        tuple[MemberActivity, ...],
        Field(listed(record(MemberActivity), "objects"), "the list, with what was counted"),
    ]
    traffic: Annotated[
        Traffic | None, Field(nullable(record(Traffic)), "null where the interface has gone")
    ]
    preparing: Annotated[
        str,
        Field(
            TEXT,
            "what was submitted here (`job` of `submit`) and is not in the network yet: it is being prepared, or the"
            " others are called; empty where nothing is",
        ),
    ] = ""
    script: Annotated[
        bool, Field(FLAG, "whether the job that is under way is a run of `nicps run` (docs/run.md)")
    ] = False
    pushes: Annotated[int, Field(COUNT, "steps of this host that parameter servers have added")] = 0
    channels: Annotated[
        tuple[ChannelActivity, ...],
        Field(
            listed(record(ChannelActivity), "objects"),
            "of a job with `priorities`, while it trains; otherwise empty",
        ),
    ] = ()
    slow: Annotated[
        tuple[SlowActivity, ...],
        Field(
            listed(record(SlowActivity), "objects"),
            "hosts that the rounds of training wait for much longer than for the others, the slowest first",
        ),
    ] = ()
    switch_asked: Annotated[
        int, Field(COUNT, "sums that this host has asked a Linux switch for again")
    ] = 0
    switch_resent: Annotated[
        int, Field(COUNT, "fragments that this host has sent again to a Linux switch")
    ] = 0
