# SPDX-License-Identifier: Apache-2.0
"""The training program of a job (R8): its process, the memory shared with it, and what is said between it and us."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nicps import wire
from nicps.agent.process import Child, python, set_nice
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.protocol import Phase
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.fields import Message, encode
from nicps.session.lanes import LaneFormat

if TYPE_CHECKING:
    from nicps.agent.job import LocalJob

_KINDS = {wire.PhaseKind.TRAIN: "train", wire.PhaseKind.TEST: "test", wire.PhaseKind.FINISH: "end"}
_HURRIED = -10  # nice value
_MOST_TEXT = 300
STALL_S = 60.0  # the job's `stall_s`: without a word of a program that others wait for
_LONGER = {"start": 5, "end": 5}  # where it has nothing to say until it is done
_SHORTER = 1 / 20  # while all wait for the rest of its gradient


class Program:
    """One training program, from its start to its end.

    Attributes: `ready`, it has built the model. `digest`, of the state that it holds (hexadecimal), once it has told.
    `holds_state`, that state was the others', too: it is no new program. `trained`, rounds of training that it was told
    of; `saved`, of those in the state that it has saved last. `duty`, what it is to do ("start", "work", "save", "load"
    or "end"); empty while it waits for us.

    Args:
        stall_s: the job's setting.
    """

    def __init__(self, job: LocalJob, stall_s: float) -> None:
        self.job = job
        self.duty = "start"
        self.stall_s = stall_s
        self._moved = job.agent.now  # it has said something, or was told what to do
        self._unanswered = 0  # phases; until it is in the last one that it was told of, it speaks of an earlier one
        self._trains = False
        self.ready = self.holds_state = False
        self.digest = ""
        self.lanes = 0
        self.trained = self.saved = 0
        self.arena: Arena | None = None
        self._channel: Channel | None = None
        self._doorbell = -1
        self._child: Child | None = None
        self._gateway: Child | None = None  # between the agent and a program that speaks JSON
        self._hurried = False
        self._blocks_told = 0
        self._saving = 0  # number of the phase in which it saves or loads
        self._numbers = 1 << 30  # those phases are ours alone: none of the network's

    # ---- the process

    def start(self, argv: Sequence[str], folder: Path, log: Path, network_access: bool) -> None:
        """Run it as the training user."""
        self._child = self.job.agent.children.spawn(
            argv, folder, log, self._ended, connected=True, network_access=network_access
        )

    def start_gateway(self, connection: int, folder: Path, log: Path) -> None:
        """A program that speaks JSON has connected: a process of its own attaches for it (docs/socket.md).

        Raises:
            JobFailed: a training program is attached already.
        """
        if self._channel is not None or self._gateway is not None:
            raise JobFailed("a training program is attached already")
        argv = python("nicps.gateway", str(connection))
        self._gateway = self.job.agent.children.spawn(
            argv, folder, log, self._gateway_ended, fds=(connection,), connected=True
        )

    def _gateway_ended(self, code: int) -> None:
        gateway, self._gateway = self._gateway, None
        if code and gateway is not None:
            self.job.program_failed(f"the gateway ended: {gateway.last_line()}")

    def _ended(self, code: int) -> None:
        child, self._child = self._child, None
        if child is not None:
            self.job.program_ended(self, code, child.last_line(self._when()))

    def _when(self) -> str:
        """In which round it is, for an error message."""
        if self.duty == "end":
            return " after the last round"
        if not self.holds_state:
            return " before its first round"
        return f" in round {self.job.agent.node.open_round}"

    @property
    def has_ended(self) -> bool:
        """The process is gone."""
        return self._child is None

    def owes(self, duty: str) -> None:
        """It was told to do something."""
        self.duty, self._moved = duty, self.job.agent.now

    def excused(self) -> None:
        """It has nothing more to do in the open round until it is committed."""
        if self.duty == "work":
            self.duty = ""

    def move(self, now: float) -> None:
        """It has said something, or could not."""
        self._moved = now

    def stalled(self, now: float, holding: bool) -> float:
        """For how long it has not moved, if that is too long; otherwise 0.

        Args:
            holding: all wait for the rest of its gradient.
        """
        limit = self.stall_s * (_SHORTER if holding else _LONGER.get(self.duty, 1))
        return limit if (holding or self.duty) and now > self._moved + limit else 0.0

    def hurry(self, yes: bool) -> None:
        """A program whose gradient all hosts wait for gets the processor before other programs."""
        if self._hurried != yes and self._child is not None:
            self._hurried = yes
            set_nice(self._child.pid, _HURRIED if yes else 0)

    def close(self, message: str) -> None:
        """End it, whatever it is doing."""
        agent = self.job.agent
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.post(encode(shared_form.Abort(message)))
        for child in (self._child, self._gateway):
            if child is not None:
                agent.children.end(child)
        self._child = self._gateway = None
        if self.arena is not None:
            agent.loop.unwatch(self._doorbell)
            os.close(self._doorbell)
            self.arena.close()
            self.arena = None

    # ---- what it is told

    def attach(self, channel: Channel) -> None:
        """The training program has connected.

        Raises:
            JobFailed: one is attached already.
        """
        if self._channel is not None:
            raise JobFailed("a training program is attached already")
        self._channel = channel
        node = self.job.agent.node
        self.post(
            shared_form.Welcome(
                node.number,
                tuple(shared_form.Member(m.number, m.name) for m in node.members),
                node.name,
                node.view.lead,
                self.job.settings,
                str(self.job.folder),
                node.view.number,
            )
        )

    def is_attached(self, channel: Channel) -> bool:
        """Whether that connection is this program's."""
        return channel is self._channel

    def detached(self) -> None:
        """It has closed its connection."""
        self._channel = None

    def enter(self, phase: Phase, first_round: int, blocks: int) -> None:
        """Leave whatever it does, and go into this phase."""
        agent = self.job.agent
        ends = phase.kind is wire.PhaseKind.FINISH
        self._trains = phase.kind is wire.PhaseKind.TRAIN
        self.owes("end" if ends else "work")
        if self.arena is not None:
            self.arena.phase = phase.number
            # A round that had closed without it may be run again (R18).
            self.arena.closed = min(self.arena.closed, first_round - 1)
        fds: tuple[int, ...] = ()
        new_blocks = 0
        if blocks and self._blocks_told != blocks:
            self._blocks_told = blocks
            new_blocks = blocks
            fds = (agent.dataplane.accumulators_fd, agent.dataplane.slots_fd)
        view = agent.node.view
        message = shared_form.Phase(
            _KINDS[phase.kind],
            first_round,
            phase.number,
            phase.unit,
            phase.shares,
            phase.exchange,
            view.number,
            view.order,
            view.lead,
            new_blocks,
        )
        self._send_into(message, fds)

    def state(self, what: str) -> None:
        """Let it "save" its state into the working folder, or "load" the one that is there."""
        self._numbers += 1
        self._saving = self._numbers
        self.owes(what)
        view = self.job.agent.node.view
        number, order, lead = view.number, view.order, view.lead
        self._send_into(
            shared_form.Phase(what, 0, self._saving, 0, (), Exchange.BROADCAST, number, order, lead)
        )

    def view(self) -> None:
        """Hosts have come or gone; the phase goes on."""
        node = self.job.agent.node
        view = node.view
        self.post(shared_form.View(view.number, view.order, view.lead, node.open_round))

    def forget_blocks(self) -> None:
        """The accumulators are new: it must map them again."""
        self._blocks_told = 0

    def post(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Say something, if it is there."""
        if self._channel is None:
            return
        try:
            self._channel.post(encode(message), fds)
        except ChannelClosed:
            self._channel = None

    def _send_into(self, phase: shared_form.Phase, fds: tuple[int, ...] = ()) -> None:
        self._unanswered += 1
        self.post(phase, fds)

    # ---- what it says

    def on_message(self, message: shared_form.FromProgram) -> None:
        """A message from it.

        Raises:
            JobFailed: its digest is not hexadecimal.
        """
        job, agent = self.job, self.job.agent
        node, now = agent.node, agent.now
        self.move(now)
        match message:
            case shared_form.Progress():
                if not self._unanswered:
                    agent.act(node.progress(now, message.round, message.samples))
            case shared_form.Offer():
                if not self._unanswered:  # otherwise it will offer the round again
                    self.excused()
                    job.offered(message.round, message.samples, message.unit, message.skip)
            case shared_form.Read():
                self.digest = message.digest or self.digest
                if not self._unanswered:
                    self.duty = "work" if self._trains else ""
                if message.round < node.open_round:
                    agent.act(node.read(now, message.round, short(message.digest)))
                job.program_has_applied()
            case shared_form.Prepared():
                self._unanswered -= 1
                job.program_prepared(message.number)
            case shared_form.Ready():
                if not self.ready:
                    self.lanes, self.digest = message.lanes, message.digest
                    self._make_arena()
                    self.ready, self.duty = True, ""
                    job.program_ready()
            case shared_form.Saved():
                if message.number == self._saving:
                    self.saved = message.round
                    self._has_state(message, message.error)
            case shared_form.Loaded():
                if message.number == self._saving:
                    self._has_state(message, "")
            case shared_form.Checkpoint():
                job.checkpoints.written(message.round, one_line(message.error))
            case shared_form.Decide():
                if self.ready:
                    if message.what != "continue":
                        self.excused()  # the lead goes on once all do something else
                    agent.trainer_says(message)
            case shared_form.Report():
                if self.ready:
                    agent.trainer_says(message)
            case shared_form.Fail():
                agent.act(node.fail(now, message.message))

    def _has_state(self, message: shared_form.Saved | shared_form.Loaded, error: str) -> None:
        self._saving, self.duty = 0, ""
        self.digest = message.digest or self.digest
        self.job.program_has_state(message.op, one_line(error))

    def _make_arena(self) -> None:
        width = int(str(self.job.settings.get("lane", "i16")).removeprefix("i"))
        fragments = LaneFormat(self.lanes, width).fragments
        self.arena = Arena.create(fragments)
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Every write wakes; reading it could block, as the program has a say in its flags.
        self.job.agent.loop.watch(self._doorbell, self._more, edge=True)
        self.post(shared_form.Arena(fragments), (self.arena.fd, self._doorbell))

    def _more(self) -> None:
        """More of a contribution has been converted."""
        self.move(self.job.agent.now)
        self.job.agent.frames.pump()


def one_line(text: object) -> str:
    """What a training program says, for people: printable, in one line, and not too long for a frame."""
    plain = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(plain.split())[:_MOST_TEXT]


def short(digest: str) -> int:
    """A state's digest as it travels in the token: 32 bits, 0 for none."""
    try:
        return int(digest[:8], 16) or 1 if digest else 0
    except ValueError:
        raise JobFailed(f"the training program's digest {digest!r} is not hexadecimal") from None
