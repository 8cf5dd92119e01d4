# SPDX-License-Identifier: Apache-2.0
"""What must hold of a group's rounds on several channels, after every event (docs/channels.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nicps import wire
from nicps.protocol import Committed, NoProgress
from tests.simulator.channel_checks import ChannelChecks

if TYPE_CHECKING:
    from tests.simulator.channel_host import ChannelHost
    from tests.simulator.channel_program import ChannelProgram
    from tests.simulator.sized_lan import SizedLan
    from tests.simulator.sized_program import Flow

_RECOVERS_S = 3.0  # after a fault


class SizedChecks(ChannelChecks):
    """Channels are bound together by nothing: each has its order, its lists and the lead's word for itself.

    Attributes: `beside`, commits of a channel while a round of another one was open between its list and its sums.
    """

    lan: SizedLan

    def __init__(self, lan: SizedLan) -> None:
        super().__init__(lan)
        self.beside = 0
        self._last: dict[tuple[int, int, int], int] = {}  # of host, life, channel: the last commit
        self._chains: dict[tuple[int, int], str] = {}  # of channel and count of rounds
        self._goes_on: set[tuple[int, int, int, int]] = set()  # view, phase, channel, round

    def committed_in(self, host: ChannelHost, commit: Committed) -> None:
        """A round of a channel counts at a host."""
        phase, channel, round_ = commit.phase, commit.channel, commit.round
        name, key = host.node.name, (phase.first_round, channel, round_)
        host.note(f"COMMITS {channel}:{round_} {sorted(commit.counted)}")
        if self.done.setdefault(key, commit.counted) != commit.counted:
            self.fail(
                f"round {round_} of channel {channel} was committed as {self.done[key]} and, at "
                f"{name}, as {commit.counted}"
            )
        self._in_order(host, commit)
        self._of_all(host, commit)
        if commit.saved:
            self.fail(f"{name}: round {round_} of channel {channel} says that the lead saves")
        settled = commit.view < host.node.view.number  # the survivors of a view have it whole
        word = commit.view, phase.first_round, channel, round_ - 1
        if round_ > phase.first_round and not settled and word not in self._goes_on:
            self.fail(f"{name} commits round {round_} of channel {channel}, not decided on")
        ring = host.node.rings.current
        others = getattr(ring, "_all", ())
        self.beside += any(of.channel != channel and of.exchange.under_way for of in others)
        if commit.has_sum:
            self.lan.sums_of(channel).committed(host.at(channel), commit, commit.fragments)

    def _in_order(self, host: ChannelHost, commit: Committed) -> None:
        """A channel's rounds are committed one after the other, from the phase's first one on."""
        whose = host.index, host.life, commit.channel
        last = self._last.get(whose, 0)
        self._last[whose] = commit.round
        if commit.round != max(last + 1, commit.phase.first_round):
            self.fail(
                f"{host.node.name} commits round {commit.round} of channel {commit.channel} after "
                f"{last}, in a phase that began with {commit.phase.first_round}"
            )

    def _of_all(self, host: ChannelHost, commit: Committed) -> None:
        """A list has all live members of its view that have a share, and nobody else."""
        view = self.views.get((b"", commit.view))
        if view is None:
            return
        listed = set(commit.phase.sharing(view[1]))
        if commit.counted.keys() != listed:
            self.fail(
                f"{host.node.name} commits round {commit.round} of channel {commit.channel} with "
                f"{sorted(commit.counted)}, and view {commit.view} has {sorted(listed)}"
            )

    def announced(self, host: ChannelHost, frame: wire.Frame) -> None:
        """A member offers to a round of a channel once the one before is committed there."""
        header, ring = frame.header, host.node.rings.current
        offers = isinstance(frame.body, wire.Want) and header.flags & wire.Flag.OFFERED
        channel = wire.channel_of(header.flags)
        if not offers or ring is None or header.round <= ring.phase.first_round:
            return
        last = self._last.get((host.index, host.life, channel), 0)
        if header.round - 1 > last:
            self.fail(
                f"{host.node.name} offers to round {header.round} of channel {channel} after {last}"
            )

    def prepared(self, host: ChannelHost, program: ChannelProgram) -> None:
        """Members that come in know how far the others are."""

    def accused(self, host: ChannelHost, action: NoProgress) -> None:
        """Nobody is, as long as no fault has come, or some time after the last one."""
        if action.evicted and self.lan.now > self.lan.struck + _RECOVERS_S:
            self.fail(f"{host.node.name} accuses member {action.evicted}: {action}")

    def goes_on(self, host: ChannelHost, channel: int, round_: int) -> None:
        """A lead's program says that rounds of that channel go on."""
        ring = host.node.rings.current
        assert ring is not None
        view = host.node.view.number
        self._goes_on.add((view, ring.phase.first_round, channel, round_))

    def read(self, host: ChannelHost, channel: int, flow: Flow) -> None:
        """A program has read a sum: after so many rounds of a channel all have read the same."""
        known = self._chains.setdefault((channel, flow.count), flow.chain)
        if known != flow.chain:
            self.fail(
                f"{host.node.name} has read {flow.chain} in {flow.count} rounds of channel {channel}, "
                f"not {known}"
            )
