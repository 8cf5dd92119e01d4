# SPDX-License-Identifier: Apache-2.0
"""Frames in and out of the agent, and the words that it shares with the XDP program."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.agent.sender import Sender
from nicps.barrier import barrier
from nicps.errors import InterfaceDown, InterfaceUnfit, JobFailed, WireError, explain
from nicps.protocol import KernelState, SendFragments

if TYPE_CHECKING:
    from nicps.agent.agent import Agent

_ALIVE_S = 0.2  # the kernel hands tokens on for us only this long after our last sign of life
_MALFORMED_SHOWN = 3
_PROBES = (bytes([wire.FrameType.PROBE]), bytes([wire.FrameType.ECHO]))


class Frames:
    """Between the state machine, the kernel and the LAN.

    Attributes: `sender`, what leaves; `turns`, times that this host had the token; `malformed` frames that came.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        dataplane, node = agent.dataplane, agent.node
        self.sender = Sender(dataplane, node.header, node.take_sequence, self._fragments_sent)
        self.turns = 0
        self.malformed = 0
        self._hold_started = 0.0
        self._unusable: InterfaceDown | InterfaceUnfit | None = None  # the interface is, and why
        self._kernel: KernelState | None = None  # as the program knows it
        self._bounced = 0
        self._room_awaited = False  # in the TX ring
        agent.loop.watch(dataplane.rx_fileno(), self._receive)
        agent.loop.watch(dataplane.tx.fileno(), self.pump, armed=False)
        agent.loop.watch(dataplane.link_changes.fileno(), self._link_changed)

    # ---- in

    def _receive(self) -> None:
        agent = self._agent
        self.sync_from_kernel()
        try:
            frames = agent.dataplane.receive()
        except InterfaceDown:
            self._check_interface()
            return
        for source, frame in frames:
            if not agent.keys.admits(source, frame, agent.dataplane.mac):
                continue
            turns = agent.node.ring.turns if agent.node.ring is not None else 0
            try:
                if frame[1:2] in _PROBES:
                    agent.prober.on_frame(source, frame)
                else:
                    agent.act(agent.node.on_frame(agent.now, source, frame))
            except WireError as error:
                self.malformed += 1
                if self.malformed <= _MALFORMED_SHOWN:
                    agent.log(f"ignored a malformed frame from {wire.mac_text(source)}: {error}")
            if agent.node.ring is not None and agent.node.ring.turns > turns:
                self.turns += 1
                self._hold_started = agent.now

    def _link_changed(self) -> None:
        if self._agent.dataplane.link_changes.drain():
            self._check_interface()

    def _check_interface(self) -> None:
        """While the interface cannot be used this host is silent, as with a cable that is pulled.

        The others go on without it, and it comes back. A host that sent only its short frames would hold them up.
        """
        agent, before = self._agent, self._unusable
        self._unusable = None
        try:
            agent.dataplane.check_interface()
        except (InterfaceDown, InterfaceUnfit) as problem:
            self._unusable = problem
        self.sender.muted = self._unusable is not None
        if self._unusable is not None and str(self._unusable) != str(before):
            agent.warn(str(self._unusable))
        elif self._unusable is None and before is not None:
            how = "is up again" if isinstance(before, InterfaceDown) else "can be used again"
            agent.log(f"interface {agent.dataplane.iface} {how}")

    # ---- out

    def send(self, frame: wire.Frame) -> None:
        """Pack a frame, and queue it. The kernel signs tokens, and must know at once that older ones are stale.

        Raises:
            WireError: a number does not fit the frame.
        """
        agent, data, token = self._agent, frame.pack(), frame.body
        if not isinstance(token, wire.Token):
            self.sender.frame(agent.keys.sign(data, agent.dataplane.mac))
            return
        agent.dataplane.saw(token.generation, token.hop)
        self.sender.frame(data, self._handed_on if token.owner != agent.node.number else None)

    def _handed_on(self) -> None:
        """For the time line: the token has left this host."""
        agent = self._agent
        started, self._hold_started = self._hold_started, 0.0
        ring = agent.node.ring
        if (
            agent.job is not None
            and ring is not None
            and ring.phase.kind is wire.PhaseKind.TRAIN
            and started
        ):
            agent.job.records.note("hold", started, time.monotonic(), ring.round)

    def pump(self) -> None:
        """Send what can be sent; wait for room in the ring only if that is what is missing."""
        agent = self._agent
        self._sync_to_kernel()
        try:
            self.sender.pump(agent.now)
        except (JobFailed, WireError, OSError) as error:  # a file that is handed out has gone, say
            self.drop_fragments()
            agent.act(agent.node.fail(agent.now, explain("send this host's part", error)))
        if self.sender.down:
            self._check_interface()
        if self.sender.blocked_by_kernel != self._room_awaited:
            self._room_awaited = self.sender.blocked_by_kernel
            agent.loop.arm(agent.dataplane.tx.fileno(), self._room_awaited)

    def drop_fragments(self) -> None:
        """What has not gone out of this host's contributions does not. The view goes on, and nobody waits for it."""
        agent = self._agent
        for action in self.sender.drop_fragments():
            agent.act(agent.node.sent(agent.now, action))

    def _fragments_sent(self, action: SendFragments, started: float) -> None:
        agent = self._agent
        now = time.monotonic()
        if agent.job is not None and agent.node.phase is not None:
            if agent.node.phase.kind is wire.PhaseKind.TRAIN:
                agent.job.sent(action, started, now)
        agent.act(agent.node.sent(now, action))

    # ---- shared with the kernel

    def sync_from_kernel(self) -> None:
        """What the program has seen, before anything is made of it."""
        agent = self._agent
        if agent.node.ring is None:
            return
        ring = agent.dataplane.ring
        seen, bounced = int(ring["seen"]), int(ring["bounced"])
        token = agent.dataplane.bounced() if bounced != self._bounced else None
        if token is not None:
            self._bounced = bounced
        token_at, frame_at = int(ring["token_ns"]) / 1e9, int(ring["heard_ns"]) / 1e9
        agent.node.kernel_saw(agent.now, (seen >> 32, seen & 0xFFFFFFFF), token_at, frame_at, token)

    def _sync_to_kernel(self) -> None:
        agent = self._agent
        state = agent.node.kernel
        config = agent.dataplane.config
        if state is not None and not self.sender.muted:
            config["alive_until_ns"] = time.monotonic_ns() + int(_ALIVE_S * 1e9)
        if state == self._kernel:
            return
        self._kernel = state
        if state is None:
            config["enabled"] = config["bounce"] = 0
            return
        write_settings(config, state)

    def off(self) -> None:
        """The program takes no tokens and fragments until there is a view again."""
        agent = self._agent
        agent.dataplane.config["enabled"] = agent.dataplane.config["bounce"] = 0
        self._kernel = None

    def kernel_forgets(self) -> None:
        """The program has been put into another view: the next state, whatever it is, goes to it."""
        self._bounced = 0
        self._kernel = None


def write_settings(config: Any, state: KernelState) -> None:
    """Write what the program must know, one word after the other, while the program works.

    A fragment that comes between two words must not be added unless the old settings or the new ones allow it. So
    rounds are closed first and opened last. In between, a round's number comes after the words that say who adds it.
    """
    config["bounce"] = 0
    config["round_low"] = state.round_low
    barrier()
    config["sums_next"], config["sums"] = int(state.sums_next), int(state.sums)
    barrier()
    config["round"] = state.round
    barrier()
    config["round_high"] = state.round_high
    config["sent_seen"], config["own_sent"] = state.sent_seen, state.own_sent
    barrier()
    config["bounce"] = int(state.bounce)
    config["enabled"] = 1
