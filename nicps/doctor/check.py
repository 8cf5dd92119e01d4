# SPDX-License-Identifier: Apache-2.0
"""One row of `nicps doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """The subject of the check, its result, and the advice (empty when there is nothing to do)."""

    name: str
    state: State
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Check:
    """A row that needs nothing."""
    return Check(name, "ok", found)


def warn(name: str, found: str, mend: str) -> Check:
    """A row that nicps can live with."""
    return Check(name, "warn", found, mend)


def fail(name: str, found: str, mend: str) -> Check:
    """A row that nicps cannot live with."""
    return Check(name, "fail", found, mend)
