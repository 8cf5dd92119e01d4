# SPDX-License-Identifier: Apache-2.0
"""A turn of the agent's loop: what it handles before timers get theirs, and when it sends again at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nicps.agent.agent import Agent
from nicps.agent.frames import Frames

pytestmark = pytest.mark.unit


class Turn:
    """Of an agent to which something has always come; to handle that takes so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_s: float) -> None:
        self.now, self.takes_s = 1000.0, takes_s
        self.batches: list[float] = []
        self.ticks: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("nicps.agent.agent.time", clock)
        self.agent: Any = object.__new__(Agent)
        vars(self.agent).update(self._rooms())

    def _rooms(self) -> dict[str, Any]:
        def nothing(*_: object) -> None:
            return None

        idle = SimpleNamespace(
            tick=nothing, flush=nothing, note=nothing, look=nothing, find_doubt=nothing
        )
        loop = SimpleNamespace(wait=lambda _: [(0, 1)], handle=self._handle, guard=nothing)
        sender = SimpleNamespace(more=False, waits=False)
        quiet = {"sync_from_kernel": nothing, "pump": nothing, "pump_rest": nothing}
        return {
            "_loop": loop,
            "_seconds_to_wait": lambda: 0.0,
            "_key_is_spent": lambda now: False,
            "_driver": SimpleNamespace(now=0.0, carry_out=nothing),
            "life": SimpleNamespace(
                renew_view=nothing, tick=lambda *_: self.ticks.append(self.now)
            ),
            "_frames": SimpleNamespace(sender=sender, **quiet),
            **dict.fromkeys(("children", "_prober", "_groups", "_scripts", "_stores"), idle),
            **dict.fromkeys(("_keys", "_control", "_waits"), idle),
        }

    def _handle(self, _: object) -> None:
        self.now += self.takes_s
        self.batches.append(self.now)


def test_what_comes_meanwhile_is_handled_before_the_rest_of_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = Turn(monkeypatch, 0.0002)
    turn.agent._step()
    assert len(turn.batches) == 4
    assert len(turn.ticks) == 1


def test_timers_do_not_wait_for_several_long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full batch of frames can take 30 ms, and the member that holds the token must send a frame every 100 ms."""
    turn = Turn(monkeypatch, 0.03)
    turn.agent._step()
    assert len(turn.batches) == 1
    assert turn.ticks == turn.batches


@pytest.mark.parametrize("what", ["", "queued", "more", "refused", "changes"])
def test_the_end_of_a_turn_sends_only_what_has_come_since(what: str) -> None:
    """Also what waits only for the loop's sake, or for the interface; and a node that has changed."""
    frames: Any = object.__new__(Frames)
    flags = {name: name == what for name in ("queued", "more", "refused")}
    frames.sender, frames._changes = SimpleNamespace(**flags), 5
    frames._node = SimpleNamespace(changes=6 if what == "changes" else 5)
    pumped: list[str] = []
    frames.pump = lambda: pumped.append(what)
    frames.pump_rest()
    assert pumped == ([what] if what else [])
