# SPDX-License-Identifier: Apache-2.0
"""The kernel of a simulated host with several channels: each has an area of the maps, which is a model by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.protocol import KernelState
from tests.simulator.kernel import Receiver
from tests.simulator.places import Places, Records
from tests.simulator.stripes import Stripes

if TYPE_CHECKING:
    from tests.simulator.channel_host import ChannelHost
    from tests.simulator.kernel import Kernel
    from tests.simulator.sums import SumChecks


class Port:
    """A channel above 0 of a host: what its area of the kernel takes for its host and for the LAN.

    Attributes: `channel`, from 1; `stripes`, the model of the area; `taken`, fragments of other exchanges: none.
    """

    def __init__(self, host: ChannelHost, channel: int) -> None:
        self.host, self.channel = host, channel
        self.kernel = self
        self.taken: dict[tuple[int, int, int], set[int]] = {}
        self.stripes = Stripes(self)  # type: ignore[arg-type]
        self.mac, self.index, self.clock = host.mac, host.index, host.clock
        self._of: KernelState | None = None  # what `_state` was made of
        self._state: KernelState | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    @property
    def sum_checks(self) -> SumChecks:
        """Those of this channel's rounds."""
        return self.host.lan.sums_of(self.channel)

    @property
    def state(self) -> KernelState | None:
        """What the agent has written for this channel."""
        state = self.host.kernel.state
        if state is not self._of:
            self._of, self._state = state, self._state_in(state)
        return self._state

    def _state_in(self, state: KernelState | None) -> KernelState | None:
        if state is None or self.channel > len(state.channels):
            return None
        of = state.channels[self.channel - 1]
        return replace(
            state,
            round=of.round,
            round_low=of.round_low,
            round_high=of.round_high,
            width=of.width,
            width_next=of.width_next,
            offered=of.offered,
            clock=of.clock,
        )

    @property
    def heard(self) -> float:
        """When a frame of a member came: one word for all channels."""
        return self.host.kernel.heard

    @heard.setter
    def heard(self, when: float) -> None:
        self.host.kernel.heard = when

    # ---- what goes up to the agent

    def wake(self, event: Callable[..., None], *told: Any) -> None:
        """The agent."""
        self.host.wake(event, *told)

    def list_up(self, view: int, round_: int, members: int, unit: int) -> None:
        """The first contribution of a round has come."""
        self.host.list_of(self.channel, view, round_, members, unit)

    def frame_up(self, source: bytes, data: bytes) -> None:
        """An answer has the channel of the question."""
        frame = wire.unpack(data)
        flags = frame.header.flags | wire.channel_flags(self.channel)
        frame = replace(frame, header=replace(frame.header, flags=flags))
        self.host.frame_up(source, frame.pack())


class ChannelReceiver(Receiver):
    """What has arrived, by channel."""

    def __init__(self, kernel: Kernel, ports: list[Port]) -> None:
        super().__init__(kernel)
        self._ports = ports

    def of_channel(self, channel: int) -> Receiver:
        """What has arrived in that one."""
        return Receiver(self._ports[channel - 1])  # type: ignore[arg-type]


def renew(stripes: Stripes, room: int | None, width: int) -> None:
    """Memory for rounds of so many fragments; None: only the own stripe's places are new."""
    if room is not None:
        stripes.records = Records(room)
    per_block = wire.fragments_per_block(width)
    stripes.places = Places(-(-stripes.records.room // per_block), per_block)
