# SPDX-License-Identifier: Apache-2.0
"""A token that is repeated: what the kernel has forwarded is nobody's to handle, and fragments go before the repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.driver import Driver
from nicps.agent.flows import FlowWatch
from nicps.agent.frames import Frames
from nicps.agent.keyring import Keyring
from nicps.agent.loop import Loop
from nicps.agent.records import TimeLine
from nicps.agent.served_room import ServedRoom
from nicps.job import Life, LifeSettings
from nicps.protocol import Send, SendFragments
from nicps.protocol.ring import Offer, Ring
from nicps.protocol.signals import Steps
from nicps.protocol.token import TokenState
from tests.ring_parts import START, VIEW, ring_of
from tests.rooms import MAC, NoKernel

pytestmark = pytest.mark.unit


def sent(steps: Steps, kind: type) -> list[Any]:
    return [step for step in steps if isinstance(step, kind)]


def tokens(steps: Steps) -> list[wire.Frame]:
    return [s.frame for s in sent(steps, Send) if isinstance(s.frame.body, wire.Token)]


def first_token() -> wire.Frame:
    """The lead's, to the second member."""
    return tokens(ring_of(1).create(START))[-1]


class Forwarding(NoKernel):
    """A kernel that forwards the token just as the agent receives, and passes a repeat of it up after that."""

    def __init__(self, token: wire.Frame) -> None:
        super().__init__()
        self.token = TokenState.of(token)
        generation, hop = self.token.key
        before = (generation << 32) | (hop - 1)
        self.ring = {"seen": before, "bounced": 0, "token_ns": 0, "heard_ns": 0}
        self.tx = self.link_changes = self.doorbell = self
        self.repeat, self.mac = token.pack(), VIEW.members[1].mac

    def fileno(self) -> int:
        return -1

    rx_fileno = fileno

    def receive(self) -> list[tuple[bytes, bytes]]:
        self.ring["seen"] += 2
        return [(VIEW.members[0].mac, self.repeat)]


class Receiving(Forwarding):
    """A kernel that passes up these frames."""

    def __init__(self, *frames: tuple[bytes, bytes]) -> None:
        super().__init__(first_token())
        self.frames = [*frames]

    def receive(self) -> list[tuple[bytes, bytes]]:
        return self.frames


class Watched(Life):
    """A member's, whose node is a ring."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(MAC, LifeSettings("h2", "nicps"), NoKernel(), lambda: 7)
        self.ring = ring
        self.node.rings.current = ring
        self.done: Steps = []

    def kernel_saw(self, now: float, *saw: Any) -> None:
        self.ring.kernel_saw(*saw[:3])

    def on_frame(self, now: float, source: bytes, data: bytes) -> list[Any]:
        self.done += self.ring.on_token(now, wire.unpack(data))
        return []


def test_a_token_that_the_kernel_has_forwarded_is_not_handled_as_well() -> None:
    """It went on without this member's gradient. Sent now, the others would add what no list has."""
    token = first_token()
    ring = ring_of(2)
    life, kernel = Watched(ring), Forwarding(token)
    ring.offer(START, Offer(1, 4))
    receive(life, kernel)
    assert not sent(life.done, SendFragments) and not ring.holding


def receive(life: Watched, kernel: Forwarding) -> None:
    """Handle what has come up."""
    loop = Loop(lambda error: None)
    loop.watch = lambda *_, **__: None  # type: ignore[method-assign]
    plane: Any = kernel
    timeline = TimeLine()
    rooms = timeline, ServedRoom(plane), FlowWatch(life.node, timeline)
    frames = Frames(Driver(life), plane, Keyring.read(None), loop, *rooms, lambda *_: None)
    frames._receive()
    loop.close()


def test_the_member_that_has_sent_a_malformed_frame_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beside its address. A stranger has no name."""
    life = Watched(ring_of(2))
    life.node._host.view = VIEW
    member, bad = VIEW.members[0], first_token().pack()[:9]
    receive(life, Receiving((member.mac, bad), (bytes([2, 0, 0, 0, 0, 77]), bad)))
    first, second = capsys.readouterr().err.splitlines()
    said = "nicps: ignored a malformed frame from"
    assert first.startswith(f"{said} {wire.mac_text(member.mac)} ({member.name}): ")
    assert second.startswith(f"{said} 02:00:00:00:00:4d: ")


def test_a_repeat_waits_for_the_fragments_before_it() -> None:
    """As the token does: several of them would leave together, behind the fragments."""
    ring = ring_of(2)
    ring.offer(START, Offer(1, 4))
    steps = ring.on_token(START, first_token())
    assert sent(steps, SendFragments)
    asks = first_token()
    asks = replace(asks, header=replace(asks.header, flags=wire.Flag.REPEAT))
    assert ring.token is not None
    ring.kernel_saw(ring.token.key, START, START)
    assert not tokens(ring.on_token(START + 1.0, asks))
    ring.sent(START + 1.0)
    assert tokens(ring.on_token(START + 2.0, asks))
