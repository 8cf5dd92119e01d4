# SPDX-License-Identifier: Apache-2.0
"""`nicps join`: the host's agent, an event loop around the state machines.

Frames, time, the training program's messages and commands come in; what the machines ask for is carried out: small
frames and fragments through the sender, settings through the XDP program's maps, files in a background thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from nicps import wire
from nicps.agent.children import Children
from nicps.agent.commands import Commands
from nicps.agent.conductor import Conductor
from nicps.agent.control import Access, ControlSocket, Peer
from nicps.agent.endings import Endings
from nicps.agent.folders import check_runs, check_work, sweep
from nicps.agent.frames import Frames
from nicps.agent.job import LocalJob
from nicps.agent.keyring import Keyring
from nicps.agent.lives import rescue
from nicps.agent.loop import Loop
from nicps.agent.probe import STEP_S, Prober
from nicps.agent.process import User, set_nice
from nicps.agent.program import one_line
from nicps.agent.settings import AgentSettings
from nicps.agent.sources import Nothing
from nicps.agent.submission import Submission
from nicps.agent.views import Views
from nicps.auth import Sequences, nonce
from nicps.dataplane import DataPlane
from nicps.dataplane.loader import need_root
from nicps.errors import JobFailed, NicpsError, WireError, explain
from nicps.protocol import (
    Action,
    Closed,
    Committed,
    Declined,
    Failed,
    Need,
    Node,
    NodeState,
    NotAdded,
    Phase,
    PhaseAgreed,
    Prepare,
    Send,
    SendFragments,
)
from nicps.session.fields import Message
from nicps.session.messages import EVENTS, Error, LastJob, Result
from nicps.session.shared_form import Decide, Report

_WAKE_S = 0.05  # so we give one at least this often while a ring is under way
_IDLE_S = 1.0
_NICE = -15  # a token that waits for a processor delays everybody
_RETRY_S = 0.001  # the interface's queue was full
_GOODBYE_S = 2.0
_HURRY_S = 0.01  # processes are being ended that would rather go on


class Agent:
    """One host of the network. Use as a context manager; `run` returns when it is told to stop."""

    def __init__(self, settings: AgentSettings) -> None:
        need_root()  # before what only looks wrong without it
        self.settings = settings
        self.user = User.named(settings.user)
        access = Access.of(self.user.uid, settings.group)
        self.keys = Keyring.read(settings.key)
        sweep(settings.work, self._rescue)
        check_work(settings.work, self.user)
        check_runs(settings.runs)
        self.now = time.monotonic()
        self.job: LocalJob | None = None
        self._declined = ""  # the job that this host has left to the others
        self.submission: Submission | None = None
        self.conductor: Conductor | None = None
        self._turns_before = 0
        self._stopping = False
        self._actions: deque[Action] = deque()
        self._acting = False
        self.last_job: LastJob | None = None
        self.progress: dict[str, Any] = {}
        self.trouble = ""  # why this host stands by in the middle of a job
        self.loop = Loop(self._work_failed)
        self.children = Children(self)
        self.commands = Commands(self)
        self.prober = Prober(self)
        self.views = Views(self)
        self.endings = Endings(self)
        set_nice(os.getpid(), _NICE)  # and the compiler: a host that comes back is waited for
        with contextlib.ExitStack() as stack:
            self.dataplane = stack.enter_context(
                DataPlane(
                    settings.iface,
                    wire.network_id(settings.network),
                    ethertype=settings.ethertype,
                    destination=settings.destination,
                    keyed=self.keys.keyed,
                )
            )
            self.control = ControlSocket(
                settings.socket,
                access,
                self.loop.watch,
                self.loop.unwatch,
                self.commands.on_message,
                self.commands.on_close,
            )
            stack.callback(self.control.close)
            self._stack = stack.pop_all()
        self.node = Node(
            self.dataplane.mac,
            settings.name,
            settings.network,
            self.dataplane,
            nonce,
            settings.timings,
            self._stage,
        )
        self.frames = Frames(self)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the loop

    def run(self) -> None:
        """Serve until SIGINT, SIGTERM or `nicps leave`."""
        self.loop.on_signals(self.stop)
        while not self._stopping:
            self._step()
        self._say_goodbye()

    def stop(self) -> None:
        """Leave the loop."""
        self._stopping = True

    def _step(self) -> None:
        wait = _WAKE_S if self.node.ring is not None else _IDLE_S
        if self.frames.sender.refused:
            wait = _RETRY_S
        if self.prober.running:
            wait = STEP_S
        deadline = self.node.deadline()
        if deadline is not None:
            wait = min(wait, max(0.0, deadline - time.monotonic()))
        if self.children.hurry:
            wait = min(wait, _HURRY_S)
        if self.frames.sender.more:
            wait = 0.0
        events = self.loop.wait(wait)
        self.now = time.monotonic()
        self.loop.handle(events)
        self.frames.sync_from_kernel()
        self._keep_time()
        if self.job is not None:
            self.job.look(self.now)
        self.children.look(self.now)
        self.prober.tick()
        if doubt := self.keys.news(self.now):
            self.warn(doubt)
        self.frames.pump()
        self.control.flush()

    def _keep_time(self) -> None:
        key_is_spent = self.dataplane.sequence >= Sequences.NUMBERS
        self.act(self.node.renew(self.now, key_is_spent=key_is_spent))
        deadline = self.node.deadline()
        if deadline is not None and deadline <= self.now:
            self.act(self.node.tick(self.now))

    def log(self, text: str) -> None:
        """One line for the operator."""
        print(f"nicps: {text}", file=sys.stderr, flush=True)

    # ---- what the machines ask for

    def act(self, actions: Sequence[Action]) -> None:
        """Carry actions out, in order; what they lead to comes after them."""
        self._actions.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._actions:
                self._do(self._actions.popleft())
        finally:
            self._acting = False

    def _do(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action.frame)
        elif isinstance(action, SendFragments):
            current = self.node.ring is not None and action.view == self.node.view.number
            if self.job is not None and self.node.ring is not None and current:
                source = Nothing() if action.only_asks else self.job.source()
                self.frames.sender.fragments_of(action, self.node.ring.phase, source)
        elif isinstance(action, Need):
            if self.job is not None:
                self.job.need(action.round, action.samples)
        elif isinstance(action, Closed):
            if self.job is not None:
                self.job.closed(action.round)
        elif isinstance(action, Committed):
            self._committed(action)
        elif isinstance(action, Prepare):
            self._prepare(action.phase)
        elif isinstance(action, PhaseAgreed):
            self._agreed(action)
        elif isinstance(action, NotAdded):
            if self.conductor is not None:
                self.conductor.course.not_added()
        elif isinstance(action, Declined):
            self._decline(action.reason)
        elif isinstance(action, Failed):
            self._failed(action.reason)
        else:
            self.views.on(action)

    def _send(self, frame: wire.Frame) -> None:
        try:
            self.frames.send(frame)
        except WireError as error:  # a number that no frame can hold
            self.act(self.node.fail(self.now, str(error)))

    def _prepare(self, phase: Phase) -> None:
        if phase.kind is wire.PhaseKind.STOP:
            if self.conductor is None:
                self._over(phase)
            self.prepared(phase.number)
            return
        if self.job is None and self.node.leaving:
            return  # taken in although it has declined: the others go on without it
        try:
            if self.job is not None and phase.settings.get("job", self.job.id) != self.job.id:
                self.end_job("another job has begun")
            job = self.job or self.begin_job(str(phase.settings["job"]))
            if not self.settings.believes(phase.exchange):
                raise JobFailed(
                    "the network's switch is to add, which this host has not been told to believe: "
                    "run `nicps join` with --mode switch there too"
                )
            job.prepare(phase)
        except (OSError, NicpsError, LookupError, TypeError, ValueError) as error:
            self.act(
                self.node.fail(self.now, f"cannot prepare for {phase.kind.name.lower()}: {error}")
            )

    def _agreed(self, action: PhaseAgreed) -> None:
        """The lead: everybody has acknowledged."""
        stops = action.phase.kind is wire.PhaseKind.STOP
        if self.conductor is not None and stops:
            self.endings.lead_over(self.conductor, action.phase)
        elif self.conductor is not None:
            self.conductor.agreed(action.phase, action.answers)
        elif stops and self.job is not None:
            self._over(action.phase)  # it departs, and has decided that before

    def _over(self, stop: Phase) -> None:
        """The job has ended, and is not led from here."""
        ok, message = stop.settings.get("ok"), str(stop.settings.get("message", ""))
        self.end_job("the job is done" if ok else message)
        said = "job done, standing by" if ok else f"job stopped: {message}"
        lead = self.node.members[self.node.view.lead - 1].name
        if stop.settings.get("saved"):
            said += "; it was saved where it was led: `nicps resume` goes on from there"
        self.endings.over(stop.settings, said, lead)

    def _committed(self, commit: Committed) -> None:
        if self.job is None:
            return
        if self.conductor is not None and commit.phase.kind is wire.PhaseKind.TRAIN:
            self.conductor.course.committed(commit.next_unit, commit.phase.exchange)
        self.job.committed(commit)

    def _decline(self, reason: str) -> None:
        """Who has come to the others' job, and cannot take part, leaves them to it."""
        self.views.say_trouble(f"out of the job until `nicps join` is run again: {reason}")
        if self.job is not None:
            self._declined = self.job.id
            self.job.note("departs", why=reason)
            self.end_job(reason, keep_records=True)

    def _failed(self, reason: str) -> None:
        if self.conductor is not None and self.node.leads:
            self.conductor.fail(reason)
        elif self.submission is not None:
            self.endings.submission_failed(reason)

    # ---- the job here

    def _stage(self, job_id: str) -> wire.Stage | None:
        """How much of a job is here, for the lead that calls (R20); None: it is not for this host."""
        if self._stopping or job_id == self._declined:
            return None
        if self.job is None or self.job.id != job_id:
            return wire.Stage.NOTHING
        return self.job.stage

    def begin_job(self, job_id: str) -> LocalJob:
        """A job reaches this host."""
        if self.job is not None:
            self.end_job("another job has begun")
        if self.submission is not None and self.submission.job_id != job_id:
            self.endings.over({}, "another job has begun; the end of this one was not heard", "")
        self.job = LocalJob(self, job_id)
        self._turns_before = self.frames.turns
        self.job.note_view()
        self.log(f"job {job_id}")
        return self.job

    def prepared(self, number: int, answer: bytes = b"") -> None:
        """This host is ready for the decision of that number."""
        self.act(self.node.prepared(self.now, number, answer))

    def handed_out(self, phase: Phase) -> None:
        """A hand-out has ended here."""
        self.views.lead_with_the_job()
        if self.conductor is not None:
            self.conductor.handed_out(phase)

    def program_ready(self) -> None:
        """The training program has built the model."""
        if self.conductor is not None:
            self.conductor.job_is_ready()

    def trainer_says(self, message: Decide | Report) -> None:
        """What the lead's training program has decided, or live progress, or a warning."""
        if isinstance(message, Report):
            values = dict(message.values)
            if (text := values.pop("warning", None)) is not None and self.job is not None:
                self.tell("warning", self.job.id, message=f"{self.settings.name}: {one_line(text)}")
            if not values:
                return
            self.progress = values
            if self.conductor is not None:
                turns = self.frames.turns - self._turns_before
                self.tell("progress", self.conductor.job_id, values=values, token_turns=turns)
        elif self.conductor is not None:
            self.conductor.decided(message.round, message.what)

    def warn(self, message: str) -> None:
        """Something that ends nothing."""
        self.log(message)
        if self.job is not None:
            self.tell("warning", self.job.id, message=f"{self.settings.name}: {message}")

    def tell(self, event: str, job_id: str, /, **values: Any) -> None:
        """To the submitter, and whoever else watches."""
        self.publish(EVENTS[event](job_id, **values))

    def end_job(self, message: str, keep_records: bool = False) -> None:
        """The job is over at this host. Its records are kept where others go on, and this host may come back."""
        job, self.job = self.job, None
        self.frames.sender.drop_fragments()
        if job is not None:
            kept = self.run_folder(job.id) / self.node.name if keep_records else None
            job.close(message, kept)
        self.progress = {}

    def _rescue(self, folder: Path) -> None:
        """An agent here was killed in the middle of a job, to which this one may come back."""
        try:
            rescue(folder, self.settings.runs)
        except OSError as error:
            self.log(explain("keep the records of an agent that was killed", error))

    def run_folder(self, job_id: str) -> Path:
        """Where a job leaves its results on this host."""
        if os.path.basename(job_id) != job_id or job_id in ("", ".", ".."):
            raise JobFailed(f"{job_id!r} is no name for a run")
        return self.settings.runs / job_id

    # ---- who is told

    def _work_failed(self, reason: Exception) -> None:
        """In the background: a full disk, a broken file. It is the job's end, not ours."""
        self.act(self.node.fail(self.now, explain("go on with the job here", reason)))

    def publish(self, message: Message, waiting: Collection[Peer] | None = None) -> None:
        """To whoever submitted the job (`waiting`: only these), and to those who watch all."""
        for peer in self.control.peers[:]:
            awaits = peer.watches and (waiting is None or peer in waiting)
            if awaits or peer.watches_all:
                self.control.post(peer, message)
            if awaits and isinstance(message, Result | Error):
                peer.watches = False

    # ---- leaving

    def _say_goodbye(self) -> None:
        """Leaving in the middle of a job: the others go on without us, or it stops for all where they cannot."""
        self.now = time.monotonic()
        reason = f"{self.settings.name} has left the network"
        if self.node.state is NodeState.MEMBER:
            if self.job is not None and self.job.digest:
                self.act(self.node.leave(self.now, reason))
            elif self.conductor is not None:
                self.conductor.fail(reason)
            else:
                self.act(self.node.fail(self.now, reason))
            if self.job is not None:
                self.job.note("departs", why=reason)
        deadline = self.now + _GOODBYE_S
        while self.node.state is NodeState.MEMBER and self.now < deadline:
            self._step()
        if self.submission is not None:
            self.endings.submission_failed(reason)
            self.control.flush()
        self.end_job(reason, keep_records=True)

    def close(self) -> None:
        """Detach the program, close everything; nothing of ours stays."""
        self.conductor = None
        if self.submission is not None:
            self.submission.close()
            self.submission = None
        self.end_job("the agent stops", keep_records=True)
        self.children.close()
        self.loop.drain()
        self._stack.close()
        self.loop.close()
