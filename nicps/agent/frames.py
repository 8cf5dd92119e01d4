# SPDX-License-Identifier: Apache-2.0
"""Frames in and out of the agent, and the words that it shares with the XDP program."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from nicps import wire
from nicps.agent.driver import Driver, log
from nicps.agent.flows import FlowWatch
from nicps.agent.keyring import Keyring
from nicps.agent.loop import Loop
from nicps.agent.records import TimeLine
from nicps.agent.sender import BATCH, Sender, Source
from nicps.agent.served_frames import Questions, ServedLanes
from nicps.agent.served_room import ServedRoom
from nicps.barrier import barrier
from nicps.dataplane import DataPlane, tags
from nicps.errors import InterfaceDown, InterfaceUnfit, JobFailed, WireError, explain
from nicps.job.actions import Action, EnterView, Transmit, TransmitServed
from nicps.protocol import KernelState, Narrow, Phase, Send, SendFragments
from nicps.protocol.kernel import ChannelState

#: The kernel forwards tokens for this agent only so long after the agent's last sign of life.
_ALIVE_NS = 200_000_000
_MALFORMED_SHOWN = 3
_LACKING = bytes([wire.FrameType.LACKING])
_ASIDE = (wire.FrameType.PROBE, wire.FrameType.ECHO, wire.FrameType.SCRIPT)


class Frames:
    """Between the life of a job, the kernel and the LAN.

    Args:
        take_aside: takes frames that the protocol does not use, with their source address: those of a measurement, and
            output of scripts.

    Attributes: `sender`, the frames that leave; `malformed`, the number of malformed frames that came.
    """

    def __init__(
        self,
        driver: Driver,
        dataplane: DataPlane,
        keys: Keyring,
        loop: Loop,
        timeline: TimeLine,
        served: ServedRoom,
        flows: FlowWatch,
        take_aside: Callable[[bytes, bytes], None],
    ) -> None:
        self._driver, self._life, self._node = driver, driver.life, driver.life.node
        self._dataplane, self._keys, self._loop = dataplane, keys, loop
        self._timeline, self._served, self._take_aside = timeline, served, take_aside
        self._flows = flows
        node = self._node
        self.sender = Sender(
            dataplane,
            node.header,
            node.take_sequence,
            self._fragments_sent,
            lambda: node.members,
            lambda channel: node.ring.batch(channel) if node.ring is not None else 0,
            node.is_over,
        )
        self._questions = Questions(BATCH)
        self.malformed = 0
        self._hold_started = 0.0
        self._unusable: InterfaceDown | InterfaceUnfit | None = None  # the interface's state
        self._kernel: KernelState | None = None  # as the program has it
        self._changes = -1  # of the node, when that was compared
        self._bounced = 0
        self.sender.lines.first.awaits_room = False
        loop.watch(dataplane.rx_fileno(), self._receive)
        loop.watch(dataplane.tx.fileno(), self.pump, armed=False)
        loop.watch(dataplane.link_changes.fileno(), self._change_link)
        loop.watch(dataplane.doorbell.fileno(), self._answer_bell)

    # ---- in

    def _receive(self) -> None:
        driver, life = self._driver, self._life
        try:
            frames = self._dataplane.receive()
        except InterfaceDown:
            self._check_interface()
            return
        # The kernel may have forwarded a token a moment ago, and passed up a repeat of it since.
        self.sync_from_kernel()
        for source, frame in frames:
            if not self._keys.admits(source, frame, self._dataplane.mac):
                continue
            lacking = frame[1:2] == _LACKING
            if lacking and not self.sender.takes_answer(frame):
                self._keys.refused["replayed"] += 1
                continue
            turns = life.turns
            try:
                if len(frame) > 1 and frame[1] in _ASIDE:
                    self._take_aside(source, frame)
                else:
                    self._flows.hear(driver.now, source, frame)
                    driver.carry_out(life.on_frame(driver.now, source, frame))
            except WireError as error:
                self.malformed += 1
                if self.malformed <= _MALFORMED_SHOWN:
                    name = life.node.view.name_of(source)
                    of = f"{wire.mac_text(source)}{f' ({name})' if name else ''}"
                    log(f"ignored a malformed frame from {of}: {error}")
            if life.turns > turns:
                self._hold_started = driver.now

    def _answer_bell(self) -> None:
        """Handle a record of the doorbell: the program reports on a round of stripes."""
        driver, life = self._driver, self._life
        bells = self._dataplane.doorbell.take()
        self.sync_from_kernel()
        for bell in bells:
            of = bell.tag >> 32, bell.tag & 0xFFFFFFFF
            if not bell.members and not bell.count:
                if not bell.fragments:
                    driver.carry_out(life.servers_refused(driver.now, bell.unit, bell.tag))
            elif not bell.count:
                listed = bell.members, bell.unit, bell.channel
                driver.carry_out(life.list_came(driver.now, *of, *listed))
            elif bell.count == bell.fragments:
                now = time.monotonic()
                self._flows.note_sums(driver.now, bell.channel, of[1])
                if not bell.channel:
                    self._timeline.note("sums", now, now, of[1])
        if any(bell.count for bell in bells):
            driver.carry_out(life.sums_came(driver.now))
        if (
            bells
        ):  # also without a bell of its own: the kernel rings once, and there was perhaps no room
            driver.carry_out(self._find_full())

    def _find_full(self) -> Sequence[Action]:
        """A parameter of the own part may be near the limits."""
        now, life = self._driver.now, self._life
        try:
            full = self._served.find_full()
        except JobFailed as error:
            return life.action_failed(now, str(error))
        return life.near_limit(now, full) if full is not None else []

    def _change_link(self) -> None:
        if self._dataplane.link_changes.drain():
            self._check_interface()

    def _check_interface(self) -> None:
        """Check the interface. While it cannot be used this host sends nothing, as with a cable that is pulled.

        The others go on without it, and it comes back. A host that sent only its short frames would hold them up.
        """
        driver, before = self._driver, self._unusable
        self._unusable = None
        try:
            self._dataplane.check_interface()
        except (InterfaceDown, InterfaceUnfit) as problem:
            self._unusable = problem
        self.sender.muted = self._unusable is not None
        if self._unusable is not None and str(self._unusable) != str(before):
            driver.carry_out(self._life.warn(driver.now, str(self._unusable)))
        elif self._unusable is None and before is not None:
            how = "is up again" if isinstance(before, InterfaceDown) else "can be used again"
            log(f"interface {self._dataplane.iface} {how}")

    # ---- out

    def send(self, action: Send) -> None:
        """Pack a frame, and queue it. The kernel signs tokens, and must know of a new one at once, since older ones are
        then stale.

        Raises:
            WireError: a number does not fit the frame.
        """
        data, token = action.frame.pack(), action.frame.body
        if not isinstance(token, wire.Token):
            self._flows.note_sent(self._driver.now, action.frame)
            self.send_control(data)
            return
        self._dataplane.maps.saw(token.generation, token.hop)
        forwards = token.owner != self._node.number
        self.sender.frame(data, self._note_hold if forwards else None)

    def send_control(self, frame: bytes) -> None:
        """Sign a control frame, and queue it."""
        self.sender.frame(self._keys.sign(frame, self._dataplane.mac))

    def transmit(self, action: Transmit, source: Source | None) -> None:
        """Queue fragments of this host's contribution; without a source they are not sent."""
        if source is None:
            driver = self._driver
            driver.carry_out(self._life.fragments_sent(driver.now, action.fragments))
        else:
            self._note_sent(action.fragments, action.phase)
            self.sender.fragments_of(action.fragments, action.phase, source)

    def transmit_served(self, action: TransmitServed) -> None:
        """Queue fragments of this host's step, or questions for parameters."""
        servers, fragments = self._dataplane.maps.servers, action.fragments
        if servers is None or servers.store is None:
            return
        if fragments.to == self._node.number:
            header = self._node.header(0, fragments.round)
            self._served.queue_own(fragments, action.phase, header)
            return
        asks = fragments.type is wire.FrameType.PULL
        source: Source = self._questions if asks else ServedLanes(servers)
        self.sender.served_of(fragments, action.phase, source)

    def _note_sent(self, action: SendFragments, phase: Phase) -> None:
        """Let the program go on where this contribution to stripes ends, as sums come."""
        striped = action.striped
        if striped is None or striped.type is not wire.FrameType.CONTRIBUTION or action.repair:
            return
        channel, stripes = action.channel, self._dataplane.maps.stripes
        total = striped.fragments or phase.fragments_in(action.round, channel)
        if not channel:
            stripes.set_rest(action.round, striped.rest_view, striped.behind)
        for first, count in action.ranges:
            owner = striped.owner(first, total)
            stripes.set_sent(action.round, owner, first + count, channel)

    def narrow(self, action: Narrow) -> None:
        """Make windows smaller, or as large as before."""
        stripes = self._dataplane.maps.stripes
        for aggregator, sums in action.swallow:
            stripes.swallow(action.round, aggregator, sums, action.channel)

    def _note_hold(self) -> None:
        """Note for the time line that the token has left this host."""
        started, self._hold_started = self._hold_started, 0.0
        ring = self._node.ring
        if started and ring is not None and ring.phase.kind is wire.PhaseKind.TRAIN:
            self._timeline.note("hold", started, time.monotonic(), ring.round)

    def pump_rest(self) -> None:
        """The same, if anything has come of it since `pump`."""
        sender = self.sender
        idle = not (sender.queued or sender.more or sender.refused)
        if not idle or self._node.changes != self._changes:
            self.pump()

    def pump(self) -> None:
        """Send all that can be sent; wait for room in the ring only if room is what is missing."""
        driver = self._driver
        self._sync_to_kernel()
        try:
            self._served.serve_own()
            self.sender.pump(driver.now)
        except (JobFailed, WireError, OSError) as error:  # a file that is handed out has gone, say
            self.drop_fragments()
            reason = explain("send this host's part", error)
            driver.carry_out(self._life.action_failed(driver.now, reason))
        if self.sender.down:
            self._check_interface()
        for line in self.sender.lines.order:
            if line.awaits_room is line.blocked:
                continue
            if line.awaits_room is None:
                self._loop.watch(line.ring.fileno(), self.pump, armed=line.blocked)
            else:
                self._loop.arm(line.ring.fileno(), line.blocked)
            line.awaits_room = line.blocked

    def close_lines(self) -> None:
        """The job is over: there is one channel, until another one begins."""
        for line in self.sender.lines.take_idle():
            if line.awaits_room is not None:
                self._loop.unwatch(line.ring.fileno())
            line.ring.close()

    def drop_fragments(self, _: object = None) -> None:
        """Drop the parts of this host's contributions that have not been sent. The view goes on, and no member
        waits for them.
        """
        driver = self._driver
        self._served.drop_own()
        for action in self.sender.drop_fragments():
            driver.carry_out(self._life.fragments_sent(driver.now, action))

    def _fragments_sent(self, action: SendFragments, started: float | None) -> None:
        now, phase = time.monotonic(), self._node.phase
        if started is None:
            self._driver.carry_out(self._life.fragments_sent(now, action))
            return
        if not action.channel and phase is not None and phase.kind is wire.PhaseKind.TRAIN:
            kind = "repair" if action.repair else "send"
            self._timeline.note(kind, started, now, action.round)
        self._driver.carry_out(self._life.fragments_sent(now, action, started))

    # ---- shared with the kernel

    def sync_from_kernel(self) -> None:
        """Read the program's state before any frame is handled."""
        if self._node.ring is None:
            return
        ring = self._dataplane.maps.ring
        seen, bounced = int(ring["seen"]), int(ring["bounced"])
        token = self._dataplane.maps.bounced() if bounced != self._bounced else None
        if token is not None:
            self._bounced = bounced
        token_at, frame_at = int(ring["token_ns"]) / 1e9, int(ring["heard_ns"]) / 1e9
        position = seen >> 32, seen & 0xFFFFFFFF
        self._life.kernel_saw(self._driver.now, position, token_at, frame_at, token)

    def _sync_to_kernel(self) -> None:
        node, config, before = self._node, self._dataplane.maps.config, self._kernel
        changes = node.changes
        same = changes == self._changes
        state = before if same else node.kernel
        if state is not None and not self.sender.muted:
            config["alive_until_ns"] = time.monotonic_ns() + _ALIVE_NS
        self._changes = changes
        if same or state == before:
            return
        self._kernel = state
        if state is None:
            config["enabled"] = config["bounce"] = 0
            return
        maps = self._dataplane.maps
        if state.aggregators:
            self._served.open_round(state.round)
        orders = state.aggregators, state.aggregators_next
        words = maps.stripes.areas.words
        if before is None or orders != (before.aggregators, before.aggregators_next):
            write_settings(config, words[0], state, lambda: maps.stripes.set_ranks(*orders))
        else:
            write_settings(config, words[0], state)
        former = before.channels if before is not None else ()
        if before is None or state.channels != former:
            write_channels(words[1:], state.channels)

    def enter_view(self, action: EnterView) -> None:
        """Let the program take tokens and fragments of another view, with that view's key."""
        view, number = action.view, action.number
        live = [m.mac if m.number in view.live else None for m in view.members]
        after = view.next_after(number)
        self._dataplane.enter_view(view.number, number, live, after, self._keys.enter(view))
        self._bounced = 0
        self._forget_kernel()

    def leave_view(self, _: object) -> None:
        """Let the program take no tokens and fragments until there is a view again."""
        self._dataplane.maps.config["enabled"] = self._dataplane.maps.config["bounce"] = 0
        self._forget_kernel()

    def _forget_kernel(self) -> None:
        """The next state is written to the program in any case."""
        self._kernel, self._changes = None, -1


def write_settings(
    config: Any, channel: Any, state: KernelState, set_ranks: Callable[[], None] | None = None
) -> None:
    """Write the program's settings, and the words of channel 0 of stripes, one word after the other, while the program
    works.

    A fragment that comes between two words must not be added unless the old settings or the new ones allow it. So
    rounds are closed first and opened last. In between, a round's number comes after the words that name its
    aggregators.

    Args:
        set_ranks: writes the ranks of the aggregators, if they change.
    """
    config["bounce"] = 0
    config["round_low"] = channel["round_low"] = state.round_low
    barrier()
    config["sums_next"], config["sums"] = int(state.sums_next), int(state.sums)
    config["width"] = channel["width"] = state.width
    channel["width_next"], channel["offered"] = state.width_next, state.offered
    config["clock"] = channel["clock"] = state.clock
    channel["priority"] = tags.of_urgency(state.urgency)
    config["passes"] = 1 << state.partner >> 1
    if set_ranks is not None:
        set_ranks()
    barrier()
    config["round"] = channel["round"] = state.round
    barrier()
    config["round_high"] = channel["round_high"] = state.round_high
    config["sent_seen"], config["own_sent"] = state.sent_seen, state.own_sent
    barrier()
    config["bounce"] = int(state.bounce)
    config["enabled"] = 1


def write_channels(words: Any, states: Sequence[ChannelState]) -> None:
    """Write the words of channels 1 and up while the program works, as `write_settings` does those of channel 0.

    A channel that the phase does not have takes no frames.
    """
    for channel, state in zip(words, states, strict=False):
        channel["round_low"] = state.round_low
        barrier()
        channel["width"], channel["width_next"] = state.width, state.width_next
        channel["offered"], channel["clock"] = state.offered, state.clock
        channel["priority"] = tags.of_urgency(state.urgency)
        barrier()
        channel["round"] = state.round
        barrier()
        channel["round_high"] = state.round_high
    words[len(states) :]["round_low"], words[len(states) :]["round_high"] = 1, 0
