# SPDX-License-Identifier: Apache-2.0
"""The state machine of a Linux switch that adds, while hosts come and go (docs/linux-switch.md).

It asks which view is in force (HELLO, with a fresh nonce), and members grant it theirs (GRANT). Once a majority of a
list has granted, the switch adds for that list and announces it (READY). Frames and times come in; frames and lines for
the user go out. The memory and the maps are behind `Places`.

A *boot* is a time in which no sum of the switch is lost. State of another boot is void: a grant names the boot that it
is for, and a member grants a view to one boot only. So in one view one boot makes sums.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from nicps import wire
from nicps.auth import nonce
from nicps.errors import EnvironmentProblem, WireError
from nicps.switch.grants import Grant, Granted, Refused, read_grant
from nicps.switch.tally import Tally
from nicps.switchauth import SwitchKey

_EVERY_S = 1.0  # between HELLOs, and between READYs
_LEAST_S = 0.1  # the same, if there is something to ask
_FRESH_S = 3.0  # a nonce counts so long
_QUIET_S = 3.0  # without a grant of the list in force, one of a lower number may follow it
_LATE_S = 0.5  # members answer at once
_UNHEARD_S = 5.0  # hosts that do not grant


class NoRoom(EnvironmentProblem):
    """There is no memory for so many fragments, or not that much is allowed."""


class Places(Protocol):
    """The switch's memory, in which it adds."""

    def grow(self, fragments: int, width: int) -> None:
        """Replace all places by zeroed ones, with room for vectors of so many fragments of lanes of so many bits.

        Raises:
            NoRoom: there is no memory for it; nothing has changed.
        """

    def enter_view(self, granted: Granted) -> None:
        """Add for this list from now on."""

    def leave_view(self) -> None:
        """Add for no member until a list is in force."""


class Adding:
    """One network at one switch.

    Args:
        network: the hash of its name.
        boot: the time, in ns, when the switch was started: later starts have larger ones.
        key: the switch's, if it has one.
        fresh: random 64-bit numbers, never 0.

    Attributes:
        granted: the list in force, if there is one.
        members: those that have granted it, with their names.
        room: fragments and bits of a lane for which there is room.
        refused: grants that were not believed, by reason.
    """

    def __init__(
        self,
        places: Places,
        network: int,
        boot: int,
        key: SwitchKey | None = None,
        fresh: Callable[[], int] = nonce,
    ) -> None:
        self._places = places
        self._network = network
        self._key = key
        self._fresh = fresh
        self._sequence = 0
        self._hello_at = 0.0
        self._hello_before = -_EVERY_S
        self._nonces: deque[tuple[int, float]] = deque()
        self._answers: Tally[Granted, Grant] = Tally()
        self._under: dict[
            int, Tally[Granted, Grant]
        ] = {}  # by nonce: those of lists that do not follow
        self._granted_at = 0.0  # when the list in force was granted last
        self._ready_at: float | None = None
        self._late_at: float | None = None
        self._heard_at: float | None = None  # when hosts were heard, before any has granted
        self._lines: deque[str] = deque()
        self._hinted: set[str] = set()
        self._past: set[tuple[int, bytes]] = set()  # lists that were in force, by number and seed
        self._asked_room: tuple[int, int] | None = (
            None  # a size that was refused, until another one is asked for
        )
        self.boot = boot
        self.granted: Granted | None = None
        self.members: dict[int, str] = {}
        self.room = (0, 0)
        self.refused: Counter[str] = Counter()

    @property
    def missing(self) -> list[str]:
        """Live members that have not granted, by their addresses: their names are unknown."""
        if self.granted is None:
            return []
        live = self.granted.live
        return [wire.mac_text(live[number]) for number in live if number not in self.members]

    def ask(self, now: float) -> None:
        """Find out as soon as possible which view is in force."""
        self._hello_at = min(self._hello_at, max(now, self._hello_before + _LEAST_S))

    def hear_of(self, now: float, view: int) -> None:
        """Contributions of that view come in, and it is not in force here."""
        if self.granted is None or view != self.granted.number:
            self._hear(now)
            self.ask(now)

    def on_frame(self, now: float, source: bytes, frame: bytes) -> None:
        """A VIEW or SWITCH frame that has come in, from the version byte on."""
        try:
            header = wire.unpack_header(frame)
            if header.network != self._network:
                return
            body = wire.unpack(frame).body
            if isinstance(body, wire.View):
                if body.step == wire.ViewStep.INSTALL:
                    self.hear_of(now, body.number)
                return
            if not isinstance(body, wire.Switch):
                return
            if body.step != wire.SwitchStep.GRANT:
                self._hear_switch(source, body)
                return
            grant = read_grant(frame, source, self._network, self._key)
        except Refused as problem:
            self._hear(now)
            self.refused["grant"] += 1
            if problem.hint and len(self._hinted) < wire.MAX_MEMBERS:
                self._report_once(str(problem))
            return
        except WireError:
            self.refused["malformed"] += 1
            return
        self._hear(now)
        self._on_grant(now, grant)

    def frames(self, now: float) -> list[bytes]:
        """The frames to be sent to all now, from `wire.SWITCH`, each from the version byte on."""
        made = []
        if now >= self._hello_at:
            self._forget_nonces(now)
            drawn = self._fresh()
            self._nonces.append((drawn, now))
            self._hello_before, self._hello_at = now, now + _EVERY_S
            made.append(
                self._pack(wire.Switch(self.boot, drawn, 0, 0, 0, 0, wire.SwitchStep.HELLO))
            )
        if self._ready_at is not None and now >= self._ready_at and self.granted is not None:
            self._ready_at = now + _EVERY_S
            made.append(self._pack(self._ready(self.granted)))
        return made

    def wait(self, now: float, most_s: float) -> float:
        """Seconds until there is a frame or a line to send, at most so many."""
        due = [self._hello_at, self._ready_at, self._late_at]
        return max(0.0, min([most_s, *(at - now for at in due if at is not None)]))

    def lines(self, now: float) -> list[str]:
        """The lines for the user."""
        if self._late_at is not None and (now >= self._late_at or not self.missing):
            self._late_at = None
            self._lines.append(self._describe())
        if self._heard_at is not None and now >= self._heard_at + _UNHEARD_S:
            self._heard_at = None
            self._report_once(
                "hosts are here, and no majority has granted its view: hosts believe a switch with"
                " `nicps join --trust-switch`, in a network with a key with `--switch-key`"
            )
        lines = [*self._lines]
        self._lines.clear()
        return lines

    def _forget_nonces(self, now: float) -> None:
        """Drop a list, with all grants that no longer count."""
        while self._nonces and now - self._nonces[0][1] > _FRESH_S:
            self._under.pop(self._nonces.popleft()[0], None)

    def _on_grant(self, now: float, grant: Grant) -> None:
        self._forget_nonces(now)
        if grant.boot != self.boot or not any(grant.nonce == drawn for drawn, _ in self._nonces):
            self.refused["late"] += 1
            return
        if grant.granted == self.granted:
            self._granted_at = now
            if grant.number not in self.members:
                self.members[grant.number] = grant.name
                self._ready_at = now
                if self._late_at is None:  # it was reported as missing
                    self._late_at = now
            if grant.number == grant.granted.lead:
                self._make_room(now, grant)
        elif self.granted is not None and grant.granted.number <= self.granted.number:
            self._on_lower(now, grant)
        elif (grant.granted.number, grant.granted.seed) in self._past:
            self.refused["past"] += 1
        else:
            heard = self._answers.add(grant.granted, grant.granted.view, grant.number, grant)
            if heard is not None:
                self._enter(now, grant.granted, heard)

    def _on_lower(self, now: float, grant: Grant) -> None:
        """Whether a list is of a network that has begun anew, or of one that no longer counts."""
        tally = self._under.setdefault(grant.nonce, Tally())
        if tally.add(grant.granted, grant.granted.view, grant.number, grant) is None:
            return
        drawn = [one for one, _ in self._nonces]
        at = drawn.index(grant.nonce)
        before = self._under.get(drawn[at - 1]) if at else None
        twice = before is not None and before.agreed(grant.granted, grant.granted.view) is not None
        if not twice or now - self._granted_at < _QUIET_S:
            return
        if any(self.room):  # the tags of these sums will come again: the places must be empty
            try:
                self._places.grow(*self.room)
            except NoRoom as problem:
                self._report_once(
                    f"{problem}: the hosts that have begun anew train without this switch"
                )
                return
        self._report(f"the hosts have begun anew with view {grant.granted.number}")
        self._begin_boot(now)

    def _enter(self, now: float, granted: Granted, heard: dict[int, Grant]) -> None:
        """A majority has granted this list."""
        self.granted = granted
        self.members = {number: grant.name for number, grant in heard.items()}
        self._answers.clear()
        self._under.clear()
        self._granted_at = self._ready_at = now
        self._late_at = now + _LATE_S
        self._heard_at = None
        lead = heard.get(granted.lead)
        if lead is not None:
            self._make_room(now, lead)
        if self.granted is not None:
            self._past.add((granted.number, granted.seed))
            self._places.enter_view(granted)

    def _make_room(self, now: float, lead: Grant) -> None:
        """The lead's grant has the size of the vectors of its job."""
        fragments, width = self.room
        wanted = (lead.fragments, lead.width)
        if not lead.fragments or (lead.width == width and lead.fragments <= fragments):
            return
        if wanted == self._asked_room:
            return
        try:
            self._places.grow(*wanted)
        except NoRoom as problem:
            self._asked_room = wanted
            self._report(f"{problem}: the hosts train without this switch")
            return
        self._asked_room = None
        self.room = wanted
        self._ready_at = now
        if fragments:  # sums may have been lost
            self._begin_boot(now)

    def _begin_boot(self, now: float) -> None:
        """From now on no earlier grant counts."""
        self._places.leave_view()
        self.boot += 1
        self.granted, self.members = None, {}
        self._answers.clear()
        self._under.clear()
        self._nonces.clear()
        self._ready_at = self._late_at = None
        self.ask(now)

    def _hear(self, now: float) -> None:
        if self._heard_at is None and self.granted is None:
            self._heard_at = now

    def _hear_switch(self, source: bytes, body: wire.Switch) -> None:
        if body.boot != self.boot and len(self._hinted) < wire.MAX_MEMBERS:
            self._report_once(
                f"another switch that adds is here ({wire.mac_text(source)}): one of them must be stopped"
            )

    def _ready(self, granted: Granted) -> wire.Switch:
        fragments, width = self.room
        return wire.Switch(
            self.boot,
            int.from_bytes(granted.seed[:8], "big"),
            sum(1 << (number - 1) for number in self.members),
            granted.number,
            fragments,
            width,
            wire.SwitchStep.READY,
        )

    def _pack(self, body: wire.Switch) -> bytes:
        self._sequence += 1
        header = wire.Header(network=self._network, view=body.number, sequence=self._sequence)
        frame = wire.pack(header, body)
        return frame if self._key is None else self._key.control.sign(frame, wire.SWITCH)

    def _describe(self) -> str:
        assert self.granted is not None
        said = ", ".join(name for _, name in sorted(self.members.items()))
        missing = self.missing
        rest = (
            f"; no grant from {', '.join(missing)}, so the hosts do not use it" if missing else ""
        )
        return f"view {self.granted.number}: adding for {said}{rest}"

    def _report(self, line: str) -> None:
        self._lines.append(line)

    def _report_once(self, line: str) -> None:
        if line not in self._hinted:
            self._hinted.add(line)
            self._report(line)
