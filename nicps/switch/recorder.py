# SPDX-License-Identifier: Apache-2.0
"""The controller's state machine while hosts come and go: it records in the switch the members that they have agreed on
(R3, R4, R19).

The switch sends it the lists that are put in force. A list alone proves nothing, because anybody can send an old one
again. So the controller asks, with a fresh nonce, and every member answers with the list that is in force at it. Once
the members that have answered with the same list are a majority of it, it is in force. With the network's key, only
members can answer. The switch also reports the port at which an answer has come in: that is the member's port.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nicps import wire
from nicps.auth import NetworkKey, nonce
from nicps.errors import WireError
from nicps.protocol.view import Successor
from nicps.switch.runtime import Member, Switch
from nicps.switch.tally import Tally

_ASKS_S = 2.0  # after a list that is not known to be in force
_FIRST_S, _MOST_S = 0.03, 0.3  # between questions
_FRESH_S = 1.0  # the time for which an answer counts
_LATE_S = 0.5  # members answer at once
_PORTS = 512


@dataclass(frozen=True, slots=True)
class _List:
    """A list, as one frame has it."""

    number: int
    ballot: int
    successor: Successor

    @property
    def name(self) -> tuple[int, bytes]:
        """The seed is random: no other list has both."""
        return self.number, self.successor.seed


class Recorder:
    """One network at one switch. Members that are recorded there already stay so until a list is known to be in force.

    Args:
        network: the hash of its name.
        mac: the controller's own address, from which it asks.
        key: of the network, if it has one.
        linux_switch: the port behind which a Linux switch adds, if one does. Number 0 is recorded there.
        nonce: random 64-bit numbers, never 0.

    Attributes: `view`, the number of the list that is recorded; `refused` counts frames that no member has made.

    Raises (every method that is given a frame, or a switch): NetworkProblem, the switch has gone.
    """

    def __init__(
        self,
        switch: Switch,
        network: int,
        mac: bytes,
        key: NetworkKey | None,
        linux_switch: int | None = None,
        nonce: Callable[[], int] = nonce,
    ) -> None:
        self._switch = switch
        self._network = network
        self._mac = mac
        self._key = key
        self._fresh = nonce
        self._list: _List | None = None
        self._members = {k: m for k, m in switch.members().items() if k}
        self._adds = {} if linux_switch is None else {0: Member(0, wire.SWITCH, linux_switch)}
        self._answered: set[int] = set()  # with the list that is recorded
        self._asks_until = self._asks_at = 0.0
        self._interval = _FIRST_S
        self._asked_at = -_FIRST_S
        self._nonce = nonce()
        self._nonce_until = 0.0  # until then it may bring a list; later, only missing members
        self._answers: Tally[tuple[int, bytes], int] = Tally()  # the members' ports
        self._late_at: float | None = None  # members that have not answered by then are reported
        self._changed = False
        self._unheard: str | None = None  # why no host will ever answer, to be reported
        self._tagged = False
        self.view = 0
        self.refused = 0

    @property
    def missing(self) -> list[str]:
        """Live members that have not answered: their ports are unknown."""
        if self._list is None:
            return []
        successor = self._list.successor
        late = successor.live - self._answered
        return [member.name for member in successor.members if member.number in late]

    def ask(self, now: float) -> None:
        """Find out which list is in force."""
        self._asks_at = max(now, self._asked_at + _FIRST_S)
        if now >= self._nonce_until:
            self._renew(now)
        self._asks_until = now + _ASKS_S
        self._interval = _FIRST_S

    def question(self, now: float) -> bytes | None:
        """The next question, if one is due; to be sent to all."""
        if now < self._asks_at or (now >= self._asks_until and not self.missing):
            return None
        self._asked_at, self._asks_at = now, now + self._interval
        self._interval = min(self._interval * 1.5, _MOST_S)
        if now >= self._nonce_until > 0.0:
            self._renew(now)
        header = wire.Header(network=self._network, view=0, round=0, sender=0, sequence=0)
        body = wire.View(0, self._nonce, 0, 0, 0, 0, 0, 0, wire.ViewStep.ASK)
        frame = wire.pack(header, body, [], [])
        return frame if self._key is None else self._key.sign(frame, self._mac)

    def _renew(self, now: float) -> None:
        self._nonce, self._nonce_until = self._fresh(), now + _FRESH_S
        self._answers.clear()

    def wait(self, now: float, most_s: float) -> float:
        """Seconds until the next question, at most so many."""
        if now >= self._asks_until and not self.missing:
            return most_s
        return min(max(self._asks_at - now, 0.0), most_s)

    def on_frame(self, now: float, frame: bytes) -> None:
        """A frame that the switch has sent up: the port that it came in at in place of its destination."""
        port, source = int.from_bytes(frame[:6], "big"), frame[6:12]
        data = frame[wire.ETHERNET_BYTES :]
        if port >= _PORTS:  # not the switch's copy: the sender knows our address
            return
        if self._key is not None and not self._key.verify(data, source):
            self.refused += 1
            return
        try:
            unpacked = wire.unpack(data)
            body = unpacked.body
            if not isinstance(body, wire.View) or body.step != wire.ViewStep.INSTALL:
                return
            successor = Successor.of(unpacked)
        except WireError:
            self.refused += 1
            return
        if unpacked.header.network != self._network or successor is None:
            return
        if self._key is None and unpacked.header.tag and not self._tagged:
            self._tagged = True
            self._unheard = (
                "these hosts have a key, and answer nobody without it: name it with --key"
            )
        its = _List(body.number, body.ballot, successor)
        if body.nonce == self._nonce:
            self._on_answer(now, port, source, its)
        elif self._list is None or its.name != self._list.name:
            self.ask(now)

    def _on_answer(self, now: float, port: int, source: bytes, its: _List) -> None:
        live = its.successor.live
        number = next((m.number for m in its.successor.members if m.mac == source), 0)
        if number not in live:
            return
        if self._list is not None and its.name == self._list.name:
            if number not in self._answered:
                self._answered.add(number)
                self._record(self._members | {number: Member(number, source, port)})
        elif now < self._nonce_until:
            view = its.successor.view(its.number, its.ballot)
            heard = self._answers.add(its.name, view, number, port)
            if heard is not None:
                self._take_over(now, its, heard)

    def _take_over(self, now: float, its: _List, ports: dict[int, int]) -> None:
        """This list is in force. A member that has not answered yet, and was a member before, keeps its port."""
        macs = {m.number: m.mac for m in its.successor.members if m.number in its.successor.live}
        before, self.view = self.view, its.number
        self._list, self._nonce_until, self._answered = its, 0.0, set(ports)
        self._late_at = now + _LATE_S
        stay = {k: m for k, m in self._members.items() if macs.get(k) == m.mac}
        self._record(stay | {k: Member(k, macs[k], port) for k, port in ports.items()})
        token = self._switch.registers()["view"]
        if token > its.number or (token == its.number and before >= its.number):
            self._switch.forget_token()  # that of another network, with numbers of its own

    def _record(self, members: dict[int, Member]) -> None:
        self._members = dict(sorted(members.items()))
        self._switch.record(self._adds | self._members)
        self._changed = True
        if self._list is not None and not self.missing:
            self._asks_until = 0.0

    def describe_change(self, now: float) -> str | None:
        """A line about the record for the user, once all have answered or some have not in time."""
        if self._unheard is not None:
            hint, self._unheard = self._unheard, None
            return hint
        late = self._late_at is not None and now >= self._late_at
        missing = self.missing
        if self._list is None or not ((self._changed and not missing) or (missing and late)):
            return None
        self._changed, self._late_at = False, None
        names = {m.number: m.name for m in self._list.successor.members}
        said = [f"{names[k]} at port {m.port}" for k, m in self._members.items()]
        said += [
            f"no answer from {name}, whose frames may be refused until then" for name in missing
        ]
        return f"view {self.view}: {', '.join(said)}"

    def again(self, now: float, switch: Switch) -> None:
        """Go on with this connection, to a switch that may have lost its members."""
        self._switch = switch
        switch.record(self._adds | self._members)
        self.ask(now)
