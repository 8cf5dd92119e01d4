# SPDX-License-Identifier: Apache-2.0
"""The ring of the phase in force, and that of the phase that is about to come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from nicps.errors import WireError
from nicps.protocol.actions import Committed
from nicps.protocol.carried import Carried
from nicps.protocol.channels import ChannelledRing
from nicps.protocol.kernel import ChannelledReceiver, ChannelState, KernelState, Receiver
from nicps.protocol.local_host import LocalHost
from nicps.protocol.phase import AdaptiveTimeout, Phase, Timings
from nicps.protocol.ring import Ring
from nicps.protocol.served_ring import ServedRing


class Rings:
    """Attributes: `current`, in force; `coming`, of the phase that this host is prepared for."""

    def __init__(
        self, host: LocalHost, receiver: Receiver, timings: Timings, timeout: AdaptiveTimeout
    ) -> None:
        self.current: Ring | None = None
        self.coming: Ring | None = None
        self._host = host
        self._receiver = receiver
        self._timings = timings
        self._timeout = timeout
        self._round = 0  # the open one, while no ring is in force; of several channels the highest
        # With servers: the last round that was committed here, and the last that the program has read.
        self._committed = self._read = 0
        self._numbers = itertools.count(
            1
        )  # of a worker's steps and pulls, as long as this process runs

    @property
    def open_round(self) -> int:
        """The round that is open here; 0 before any."""
        return self.current.round if self.current is not None else self._round

    @property
    def highest_round(self) -> int:
        """The highest open round of any channel: a phase to come begins with a later one."""
        return max(self.current.rounds) if self.current is not None else self._round

    @property
    def opened(self) -> tuple[int, ...]:
        """The open rounds of channels 1 and up."""
        return self.current.rounds[1:] if self.current is not None else ()

    @property
    def between_phases(self) -> bool:
        """No ring is in force, or one that is about to end."""
        return self.current is None or self.current.frozen

    @property
    def kernel(self) -> KernelState | None:
        """What the XDP program must know; None while there is no ring."""
        ring, coming = self.current, self.coming
        if ring is None:
            return coming.kernel if coming is not None else None
        state = ring.kernel
        if coming is None:
            return state
        later = coming.kernel
        state.round_high, state.bounce = coming.round, False
        state.sums_next, state.aggregators_next = later.sums, later.aggregators
        state.width_next = later.width
        state.offered = (
            state.offered[0] or later.offered[0],
            state.offered[1] or later.offered[1],
        )
        state.clock = max(state.clock, later.clock)
        state.channels = _both(state.channels, later.channels)
        return state

    def check(self, phase: Phase) -> None:
        """Refuse a phase that this host's kernel cannot take part in.

        Raises:
            WireError: it has channels.
        """
        if phase.channels and not isinstance(self._receiver, ChannelledReceiver):
            raise WireError("the phase has channels, and this host's kernel has none")

    def prepare(self, now: float, phase: Phase) -> None:
        """This host is prepared for the phase: its ring takes contributions."""
        behind = phase.exchange.served and self._read < self._committed
        self.coming = self._make(now, phase, Carried.at_the_start(phase, behind=behind))

    def enter_coming(self) -> Ring:
        """The phase that this host is prepared for is in force."""
        assert self.coming is not None
        self.current, self.coming = self.coming, None
        return self.current

    def enter_view(
        self, now: float, rounds: Sequence[int], phase: Phase | None, carried: Carried
    ) -> None:
        """Another view is in force, with these open rounds; a phase goes on in it, or none does."""
        self.coming = None
        self._round = max(rounds)
        self.current = self._make(now, phase, carried) if phase is not None else None

    def close(self) -> None:
        """This host stands by."""
        self._round = self.highest_round
        self.current = self.coming = None
        # A host that comes back is given the state of the last commit.
        self._committed = self._read = 0

    def note_committed(self, commit: Committed) -> None:
        """Round `commit.round` is committed at this host."""
        if commit.phase.exchange.served and self._host.is_member:
            self._committed = commit.round

    def note_read(self, round_: int) -> None:
        """The training program has read that round."""
        self._read = max(self._read, round_)

    def freeze(self) -> None:
        """Another phase or view is coming."""
        for ring in (self.current, self.coming):
            if ring is not None:  # the phase to come may be in force already, though not here
                ring.freeze()

    def of_round(self, round_: int) -> Ring | None:
        """The ring that a contribution to `round_` belongs to: perhaps that of the phase to come."""
        if self.coming is not None and round_ >= self.coming.round:
            return self.coming
        return self.current

    def by_phase(self) -> dict[int, Ring]:
        """Both, by the numbers of their phases."""
        rings = (self.coming, self.current)
        return {ring.phase.number: ring for ring in rings if ring is not None}

    def _make(self, now: float, phase: Phase, carried: Carried | None) -> Ring:
        host, timings = self._host, self._timings
        whose = phase, host.view, host.number, self._receiver, timings, self._timeout
        if phase.exchange.served:
            return ServedRing(*whose, carried, now, self._numbers)
        make = ChannelledRing if phase.channels else Ring
        return make(*whose, carried, now)


def _both(
    now: tuple[ChannelState, ...], later: tuple[ChannelState, ...]
) -> tuple[ChannelState, ...]:
    """Of each channel above 0, while the phase to come is prepared: what is in force, and what is to come."""
    common = [
        replace(
            state,
            round_high=to_come.round,
            width_next=to_come.width,
            offered=(
                state.offered[0] or to_come.offered[0],
                state.offered[1] or to_come.offered[1],
            ),
            clock=max(state.clock, to_come.clock),
        )
        for state, to_come in zip(now, later, strict=False)
    ]
    return (*common, *now[len(common) :], *later[len(common) :])
