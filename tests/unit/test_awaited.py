# SPDX-License-Identifier: Apache-2.0
"""Whom the open round waits for, as the status says it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.agent.status import awaited
from nicps.exchange import Exchange
from nicps.protocol.token import Line, TokenState
from tests.ring_parts import VIEW, node_of, ring_of

CONTRIBUTED, SKIPPED, COMPLETE = wire.Mark.CONTRIBUTED, wire.Mark.SKIPPED, wire.Mark.COMPLETE
OPEN, CLOSING = wire.TokenState.OPEN, wire.TokenState.CLOSING


def waits(
    *marks: int,
    state: int = OPEN,
    live: tuple[int, ...] = (1, 2, 3),
    shares: tuple[int, ...] = (8, 8, 8),
    offered: tuple[int, ...] = (),
    round_: int = 5,
) -> set[int]:
    """As member 1 knows it, whose open round is `round_`."""
    view = replace(VIEW, live=frozenset(live))
    ring = ring_of(1, Exchange.STRIPES, quorum=24, first_round=round_, shares=shares, view=view)
    ring._control.token = TokenState(1, 1, 1, 5, 0, 0, [Line(marks=mark) for mark in marks], state)
    for number in offered:
        ring._control.offers.hear(round_, number, 8, -20)
    return set(awaited(node_of(1, ring, view)))


def test_nobody_while_all_compute() -> None:
    assert waits(0, 0, 0) == set()
    assert waits(0, 0, 0, live=(1,)) == set()


@pytest.mark.parametrize("done", [CONTRIBUTED, SKIPPED])
def test_who_has_not_offered_while_the_list_is_open(done: int) -> None:
    assert waits(done, 0, done) == {2}
    assert waits(0, 0, done) == {1, 2}


def test_an_offer_that_was_broadcast_counts() -> None:
    assert waits(0, 0, 0, offered=(1, 2)) == {3}


def test_who_has_left_or_has_no_share_is_not_waited_for() -> None:
    assert waits(CONTRIBUTED, 0, 0, live=(1, 3)) == {3}
    assert waits(CONTRIBUTED, 0, 0, shares=(8, 0, 8)) == {3}
    assert waits(0, 0, 0, shares=(8, 0, 8)) == set()


def test_who_lacks_fragments_once_the_list_is_closed() -> None:
    """Also one that only receives."""
    full = CONTRIBUTED | COMPLETE
    assert waits(full, CONTRIBUTED, full, state=CLOSING) == {2}
    assert waits(full, full, 0, state=CLOSING, shares=(8, 8, 0)) == {3}
    assert waits(full, full, full, state=CLOSING) == set()


def test_a_token_of_another_round_says_nothing() -> None:
    assert waits(CONTRIBUTED, 0, 0, round_=6) == set()
