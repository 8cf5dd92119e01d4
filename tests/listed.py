# SPDX-License-Identifier: Apache-2.0
"""The members of a view in unit tests, and a token that has some of them in its list."""

from __future__ import annotations

from collections.abc import Mapping

from nicps import wire
from nicps.protocol import Member
from nicps.protocol.token import Line, TokenState

ROUND = 7


def members_of(count: int) -> tuple[Member, ...]:
    """So many of them; their MACs end in their numbers."""
    return tuple(Member(k, bytes([2, 0, 0, 0, 0, k]), f"h{k}") for k in range(1, count + 1))


def token_of(
    members: int,
    *contributors: int,
    closed: bool = True,
    units: Mapping[int, int] | None = None,
) -> TokenState:
    """Of the open round, with these contributors and their largest exponents."""
    made = TokenState.create(1, 1, ROUND, -40, [Line() for _ in range(members)])
    for number in contributors:
        line = made.lines[number - 1]
        line.samples, line.marks = 4, int(wire.Mark.CONTRIBUTED)
        line.unit = (units or {}).get(number, -20)
    if closed:
        made.state = wire.TokenState.CLOSING
    return made
