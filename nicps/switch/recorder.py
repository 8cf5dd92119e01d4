# SPDX-License-Identifier: Apache-2.0
"""What the controller does while hosts come and go: it records in the switch whom they have agreed on (R3, R4, R19).

The switch sends it the lists that are put in force. With the network's key it believes none but a member's. A switch
that has been started again gets from `again` what it has forgotten.
"""

from __future__ import annotations

from nicps import wire
from nicps.auth import NetworkKey
from nicps.errors import WireError
from nicps.protocol.view import Successor
from nicps.switch.runtime import Member, Switch


class Recorder:
    """One network at one switch.

    Args:
        network: the hash of its name.
        key: of the network, if it has one.

    Attributes: `view`, the number of the list that is recorded; `refused` counts frames that no member has made.
    """

    def __init__(self, switch: Switch, network: int, key: NetworkKey | None) -> None:
        self._switch = switch
        self._network = network
        self._key = key
        self._seed = b""
        self._members: dict[int, Member] = {}
        self.view = 0
        self.refused = 0

    def on_frame(self, source: bytes, data: bytes) -> dict[str, Member] | None:
        """A frame that the switch has sent up; who is recorded now, by name, if that is news.

        Raises:
            NetworkProblem: the switch has gone.
        """
        if self._key is not None and not self._key.verify(data, source):
            self.refused += 1
            return None
        try:
            frame = wire.unpack(data)
            body = frame.body
            if not isinstance(body, wire.View) or body.step != wire.ViewStep.INSTALL:
                return None
            successor = Successor.of(frame)
        except WireError:
            self.refused += 1
            return None
        if frame.header.network != self._network or successor is None:
            return None
        if successor.seed == self._seed or (body.base and body.number <= self.view):
            return None
        ports = self._switch.learnt()
        live = [m for m in successor.members if m.number in successor.live and m.mac in ports]
        if not body.base:  # a network begins, with numbers of its own
            self._switch.forget_token()
        self._members = {m.number: Member(m.number, m.mac, ports[m.mac]) for m in live}
        self._switch.record(self._members)
        self.view, self._seed = body.number, successor.seed
        return {m.name: self._members[m.number] for m in live}

    def again(self, switch: Switch) -> None:
        """Go on with this connection, to a switch that knows no members any more.

        Raises:
            NetworkProblem: the switch has gone again.
        """
        self._switch = switch
        switch.record(self._members)
