# SPDX-License-Identifier: Apache-2.0
"""What every simulated host has: lives, a clock, frames that come up, and actions that are carried out."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.protocol import Node, View
from tests.simulator.kernel import Kernel, Receiver

if TYPE_CHECKING:
    from tests.simulator.lan import Lan
    from tests.simulator.outbox import Outbox
    from tests.simulator.sums import SumChecks

_VIEW = struct.Struct(">I")
_VIEW_AT = wire.Layout.of(wire.Header).offsets[wire.Layout.of(wire.Header).names.index("view")]


class BaseHost:
    """A host with its kernel and the protocol's node. Its kinds differ in what drives the node (`_boot`, `_do`)."""

    kernel: Kernel
    node: Node
    machine: Any  # what drives the node
    outbox: Outbox
    process: Any  # the training program
    keys: dict[int, bytes]  # view -> its seed: this one's and the one's before
    _blocks: int  # in a bank of the accumulators
    _timer: float | None

    def __init__(self, lan: Lan, index: int, rate: float) -> None:
        self.lan, self.index, self.rate = lan, index, rate
        self.mac = bytes([2, 0, 0, 0, 0, index + 1])
        self.life = 0  # raised by every restart
        self.dead = self.paused = False
        self.believes = True  # a switch that adds
        self.slowness = 1.0  # how much longer its training program takes than the others'
        self.differs = False  # whatever is applied here comes to other weights
        self.refuses_stripes = False  # its kernel does not load the program that takes them
        self.sick = False  # training programs that are started here end with an error
        self.job_over = ""
        self.killed_at = 0.0
        self.result: tuple[int, str] | None = None  # trained rounds and weights that it has saved
        self.on_disk: tuple[int, str] | None = None  # saved before the host was killed
        self.checkpoint: Any = None  # the state from which `nicps resume` would go on
        self.cancelled_at: float | None = None  # by its user
        self.stepped = True  # the agent has run since the kernel's view of it was made
        self._held: list[Callable[[], None]] = []  # what waits while the agent is stopped
        self._boot()

    def _boot(self) -> None:
        """Nothing of before is known."""
        raise NotImplementedError

    def receiver(self) -> Receiver:
        """What has arrived."""
        return Receiver(self.kernel)

    @property
    def sum_checks(self) -> SumChecks:
        """What was offered to its rounds, and what that came to."""
        return self.lan.checks.sums

    def at(self, channel: int) -> Any:
        """The host as the kernel's area of that channel has it."""
        return self

    def clock(self) -> float:
        """This host's own steady clock."""
        return self.lan.now * self.rate + self.index * 1000.0

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.lan.note(f"h{self.index + 1}  {text}")

    # ---- the outside world

    def kill(self) -> None:
        """kill -9 of agent and training program."""
        self.note("KILLED")
        self.killed_at = self.lan.now
        self.dead, self.paused = True, False
        self.life += 1
        self._held = []

    def restart(self) -> None:
        """`nicps join` again; nothing of before is known."""
        self.note("RESTARTED")
        self.dead = False
        self.on_disk, self.result = self.result or self.on_disk, None
        self.believes = not self.lan.plan.exchange.needs_trust or self.lan.more.random() < 0.9
        self._boot()
        self.do(self.machine.join(self.clock()))

    def pause(self) -> None:
        """SIGSTOP of agent and training program; the kernel goes on."""
        self.note("PAUSED")
        self.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.note("RESUMED")
        self.paused = False
        held, self._held = self._held, []
        for event in held:
            event()
        self._tick()

    def renew(self) -> None:
        """The view's key has served its time."""
        self.later(1e-5, lambda: self.do(self.machine.renew_view(self.clock(), key_is_spent=True)))

    def wake(self, event: Callable[..., None], *told: Any) -> None:
        """For the agent: at once, or when it goes on."""
        if self.paused:
            self._held.append(functools.partial(event, *told))
        else:
            event(*told)

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """In this life."""
        self.lan.at_host(self, self.lan.now + delay_s, self.wake, event)

    # ---- frames and time

    def completion(self, round_: int, sender: int) -> bytes:
        """The fragment that went up since it completed a contribution."""
        header = wire.Header(
            network=self.node.network,
            view=self.node.view.number,
            round=round_,
            sender=sender,
        )
        return wire.pack(header, wire.Fragment(0, 1, 1, 16, 0), tail=bytes(wire.PAYLOAD_BYTES))

    def keep_key(self, view: View) -> None:
        """A view is in force: its key, and the one before it."""
        before = max((number for number in self.keys if number < view.number), default=0)
        self.keys = {number: seed for number, seed in self.keys.items() if number == before}
        self.keys[view.number] = view.seed

    def key_of(self, frame: bytes) -> bytes | None:
        """What this host would sign or check such a frame with; None: it does not know that view."""
        (view,) = _VIEW.unpack_from(frame, _VIEW_AT)
        return self.keys.get(view) if view else b""

    def take_frame(self, source: bytes, data: bytes, key: bytes | None) -> None:
        if key is None or self.key_of(data) != key:
            return
        if data[1] == wire.FrameType.TOKEN and not self.kernel.take_token(wire.unpack(data)):
            return
        if self.paused:
            self.wake(self.frame_up, source, data)
        else:
            self.frame_up(source, data)

    def take_of_switch(self, data: bytes) -> None:
        """A Linux switch says something; it needs no view's key for that."""
        self.wake(self.frame_up, wire.SWITCH, data)

    def frame_up(self, source: bytes, data: bytes) -> None:
        now = self._sync()
        if data[1] == wire.FrameType.VIEW:
            self.lan.checks.told(self, data)
        self.do(self.machine.on_frame(now, source, data))

    def list_up(self, view: int, round_: int, members: int, unit: int) -> None:
        """The doorbell: the first contribution of a round has come."""
        self.do(self.machine.list_came(self._sync(), view, round_, members, unit))

    def sums_up(self) -> None:
        """The doorbell: some sums have come, or the last."""
        self.do(self.machine.sums_came(self._sync()))

    def arm(self) -> None:
        """The node or the job may have another deadline now."""
        deadline = self.machine.deadline()
        if deadline != self._timer and deadline != math.inf:
            self._timer = deadline
            time = max((deadline - self.index * 1000.0) / self.rate, self.lan.now + 1e-5)
            self.lan.at_host(self, time, self._due, deadline)

    def _due(self, deadline: float) -> None:
        if self._timer == deadline and not self.paused:
            self._tick()

    def _tick(self) -> None:
        self._timer = None
        now = self._sync()
        self.do(self.machine.tick(now, self.outbox.waits))

    def _sync(self) -> float:
        kernel, now = self.kernel, self.clock()
        machine, bounced = self.machine, kernel.bounced
        machine.kernel_saw(now, kernel.seen, kernel.token_at, kernel.heard, bounced)
        kernel.bounced = None
        kernel.alive = now
        if renewal := machine.renew_view(now, key_is_spent=False):
            self.do(renewal)
        return now

    # ---- what the agent does

    def do(self, actions: Sequence[Any]) -> None:
        if self.dead:
            return
        self.stepped = True
        self.lan.checks.moved.append(self)
        awaited = self.outbox.waits
        for at, action in enumerate(actions, 1):
            self._do(action)
            if self.dead:
                return
            if self.paused:
                self.wake(self.do, actions[at:])
                return
        self.kernel.alive = self.clock()
        self.lan.checks.has_room(self, self._blocks)
        if self.outbox.waits and not awaited:
            self.later(1e-5, self._tick)
        self.arm()

    def _do(self, action: Any) -> None:
        """Carry it out."""
        raise NotImplementedError
