# SPDX-License-Identifier: Apache-2.0
"""What must hold of jobs whose steps have a plan, beside what holds of all (docs/channels.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nicps import wire
from nicps.protocol import Committed, Phase
from tests.simulator.channel_checks import list_differs
from tests.simulator.checks import Checks

if TYPE_CHECKING:
    from tests.simulator.host import Host
    from tests.simulator.planned_host import PlannedHost
    from tests.simulator.planned_lan import PlannedLan

Key = tuple[bytes, int, int, int]  # branch, first round of the phase, channel, round


class PlannedChecks(Checks):
    """Attributes: `done`, the commits so far, and `at`, at which hosts, in which lives."""

    lan: PlannedLan

    def __init__(self, lan: PlannedLan) -> None:
        super().__init__(lan)
        self.done: dict[Key, Mapping[int, int]] = {}
        self.at: defaultdict[Key, set[tuple[int, int]]] = defaultdict(set)
        self._saved: dict[Key, bool] = {}
        self._lists: dict[tuple[bytes, int, int], Mapping[int, int]] = {}  # of a step

    def committed(self, host: Host, commit: Committed, phase: Phase) -> None:
        """A round of a channel counts at a host."""
        if not phase.planned:
            super().committed(host, commit, phase)
            return
        self.lan.digest.add_commit(host.index, self.lan.now, commit)
        channel, round_ = commit.channel, commit.round
        key = self.branch(host), phase.first_round, channel, round_
        what = dict(commit.counted)
        fresh = key not in self.done
        if self.done.setdefault(key, what) != what:
            self.fail(
                f"round {round_} of channel {channel} was committed as {self.done[key]} and, at "
                f"{host.node.name}, as {what}"
            )
        # If the lead is not in the next view, a member that commits with that view may not know what its mark said.
        view, before = host.node.view, self.before(host.node.view)
        knows = commit.view == view.number or (before is not None and before.lead in view.live)
        saves = self._saved.setdefault(key, commit.saved) if knows else commit.saved
        if saves != commit.saved:
            self.fail(f"hosts do not agree on whether the lead saves after round {round_}")
        step = phase.step_of(round_, channel)
        if lacks := self._lacking(host, phase, step):
            self.fail(f"{host.node.name} commits round {round_} of channel {channel}, {lacks}")
        self.at[key].add((host.index, host.life))
        if fresh:
            self._of_list(host, commit, step)
        last = not channel and phase.place_of(round_) == phase.rounds_per_step() - 1
        if commit.saved and not last:
            self.fail(f"{host.node.name}: round {round_} of channel {channel} says that it saves")
        if last and host.node.leads and commit.view == host.node.view.number:
            word = commit.view, phase.number, phase.first_of(step) - 1
            if host.word[:3] == word and host.word[3] != commit.saved:
                self.fail(
                    f"{host.node.name} has said {host.word[3]}, and commits {round_} with {commit.saved}"
                )
        fragments = phase.fragments_in(round_, channel)
        self.lan.sums_of(channel).committed(host.at(channel), commit, fragments)

    def _lacking(self, host: Host, phase: Phase, step: int) -> str:
        """Before a step all rounds of the steps before are committed here, on all channels; or which one is not."""
        for channel in range(phase.channel_count):
            before = phase.first_of(step, channel) - 1
            there = self.at[self.branch(host), phase.first_round, channel, before]
            if before >= phase.first_round and (host.index, host.life) not in there:
                return f"and has not committed {before} of channel {channel}"
        return ""

    def _of_list(self, host: Host, commit: Committed, step: int) -> None:
        """All rounds of a step have one list, less members that have left."""
        whose = self.branch(host), commit.phase.first_round, step
        listed = self._lists.setdefault(whose, commit.counted)
        if differs := list_differs(commit, listed, host.node.view.live, step):
            self.fail(differs)

    def announced(self, host: PlannedHost, frame: wire.Frame) -> None:
        """What a host offers is of the step that it is in."""
        header, ring = frame.header, host.node.rings.current
        if not isinstance(frame.body, wire.Want) or not header.flags & wire.Flag.OFFERED:
            return
        channel = wire.channel_of(header.flags)
        if ring is None or not ring.phase.planned or channel >= ring.phase.channel_count:
            return
        if header.round < ring.phase.first_round:
            return
        step = ring.phase.step_of(header.round, channel)
        if lacks := self._lacking(host, ring.phase, step):
            self.fail(
                f"{host.node.name} offers to round {header.round} of channel {channel}, {lacks}"
            )

    def decided_before(self, host: Host, commit: Committed) -> None:
        """R14: the lead lets no round of a step be committed before its program has judged the step before."""
        phase, node = commit.phase, host.node
        if not phase.planned:
            super().decided_before(host, commit)
            return
        step = phase.step_of(commit.round, commit.channel)
        before, view = host.last_commit, node.view.number
        host.last_commit = view, phase.number, step, node.leads
        # Survivors of a view may have rounds of a step whole that nobody has decided on: it goes on to its end.
        led = {(v, phase.number, step - 1, True) for v in (view - 1, view)}
        judged = phase.first_of(step) - 1
        if node.leads and step and before in led and host.judged < judged:
            self.fail(
                f"round {commit.round} of channel {commit.channel} is committed, {judged} not decided on"
            )

    def ends(self, host: PlannedHost, reason: str) -> None:
        """An agent ends its training program for what it does not do: only where that hangs, or has been stopped."""
        process = host.process
        if process is None or not reason.startswith("it has not moved"):
            return
        if not (process.hung or host.was_paused):
            self.fail(f"{host.node.name} ends a training program that works: {reason}")

    def last_trained(self, host: Host, commit: Committed) -> int:
        """The last round of channel 0 in the last step of which all rounds are committed."""
        phase, channel = commit.phase, commit.channel
        if not phase.planned:
            return commit.round
        rounds = host.opened.setdefault(
            phase.first_round, [phase.first_round] * phase.channel_count
        )  # type: ignore[attr-defined]
        rounds[channel] = commit.round + 1
        step = min(phase.step_of(open_, c) for c, open_ in enumerate(rounds))
        return phase.first_of(step) - 1 if step else host.committed

    def has_room(self, host: Host, blocks: int) -> None:
        """The kernel can take all fragments of the phase in force, or of the one that is prepared, on each channel."""
        node, part = host.node, host.part
        ring = node.rings.coming or node.rings.current
        if ring is None or not ring.phase.planned:
            super().has_room(host, blocks)
            return
        phase = ring.phase
        channels = [host.at(channel).kernel.stripes for channel in range(phase.channel_count)]
        makes = part is not None and not part.accumulators.memory.places
        what = ring, makes, [(stripes.records, stripes.places) for stripes in channels]
        if what == self._roomy.get(host):
            return
        if node.changing or node.phase is None or node.phase.number > phase.number:
            return
        if part is not None and part.accumulators.refused:
            return
        n = len(phase.aggregators(node.view.live))
        for channel, plan in enumerate(phase.channels if n else ()):
            stripes = channels[channel]
            places = stripes.places.blocks * stripes.places.per_block
            lacks = stripes.records.room < plan.room
            if lacks or (not makes and places < -(-plan.room // n)):
                self.fail(
                    f"{node.name} has room for {stripes.records.room} fragments of channel {channel}, and {places}"
                    f" places, for phase {phase.number} with {plan.room}"
                )
        self._roomy[host] = what
