# SPDX-License-Identifier: Apache-2.0
"""A host can be in the lists of two networks, as it has answered both starters. It is a member of one of them."""

from __future__ import annotations

import itertools

import pytest

from nicps import wire
from nicps.protocol import Evicted, Failed, Group, Member, Node, NodeState, Timings
from nicps.protocol.actions import Action, Send
from nicps.protocol.installation import Installation
from nicps.protocol.view import Successor

pytestmark = pytest.mark.unit

NETWORK = "lan"


def mac(host: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, host])


class Nothing:
    """A kernel that nothing has come to."""

    def count(self, *_: int) -> int:
        return 0

    def missing(self, *_: int) -> list[tuple[int, int]]:
        return []


def installed(
    node: Node,
    number: int,
    hosts: tuple[int, ...],
    live: tuple[int, ...],
    ending: wire.Ending = wire.Ending.NONE,
) -> list[Action]:
    """The node hears of that view, with a list of these hosts, as its answer to a call allows."""
    members = tuple(Member(k, mac(host), f"h{host}") for k, host in enumerate(hosts, 1))
    of = Successor(members, frozenset(live), 1, 0, 0, 0, 0, bytes(16))
    made = Installation(of.view(number, 1), number - 1, of, set(), {}, Timings())
    made.ending = ending
    own = next(k for k, member in enumerate(members, 1) if member.mac == node.mac)
    frame = made.send_to(own, node.membership.fresh).frame
    header = wire.Header(network=wire.network_id(NETWORK))
    data = wire.Frame(header, frame.body, frame.items).pack()
    return node.on_frame(0.0, mac(hosts[0]), data)


@pytest.fixture
def node() -> Node:
    """Host 3, in a network that host 1 has started."""
    nonces = itertools.count(1)
    made = Node(mac(3), "h3", NETWORK, Nothing(), lambda: next(nonces))
    installed(made, 2, (1, 2, 3), (1, 2, 3))
    assert made.state is NodeState.MEMBER and made.number == 3
    return made


@pytest.mark.parametrize("group", [Group(7, 2), None])
def test_a_host_whose_list_comes_first_is_named(group: Group | None) -> None:
    """As its list has it: a host that starts a network at the same moment has answered no call."""
    nonces = itertools.count(1)
    made = Node(mac(3), "h3", NETWORK, Nothing(), lambda: next(nonces))
    made.wait_for(group)
    made.start(0.0, 9, group)
    made.membership.busy = True
    made.on_frame(0.0, mac(1), call(group))
    actions = installed(made, 2, (1, 3), (1, 2))
    (failed,) = [action for action in actions if isinstance(action, Failed)]
    assert failed.reason.startswith("h1 has formed the network" if group else "h1 started a job")
    assert ("the program here goes on waiting" in failed.reason) == (group is not None)


def call(group: Group | None) -> bytes:
    """Of host 1, which starts the same."""
    body = wire.Call(5, 0, group.key if group else 0)
    return wire.Frame(wire.Header(network=wire.network_id(NETWORK)), body).pack()


@pytest.mark.parametrize("hosts", [(4, 3), (1, 3), (4, 2, 3)])
def test_another_networks_list_evicts_nobody(node: Node, hosts: tuple[int, ...]) -> None:
    """Its view has a higher number, and its lead calls the host, which it has lost."""
    assert not installed(node, 7, hosts, (1,))
    assert node.state is NodeState.MEMBER and node.view.number == 2


def test_nor_does_the_end_of_its_job_end_another(node: Node) -> None:
    assert not installed(node, 7, (4, 3), (1,), wire.Ending.DONE)
    assert node.state is NodeState.MEMBER and not node.ended


def test_a_later_list_of_its_own_does(node: Node) -> None:
    """New hosts are behind it."""
    actions = installed(node, 7, (1, 2, 3, 5), (1, 2, 4))
    assert [type(action) for action in actions if not isinstance(action, Send)] == [Evicted]
    assert node.state is NodeState.STANDBY
