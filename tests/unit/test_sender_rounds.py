# SPDX-License-Identifier: Apache-2.0
"""Contributions to stripes that have not left their host as their round is over: other lanes lie in their place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.agent.frames import Frames
from nicps.agent.keyring import Keyring
from nicps.agent.records import TimeLine
from nicps.agent.served_room import ServedRoom
from nicps.agent.sources import OwnLanes
from nicps.dataplane.areas import Area
from nicps.exchange import Exchange
from nicps.job.actions import Action
from nicps.layout import layout
from nicps.protocol import SendFragments, Striped
from nicps.protocol.ring import Ring
from tests.ring_parts import enter_ring, node_of, ring_of
from tests.rooms import Rooms
from tests.unit.test_sender_channels import Plane

pytestmark = pytest.mark.unit

FRAGMENTS, UNIT = 8, -72
_LARGEST = UNIT + wire.MAX_SHIFT[16]


class Lanes:
    """Own lanes of a bank, as `Stripes` has them."""

    def __init__(self) -> None:
        self.replace(FRAGMENTS, _LARGEST)

    def replace(self, room: int, exponent: int) -> None:
        """Others lie there from now on: of a phase with another plan, or of a later round."""
        self.areas = [Area(0, room, 0, 1)]
        self.own = np.zeros((2, room), layout().records["own"])
        self.own["exponent"] = np.int8(exponent).view(np.uint8)


class Host:
    """Member 2, and a ring for frames that is full."""

    def __init__(self, folder: Path) -> None:
        self.ring = ring_of(2, Exchange.STRIPES)
        self.rooms, self.lanes = Rooms(folder), Lanes()
        self.sent: list[tuple[SendFragments, bool]] = []
        self.plane: Any = Plane(slots=0)
        self.plane.maps = self.rooms.dataplane
        files = self._files = [os.fdopen(os.eventfd(0), "rb") for _ in range(4)]
        self.plane.rx_fileno, self.plane.tx.fileno = files[0].fileno, files[1].fileno
        self.plane.link_changes, self.plane.doorbell = files[2:]
        driver: Any = self.rooms.driver
        driver.life.node, driver.life.fragments_sent = node_of(2, self.ring), self._note_sent
        of = self.plane, Keyring.read(None), self.rooms.loop, TimeLine()
        served: Any = ServedRoom(self.rooms.dataplane)
        none: Any = None
        self.sender = Frames(driver, *of, served, none, none).sender
        self.node = driver.life.node

    def _note_sent(
        self, now: float, action: SendFragments, started: float | None = None
    ) -> list[Action]:
        self.sent.append((action, started is not None))
        return []

    def queue(self, round_: int, *, repair: bool) -> SendFragments:
        """A contribution that waits for room."""
        striped = Striped(wire.FrameType.CONTRIBUTION, 0b111, UNIT, (1, 2, 3))
        of = 1, 1, round_, 4, ((5, 3),), repair, Exchange.STRIPES, striped
        action, stripes = SendFragments(*of), self.lanes
        self.sender.fragments_of(action, self.ring.phase, OwnLanes(stripes, None))  # type: ignore[arg-type]
        self.sender.pump(1.0)
        assert not self.sent, "it waits"
        return action

    def close(self) -> None:
        self.rooms.close()
        for file in self._files:
            file.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def commit(ring: Ring) -> None:
    ring._control.round += 1


def enter_phase(ring: Ring) -> None:
    ring._control.phase = ring_of(2, Exchange.STRIPES, first_round=2).phase
    object.__setattr__(ring._control.phase, "generation", 2)


OVERS: dict[str, Callable[[Ring], None]] = {
    "committed": commit,
    "another phase is coming": Ring.freeze,
    "another phase": enter_phase,
}


@pytest.mark.parametrize("how", OVERS)
@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize(
    ("room", "exponent"), [(4, _LARGEST), (FRAGMENTS, _LARGEST + 1)], ids=["smaller", "larger"]
)
def test_what_nobody_waits_for_is_not_sent(
    host: Host, how: str, repair: bool, room: int, exponent: int
) -> None:
    """Else the agent ends with an error, or the job: the program seems to have written over its contribution."""
    action = host.queue(1, repair=repair)
    OVERS[how](host.ring)
    host.lanes.replace(room, exponent)
    host.plane.tx.slots = 100
    host.sender.pump(2.0)
    assert host.sent == [(action, False)] and not host.plane.leaving


def test_what_others_wait_for_is_sent(host: Host) -> None:
    action = host.queue(1, repair=True)
    host.plane.tx.slots = 100
    host.sender.pump(2.0)
    assert host.sent == [(action, True)] and len(host.plane.leaving) == 3


def test_what_is_of_another_view_is_over(host: Host) -> None:
    action = host.queue(1, repair=True)
    assert not host.node.is_over(action)
    enter_ring(host.node, 2, None)
    assert host.node.is_over(action), "no phase goes on"
