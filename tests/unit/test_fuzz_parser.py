# SPDX-License-Identifier: Apache-2.0
"""Any bytes at the Python parser and at a node in any state: `WireError` or nothing comes out, and what is refused has
changed nothing.

Nodes, and the good frames that are spoilt here, come from the simulator.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nicps import wire
from nicps.errors import WireError
from nicps.job.plan import Plan
from nicps.protocol import Node, NodeState, Send
from nicps.protocol.phase import Phase
from nicps.protocol.token import TokenState
from nicps.protocol.view import Successor
from tests.simulator.host import Host
from tests.simulator.lan import Lan
from tests.vectors import frames as vectors
from tests.vectors.encode import frame as encoded

pytestmark = pytest.mark.unit

HOSTS = 4
VECTORS = [encoded(v.header, *v.structs, tail=v.tail) for v in vectors.FRAMES]


def _training(lan: Lan, rounds: int) -> bool:
    ring = lan.hosts[1].node.ring
    return ring is not None and ring.phase.kind is wire.PhaseKind.TRAIN and ring.turns > rounds


#: What must be so at the LAN, and whose node is looked at (by index).
STATES: dict[str, tuple[Callable[[Lan], bool], int]] = {
    "stands by": (lambda lan: lan.hosts[0].node.state is NodeState.FORMING, 1),
    "forms": (lambda lan: lan.frames > 3, 0),
    "leads, without a ring": (lambda lan: lan.hosts[0].node.leads, 0),
    "member, without a ring": (lambda lan: lan.hosts[1].node.state is NodeState.MEMBER, 1),
    "prepares": (lambda lan: lan.hosts[1].node.phase is not None, 1),
    "leads the ring": (lambda lan: _training(lan, 3), 0),
    "member of the ring": (lambda lan: _training(lan, 3), 1),
    "holds the token": (lambda lan: _training(lan, 3) and lan.hosts[2].node.ring.holding, 2),
    "changes the view": (lambda lan: _training(lan, 3) and lan.hosts[1].node.changing, 1),
    "proposes": (lambda lan: _training(lan, 3) and lan.hosts[2].node.changing, 2),
    "in the next view": (lambda lan: lan.hosts[1].node.view.number > 1, 1),
    "after the end": (lambda lan: all(h.node.ended for h in lan.hosts if not h.dead), 1),
}
#: Rounds of the job: the scene in which it has ended is made again for every frame that this one takes.
ROUNDS = {"after the end": 5}
LOSING = ("changes the view", "proposes", "in the next view")


class Scene:
    """A LAN that has come to a state, one of its nodes, and what was sent until then."""

    def __init__(self, state: str) -> None:
        until, index = STATES[state]
        plan = Plan("job", batch=10 * HOSTS, width=16, alarm_below=0.0)
        rounds = ROUNDS.get(state, 12)
        self.lan = Lan(HOSTS, seed=5, plan=plan, rounds=rounds, fragments=4)
        self.sent: dict[tuple[int, bytes], list[bytes]] = {}
        broadcast = self.lan.broadcast

        def listen(sender: Host, frame: bytes, *rest: Any) -> None:
            kept = self.sent.setdefault((frame[1], sender.mac), [])
            kept[:] = [*kept[-3:], frame]
            broadcast(sender, frame, *rest)

        self.lan.broadcast = listen  # type: ignore[method-assign]
        self.lan.hosts[0].submit()
        if state in LOSING:
            assert self.lan.run(lambda: _training(self.lan, 3), 60.0)
            self.lan.hosts[-1].kill()
        assert self.lan.run(lambda: until(self.lan), 60.0), f"nobody {state}"
        self.node = self.lan.hosts[index].node
        self.now = self.lan.hosts[index].clock()
        self.good = [
            (source, frame)
            for (_, source), frames in self.sent.items()
            for frame in frames
            if source != self.node.mac
        ]
        self.before = observed(self.node)


SCENES: dict[str, Scene] = {}


def scene(state: str) -> Scene:
    """The state as it was, made again only where a frame has changed it."""
    if state not in SCENES:
        SCENES[state] = Scene(state)
    return SCENES[state]


PLAIN = (int, float, str, bytes, Enum, type(None))


def observed(value: Any, found: dict[int, Any] | None = None) -> Any:
    """All that a node holds, as plain values that can be compared; what is not the protocol's own is left out.

    Args:
        found: what was found so far, by the identity of the object: many parts hold the same others.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, set | frozenset):
        return frozenset(value)
    found = {} if found is None else found
    if (known := found.get(id(value))) is not None:
        return known
    found[id(value)] = "itself"
    if isinstance(value, dict):
        plain: Any = tuple([(observed(k, found), observed(v, found)) for k, v in value.items()])
    elif isinstance(value, list | tuple | deque):
        plain = tuple([observed(item, found) for item in value])
    elif is_ours(kind := type(value)):
        names = [*getattr(value, "__dict__", ()), *(n for n in slots_of(kind) if hasattr(value, n))]
        plain = (
            kind.__name__,
            tuple([(n, observed(getattr(value, n), found)) for n in sorted(names)]),
        )
    else:
        plain = kind.__name__
    found[id(value)] = plain
    return plain


@cache
def is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "nicps"


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    return tuple(name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ()))


@cache
def fields_of(kind: int) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of what the header, and a body of that type, hold."""
    body = wire.FORMATS[wire.FrameType(kind)][0]
    return tuple(
        (base + offset, field.size)
        for base, cls in ((0, wire.Header), (wire.HEADER_BYTES, body))
        for offset, field in zip(
            wire.Layout.of(cls).offsets, wire.Layout.of(cls).wires, strict=True
        )
    )


@st.composite
def spoilt(draw: st.DrawFn, good: bytes) -> bytes:
    """A good frame with some faults, most of them in one field."""
    data = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(
            st.sampled_from(["field"] * 5 + ["byte", "byte", "cut", "more", "splice", "length"])
        )
        if kind == "field" and len(data) > wire.HEADER_BYTES:
            at, size = draw(st.sampled_from(fields_of(good[1])))
            top = (1 << 8 * size) - 1
            now = int.from_bytes(data[at : at + size], "big")
            near = st.sampled_from([0, 1, 2, 3, 4, 5, top, top >> 1, (top >> 1) + 1])
            value = draw(
                near | st.just(now + 1 & top) | st.just(now - 1 & top) | st.integers(0, top)
            )
            data[at : at + size] = value.to_bytes(size, "big")
        elif kind == "byte" and data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[draw(st.integers(0, len(data))) :]
        elif kind == "more":
            data += draw(st.binary(max_size=40))
        elif kind == "splice":
            at = draw(st.integers(0, len(data)))
            data[at:] = draw(st.sampled_from(VECTORS))[at:]
        elif kind == "length" and len(data) >= 20:
            data[18:20] = len(data).to_bytes(2, "big")
    return bytes(data)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("state", STATES)
@given(data=st.data())
def test_a_node(state: str, data: st.DataObject) -> None:
    """Frames of the others, spoilt; what is refused, or ignored, leaves the node as it was."""
    now = scene(state)
    source, good = data.draw(st.sampled_from(now.good))
    if data.draw(st.integers(0, 9)) == 0:
        good = data.draw(st.sampled_from(VECTORS))
    frame = data.draw(spoilt(good))
    taken = False
    try:
        with contextlib.suppress(WireError):
            now.node.on_frame(now.now + 0.01, source, frame)
            taken = True
    finally:
        changed = observed(now.node) != now.before
        if changed:
            del SCENES[state]
    if taken:
        wire.unpack(frame)  # what is no frame of ours is always refused
        if changed:
            live_on(now.node, now.now + 0.01)
    else:
        assert not changed, "a frame that was refused has changed something"
    event("accepted" if changed else "ignored" if taken else "refused")


def live_on(node: Node, now: float) -> None:
    """Whatever it has taken in, its clock does not stop it, and all that it says can be read."""
    for _ in range(4):
        deadline = node.deadline()
        if deadline == math.inf:
            return
        now = max(now, deadline)
        for action in node.tick(now):
            if not isinstance(action, Send):
                continue
            try:
                frame = action.frame.pack()
            except WireError:  # a number that no frame can hold: the agent gives the job up
                return
            wire.unpack(frame)


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_what_it_says(state: str) -> None:
    """The scenes are made in the same way each time, and hold enough to spoil."""
    one, other = Scene(state), Scene(state)
    assert one.before == other.before
    kinds = {frame[1] for _, frame in one.good}
    assert kinds, state
    if state in ("member of the ring", "leads the ring", "holds the token"):
        assert wire.FrameType.TOKEN in kinds
    if state in LOSING:
        assert wire.FrameType.VOTE in kinds or wire.FrameType.VIEW in kinds


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_what_is_taken_apart_fits_together(data: st.DataObject) -> None:
    """Frames, and what they carry, come back from their bytes; or `WireError`."""
    frame = data.draw(spoilt(data.draw(st.sampled_from(VECTORS))))
    try:
        found = wire.unpack(frame)
    except WireError:
        return
    again = wire.pack(found.header, found.body, *found.items, tail=found.tail)
    assert again == frame[: found.header.length]
    if isinstance(found.body, wire.Token) and found.header.round < 1 << 31:
        state = TokenState.of(found)
        body = replace(found.body, stripe=0, listed=state.listed, reserved=0)
        plain = wire.Frame(found.header, body, found.items)
        assert state.frame(found.header).pack() == plain.pack()
    if isinstance(found.body, wire.View | wire.Vote):
        successor = refused(lambda: Successor.of(found))
        if successor is not None:
            value, members, channels = successor.items()
            counts = {"values": 1, "members": len(members), "channels": len(channels)}
            if isinstance(found.body, wire.Vote):
                counts["standings"] = 0
            body = replace(found.body, **counts)
            packed = wire.pack(found.header, body, value, members, channels)
            assert Successor.of(wire.unpack(packed)) == successor
    if isinstance(found.body, wire.Decision):
        check_phase(found.body, found.tail)


def refused(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except WireError:
        return None


def check_phase(body: wire.Decision, tail: bytes) -> None:
    phase = refused(lambda: Phase.unpack(body, tail, 3))
    if phase is not None:
        assert Phase.unpack(body, phase.pack(), 3) == phase


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
GOOD_PHASE = {"first_round": 1, "rounds": 9, "fragments": 3, "last_fragments": 2, "width": 16}
GOOD_PHASE |= {"quorum": 20, "unit": -40}


@settings(max_examples=500, deadline=None)
@given(kind=st.integers(0, 6), data=st.data())
def test_decisions(kind: int, data: st.DataObject) -> None:
    """A decision's settings as JSON that fits in part, or not at all."""
    values: dict[str, Any] = {**GOOD_PHASE, "shares": [10, 10, 10], "settings": {"job": "x"}}
    for _ in range(data.draw(st.integers(0, 2))):
        key = data.draw(st.sampled_from(sorted(values)) | st.text(max_size=4))
        if data.draw(st.booleans()):
            values[key] = data.draw(JSON)
        else:
            values.pop(key, None)
    tail = json.dumps(values).encode()
    cut = data.draw(st.integers(0, 4 * len(tail)))
    check_phase(wire.Decision(3, 1, kind), tail[:cut] + tail[cut + 1 :])
