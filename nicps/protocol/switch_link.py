# SPDX-License-Identifier: Apache-2.0
"""What this host knows of a Linux switch that adds, and what it grants to it (docs/linux-switch.md).

Frames come here only if they are the switch's: where there is a key, whoever drives the node has checked their tags.
"""

from __future__ import annotations

import math

from nicps import wire
from nicps.protocol.actions import Send, SwitchChanged
from nicps.protocol.local_host import LocalHost
from nicps.protocol.signals import Renew, Steps
from nicps.protocol.view import numbers

#: What the switch has said counts for so long. It says everything once a second.
FRESH_S = 3.0
#: Between two grants, however often the switch asks.
_GRANT_S = 0.05
#: HELLOs of a newer boot after which a member that does not lead asks for a new view, if the lead has not.
_UNANSWERED = 3

UNBELIEVED = (
    "a switch that adds is there, and this host has not been told to believe it: `nicps join`"
    " with --trust-switch, or in a network with a key --switch-key"
)
OLDER = (
    "the switch that is heard was started before the last one, by its clock, and is not used: set its clock, and start"
    " it again"
)


class SwitchLink:
    """One host's part in what a Linux switch and the members say to each other.

    A view is granted to one boot of the switch only. Another boot numbers its frames from the beginning, and has no
    remainders: its sums could differ from those that some members have. So it gets a view of its own.

    Args:
        believes: this host's user has said that it believes the switch.

    Attributes: `heard`, the switch has been heard lately; `boot`, the newest of its boots that was heard, 0 before.
    """

    def __init__(self, host: LocalHost, *, believes: bool) -> None:
        self.heard = False
        self._host = host
        self._believes = believes
        self.boot = self._nonce = 0
        self._heard_at = self._older_at = self._two_at = -math.inf
        self._granted: tuple[int, bytes, int] | None = None  # a view, its seed, and the boot
        self._granted_at = -math.inf
        self._grant_due = math.inf
        self._unanswered = 0  # HELLOs of a boot that must not have this view
        self._ready: wire.Switch | None = None  # of this view, as the newest boot has said it
        self._ready_at = -math.inf
        self._room = 0, 0  # fragments of the vectors to come, bits of a lane
        self._lacks = ""
        self._said = ""  # for the operator, of this boot

    # ---- what others ask

    def find_lack(self, fragments: int, width: int) -> str:
        """Why the switch cannot add such vectors in the view in force, for people; an empty text if it can."""
        view, ready = self._host.view, self._ready
        if not self._believes:
            return "this host has not been told to believe a switch (`nicps join --trust-switch`)"
        if not self.heard:
            return "no switch is heard"
        if self._two_at > -math.inf:
            return "two switches are heard"
        if ready is None:
            return f"the switch is not ready for view {view.number}"
        if without := view.live - numbers(ready.members):
            return f"the switch has no grant of {view.names(without)}"
        if ready.width != width or ready.fragments < fragments:
            room = f"{ready.fragments} fragments of {ready.width} bits"
            return f"the switch has room for {room}, and the vectors have {fragments} of {width}"
        return ""

    def describe(self) -> str:
        """For `nicps status`: an empty text where no switch is heard."""
        if not self.heard:
            return ""
        if not self._believes:
            return UNBELIEVED
        if not self._host.is_member:
            return "believed"
        return self.find_lack(*self._room) or "ready"

    @property
    def granted_boot(self) -> int:
        """The boot that makes sums in the view in force, though a newer one may have been heard: the last one that this
        host has granted a view to. If it has granted none, the newest that was heard.
        """
        return self._granted[2] if self._granted is not None else self.boot

    # ---- events

    def on_frame(self, now: float, body: wire.Switch) -> Steps:
        """A HELLO or a READY of a switch."""
        if body.step not in (wire.SwitchStep.HELLO, wire.SwitchStep.READY):
            return []
        if body.boot < self.boot:
            self._older_at = now
            return self._report(OLDER, warns=True) if self._believes and not self.heard else []
        steps = self._note_boot(now, body.boot)
        if body.step == wire.SwitchStep.HELLO:
            self._nonce = body.nonce
            return steps + self._ask_to_grant(now, hello=True) + self._note_change()
        view = self._host.view
        if self._host.is_member and (body.number, body.nonce) == (view.number, name_of(view.seed)):
            self._ready, self._ready_at = body, now
        return steps + self._note_change()

    def enter_view(self, now: float) -> Steps:
        """Another view is in force."""
        self._ready, self._unanswered = None, 0
        return self._ask_to_grant(now) + self._note_change()

    def need_room(self, now: float, fragments: int, width: int) -> Steps:
        """The size of the vectors to come is known."""
        self._room = fragments, width
        return self._ask_to_grant(now) + self._note_change()

    def tick(self, now: float) -> Steps:
        """Grant what is due; forget what the switch has not repeated."""
        if now < self.deadline():
            return []
        steps: Steps = []
        if now >= self._grant_due:
            steps += self._grant(now)
        if now >= self._ready_at + FRESH_S:
            self._ready = None
        if now >= self._two_at + FRESH_S:
            self._two_at = -math.inf
        if now >= self._heard_at + FRESH_S and self.heard:
            self.heard = False
            steps += self._report("the switch is not heard any more")
        return steps + self._note_change()

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        due = self._grant_due
        if self.heard:
            due = min(due, self._heard_at + FRESH_S)
        if self._ready is not None:
            due = min(due, self._ready_at + FRESH_S)
        if self._two_at > -math.inf:
            due = min(due, self._two_at + FRESH_S)
        return due

    # ---- the switch

    def _note_boot(self, now: float, boot: int) -> Steps:
        """It is there; perhaps it has been started again."""
        before, self._heard_at = self._heard_at, now
        steps: Steps = []
        if boot > self.boot:
            self.boot, self._nonce, self._ready, self._unanswered = boot, 0, None, 0
            self._said = ""
        elif before < self._older_at and now < self._older_at + FRESH_S:
            self._two_at = now
            text = "two switches that add are heard at once: neither is used"
            steps += self._report(text, warns=True)
        if not self.heard:
            self.heard = True
            there = "a switch that adds is there, and is believed"
            steps += self._report(there if self._believes else UNBELIEVED)
        return steps

    def _report(self, text: str, *, warns: bool = False) -> Steps:
        if text == self._said:
            return []
        self._said = text
        return [SwitchChanged(text, warns=warns)]

    def _note_change(self) -> Steps:
        """Whoever waits for the switch looks again."""
        before, self._lacks = self._lacks, self.find_lack(*self._room)
        if self._lacks == before or not self._believes:
            return []
        return [SwitchChanged()]

    # ---- grants

    @property
    def _may_grant(self) -> bool:
        """This host has a view to grant. A lone member adds for itself, and would take the switch from others."""
        host = self._host
        asked = self._believes and self.heard and self._nonce
        return bool(asked) and host.is_member and len(host.view.live) > 1

    @property
    def _is_anothers(self) -> bool:
        """An earlier boot has the view."""
        view, granted = self._host.view, self._granted
        if granted is None or granted[:2] != (view.number, view.seed):
            return False
        return granted[2] != self.boot

    def _ask_to_grant(self, now: float, *, hello: bool = False) -> Steps:
        if not self._may_grant:
            return []
        if self._is_anothers:
            self._unanswered += hello
            asks = self._host.leads or self._unanswered >= _UNANSWERED
            return [Renew()] if hello and asks else []
        self._grant_due = max(now, self._granted_at + _GRANT_S)
        return self._grant(now) if now >= self._grant_due else []

    def _grant(self, now: float) -> Steps:
        host, view = self._host, self._host.view
        self._grant_due = math.inf
        if not self._may_grant or self._is_anothers:  # since the grant was put off
            return []
        self._granted, self._granted_at = (view.number, view.seed, self.boot), now
        name = host.name.encode()[: wire.NAME_BYTES]
        # Whoever drives this node has the view's key, and puts it in.
        said = wire.Grant(view.seed, bytes(16), name.ljust(wire.NAME_BYTES, b"\0"), view.lead)
        live = [wire.GrantMember(view.members[k - 1].mac, k) for k in view.order]
        fragments, width = self._room
        body = wire.Switch(
            self.boot, self._nonce, 0, view.number, fragments, width, wire.SwitchStep.GRANT
        )
        return [Send(wire.Frame(host.header(0), body, (), wire.pack_grant(said, live)))]


def name_of(seed: bytes) -> int:
    """What names a view's list in a READY, beside its number: the first 8 bytes of its seed."""
    return int.from_bytes(seed[:8], "big")
