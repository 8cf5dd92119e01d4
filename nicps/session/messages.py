# SPDX-License-Identifier: Apache-2.0
"""Commands at the agent's socket, and what the agent answers: the one definition.

docs/socket.md has its tables from here (`python -m nicps.wiregen`). What a training program says is in `json_form`
and `shared_form`; the events of a job are in `events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from nicps.errors import (
    Alarm,
    Cancelled,
    EnvironmentProblem,
    JobFailed,
    MessageError,
    NetworkProblem,
    NicpsError,
    UsageProblem,
)
from nicps.session.activity import Activity
from nicps.session.events import EVENTS, Event
from nicps.session.fields import (
    COUNT,
    FLAG,
    OBJECT,
    ROUND,
    TEXT,
    VIEW,
    Conversation,
    Field,
    Message,
    choice,
    listed,
    nullable,
    number,
    or_empty,
    path,
    record,
    whole,
)
from nicps.wire import MAX_MEMBERS

VERSION = 1
LEAST_PROBE_S, MOST_PROBE_S = 0.05, 3.0

MEMBER = whole(1, MAX_MEMBERS)
NO_MEMBER = whole(0, MAX_MEMBERS)


# ---- commands


@dataclass(frozen=True, slots=True)
class AskStatus(Message):
    """What is the state of this host, its network and its job?"""

    op: ClassVar[str] = "status"


@dataclass(frozen=True, slots=True)
class Watch(Message):
    """Send the events that this host has from now on, and the result or the error of every job."""

    op: ClassVar[str] = "watch"


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """Run a job. The agent reads what the paths name, and runs it, as the training user."""

    op: ClassVar[str] = "submit"
    job: Annotated[str, Field(path(), "the folder with job.py, or a checkpoint's job.tar")]
    data: Annotated[str | None, Field(nullable(path()), "where the job finds its data")] = None
    settings: Annotated[
        Mapping[str, Any] | None,
        Field(nullable(OBJECT), "settings of the job, in place of those that job.py has"),
    ] = None
    resume: Annotated[str | None, Field(nullable(path()), "the checkpoint to go on from (R22)")] = (
        None
    )
    entry: Annotated[
        str | None,
        Field(
            nullable(TEXT),
            "the Python module that prepares; prepared.json names the one that trains",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class AskProbe(Message):
    """Measure the LAN. The agent refuses while a job is under way; a job that begins ends the measurement."""

    op: ClassVar[str] = "probe"
    seconds: Annotated[
        float, Field(number(LEAST_PROBE_S, MOST_PROBE_S), "how long each train of frames lasts")
    ] = 1.0


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Leave the network. The connection ends when the agent has left and its program is off the interface."""

    op: ClassVar[str] = "leave"


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """End the job that is under way, on all hosts; the lead saves it first. The network stays."""

    op: ClassVar[str] = "cancel"


@dataclass(frozen=True, slots=True)
class Attach(Message):
    """Be the training program of the job here, in one of two forms: see [training programs](#training-programs)."""

    op: ClassVar[str] = "attach"
    form: Annotated[str, Field(choice("shared", "json"), "how gradients and sums travel")] = (
        "shared"
    )
    pid: Annotated[
        int | None, Field(nullable(whole(0, (1 << 31) - 1)), "the program's process")
    ] = None


@dataclass(frozen=True, slots=True)
class JoinGroup(Message):
    """Be a member of a group of programs: see [collective.md](collective.md). The answer comes once it has formed."""

    op: ClassVar[str] = "group"
    name: Annotated[str, Field(TEXT, "the group's name, the same on all hosts")]
    size: Annotated[int, Field(NO_MEMBER, "hosts of the group; 0: all whose agents stand by")] = 0
    timeout_s: Annotated[
        float, Field(number(0.1, 1e6), "after so long without the others: an error")
    ] = 300.0
    late: Annotated[
        bool, Field(FLAG, "come into the group that is under way, which must be admitting")
    ] = False


Command: TypeAlias = AskStatus | Watch | Submit | AskProbe | Cancel | Leave | Attach | JoinGroup
COMMANDS: Conversation[Command] = Conversation(
    "the agent", AskStatus, Watch, Submit, AskProbe, Cancel, Leave, Attach, JoinGroup
)


def decode_command(raw: Mapping[str, Any]) -> Command:
    """A command, of what JSON has.

    Raises:
        MessageError: it is none, it is of another version, or one of its fields is missing or wrong.
    """
    check_version(raw)
    return COMMANDS.decode(raw)


def check_version(raw: Mapping[str, Any]) -> None:
    """Refuse a message that says it is of another version.

    Raises:
        MessageError: it does.
    """
    version = raw.get("version", VERSION)
    if type(version) is not int or version != VERSION:
        shown = "of that form" if isinstance(version, list | dict) else repr(version)[:20]
        raise MessageError(
            f"version {shown} of the socket's messages is unknown; this nicps speaks {VERSION}"
        )


# ---- answers


@dataclass(frozen=True, slots=True)
class Ok(Message):
    """It is done."""

    op: ClassVar[str] = "ok"


@dataclass(frozen=True, slots=True)
class Error(Message):
    """It cannot be done, or the job has failed."""

    op: ClassVar[str] = "error"
    message: Annotated[str, Field(TEXT, "what is wrong and what to do: one line for people")]
    exit_code: Annotated[
        int, Field(whole(0, 255), "the exit code that a command should end with (README)")
    ]

    @classmethod
    def of(cls, error: NicpsError) -> Error:
        """What tells another process of an error."""
        return cls(str(error), error.exit_code)

    @property
    def error(self) -> NicpsError:
        """The error that was told."""
        kinds: tuple[type[NicpsError], ...]
        kinds = (UsageProblem, EnvironmentProblem, NetworkProblem, JobFailed, Alarm, Cancelled)
        known = {kind.exit_code: kind for kind in kinds}
        error = known.get(self.exit_code, NicpsError)(self.message)
        error.exit_code = self.exit_code  # it may be a script's
        return error


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One host of the list."""

    number: Annotated[int, Field(MEMBER, "its place in the list")]
    mac: Annotated[str, Field(TEXT, "its MAC address")]
    name: Annotated[str, Field(TEXT, "its name")]
    state: Annotated[
        str,
        Field(
            TEXT,
            "`left`, `standby`, `member`, or while a phase is under way its name; in training `computing` or `sent`",
        ),
    ]
    is_self: Annotated[bool, Field(FLAG, "this host", key="self")]
    role: Annotated[
        str,
        Field(TEXT, "`server` or `worker` in a job with parameter servers; empty otherwise"),
    ] = ""


@dataclass(frozen=True, slots=True)
class LastJob:
    """How a job ended."""

    job_id: Annotated[str, Field(TEXT, "the run's name, empty where it had none yet")]
    error: Annotated[str | None, Field(nullable(TEXT), "why it failed; null if it ended well")]
    result: Annotated[Mapping[str, Any], Field(OBJECT, "as in the message `result`")]


@dataclass(frozen=True, slots=True)
class Status(Message):
    """The state of a host, its network and its job."""

    op: ClassVar[str] = "status"
    network: Annotated[str, Field(TEXT, "the network's name, as `nicps join` was told")]
    name: Annotated[str, Field(TEXT, "this host's name")]
    iface: Annotated[str, Field(TEXT, "the interface")]
    keyed: Annotated[bool, Field(FLAG, "whether the network has a key")]
    xdp_mode: Annotated[str, Field(TEXT, "`native` or `generic`")]
    state: Annotated[
        str, Field(choice("standby", "forming", "member"), "what this host does in the network")
    ]
    trouble: Annotated[
        str,
        Field(
            TEXT,
            "why this host stands by in the middle of a job, in one line; empty where all is well. Without a"
            " majority `state` is still `member`, and this says who cannot be heard, and where the model was saved",
        ),
    ]
    warning: Annotated[
        str,
        Field(
            TEXT,
            "what the user should look into though the host works: frames with a tag of another key, of hosts or of"
            " a switch that adds; empty where all is well",
        ),
    ]
    switch: Annotated[
        str,
        Field(
            TEXT,
            "of a Linux switch that adds: `adds`, `ready`, `believed`, or in one line why it cannot add, or is not"
            " believed; empty where none is heard",
        ),
    ]
    other_job: Annotated[
        str,
        Field(
            TEXT,
            "a job of the network that is under way without this host and admits no new ones: this host takes part in"
            " the next; empty where none is known",
        ),
    ]
    phase: Annotated[str, Field(TEXT, "`handout`, `train`, `test`, `finish`; empty between them")]
    view: Annotated[int, Field(VIEW, "the number of the member list")]
    round: Annotated[int, Field(ROUND, "the open round")]
    number: Annotated[
        int, Field(NO_MEMBER, "this host's number in the list; 0 where there was no list yet")
    ]
    lead: Annotated[int, Field(NO_MEMBER, "the number of the host that acts as node 1; 0: none")]
    members: Annotated[
        tuple[MemberStatus, ...], Field(listed(record(MemberStatus), "hosts"), "the list")
    ]
    job: Annotated[str | None, Field(nullable(TEXT), "the run's name; null without one")]
    progress: Annotated[
        Mapping[str, Any], Field(OBJECT, "what this host's training program reported last")
    ]
    last_job: Annotated[
        LastJob | None,
        Field(
            or_empty(record(LastJob)),
            "the last job that was submitted here or led from here; `{}` before",
        ),
    ]
    token_turns: Annotated[int, Field(COUNT, "turns of the token since the agent began")]
    fragments_sent: Annotated[int, Field(COUNT, "fragments sent since the agent began")]
    frames_malformed: Annotated[
        int, Field(COUNT, "frames that could not be read, since the agent began")
    ]
    control_refused: Annotated[
        Mapping[str, int], Field(OBJECT, "control frames that were refused, by reason")
    ]
    counters: Annotated[
        Mapping[str, int], Field(OBJECT, "the XDP program's counters, by name (protocol.md)")
    ]
    activity: Annotated[
        Activity | None,
        Field(nullable(record(Activity)), "what was counted ([monitoring.md](monitoring.md))"),
    ] = None


@dataclass(frozen=True, slots=True)
class Train:
    """A train of frames that was sent."""

    rate_bps: Annotated[
        float | None, Field(nullable(number()), "the rate asked for; null: as fast as it goes")
    ]
    sent: Annotated[int, Field(COUNT, "frames")]
    offered_bps: Annotated[float, Field(number(), "the rate that the sender came to")]


@dataclass(frozen=True, slots=True)
class TrainSeen:
    """What another host has counted of a train."""

    received: Annotated[int, Field(COUNT, "frames")]
    rate_bps: Annotated[float, Field(number(), "the rate at which they came")]


@dataclass(frozen=True, slots=True)
class TagsSeen:
    """What another host has counted of the train with 802.1p tags."""

    received: Annotated[int, Field(COUNT, "frames")]
    tagged: Annotated[int, Field(COUNT, "those whose tags have reached its XDP program")]


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Times from a question to its answer."""

    min: Annotated[float, Field(number(), "the least")]
    median: Annotated[float, Field(number(), "the one in the middle")]
    max: Annotated[float, Field(number(), "the most")]


@dataclass(frozen=True, slots=True)
class ProbedHost:
    """Another host that was measured."""

    name: Annotated[str, Field(TEXT, "its name")]
    mac: Annotated[str, Field(TEXT, "its MAC address")]
    answers: Annotated[int, Field(COUNT, "questions that it answered")]
    round_trip_us: Annotated[
        RoundTrips | None,
        Field(nullable(record(RoundTrips)), "round trips in microseconds; null of none"),
    ]
    trains: Annotated[
        tuple[TrainSeen | None, ...],
        Field(
            listed(nullable(record(TrainSeen)), "objects"), "every train; null without an answer"
        ),
    ]
    tags: Annotated[
        TagsSeen | None,
        Field(nullable(record(TagsSeen)), "the train with tags; null without an answer"),
    ] = None


@dataclass(frozen=True, slots=True)
class Probe(Message):
    """The LAN, as measured from this host."""

    op: ClassVar[str] = "probe"
    name: Annotated[str, Field(TEXT, "this host's name")]
    iface: Annotated[str, Field(TEXT, "the interface")]
    destination: Annotated[str, Field(TEXT, "the MAC address that frames are sent to")]
    questions: Annotated[int, Field(COUNT, "questions asked for round trips")]
    trains: Annotated[tuple[Train, ...], Field(listed(record(Train), "objects"), "what was sent")]
    hosts: Annotated[
        tuple[ProbedHost, ...], Field(listed(record(ProbedHost), "objects"), "who answered")
    ]
    tagged: Annotated[int, Field(COUNT, "frames of one more train, with 802.1p tags")] = 0


@dataclass(frozen=True, slots=True)
class Result(Message):
    """The job is done. Where another host has led it to its end, the object has only `job_id` and `lead`."""

    op: ClassVar[str] = "result"
    result: Annotated[Mapping[str, Any], Field(OBJECT, "what `nicps submit --json` prints")]


Answer: TypeAlias = Ok | Error | Status | Probe | Result | Event
ANSWERS: Conversation[Answer] = Conversation(
    "a command",
    *(Ok, Error, Status, Probe, Result),
    *EVENTS.values(),
)
