# SPDX-License-Identifier: Apache-2.0
"""The list of a round that the kernel tells of before the round before is committed here (`Node.on_list`)."""

from __future__ import annotations

import pytest

from nicps.protocol import Action, Node
from nicps.protocol.early_lists import EarlyLists, ToldList
from tests.ring_parts import START, node_of
from tests.unit.test_broadcast_marks import Kernel, closed, member

pytestmark = pytest.mark.unit

LISTED = 0b011  # members 1 and 2


def whole() -> tuple[Node, Kernel]:
    """Of member 2, which waits for one sum of round 1. The others have all."""
    ring, kernel = member(lacks=1)
    node = node_of(2, ring)
    ring.on_token(START, closed(5, 1, 1, 1, 3))
    return node, kernel


def commit(node: Node, kernel: Kernel) -> list[Action]:
    """Its last sum comes, and it commits the round."""
    kernel.lacks = 0
    actions = node.advance(START)
    assert node.open_round == 2
    return actions


def knows_list(node: Node) -> bool:
    assert node.ring is not None
    return node.ring._exchange.knows_list


def test_it_counts_as_soon_as_the_round_before_is_committed() -> None:
    node, kernel = whole()
    assert node.on_list(START, 1, 2, LISTED, -40) == []
    commit(node, kernel)
    assert knows_list(node)


def test_a_record_that_no_round_can_be_of_is_dropped() -> None:
    """Of another view, or of a round further on."""
    node, kernel = whole()
    for view, round_ in ((2, 2), (1, 3), (0, 2)):
        assert node.on_list(START, view, round_, LISTED, -40) == []
    commit(node, kernel)
    assert not knows_list(node)


def test_what_is_kept_is_dropped_with_its_view() -> None:
    lists = EarlyLists()
    for channel in (0, 2):
        assert not lists.take(
            1, (4, 7, 7), ToldList(1, 5 + 3 * (channel > 0), LISTED, -40, channel)
        )
    assert lists.take_kept(1, (4, 7, 8)) == [ToldList(1, 8, LISTED, -40, 2)]
    assert lists, "that of channel 0 is of the next round yet"
    assert lists.take_kept(2, (5, 7, 8)) == [] and not lists
