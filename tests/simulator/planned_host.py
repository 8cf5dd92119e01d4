# SPDX-License-Identifier: Apache-2.0
"""A simulated host of a job whose steps have a plan: the life of the job as it is, and a kernel with areas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nicps import protocol, wire
from nicps.job import actions as act
from nicps.job.slow_work import ReserveAccumulators
from nicps.session import shared_form as says
from tests.simulator.channel_kernel import ChannelReceiver, Port
from tests.simulator.host import Host
from tests.simulator.kernel import Receiver
from tests.simulator.outbox import Outbox
from tests.simulator.places import Places, Records
from tests.simulator.planned_program import PlannedProgram
from tests.simulator.program import Program

if TYPE_CHECKING:
    from tests.simulator.planned_lan import PlannedLan


class PlannedOutbox(Outbox):
    """Each channel has a way of its own out of the host."""

    _host: PlannedHost

    def __init__(self, host: PlannedHost) -> None:
        super().__init__(host)
        self._free: dict[int, float] = {}

    def _stripe(self, action: act.Transmit, now: float) -> None:
        host, fragments, channel = self._host, action.fragments, action.fragments.channel
        if not channel:
            super()._stripe(action, now)
            return
        total, width = action.phase.fragments_in(fragments.round, channel), action.phase.width
        free = max(now, self._free.get(channel, 0.0))
        self._free[channel] = free = host.at(channel).kernel.stripes.send(
            fragments, total, width, free
        )
        host.later(free - now, lambda: self._sent(fragments, now))


class PlannedHost(Host):
    """Attributes: `ports`, of the channels above 0; `opened`, the open round of each channel, by phase."""

    lan: PlannedLan

    def _boot(self) -> None:
        self.ports = [Port(self, channel) for channel in range(1, wire.MAX_CHANNELS)]  # type: ignore[arg-type]
        self.was_paused = False  # in this life
        self.word = (
            0,
            0,
            0,
            False,
        )  # view, phase, round, and whether the lead saves after the next step
        self.opened: dict[int, list[int]] = {}
        super()._boot()

    def pause(self) -> None:
        super().pause()
        self.was_paused = True

    def hear(self, process: Program, message: says.FromProgram) -> None:
        """The word of a lead's program is not lost, as long as it leads and the phase goes on.

        Before all members are in the lead's view it is: the lead asks for a checkpoint again.
        """
        phase = self.node.phase_in_force if self.node.membership.ready else None
        if isinstance(message, says.Decide) and phase is not None and message.what == "continue":
            self.word = self.node.view.number, phase.number, message.round, message.checkpoint
        super().hear(process, message)

    def _outbox(self) -> Outbox:
        return PlannedOutbox(self)

    def receiver(self) -> Receiver:
        """What has arrived, by channel."""
        return ChannelReceiver(self.kernel, self.ports)

    def at(self, channel: int) -> Any:
        """The host as the kernel's area of that channel has it."""
        return self.ports[channel - 1] if channel else self

    def list_of(self, channel: int, view: int, round_: int, members: int, unit: int) -> None:
        """The doorbell of a channel above 0."""
        self.do(self.machine.list_came(self._sync(), view, round_, members, unit, channel))

    def _start(self, number: int, settings: Mapping[str, Any]) -> PlannedProgram:
        return PlannedProgram(self, number, settings)

    def _do(self, action: Any) -> None:
        match action:
            case protocol.Send():
                self.lan.checks.announced(self, action.frame)
                super()._do(action)
            case protocol.Narrow():
                self.at(action.channel).kernel.stripes.narrow(action)
            case act.EndProgram(_, reason):
                self.lan.checks.ends(self, reason)
                super()._do(action)
            case act.EnterView():
                super()._do(action)
                for port in self.ports:
                    port.stripes.clear()
            case act.RenewAccumulators(blocks, room, rooms):
                self._blocks = blocks or self._blocks
                self._make(rooms or ((room,) if room else ()), ())
            case act.RetirePlaces():
                for channel in range(wire.MAX_CHANNELS):
                    self.at(channel).kernel.stripes.retire_places()
            case _:
                super()._do(action)

    def _use(self, made: ReserveAccumulators) -> None:
        self._blocks = made.blocks or self._blocks
        rooms = made.rooms or ((made.room,) if made.room else ())
        self._make(rooms, made.stripes or ((made.places,) if made.places else ()))

    def _make(self, rooms: tuple[int, ...], places: tuple[int, ...]) -> None:
        """New memory of the kernel's, by channel; nothing: what there is does."""
        per_block = wire.fragments_per_block(self.lan.plan.width)
        for channel, room in enumerate(rooms):
            stripes = self.at(channel).kernel.stripes
            stripes.records = Records(room)
            stripes.retire_places()
        for channel, count in enumerate(places):
            self.at(channel).kernel.stripes.places = Places(count, per_block)
