# SPDX-License-Identifier: Apache-2.0
"""A node's deadline, and what its kernel must know, are found anew only after a change: they are what they would be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from nicps.exchange import Exchange
from nicps.protocol import Node
from nicps.protocol.parts import NodeParts
from tests.simulator import channel_lan, planned_lan, schedules
from tests.simulator.drill import run

pytestmark = pytest.mark.unit


class Looks:
    """Looks at each node before and after each of its events: between two events only its kernel, and time, go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._inside = False  # an event, in the middle of which nobody looks
        self._told: dict[int, tuple[Node, int, Any]] = {}
        public = {name: of for name, of in vars(Node).items() if not name.startswith("_")}
        for name, method in public.items():
            if inspect.isfunction(method):
                monkeypatch.setattr(Node, name, self._between(method))
        busy: Any = vars(NodeParts)["busy"]
        monkeypatch.setattr(NodeParts, "busy", property(busy.fget, self._between(busy.fset)))

    def _between(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def event(node: Node, *args: Any, **options: Any) -> Any:
            if self._inside:
                return method(node, *args, **options)
            self._look(node)
            self._inside = True
            try:
                return method(node, *args, **options)
            finally:
                self._inside = False
                self._look(node)

        return event

    def _look(self, node: Node) -> None:
        self.count += 1
        assert node._due is None or node._due == node._find_deadline()
        _, changes, before = self._told.get(id(node), (node, -1, None))
        state = node.kernel
        assert changes != node.changes or state == before
        self._told[id(node)] = node, node.changes, state


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.mark.parametrize("exchange", [Exchange.BROADCAST, Exchange.STRIPES, Exchange.SERVERS])
def test_nothing_changes_unnoticed(looks: Looks, exchange: Exchange) -> None:
    run(range(3), exchange=exchange)
    assert looks.count > 1000


def test_nothing_changes_unnoticed_in_steps(looks: Looks) -> None:
    run(range(2), steps=True)
    assert looks.count > 1000


def test_nothing_changes_unnoticed_with_channels(looks: Looks) -> None:
    """Offers wait for rounds of other channels, which the kernel ends."""
    channel_lan.finish(channel_lan.lan_of(1))
    assert looks.count > 1000


@pytest.mark.long
def test_nothing_changes_unnoticed_with_a_plan(looks: Looks) -> None:
    schedules.finish(planned_lan.lan_of(1))
    assert looks.count > 1000
