# SPDX-License-Identifier: Apache-2.0
"""A parameter near the limits is reported also where the kernel had no room for a bell of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from nicps.agent.frames import Frames
from nicps.agent.keyring import Keyring
from nicps.agent.records import TimeLine
from nicps.agent.served import ServedPart
from nicps.agent.served_room import ServedRoom
from nicps.dataplane.doorbell import Bell
from nicps.session.served_form import NearLimit
from tests.rooms import Rooms

pytestmark = pytest.mark.unit

_NEAR = NearLimit(17, 4.19e6)


class _Near:
    """A part, and maps, of a server that has such a parameter."""

    full: int | None = None
    found = 0

    def find_full(self) -> NearLimit:
        self.found += 1
        return _NEAR


@pytest.mark.parametrize("count", [0, 3], ids=["a list", "sums"])
def test_any_bell_has_the_agent_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rooms, near, told = Rooms(tmp_path), _Near(), list[NearLimit]()
    plane = rooms.dataplane
    plane.doorbell = plane
    plane.take = lambda: [Bell(1 << 32 | 3, 1, count, 9, 0)]
    room = ServedRoom(plane)
    room._part = cast(ServedPart, near)
    monkeypatch.setattr(ServedRoom, "_servers", near)
    life: Any = rooms.life
    monkeypatch.setattr(life, "near_limit", lambda now, what: told.append(what) or [])
    frames = Frames.__new__(Frames)
    frames._driver, frames._life, frames._dataplane = rooms.driver, life, plane
    frames._served, frames._keys, frames._timeline = room, Keyring.read(None), TimeLine()
    monkeypatch.setattr(frames, "sync_from_kernel", lambda: None)
    for method in ("list_came", "sums_came"):
        monkeypatch.setattr(life, method, lambda *_: [])
    frames._answer_bell()
    assert not told
    near.full = 4
    for _ in range(3):
        frames._answer_bell()
    assert told == [_NEAR] and near.found == 1
    rooms.close()
