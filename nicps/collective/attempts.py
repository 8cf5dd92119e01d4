# SPDX-License-Identifier: Apache-2.0
"""How a call is carried out: begun again for as long as members leave in its middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from nicps.collective.errors import CallMismatch, MemberLost
from nicps.collective.kinds import Array
from nicps.collective.rounds import (
    Attempt,
    Changed,
    Differs,
    DirectGather,
    Exchange,
    Ranks,
)

R = TypeVar("R")
_TEXT_BYTES = 200  # of what a member says that it has called


def carried_out(
    link: Exchange,
    carry_out: Callable[[Attempt], R],
    text: str,
    ranks: Ranks,
    deadline: float,
    note: Callable[[Attempt], None],
    direct: DirectGather | None = None,
) -> R:
    """What the call has come to.

    Args:
        text: what is called, the same at all members.
        deadline: on the monotonic clock.
        note: is told what has been exchanged, also where that is of no use.
        direct: makes a direct call of what fits one.

    Raises:
        CallMismatch: the members have called different things.
        MemberLost: what a lost member would have given is needed.
    """
    while True:
        attempt = Attempt(link, text, ranks, deadline, direct)
        try:
            result = carry_out(attempt)
        except Changed:
            continue
        except Differs:
            raise _explained(link, text, ranks, deadline) from None
        except MemberLost:
            note(attempt)
            raise
        note(attempt)
        return result


def _explained(link: Exchange, text: str, ranks: Ranks, deadline: float) -> CallMismatch:
    """All members know that they have called different things: each says what."""
    said = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8)

    def ask(attempt: Attempt) -> tuple[Array, tuple[int, ...]]:
        return attempt.gather(said), attempt.counted

    rows, counted = carried_out(link, ask, "what was called", ranks, deadline, lambda _: None)
    by_text: dict[str, list[str]] = {}
    for rank in counted:
        told = rows[rank].tobytes().rstrip(b"\0").decode(errors="replace")
        by_text.setdefault(told, []).append(f"{ranks.names[rank]} (rank {rank})")
    calls = "; ".join(f"{', '.join(who)}: {told}" for told, who in by_text.items())
    return CallMismatch(f"the members have called different things: {calls}")
