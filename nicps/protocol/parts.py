# SPDX-License-Identifier: Apache-2.0
"""The parts of a node, how they hold one another, and what others ask of them."""

from __future__ import annotations

from collections.abc import Callable

from nicps import wire
from nicps.protocol.admission import Admission
from nicps.protocol.bystander import Bystander
from nicps.protocol.deciding import Decisions
from nicps.protocol.departure import Departure
from nicps.protocol.early_lists import EarlyLists
from nicps.protocol.fault_finder import FaultFinder
from nicps.protocol.formation import Formation
from nicps.protocol.inbox import Inbox
from nicps.protocol.kernel import KernelState, Receiver
from nicps.protocol.lead import LeadWatch
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.membership import Membership
from nicps.protocol.phase import AdaptiveTimeout, Member, Phase, Timings
from nicps.protocol.readmission import Readmission
from nicps.protocol.ring import Ring
from nicps.protocol.rings import Rings
from nicps.protocol.switch_link import SwitchLink
from nicps.protocol.view import View, safe_name


class NodeParts:
    """Everything that a node consists of; `Node` has its events.

    Args:
        receiver: what has arrived (the kernel's maps).
        nonce: fresh random 64-bit numbers, never 0.
        stage: how much this host has of a job, by the job's name (R20); None if it wants no part in it.
        believes_switch: the user has said that a Linux switch that adds is believed.

    Attributes: `membership`, this host's part in views; `rings`, that of the phase in force and of the one to come;
    `switch`, what is known of a Linux switch that adds. `changes`: as long as it stays the same, `kernel` and
    `deadline` do.
    """

    def __init__(
        self,
        mac: bytes,
        name: str,
        network: str,
        receiver: Receiver,
        nonce: Callable[[], int],
        timings: Timings | None = None,
        stage: Callable[[str], wire.Stage | None] = lambda job: wire.Stage.NOTHING,
        *,
        believes_switch: bool = False,
    ) -> None:
        self.network = wire.network_id(network)
        self.timings = timings = timings or Timings()
        self.timeout = AdaptiveTimeout(timings)
        self.changes = 0
        self._due: float | None = None  # `deadline`, since the last change
        self._sequence = 0  # of the frames that this host has sent
        self._host = host = LocalHost(mac, safe_name(name, mac))
        self._formation = Formation(mac, host.name, timings)
        self._lead = LeadWatch(host, timings, self.timeout)
        self._readmission = Readmission(host, timings, nonce)
        self._bystander = Bystander(host, timings)
        self.rings = Rings(host, receiver, timings, self.timeout)
        self._decisions = Decisions(host, self.rings, timings, self.timeout)
        self._departure = Departure(host, self.rings, timings)
        self.membership = Membership(
            host,
            self.rings,
            self._decisions,
            self._departure,
            self._readmission,
            self._lead,
            self._formation,
            timings,
            self.timeout,
            nonce,
        )
        self._admission = Admission(
            host,
            self.membership,
            self._formation,
            self._readmission,
            self._departure,
            self._lead,
            timings,
            stage,
            self._bystander,
        )
        self._early = EarlyLists()
        self._faults = FaultFinder(host, self.rings, self.membership, timings)
        self.switch = SwitchLink(host, believes=believes_switch)
        self._inbox = Inbox(
            host,
            self._admission,
            self.membership,
            self._decisions,
            self.rings,
            self._lead,
            self.switch,
        )

    def _note_change(self) -> None:
        """Something has happened: what was derived from the parts no longer holds. Every event calls this."""
        self.changes += 1
        self._due = None

    # ---- what others ask

    @property
    def mac(self) -> bytes:
        """This host's address."""
        return self._host.mac

    @property
    def name(self) -> str:
        """As it is in the list."""
        return self._host.name

    @property
    def state(self) -> NodeState:
        """What `nicps status` says of this host."""
        return self._host.state

    @property
    def view(self) -> View:
        """The view in force, or the last one."""
        return self._host.view

    @property
    def number(self) -> int:
        """This member's."""
        return self._host.number

    @property
    def members(self) -> tuple[Member, ...]:
        """The list; who has left is still in it."""
        return self._host.view.members

    @property
    def learners(self) -> frozenset[int]:
        """Members that came back and have not been counted since."""
        return self.membership.learners

    @property
    def phase(self) -> Phase | None:
        """In force, or being prepared."""
        return self._decisions.phase

    @property
    def phase_in_force(self) -> Phase | None:
        """In force: its first token has been seen."""
        return self.rings.current.phase if self.rings.current is not None else None

    @property
    def ring(self) -> Ring | None:
        """That of the phase in force."""
        return self.rings.current

    @property
    def open_round(self) -> int:
        """The round that is open here; 0 before any."""
        return self.rings.open_round

    @property
    def rounds(self) -> tuple[int, ...]:
        """The open round of each channel of the phase in force; of one channel where none is."""
        return (self.rings.open_round, *self.rings.opened)

    @property
    def highest_round(self) -> int:
        """The highest open round of any channel. A phase that is decided on begins with a later one."""
        return self.rings.highest_round

    @property
    def between_steps(self) -> bool:
        """No step is under way here: the lead may decide, and take hosts in (docs/channels.md)."""
        return self.rings.current is None or self.rings.current.between_steps

    @property
    def leads(self) -> bool:
        """This host acts as node 1 (R22)."""
        return self._host.leads

    @property
    def ended(self) -> bool:
        """This host stands by because the job has ended."""
        return self._host.ended

    @property
    def leaving(self) -> bool:
        """This host has said that it departs; the others have not agreed on it yet."""
        return self._departure.leaving

    @property
    def changing(self) -> bool:
        """The view is about to end: nothing may be completed or committed in it."""
        return self.membership.changing

    @property
    def asks(self) -> bool:
        """This host was evicted, and asks whoever may know what has become of the job."""
        return self._admission.asks

    @property
    def busy(self) -> bool:
        """This host is about to start a network of its own: it answers no calls."""
        return self.membership.busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        self.membership.busy = busy
        self._note_change()

    @property
    def kernel(self) -> KernelState | None:
        """What the XDP program must know, or None while it is to take nothing."""
        if self.membership.view_change is None or self.membership.changing:
            return None
        return self.rings.kernel
