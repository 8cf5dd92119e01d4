# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, which a training program leaves: what docs/socket.md demands of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nicps.session.fields import TEXT, Field, whole


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One line: a round that this member has committed, test rounds too; or a push to parameter servers."""

    round: Annotated[int, Field(whole(0), "that round")]
    weights_sha256: Annotated[
        str,
        Field(
            TEXT,
            "of the weights after it, which must be the same on all members; empty for a push, and where it was not"
            " computed",
        ),
    ]
    view: Annotated[int, Field(whole(0), "the number of the list that was in force")] = 0
    digest: Annotated[
        str,
        Field(
            TEXT,
            "of this member's state after it (R19), which must be the same on all members, too",
        ),
    ] = ""
