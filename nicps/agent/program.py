# SPDX-License-Identifier: Apache-2.0
"""The training program of a job (R8): its process, the memory shared with it, and its connection."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nicps.agent.children import Children
from nicps.agent.direct import DirectRoom
from nicps.agent.driver import Driver
from nicps.agent.executor import Executor
from nicps.agent.jobfiles import TRAINER_LOG
from nicps.agent.lives import set_aside
from nicps.agent.loop import Loop
from nicps.agent.process import Child, python, set_nice
from nicps.agent.sender import Source
from nicps.agent.sources import ArenaSource, Nothing, OwnLanes, StreamSource
from nicps.dataplane import DataPlane
from nicps.errors import NicpsError
from nicps.job import actions as act
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.fields import Message, encode
from nicps.session.shared_form import Abort, Fail, FromProgram

_HURRIED = -10  # nice value
_LAST_MOMENT_S = 3.0  # in which a program may write its residual


class Program:
    """The training program: one at a time. It is started, and gets messages.

    Args:
        trainer: the command that trains, in place of the job's own.
        open_store: makes a connection to the store of the group that the program is in.
        direct: gives that program what it needs for direct calls.

    Attributes: `expects`, the program of a group is to attach here.
    """

    def __init__(
        self,
        driver: Driver,
        loop: Loop,
        children: Children,
        dataplane: DataPlane,
        executor: Executor,
        trainer: tuple[str, ...],
        open_store: Callable[[], int],
        direct: DirectRoom,
    ) -> None:
        self._driver, self._life, self._loop = driver, driver.life, loop
        self._children, self._dataplane, self._executor = children, dataplane, executor
        self._trainer, self._open_store, self._direct = trainer, open_store, direct
        self._number = 0
        self._child: Child | None = None
        self._gateway: Child | None = None  # between the agent and a program that speaks JSON
        self._channel: Channel | None = None
        self._arena: Arena | None = None
        self._doorbell = -1
        self._hurried = False
        self._adopted = False  # it runs, and was not started by this agent
        self.expects = False

    # ---- processes

    def start(self, action: act.StartProgram) -> None:
        """Run it as the training user, in the job's folder; the program of a group runs already."""
        self._number = action.program
        self._adopted = self.expects = action.adopts
        if action.adopts:
            return
        job = self._executor.job
        assert job is not None
        set_aside(job.folder / "out", job.base)  # the records of the one before
        argv = list(self._trainer) or python(action.entry, "run", "--workdir", str(job.folder))
        try:
            self._child = self._children.spawn(
                argv,
                job.folder,
                job.base / TRAINER_LOG,
                partial(self._ended, action.program),
                connected=True,
                network_access=action.network_access,
            )
        except (OSError, NicpsError) as error:
            driver = self._driver
            reason = str(error)
            driver.carry_out(self._life.program_unstarted(driver.now, action.program, reason))

    def _ended(self, number: int, code: int) -> None:
        child, self._child = self._child, None
        if child is not None and number == self._number:
            driver, part = self._driver, self._life.part
            if child.failure:
                driver.carry_out(self._life.program_unstarted(driver.now, number, child.failure))
                return
            last = child.last_line(part.programs.moment if part is not None else "")
            if code and self._executor.job is not None:
                last = self._executor.job.keep_log(last)
            driver.carry_out(self._life.program_ended(driver.now, number, code, last))

    def end(self, action: act.EndProgram) -> None:
        """End it, in any state."""
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.post(encode(Abort(action.reason, action.saved)))
        for child in (self._child, self._gateway):
            if child is not None:
                self._children.end(child, _LAST_MOMENT_S if action.saved else 0.0)
        self._child = self._gateway = self._channel = None
        self._hurried = self._adopted = self.expects = False
        self._direct.close()
        if self._arena is not None:
            self._loop.unwatch(self._doorbell)
            os.close(self._doorbell)
            self._arena.close()
            self._arena = None

    def hurry(self, yes: bool) -> None:
        """A program whose gradient all hosts wait for gets a higher priority than other programs."""
        if self._hurried != yes and self._child is not None:
            self._hurried = yes
            set_nice(self._child.pid, _HURRIED if yes else 0)

    # ---- its connection

    def attach(self, channel: Channel) -> None:
        """The program has connected.

        Raises:
            NetworkProblem, JobFailed: none is expected, or one is attached.
        """
        driver = self._driver
        actions = self._life.attach(driver.now)
        self._channel, self.expects = channel, False
        driver.carry_out(actions)

    def start_gateway(self, connection: int) -> None:
        """A program that speaks JSON has connected: a process of its own attaches for it (docs/socket.md).

        Raises:
            NetworkProblem, JobFailed: as `attach`.
        """
        number = self._life.attach_gateway()
        job = self._executor.job
        assert job is not None
        self._gateway = self._children.spawn(
            python("nicps.gateway", str(connection)),
            job.folder,
            job.base / "gateway.log",
            partial(self._gateway_ended, number),
            fds=(connection,),
            connected=True,
        )

    def _gateway_ended(self, number: int, code: int) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is not None and number == self._number:
            driver, last = self._driver, gateway.last_line()
            driver.carry_out(self._life.gateway_ended(driver.now, number, code, last))

    @property
    def attached(self) -> bool:
        """Whether there is a program."""
        return self._channel is not None

    def is_attached(self, channel: Channel) -> bool:
        """Whether that connection is the program's own."""
        return channel is self._channel

    def detach(self, channel: Channel) -> None:
        """A connection is closed."""
        if channel is self._channel:
            self._lose_connection()

    def _lose_connection(self) -> None:
        self._channel = None
        self._direct.close()
        self._life.detach(self._number)
        if self._adopted:  # it is gone, as far as the agent can know
            driver, reason = self._driver, "it has closed its connection"
            driver.carry_out(self._life.program_ended(driver.now, self._number, -1, reason))

    def handle_message(self, message: FromProgram) -> None:
        """The program has sent a message."""
        driver, job = self._driver, self._executor.job
        if isinstance(message, Fail) and job is not None:
            message = Fail(job.keep_log(message.message))
        driver.carry_out(self._life.program_message(driver.now, message))

    # ---- messages to it

    def welcome(self, action: act.Welcome) -> None:
        """Answer its connection."""
        job = self._executor.job
        assert job is not None
        self._post(action.program, replace(action.message, workdir=str(job.folder)))
        if self._adopted:
            connection = self._open_store()
            self._post(action.program, shared_form.Store(), (connection,))
            os.close(connection)

    def post(self, action: act.Post) -> None:
        """Send the program a message."""
        self._post(action.program, action.message, self._descriptors(action.message))

    def enter_phase(self, action: act.EnterPhase) -> None:
        """Send it into a phase."""
        if self._arena is not None:
            self._arena.phase = action.message.number
            # A round that had closed without it may be run again (R18).
            self._arena.closed = min(self._arena.closed, action.message.first_round - 1)
        if self._adopted and (given := self._direct.enter(action.message)):
            self._post(action.program, shared_form.Direct(self._direct.share), given)
        self._post(action.program, action.message, self._descriptors(action.message))

    def _descriptors(self, message: Message) -> tuple[int, ...]:
        """Descriptors of the kernel's memory that a message promises, in its order."""
        maps, fds = self._dataplane.maps, list[int]()
        if isinstance(message, shared_form.Phase):
            fds += [maps.accumulators_fd, maps.slots_fd] if message.blocks else []
            fds += [maps.stripes.own_fd, maps.stripes.sums_fd] if message.room else []
        if isinstance(message, shared_form.Phase | shared_form.View) and message.places:
            fds.append(maps.stripes.blocks_fd)
        fds += self._executor.served.descriptors(message)
        return tuple(fds)

    def _post(self, number: int, message: Message, fds: tuple[int, ...] = ()) -> None:
        if self._channel is None or number != self._number:
            return
        try:
            self._channel.post(encode(message), fds)
        except ChannelClosed:
            self._lose_connection()

    # ---- memory

    def share_arena(self, action: act.ShareArena) -> None:
        """Make the memory that its gradient is sent from, and the doorbell that it rings."""
        self._arena = Arena.create(action.fragments)
        self._dataplane.maps.stripes.forget_own()  # lanes that another program has converted
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Every write wakes. A read could block, as the program can change the flags.
        self._loop.watch(self._doorbell, self._note_converted, edge=True)
        descriptors: tuple[int, ...] = (self._arena.fd, self._doorbell)
        job = self._executor.job
        kept = job.open_residual(action.resumed) if job is not None and action.resumed else None
        if kept is None:
            self._post(action.program, shared_form.Arena(action.fragments), descriptors)
            return
        message = shared_form.Arena(action.fragments, action.state)
        self._post(action.program, message, (*descriptors, kept))
        os.close(kept)

    def _note_converted(self) -> None:
        """More of a contribution has been converted; the loop sends it at the end of this step."""
        driver = self._driver
        driver.carry_out(self._life.note_converted(driver.now))

    def show_need(self, action: act.ShowNeed) -> None:
        """Write the number of samples that still make the quorum (R13)."""
        if self._arena is not None:
            self._arena.need = (action.round, action.samples)

    def show_closed(self, action: act.ShowClosed) -> None:
        """Write that the round closes without this program."""
        if self._arena is not None:
            self._arena.closed = action.round

    def source_of(self, action: act.Transmit) -> Source | None:
        """The source of these fragments; None if it no longer exists."""
        if action.source is act.Source.NOTHING:
            return Nothing()
        if action.source is act.Source.PROGRAM and action.fragments.striped is not None:
            channel = action.fragments.channel
            return OwnLanes(self._dataplane.maps.stripes, self._arena, channel)
        if action.source is act.Source.PROGRAM:
            return ArenaSource(self._arena, self.hurry) if self._arena is not None else None
        stream = self._executor.streams.get(action.stream)
        return StreamSource(stream, action.phase.first_round) if stream is not None else None
