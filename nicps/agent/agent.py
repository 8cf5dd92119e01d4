# SPDX-License-Identifier: Apache-2.0
"""`nicps join`: the host's agent, an event loop around the state machines.

Frames, time, the training program's messages and commands come in; what the machines ask for is carried out: small
frames and fragments through the sender, settings through the XDP program's maps, files in a background thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nicps import wire
from nicps.agent.background import Background
from nicps.agent.conductor import Conductor
from nicps.agent.control import VERSION, Access, ControlSocket, Peer
from nicps.agent.job import LocalJob, sweep
from nicps.agent.process import Child, User, set_nice
from nicps.agent.sender import Sender
from nicps.agent.settings import AgentSettings
from nicps.agent.status import status_of
from nicps.dataplane import DataPlane
from nicps.errors import JobFailed, NetworkProblem, NicpsError, UsageProblem, WireError
from nicps.protocol import (
    Action,
    Closed,
    Committed,
    Failed,
    Formed,
    Need,
    Node,
    NodeState,
    Phase,
    PhaseAgreed,
    Prepare,
    Send,
    SendFragments,
)
from nicps.protocol.ring import KernelState

_ALIVE_S = 0.2  # the kernel hands tokens on for us only this long after our last sign of life
_WAKE_S = 0.05  # so we give one at least this often while a ring is under way
_IDLE_S = 1.0
_MALFORMED_SHOWN = 3
_NICE = -15  # a token that waits for a processor delays everybody
_RETRY_S = 0.001  # the interface's queue was full


class Agent:
    """One host of the network. Use as a context manager; `run` returns when it is told to stop."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.user = User.named(settings.user)
        access = Access.of(self.user.uid, settings.group)
        sweep(settings.work)
        self.now = time.monotonic()
        self.job: LocalJob | None = None
        self.conductor: Conductor | None = None
        self.turns = 0  # times that this host had the token
        self._turns_before = 0
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._stopping = False
        self._actions: deque[Action] = deque()
        self._acting = False
        self._kernel: KernelState | None = None
        self._hold_started = 0.0
        self.malformed = 0
        self.last_job: dict[str, Any] = {}
        self.progress: dict[str, Any] = {}
        self._background = Background()
        with contextlib.ExitStack() as stack:
            self.dataplane = stack.enter_context(
                DataPlane(
                    settings.iface, wire.network_id(settings.network), ethertype=settings.ethertype
                )
            )
            self.control = ControlSocket(
                settings.socket,
                access,
                self.watch,
                self.unwatch,
                self._on_message,
                self._on_close,
            )
            stack.callback(self.control.close)
            self._stack = stack.pop_all()
        self.node = Node(
            self.dataplane.mac, settings.name, settings.network, self.dataplane, settings.timings
        )
        self.sender = Sender(
            self.dataplane, self.node.header, self.node.take_sequence, self._fragments_sent
        )
        self.watch(self.dataplane.rx_fileno(), self._receive)
        self.watch(self._background.fileno(), self._background_done)
        self._poll.register(self.dataplane.tx.fileno(), 0)  # armed while the ring is full
        self._handlers[self.dataplane.tx.fileno()] = self.pump
        self._tx_armed = False
        self._bounced = 0

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the loop

    def run(self) -> None:
        """Serve until SIGINT, SIGTERM or `nicps leave`."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self.watch(read, self.stop)
        set_nice(os.getpid(), _NICE)
        while not self._stopping:
            self._step()
        self._say_goodbye()

    def stop(self) -> None:
        """Leave the loop."""
        self._stopping = True

    def _step(self) -> None:
        wait = _WAKE_S if self.node.ring is not None else _IDLE_S
        if self.sender.refused:
            wait = _RETRY_S
        deadline = self.node.deadline()
        if deadline is not None:
            wait = min(wait, max(0.0, deadline - time.monotonic()))
        events = self._poll.poll(wait)
        self.now = time.monotonic()
        for fd, _ in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        self._sync_from_kernel()
        deadline = self.node.deadline()
        if deadline is not None and deadline <= self.now:
            self._tick()
        self.pump()
        self.control.flush()

    def _tick(self) -> None:
        try:
            self.act(self.node.tick(self.now))
        except (
            WireError
        ) as error:  # a number that no frame can hold: from a broken program or a forged frame
            self.act(self.node.fail(self.now, str(error)))

    def watch(self, fd: int, handler: Callable[[], None], edge: bool = False) -> None:
        """Call `handler` whenever `fd` is readable; with `edge`, once for every write, and nothing is read."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN | (select.EPOLLET if edge else 0))

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)

    def log(self, text: str) -> None:
        """One line for the operator."""
        print(f"nicps: {text}", file=sys.stderr, flush=True)

    # ---- frames

    def _receive(self) -> None:
        self._sync_from_kernel()
        for source, frame in self.dataplane.receive():
            turns = self.node.ring.turns if self.node.ring is not None else 0
            try:
                self.act(self.node.on_frame(self.now, source, frame))
            except WireError as error:
                self.malformed += 1
                if self.malformed <= _MALFORMED_SHOWN:
                    self.log(f"ignored a malformed frame from {wire.mac_text(source)}: {error}")
            if self.node.ring is not None and self.node.ring.turns > turns:
                self.turns += 1
                self._hold_started = self.now

    def pump(self) -> None:
        """Send what can be sent; wait for room in the ring only if that is what is missing."""
        self._sync_to_kernel()
        try:
            self.sender.pump(self.now)
        except (JobFailed, WireError, OSError) as error:  # a file that is handed out has gone, say
            self.sender.drop_fragments()
            self.act(self.node.fail(self.now, str(error)))
        if self.sender.blocked_by_kernel != self._tx_armed:
            self._tx_armed = self.sender.blocked_by_kernel
            mask = select.EPOLLIN if self._tx_armed else 0
            self._poll.modify(self.dataplane.tx.fileno(), mask)

    def _fragments_sent(self, action: SendFragments, started: float) -> None:
        now = time.monotonic()
        if self.job is not None and self.node.phase is not None:
            if self.node.phase.kind is wire.PhaseKind.TRAIN:
                self.job.sent(action, started, now)
        self.act(self.node.sent(now, action))

    def _sync_from_kernel(self) -> None:
        if self.node.ring is None:
            return
        ring = self.dataplane.ring
        seen, bounced = int(ring["seen"]), int(ring["bounced"])
        token = self.dataplane.bounced() if bounced != self._bounced else None
        self._bounced = bounced
        self.node.kernel_saw(
            self.now, (seen >> 32, seen & 0xFFFFFFFF), int(ring["heard_ns"]) / 1e9, token
        )

    def _sync_to_kernel(self) -> None:
        state = self.node.kernel
        config = self.dataplane.config
        if state is not None:
            config["alive_until_ns"] = time.monotonic_ns() + int(_ALIVE_S * 1e9)
        if state == self._kernel:
            return
        self._kernel = state
        if state is None:
            config["enabled"] = config["bounce"] = 0
            return
        config["round_high"] = state.round_high
        config["round_low"] = state.round_low
        config["round"] = state.round
        config["fragments"] = state.fragments
        config["sent_seen"] = state.sent_seen
        config["own_sent"] = state.own_sent
        config["bounce"] = int(state.bounce)
        config["enabled"] = 1

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
            if self.job is not None and self.node.ring is not None:
                self.sender.fragments_of(action, self.node.ring.phase, self.job.source())
        elif isinstance(action, Need):
            if self.job is not None:
                self.job.need(action.round, action.samples)
        elif isinstance(action, Closed):
            if self.job is not None:
                self.job.closed(action.round)
        elif isinstance(action, Committed):
            self._committed(action)
        elif isinstance(action, Formed):
            self._formed(action)
        elif isinstance(action, Prepare):
            self._prepare(action.phase)
        elif isinstance(action, PhaseAgreed):
            if self.conductor is not None:
                self.conductor.agreed(action.phase, action.answers)
        elif isinstance(action, Failed):
            self._failed(action.reason)

    def _send(self, frame: bytes) -> None:
        """Queue a frame; of a token, the kernel must know at once that older ones are stale."""
        if frame[1] == wire.FrameType.TOKEN:
            token = wire.unpack(frame).body
            assert isinstance(token, wire.Token)
            self.dataplane.saw(token.generation, token.hop)
            if token.owner != self.node.number:
                self.sender.frame(frame, self._handed_on)
                return
        self.sender.frame(frame)

    def _handed_on(self) -> None:
        """For the time line: the token has left this host."""
        started, self._hold_started = self._hold_started, 0.0
        ring = self.node.ring
        if (
            self.job is not None
            and ring is not None
            and ring.phase.kind is wire.PhaseKind.TRAIN
            and started
        ):
            self.job.records.note("hold", started, time.monotonic(), ring.round)

    def _formed(self, formed: Formed) -> None:
        self.dataplane.enter_view(
            formed.view,
            formed.number,
            [m.mac for m in formed.members],
            formed.number % len(formed.members) + 1,
        )
        self._bounced = 0
        self._kernel = None  # the next state, whatever it is, goes to the kernel
        names = ", ".join(m.name for m in formed.members)
        self.log(f"network {self.settings.network} formed: view {formed.view}, {names}")
        if formed.number == 1 and self.conductor is not None:
            self.conductor.formed()

    def _prepare(self, phase: Phase) -> None:
        if phase.kind is wire.PhaseKind.STOP:
            ok, message = phase.settings.get("ok"), str(phase.settings.get("message", ""))
            if self.conductor is None:
                self._end_job("the job is done" if ok else message)
                self.log("job done, standing by" if ok else f"job stopped: {message}")
            self.prepared(phase.number)
            return
        try:
            job = self.job or self.begin_job(str(phase.settings["job"]))
            job.prepare(phase)
        except (OSError, NicpsError, LookupError, TypeError, ValueError) as error:
            self.act(
                self.node.fail(self.now, f"cannot prepare for {phase.kind.name.lower()}: {error}")
            )

    def _committed(self, commit: Committed) -> None:
        if self.job is None:
            return
        phase = self.node.ring.phase if self.node.ring is not None else None
        if self.conductor is not None and phase is not None:
            if phase.kind is wire.PhaseKind.TRAIN:
                self.conductor.unit = commit.next_unit
        self.job.committed(commit)

    def _failed(self, reason: str) -> None:
        if self.conductor is not None:
            self.conductor.fail(reason)
        elif self.job is not None:
            self._end_job(reason)
            self.log(f"job stopped: {reason}")

    # ---- the job here

    def begin_job(self, job_id: str) -> LocalJob:
        """A job reaches this host."""
        if self.job is not None:
            self._end_job("another job has begun")
        self.job = LocalJob(self, job_id)
        self._turns_before = self.turns
        self.log(f"job {job_id}")
        return self.job

    def prepared(self, number: int, answer: bytes = b"") -> None:
        """This host is ready for the decision of that number."""
        self.act(self.node.prepared(self.now, number, answer))

    def handed_out(self, phase: Phase, digest: str) -> None:
        """A hand-out has ended here."""
        if self.conductor is not None:
            self.conductor.handed_out(phase, digest)

    def trainer_ready(self, lanes: int, digest: str) -> None:
        """The training program has built the model."""
        if self.conductor is not None:
            self.conductor.trainer_ready(lanes)

    def trainer_says(self, message: Mapping[str, Any]) -> None:
        """A decision of node 1's training program, or live progress."""
        if message["op"] == "report":
            self.progress = dict(message["values"])
            if self.conductor is not None:
                turns = self.turns - self._turns_before
                self.conductor.event("progress", **{**self.progress, "token_turns": turns})
        elif self.conductor is not None:
            self.conductor.decided(message["what"])

    def release(self, conductor: Conductor, reason: str | None) -> None:
        """Node 1: the job has ended everywhere; this host can take the next one."""
        self._end_job(reason or "the job is done")
        if self.conductor is conductor:
            self.conductor = None
            self.node.busy = False

    def job_is_over(
        self, conductor: Conductor, reason: str | None, result: Mapping[str, Any]
    ) -> None:
        """Node 1: tell how the job ended."""
        self.last_job = {"job_id": conductor.job_id, "error": reason, "result": dict(result)}
        if reason is None:
            self.log(f"job {conductor.job_id} done: {result.get('report')}")
            self.publish(conductor, {"op": "result", "result": dict(result)})
        else:
            self.log(f"job stopped: {reason}")
            message = {"op": "error", "message": reason, "exit_code": JobFailed.exit_code}
            self.publish(conductor, message)

    def _end_job(self, message: str) -> None:
        job, self.job = self.job, None
        self.sender.drop_fragments()
        if job is not None:
            job.close(message)
        self.progress = {}

    def run_folder(self, job_id: str) -> Path:
        """Where a job leaves its results on this host."""
        if os.path.basename(job_id) != job_id or job_id in ("", ".", ".."):
            raise JobFailed(f"{job_id!r} is no name for a run")
        return self.settings.runs / job_id

    # ---- processes and background work

    def spawn(
        self,
        argv: Sequence[str],
        folder: Path,
        log: Path,
        done: Callable[[int], None],
        as_owner: bool = False,
        fds: Sequence[int] = (),
        connected: bool = False,
        network_access: bool = False,
    ) -> Child:
        """Start a process as the training user; `done(exit_code)` is called when it has ended.

        One that is to be `connected` finds a connection to us in NICPS_SOCKET.
        """
        user = User.named("root") if as_owner and os.geteuid() == 0 else self.user
        env = {}
        with contextlib.ExitStack() as stack:
            if connected:
                ours, theirs = socket.socketpair()
                stack.enter_context(theirs)
                self.control.adopt(ours, user.uid)
                fds = (*fds, theirs.fileno())
                env["NICPS_SOCKET"] = f"fd:{theirs.fileno()}"
            child = Child(argv, user, folder, log, env, fds, network_access)

        def ended() -> None:
            self.unwatch(child.fileno())
            done(child.reap())

        self.watch(child.fileno(), ended)
        return child

    def background(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Do something slow (files, hashes) in order in a thread, and `then` in the loop."""
        self._background.do(work, then)

    def _background_done(self) -> None:
        for then, error in self._background.take_done():
            try:
                if error is not None:
                    raise error
                then()
            except Exception as reason:  # a full disk, a broken file: the job's end, not ours
                self.act(self.node.fail(self.now, str(reason)))

    # ---- the socket

    def _on_message(self, peer: Peer, message: dict[str, Any]) -> None:
        op = message.get("op")
        try:
            if peer.is_trainer:
                if self.job is not None and self.job.is_attached(peer.channel):
                    self.job.on_message(message)
            elif message.get("version", VERSION) != VERSION:
                raise UsageProblem(
                    f"version {message['version']} of the socket's messages is unknown; this nicps speaks {VERSION}"
                )
            elif op == "attach":
                self._attach(peer, message.get("form", "shared"))
            elif not peer.commands:
                raise UsageProblem(
                    f"user {peer.uid} may not give this agent commands: run it as root, or let the agent"
                    " admit a group of yours (`nicps join --group NAME`)"
                )
            elif op == "status":
                peer.post({"op": "status", **status_of(self)})
            elif op == "watch":
                peer.watches_all = True
            elif op in ("submit", "leave"):
                self._command(peer, op, message)
            else:
                raise UsageProblem(f"the agent knows no {op!r}")
        except (NicpsError, OSError) as error:
            if peer.is_trainer:
                self.act(self.node.fail(self.now, str(error)))
            else:
                peer.refuse(error if isinstance(error, NicpsError) else JobFailed(str(error)))

    def _command(self, peer: Peer, op: str, message: Mapping[str, Any]) -> None:
        if op == "leave":
            peer.post({"op": "ok"})
            self.stop()
            return
        if (
            self.conductor is not None
            or self.job is not None
            or self.node.state is not NodeState.STANDBY
        ):
            raise NetworkProblem("a job is under way: wait for its end (`nicps status --watch`)")
        if "entry" in message and peer.uid not in (0, os.geteuid()):  # it draws the report as us
            raise UsageProblem(f"user {peer.uid} may not name the module that trains")
        self.node.busy = True
        try:
            peer.watches = self.conductor = Conductor(self, message)
        except (OSError, NicpsError):
            self.node.busy = False
            raise

    def _attach(self, peer: Peer, form: str) -> None:
        if not peer.trains:
            raise UsageProblem(f"user {peer.uid} may not train here, only {self.user.name}")
        if self.job is None:
            raise NetworkProblem("no job is under way that a training program could join")
        if form == "json":  # megabytes of text are for another process to read
            if peer.channel.buffered:
                raise UsageProblem("wait for the answer to attach before you send more")
            self.control.hand_over(peer, self.job.start_gateway)
        elif form == "shared":
            self.job.attach(peer.channel)
            peer.is_trainer = True
        else:
            raise UsageProblem(f"training programs attach in the form shared or json, not {form!r}")

    def _on_close(self, peer: Peer) -> None:
        if peer.is_trainer and self.job is not None and self.job.is_attached(peer.channel):
            self.job.detached()

    def publish(self, conductor: Conductor, message: Mapping[str, Any]) -> None:
        """To whoever submitted that job, and to those who watch all."""
        for peer in self.control.peers[:]:
            if peer.watches is conductor or peer.watches_all:
                self.control.post(peer, message)

    @property
    def sent_again(self) -> int:
        """Fragments that this host repaired."""
        return self.sender.again

    # ---- leaving

    def _say_goodbye(self) -> None:
        """Leaving in the middle of a job stops it for all: nobody can go on without us (yet)."""
        self.now = time.monotonic()
        if self.job is None and self.conductor is None:
            return
        reason = f"{self.settings.name} has left the network"
        if self.conductor is not None:
            self.conductor.fail(reason)
        else:
            self.act(self.node.fail(self.now, reason))
        deadline = self.now + 1.0
        while self.node.state is NodeState.MEMBER and self.now < deadline:
            self._step()
        self._end_job(reason)

    def close(self) -> None:
        """Detach the program, close everything; nothing of ours stays."""
        if self.conductor is not None:
            self.conductor.abandon()
            self.conductor = None
        self._end_job("the agent stops")
        self._background.close()
        self._stack.close()
        self._poll.close()
