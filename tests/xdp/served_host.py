# SPDX-License-Identifier: Apache-2.0
"""A host with parameter servers, given one frame after the other: the XDP program and its model, which must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane.doorbell import Bell
from nicps.wire import Refusal
from tests.model import TX, Outcome
from tests.servers import Home, signed
from tests.servers_model import ServersModel
from tests.stripes import LANES, MACS, NATIVE, NETWORK
from tests.xdp.served import Target

VIEW, ROUND = 5, 7
TAG = VIEW << 32 | ROUND
#: An exponent whose lanes are parameters' units, at weight 1.
EXACT = -40
UNIT = 2.0**-40
I64 = NDArray[np.int64]
Lanes = int | Sequence[int] | I64


class Frames:
    """Frames for a host, of the round and the view that are open at it; of worker 3 unless another one is named."""

    def __init__(self, model: ServersModel) -> None:
        self._model = model
        self._sequence = 100

    def make(self, body: Any, payload: bytes = b"", sender: int = 3, **header: int) -> bytes:
        """A frame of a member; all but a TAKEN have a payload."""
        self._sequence += 1
        model = self._model
        if not payload and not isinstance(body, wire.Taken):
            payload = bytes(wire.PAYLOAD_BYTES)
        values = {"network": NETWORK, "view": model.view, "round": model.rounds[0]}
        values |= {"sender": sender, "sequence": self._sequence if model.key else 0, **header}
        to = MACS[model.number - 1]
        return signed(sender, wire.Header(**values), body, payload, to, model.key)

    def push(
        self,
        lanes: Lanes,
        index: int = 0,
        number: int = 1,
        *,
        version: int = 0,
        exponent: int = EXACT,
        sender: int = 3,
    ) -> bytes:
        """A fragment of a step: all lanes are this, or these."""
        width, fragments = self._model.width, self._model.fragments
        body = wire.Push(version, number, index, fragments, 0, width, exponent)
        return self.make(body, payload_of(lanes, width), sender)

    def contribute(
        self,
        lanes: Lanes,
        sender: int,
        members: int = 0b1100,
        index: int = 0,
        *,
        number: int = 9,
        exponent: int = EXACT,
        **header: int,
    ) -> bytes:
        """A fragment of a worker's step for the synchronisation."""
        width, fragments = self._model.width, self._model.fragments
        body = wire.Contribution(members, index, fragments, number, width, exponent, 0)
        return self.make(body, payload_of(lanes, width), sender, **header)

    def pull(
        self, index: int = 0, number: int = 1, sender: int = 3, *, version: int = 0, **header: int
    ) -> bytes:
        """A question for parameters."""
        body = wire.Pull(version, number, index, self._model.room, 0, 32, 0)
        return self.make(body, b"", sender, **header)

    def held(
        self,
        index: int = 0,
        number: int = 1,
        sender: int = 2,
        *,
        version: int = 0,
        staleness: int = 0,
        lane: int = 5,
        **header: int,
    ) -> bytes:
        """Parameters come: all lanes are this."""
        body = wire.Held(version, number, index, self._model.room, staleness, 32, -20)
        return self.make(body, payload_of(lane, 32), sender, **header)

    def taken(
        self,
        index: int = 0,
        number: int = 1,
        sender: int = 2,
        *,
        version: int = 0,
        staleness: int = 1,
        reason: int = 0,
        **header: int,
    ) -> bytes:
        """A server acknowledges a fragment, or gives the reason why not."""
        width, fragments = self._model.width, self._model.fragments
        body = wire.Taken(version, number, index, fragments, staleness, width, EXACT, reason)
        return self.make(body, b"", sender, **header)


class Host:
    """Member 1 of five, the only server, of a vector of two fragments, unless `values` of the model say otherwise.

    Attributes: `frames` makes frames for it; `last` is the one that came last.
    """

    def __init__(self, target: Target, **values: Any) -> None:
        usual: dict[str, Any] = {"number": 1, "live": frozenset(range(1, 6)), "servers": (1,)}
        usual |= {"width": 32, "room": 2, "view": VIEW, "rounds": (ROUND, ROUND + 1)}
        usual |= {"settled": ROUND - 1, "version": (ROUND, 0)}
        self.target, self.model = target, ServersModel(**usual | values)
        self.frames = Frames(self.model)
        self.last = b""
        lanes = LANES[self.model.width]
        for local in range(len(self.model.part(self.model.number))):
            home = Home(start(local, self.model.width), np.zeros(lanes, np.int64))
            self.model.homes.setdefault(local, home)
        target.begin(self.model)

    def give(self, frame: bytes) -> Outcome:
        """A frame, to both."""
        self.last = frame
        found = self.target.run(frame)
        assert found == self.model.run(frame)
        return found

    def again(self) -> Outcome:
        """The same frame once more."""
        return self.give(self.last)

    def push(self, *args: Any, **values: Any) -> Outcome:
        """`Frames.push`, given."""
        return self.give(self.frames.push(*args, **values))

    def contribute(self, *args: Any, **values: Any) -> Outcome:
        """`Frames.contribute`, given."""
        return self.give(self.frames.contribute(*args, **values))

    def pull(self, *args: Any, **values: Any) -> Outcome:
        """`Frames.pull`, given."""
        return self.give(self.frames.pull(*args, **values))

    def held(self, *args: Any, **values: Any) -> Outcome:
        """`Frames.held`, given."""
        return self.give(self.frames.held(*args, **values))

    def taken(self, *args: Any, **values: Any) -> Outcome:
        """`Frames.taken`, given."""
        return self.give(self.frames.taken(*args, **values))

    def commit(self, listed: bool = True) -> None:
        """The agent begins the next round."""
        before = self.model.rounds[0]
        if listed:
            self.model.settled = before
        self.model.rounds, self.model.version = (before + 1, before + 2), (before + 1, 0)
        self.target.enter(self.model)

    def enter_view(self, by: int = 1) -> None:
        """Another view is in force; the round goes on."""
        self.model.view += by
        self.target.enter(self.model)

    def parameters(self, local: int = 0) -> I64:
        """Of a home, as the program has them."""
        return self.target.lanes(self.model, local).copy()

    def bells(self) -> list[Bell]:
        """The messages; and nothing differs from the model."""
        bells = list(self.model.bells)
        self.target.same_state(self.model)
        return bells


def payload_of(lanes: Lanes, width: int) -> bytes:
    """Lanes as they lie on the wire."""
    values = np.full(LANES[width], lanes) if isinstance(lanes, int) else np.asarray(lanes)
    return values.astype(NATIVE[width]).tobytes()


def said(found: Outcome) -> wire.Push:
    """The body of the answer."""
    assert found.verdict == TX and found.out is not None
    body = wire.unpack(found.out[wire.ETHERNET_BYTES :]).body
    assert isinstance(body, wire.Push)
    return body


def reason(found: Outcome) -> Refusal:
    """That of a short answer."""
    body = said(found)
    assert isinstance(body, wire.Taken)
    return Refusal(body.reason)


def numbers(found: Outcome) -> NDArray[np.float64]:
    """The parameters in an answer."""
    assert found.out is not None
    frame = wire.unpack(found.out[wire.ETHERNET_BYTES :])
    assert isinstance(frame.body, wire.Held)
    return np.frombuffer(frame.tail, ">i4") * 2.0**frame.body.exponent


def start(local: int = 0, width: int = 32) -> I64:
    """The parameters of a home at first."""
    return np.arange(LANES[width], dtype=np.int64) + 1000 * local
