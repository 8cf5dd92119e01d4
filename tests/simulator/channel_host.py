# SPDX-License-Identifier: Apache-2.0
"""A simulated host in a phase with channels: the protocol's node, a kernel with areas, and a model of a job.

This host runs the node by itself, without the life of a job, which `planned_host.py` has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nicps import protocol, wire
from nicps.protocol import Action, Node
from tests.simulator.base_host import BaseHost
from tests.simulator.channel_kernel import ChannelReceiver, Port
from tests.simulator.channel_program import ChannelProgram
from tests.simulator.kernel import Kernel
from tests.simulator.outbox import Outbox

if TYPE_CHECKING:
    from tests.simulator.channel_lan import ChannelLan

JOB = "job"


class Machine:
    """The node, as a host drives the life of a job."""

    part = None

    def __init__(self, host: ChannelHost, kernel: Kernel, ports: list[Port]) -> None:
        rng = random.Random(f"nonces {host.lan.seed} {host.index} {host.life}")
        self.node = Node(
            host.mac,
            f"h{host.index + 1}",
            "sim",
            ChannelReceiver(kernel, ports),
            lambda: rng.getrandbits(63) + 1,
            host.lan.timings,
            lambda job: wire.Stage.WAITING if job == JOB else None,
        )
        self.on_frame = self.node.on_frame
        self.list_came = self.node.on_list
        self.sums_came = self.node.advance
        self.deadline = self.node.deadline
        self.kernel_saw = self.node.kernel_saw
        self.renew_view = self.node.renew

    def tick(self, now: float, waits: bool) -> list[Action]:
        """Time has passed."""
        return self.node.tick(now)


class ChannelHost(BaseHost):
    """Attributes: `ports`, of the channels above 0; `program`, the training program and what the agent does for it."""

    lan: ChannelLan

    def _boot(self) -> None:
        self.kernel = Kernel(self)
        self.ports = [Port(self, channel) for channel in range(1, wire.MAX_CHANNELS)]
        self.keys = {}
        self.machine = Machine(self, self.kernel, self.ports)
        self.node = self.machine.node
        self.outbox = Outbox(self)
        self.process = self.memory = None
        self.program = self.make_program()
        self._blocks = 0
        self._timer: float | None = None

    def make_program(self) -> ChannelProgram:
        """The training program, and what the agent does for it; nothing of one before is known."""
        return ChannelProgram(self)

    @property
    def part(self) -> Any:
        """No job of `nicps.job` is here."""
        return None

    def restart(self) -> None:
        """`nicps join` again."""
        self.note("RESTARTED")
        self.dead = False
        self._boot()
        self.node.join(self.clock())
        self.arm()

    def at(self, channel: int) -> Any:
        """The host as the kernel's area of that channel has it."""
        return self.ports[channel - 1] if channel else self

    def list_of(self, channel: int, view: int, round_: int, members: int, unit: int) -> None:
        """The doorbell of a channel above 0."""
        self.do(self.node.on_list(self._sync(), view, round_, members, unit, channel))

    def do(self, actions: Sequence[Any]) -> None:
        """Carry them out; the lead calls hosts all the time."""
        if self.dead:
            return
        if actions:
            self.lan.checks.frozen(self, actions)
        self.node.call_hosts(JOB, calls=self.node.leads, closed=True)
        super().do(actions)

    def _do(self, action: Any) -> None:
        lan, program = self.lan, self.program
        if lan.moments:
            lan.moment(self, action)
            if self.dead:
                return
        match action:
            case protocol.Send():
                lan.checks.announced(self, action.frame)
                self.outbox.send(action)
            case protocol.SendFragments():
                self._transmit(action)
            case protocol.Narrow():
                self.at(action.channel).kernel.stripes.narrow(action)
            case protocol.Installed(view=view):
                self.keep_key(view)
                self.kernel.clear()
                for port in self.ports:
                    port.stripes.clear()
                self.kernel.alive = self.clock()
                lan.checks.installed(self, action)
                program.installed(action)
            case protocol.Committed():
                lan.checks.committed_in(self, action)
                program.committed(action)
            case protocol.Prepare(phase):
                program.prepare(phase)
            case protocol.PhaseAgreed(phase=phase):
                self.note(f"AGREED {phase.kind.name} {phase.number}")
                if phase.kind is wire.PhaseKind.STOP:
                    lan.over(self, "", ok=True)
            case protocol.Ready():
                program.decide()
            case protocol.Closed(round_):
                program.closed(round_)
            case protocol.Need(round_, samples):
                program.need = round_, samples
            case protocol.Answered() if action.number not in self.node.view.live:
                program.joiners[action.joiner.mac] = action.joiner
            case protocol.Evicted(reason=reason):
                self.note(f"EVICTED {reason}")
                self.program = self.make_program()
            case protocol.Differs() | protocol.Failed():
                lan.checks.fail(f"{self.node.name}: {action}")
            case protocol.NoProgress():
                lan.checks.accused(self, action)

    def _transmit(self, action: protocol.SendFragments) -> None:
        """Fragments of a channel: an urgent one has a way of its own out of the host."""
        lan, channel = self.lan, action.channel
        stripes = self.at(channel).kernel.stripes
        phase = self.program.phase_of(action)
        free = max(lan.now, lan.free_at.get((self.index, channel), 0.0))
        if phase is not None:
            striped = action.striped
            assert striped is not None
            total = striped.fragments or phase.fragments_in(action.round, channel)
            free = stripes.send(action, total, striped.width or phase.width, free)
        lan.free_at[self.index, channel] = free
        self.later(free - lan.now, lambda: self.do(self.node.sent(self.clock(), action)))
