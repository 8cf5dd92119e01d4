# SPDX-License-Identifier: Apache-2.0
"""A node's deadline, and what its kernel must know, are found anew only after a change: they are what they would be."""

from __future__ import annotations

from typing import Any

import pytest

from nicps.exchange import Exchange
from nicps.protocol import Node
from tests.simulator.drill import run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("exchange", [Exchange.BROADCAST, Exchange.STRIPES])
def test_nothing_changes_unnoticed(monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> None:
    deadline, told, looks = Node.deadline, dict[int, tuple[Node, int, Any]](), 0

    def check(node: Node) -> float:
        nonlocal looks
        looks += 1
        _, changes, before = told.get(id(node), (node, -1, None))
        state = node.kernel
        assert changes != node.changes or state == before
        told[id(node)] = node, node.changes, state
        found = deadline(node)
        assert found == node._find_deadline()
        return found

    monkeypatch.setattr(Node, "deadline", check)
    run(range(3), exchange=exchange)
    assert looks > 1000
