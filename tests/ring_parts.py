# SPDX-License-Identifier: Apache-2.0
"""One member's ring by itself, or its node with that ring: three members train, and nothing of theirs has arrived."""

from __future__ import annotations

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Node, NodeState, Phase, Receiver, Timings, View
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.ring import Ring
from tests.listed import members_of
from tests.rooms import NoKernel

VIEW = View(1, members_of(3), frozenset({1, 2, 3}), 1)
TIMINGS = Timings()
START = 100.0


def ring_of(
    number: int,
    exchange: Exchange = Exchange.BROADCAST,
    timeout: AdaptiveTimeout | None = None,
    receiver: Receiver | None = None,
    quorum: int = 12,
    first_round: int = 1,
    shares: tuple[int, ...] = (4, 4, 4),
    view: View = VIEW,
    kind: wire.PhaseKind = wire.PhaseKind.TRAIN,
) -> Ring:
    """That member's, before the first token; `receiver` says what has arrived, by default nothing."""
    phase = Phase(
        1,
        1,
        kind,
        first_round=first_round,
        fragments=8,
        last_fragments=8,
        width=16,
        shares=shares,
        quorum=quorum,
        exchange=exchange,
    )
    timeout = timeout or AdaptiveTimeout(TIMINGS)
    return Ring(phase, view, number, receiver or NoKernel(), TIMINGS, timeout, None, START)


def node_of(number: int, ring: Ring | None, view: View = VIEW) -> Node:
    """That member's node, with this ring in force, or none."""
    member = view.members[number - 1]
    node = Node(member.mac, member.name, "nicps", NoKernel(), lambda: 1)
    enter_ring(node, number, ring, view)
    return node


def enter_ring(node: Node, number: int, ring: Ring | None, view: View = VIEW) -> None:
    """The node is that member's from now on, with this ring in force, or none."""
    host = node._host
    host.state, host.view, host.number = NodeState.MEMBER, view, number
    node.rings.current = ring
