# SPDX-License-Identifier: Apache-2.0
"""What must hold of channels, after every event (docs/channels.md, "What the simulator drives")."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.protocol import Committed, Installed, NodeState, NoProgress, Phase
from tests.simulator.checks import Checks

if TYPE_CHECKING:
    from tests.simulator.channel_host import ChannelHost
    from tests.simulator.channel_lan import ChannelLan
    from tests.simulator.channel_program import ChannelProgram
    from tests.simulator.host import Host

Key = tuple[int, int, int]  # first round of the phase, channel, round
Place = tuple[bytes, int, tuple[int, ...]]  # a view's seed, a phase, the open round of each channel


def list_differs(
    commit: Committed, listed: Mapping[int, int], live: Collection[int], step: int
) -> str:
    """What is wrong with a round whose list is not that of its step, less members that have left; empty: nothing."""
    left = {k: n for k, n in listed.items() if k in live}
    whole = commit.counted in (listed, left)
    if whole or left.keys() <= commit.counted.keys() <= listed.keys():
        return ""
    return (
        f"round {commit.round} of channel {commit.channel} has the list {commit.counted}, and "
        f"step {step} has {listed}"
    )


class ChannelChecks(Checks):
    """Attributes: `done`, the commits so far, by phase, channel and round: what was counted, and at which hosts."""

    def __init__(self, lan: ChannelLan) -> None:
        super().__init__(lan)
        self.done: dict[Key, Mapping[int, int]] = {}
        self.at: defaultdict[Key, set[tuple[int, int]]] = defaultdict(set)
        self._lists: dict[tuple[int, int], Mapping[int, int]] = {}  # of a step, by its first commit
        self._steps: dict[int, str] = {}  # weights after so many steps
        #: Steps that a lead has decided on: it saves after the next one; who it is, in which life, and the view.
        self._words: dict[int, tuple[bool, int, int, int]] = {}
        self._saved: dict[tuple[int, int], bool] = {}
        self._places: dict[Host, Place | None] = {}

    def has_room(self, host: Host, blocks: int) -> None:
        """Rooms are the agent's."""

    def committed_in(self, host: ChannelHost, commit: Committed) -> None:
        """A round of a channel counts at a host."""
        phase, channel, round_ = commit.phase, commit.channel, commit.round
        first = phase.first_round
        key = first, channel, round_
        host.note(f"COMMITS {channel}:{round_} {sorted(commit.counted)}")
        fresh = key not in self.done
        if self.done.setdefault(key, commit.counted) != commit.counted:
            self.fail(
                f"round {round_} of channel {channel} was committed as {self.done[key]} and, at "
                f"{host.node.name}, as {commit.counted}"
            )
        self.at[key].add((host.index, host.life))
        step = phase.step_of(round_, channel)
        if lacks := self._lacking(host, phase, step):
            self.fail(f"{host.node.name} commits round {round_} of channel {channel}, {lacks}")
        if fresh:  # a host that enters a later view may commit it there
            self._of_list(host, commit, step)
        trained = host.program.trained
        if not host.program.blank and not host.program._watches:
            begun = host.program._base + step
            if commit.view < host.node.view.number:  # the survivors of a view have it whole
                self._words.setdefault(begun, (False, -1, 0, 0))
            if begun not in self._words:
                self.fail(f"{host.node.name} commits step {begun}, and no lead has decided on it")
            if begun - trained not in (0, 1):
                self.fail(f"{host.node.name} commits step {begun}, and has trained {trained}")
        last = not channel and phase.place_of(round_) == phase.rounds_per_step() - 1
        if commit.saved and not last:
            self.fail(f"{host.node.name}: round {round_} of channel {channel} says that it saves")
        if last and not host.program.blank and not host.program._watches:
            self._says_so(host, commit, host.program._base + step)
        # A member that commits as the next view comes may not have heard the lead's mark, which says that it saves.
        heard = last and commit.view == host.node.view.number
        if heard and self._saved.setdefault((first, round_), commit.saved) != commit.saved:
            self.fail(f"hosts do not agree on whether the lead saves after round {round_}")
        port = host.at(channel)
        self.lan.sums_of(channel).committed(port, commit, phase.fragments_in(round_, channel))

    def _says_so(self, host: ChannelHost, commit: Committed, begun: int) -> None:
        """What the lead has said is not lost, as long as it leads."""
        saves, *whose = self._words[begun]
        if whose == [host.index, host.life, commit.view] and commit.saved != saves:
            self.fail(
                f"{host.node.name} has said {saves}, and commits step {begun} with {commit.saved}"
            )

    def _lacking(self, host: ChannelHost, phase: Phase, step: int) -> str:
        """Before a step all rounds of the steps before are committed here, on all channels; or which one is not."""
        for channel in range(phase.channel_count):
            before = phase.first_of(step, channel) - 1
            there = self.at[phase.first_round, channel, before]
            if before >= phase.first_round and (host.index, host.life) not in there:
                return f"and has not committed {before} of channel {channel}"
        return ""

    def _of_list(self, host: ChannelHost, commit: Committed, step: int) -> None:
        """All rounds of a step have one list, less members that have left."""
        whose = commit.phase.first_round, step
        listed = self._lists.setdefault(whose, commit.counted)
        if differs := list_differs(commit, listed, host.node.view.live, step):
            self.fail(differs)

    def announced(self, host: ChannelHost, frame: wire.Frame) -> None:
        """What a host offers and marks is of the step that it is in."""
        header, body = frame.header, frame.body
        if not isinstance(body, wire.Want):
            return
        ring = host.node.rings.current
        if ring is None or not header.flags & wire.Flag.OFFERED:
            return
        phase, channel = ring.phase, wire.channel_of(header.flags)
        if header.round < phase.first_round or channel >= phase.channel_count:
            return
        if lacks := self._lacking(host, phase, phase.step_of(header.round, channel)):
            self.fail(
                f"{host.node.name} offers to round {header.round} of channel {channel}, {lacks}"
            )

    def frozen(self, host: ChannelHost, actions: Sequence[Any]) -> None:
        """After a promise nothing is committed, but what the next view settles."""
        commits = any(isinstance(action, Committed) for action in actions)
        installs = any(isinstance(action, Installed) for action in actions)
        if commits and host.node.changing and not installs:
            self.fail(f"{host.node.name} commits, and has promised to follow a proposal")

    def accused(self, host: ChannelHost, action: NoProgress) -> None:
        """A channel that only waits is in no report: but where frames do not pass, somebody is."""
        if action.evicted and not self.lan.calm_at:
            self.fail(f"{host.node.name} accuses member {action.evicted}: {action}")

    def prepared(self, host: ChannelHost, program: ChannelProgram) -> None:
        """A phase begins between two steps, at all hosts with the same weights."""
        self.hold_step(host, program)

    def applied_step(self, host: ChannelHost, program: ChannelProgram) -> None:
        """A step is whole at a host."""
        host.note(f"APPLIES step {program.trained} {program.weights}")
        self.hold_step(host, program)

    def hold_step(self, host: ChannelHost, program: ChannelProgram) -> None:
        """All hosts have the same weights after the same step."""
        known = self._steps.setdefault(program.trained, program.weights)
        if known != program.weights:
            self.fail(
                f"{host.node.name} has {program.weights} after step {program.trained}, not {known}"
            )

    def decided(self, host: ChannelHost, trained: int, *, saves: bool) -> None:
        """A lead's program says that training goes on after so many steps."""
        host.note(f"DECIDES after step {trained}{', saves' if saves else ''}")
        self._words[trained] = saves, host.index, host.life, host.node.view.number

    def step(self) -> None:
        """Also: no live member's channel is two rounds behind another's."""
        moved = list(self.moved)
        super().step()
        for host in moved:
            place = self._place(host)
            if place != self._places.get(host):
                self._places[host] = place
                self._abreast(host, place)

    def _place(self, host: Host) -> Place | None:
        """View, phase, and the open round of each channel; None: it is in no phase, or the view is about to change."""
        node = host.node
        ring = node.rings.current
        if ring is None or host.dead or node.state is not NodeState.MEMBER or node.changing:
            return None
        return node.view.seed, ring.phase.number, ring.rounds

    def _abreast(self, host: Host, place: Place | None) -> None:
        """Compare a host that has moved to another step with all others; those were compared as they moved."""
        if place is None:
            return
        for other in self.lan.hosts:
            there = self._place(other) if other is not host else None
            if there is None or there[:2] != place[:2]:
                continue
            for channel, (a, b) in enumerate(zip(place[2], there[2], strict=True)):
                if abs(a - b) > 1:
                    names = host.node.name, other.node.name
                    self.fail(f"channel {channel}: {names[0]} is in {a}, {names[1]} in {b}")
