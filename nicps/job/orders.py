# SPDX-License-Identifier: Apache-2.0
"""What the parts of a job ask of the node, of one another, and of the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nicps.protocol import Joiner, Phase


@dataclass(frozen=True, slots=True)
class Decide:
    """The lead: let all members prepare this phase (`Node.decide`); `Course.decision_agreed` follows."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class CommitNext:
    """The lead: the next round may be committed (`Node.go_on`, R14)."""


@dataclass(frozen=True, slots=True)
class RebuildView:
    """The lead: take these hosts into the view (`Node.rebuild`, R20); `Course.view_installed` follows."""

    joiners: tuple[Joiner, ...]


@dataclass(frozen=True, slots=True)
class CallHosts:
    """The lead: call hosts on standby from now on for this job; with an empty name, call no more (`Node.calls`)."""

    job: str


@dataclass(frozen=True, slots=True)
class OpenHandOut:
    """The course: get ready what is handed out, "job", "files" or "state"; `Course.stream_opened` follows."""

    purpose: str


@dataclass(frozen=True, slots=True)
class SaveModel:
    """The course: save the model before the alarm (R22); `Course.model_saved` follows."""


@dataclass(frozen=True, slots=True)
class Tell:
    """The lead: the submitter and the watchers of the job hear of an event (docs/socket.md)."""

    event: str
    values: Mapping[str, Any] = field(default_factory=dict)


Order: TypeAlias = Decide | CommitNext | RebuildView | CallHosts | OpenHandOut | SaveModel | Tell
Orders: TypeAlias = list[Order]
