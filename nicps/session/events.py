# SPDX-License-Identifier: Apache-2.0
"""Events of a job, which the agent tells those that submitted it or watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from nicps.session.fields import (
    ANYTHING,
    COUNT,
    REST,
    TEXT,
    VIEW,
    Field,
    Message,
    choice,
    listed,
    number,
)


@dataclass(frozen=True, slots=True)
class Preparing(Message):
    """The host makes model and data (R5); nobody else has heard of the job. It has no name yet: `job_id` is empty."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "preparing"
    job_id: Annotated[str, Field(TEXT, "empty")]
    job: Annotated[str, Field(TEXT, "as in `submit`")]


@dataclass(frozen=True, slots=True)
class Forming(Message):
    """Model and data are prepared; the host calls the others (R1)."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "forming"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    data: Annotated[Any, Field(ANYTHING, "what the preparation says of the data")]


@dataclass(frozen=True, slots=True)
class Formed(Message):
    """The network is formed (R3)."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "formed"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    members: Annotated[tuple[str, ...], Field(listed(TEXT, "names"), "the hosts, by number")]
    view: Annotated[int, Field(VIEW, "the number of the list")]


@dataclass(frozen=True, slots=True)
class HandedOut(Message):
    """All hosts have model and data (R5, R6)."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "handed out"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    bytes: Annotated[int, Field(COUNT, "bytes that were handed out")]
    seconds: Annotated[float, Field(number(), "seconds that it took")]


@dataclass(frozen=True, slots=True)
class Training(Message):
    """Training begins (R7)."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "training"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    exchange: Annotated[
        str, Field(TEXT, "that with which it begins, by its name in `exchanges`")
    ] = ""
    exchange_reason: Annotated[str, Field(TEXT, "why it is that one: one line for people")] = ""


@dataclass(frozen=True, slots=True)
class TakingBack(Message):
    """Hosts come back into the job, or join it (R20)."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "taking back"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    members: Annotated[tuple[str, ...], Field(listed(TEXT, "names"), "these hosts")]


@dataclass(frozen=True, slots=True)
class Progressed(Message):
    """What node 1's training program reports: `round`, `loss`, `accuracy` and the like."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "progress"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    values: Annotated[Mapping[str, Any], Field(REST, "the values of the report")]
    token_turns: Annotated[int, Field(COUNT, "turns of the token in this job so far")]


@dataclass(frozen=True, slots=True)
class Warned(Message):
    """Something that ends nothing."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "warning"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    message: Annotated[str, Field(TEXT, "one line for people")]


@dataclass(frozen=True, slots=True)
class Launched(Message):
    """The script of `nicps run` begins on all hosts (docs/run.md)."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "launched"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    hosts: Annotated[tuple[str, ...], Field(listed(TEXT, "names"), "the hosts, by rank")]
    folder: Annotated[str, Field(TEXT, "where this host keeps what the run leaves")] = ""


@dataclass(frozen=True, slots=True)
class Output(Message):
    """A piece of what a host's script has printed."""

    op: ClassVar[str] = "event"
    event: ClassVar[str] = "output"
    job_id: Annotated[str, Field(TEXT, "the run's name")]
    host: Annotated[str, Field(TEXT, "the host's name")]
    text: Annotated[str, Field(TEXT, "the piece; what is no UTF-8 is replaced")]
    stream: Annotated[str, Field(choice("stdout", "stderr"), "where the script has printed it")] = (
        "stdout"
    )


Event: TypeAlias = (
    Preparing
    | Forming
    | Formed
    | HandedOut
    | Training
    | TakingBack
    | Progressed
    | Warned
    | Launched
    | Output
)
EVENTS: dict[str, type[Event]] = {
    cls.event: cls
    for cls in (
        *(Preparing, Forming, Formed, HandedOut, Training, TakingBack, Progressed, Warned),
        *(Launched, Output),
    )
}
