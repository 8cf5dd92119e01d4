# SPDX-License-Identifier: Apache-2.0
"""The script of `nicps run` at this host: its process and output, and at the host that has started it the others'.

docs/run.md. One run at a time. The script is no training program: it forms a group with those of the other hosts
(`nicps.collective`) if it wants to, by the connection to the agent that it inherits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from nicps import wire
from nicps.agent.children import Children
from nicps.agent.control import ControlSocket
from nicps.agent.driver import Driver, log
from nicps.agent.executor import Executor
from nicps.agent.folders import remove, working_folder
from nicps.agent.left import WEIGHTS, Left
from nicps.agent.loop import Loop
from nicps.agent.peer import Peer
from nicps.agent.printed import Printed
from nicps.agent.process import Child, python
from nicps.agent.records import open_file
from nicps.agent.relay import INTERVAL_S, OutputSender, Piece
from nicps.agent.settings import AgentSettings
from nicps.agent.shown import Shown
from nicps.agent.started import Started
from nicps.errors import Cancelled, JobFailed, NetworkProblem, NicpsError, explain
from nicps.job.script import LaunchScript
from nicps.session.events import Launched
from nicps.session.messages import Error
from nicps.wire import ScriptStep, ScriptStream

_TICK_S = 0.05  # between two reads of a script's output


class _Run:
    """A run that this host takes part in."""

    def __init__(self, launch: LaunchScript, base: Path, runs: Path, now: float) -> None:
        self.launch, self.base = launch, base
        self.number = run_number(launch.job)
        self.starter = launch.hosts[launch.starter][1]
        self.printed = Printed(base)
        self.left = Left(self.printed, base, runs / launch.job / self.name)
        self.child: Child | None = None
        self.report: bytes | None = None  # the result of its script
        self.sender = OutputSender(now, self.printed.reach)
        self.started: Started | None = None
        self.cancelled = False  # by the user of this host, which is not the one that has started it
        self.told_at = 0.0

    @property
    def name(self) -> str:
        """This host's number, as the others know it."""
        return self.launch.hosts[self.launch.rank][0]

    @property
    def starts_here(self) -> bool:
        """Whether this host has started it."""
        return self.launch.rank == self.launch.starter


class Scripts:
    """One script at a time.

    Args:
        send: tags a control frame, and sends it.
        forming: whether a program here waits for its group.
        in_group: whether a program here is in its group.
    """

    def __init__(
        self,
        driver: Driver,
        loop: Loop,
        children: Children,
        executor: Executor,
        control: ControlSocket,
        settings: AgentSettings,
        send: Callable[[bytes], None],
        forming: Callable[[], bool],
        in_group: Callable[[], bool],
    ) -> None:
        self._driver, self._loop, self._children = driver, loop, children
        self._executor, self._control, self._settings = executor, control, settings
        self._send_frame, self._forming, self._in_group = send, forming, in_group
        self._run: _Run | None = None

    @property
    def job(self) -> str | None:
        """The run that is under way here, or whose output is on its way."""
        return self._run.launch.job if self._run is not None else None

    @property
    def wait_s(self) -> float:
        """The time between two calls of `tick`."""
        return INTERVAL_S if self._run is not None and self._run.report else _TICK_S

    def check_free(self) -> None:
        """Check that a job can be submitted here.

        Raises:
            NetworkProblem: a script is under way.
        """
        if self._run is not None:
            raise NetworkProblem(
                f"run {self._run.launch.job} is under way: wait for its end, or end it (`nicps cancel`)"
            )

    # ---- begin

    def launch(self, action: LaunchScript) -> None:
        """Start the script, in a folder of its own, with the files that were handed out."""
        now = self._driver.now
        if self._run is not None:
            if self._run.started is not None:
                self._run.started.shown.send(Error.of(JobFailed("another job or run has begun")))
            self._close(self._run)
        job, base = self._executor.job, None
        assert job is not None
        try:
            base = working_folder(self._settings.work)
            folder = base / "work"
            os.rename(job.folder, folder)
        except (OSError, NicpsError) as error:
            reason = explain("start the script", error)
            log(reason)
            if base is not None:
                remove(base)
            for peer in self._control.peers[:]:
                if action.submission and peer.submission == action.submission:
                    peer.submission = 0
                    self._control.post(peer, Error.of(JobFailed(reason)))
            return
        run = self._run = _Run(action, base, self._settings.runs, now)
        self._driver.life.note_run(action.job)
        log(f"run {action.job}: rank {action.rank} of {len(action.hosts)}")
        if run.starts_here:
            shown = Shown(self._control, action.job, action.submission)
            send = partial(self._send, run)
            run.started = Started(action, shown, now, self._settings.runs, run.printed, send)
            names = tuple(name for name, _ in action.hosts)
            shown.send(Launched(action.job, names, str(self._settings.runs / action.job)))
            if action.submission and not shown.waiting:
                self.cancel("`nicps run` was ended")  # while the files were handed out
        try:
            run.child = self._children.spawn(
                python(action.entry, "run", "--workdir", str(folder)),
                folder,
                run.printed.stderr,
                partial(self._ended, run),
                connected=True,
                network_access=action.settings.get("network_access") is True,
                env=action.environment(str(folder / WEIGHTS)),
                stdout=run.printed.stdout,
            )
        except (OSError, NicpsError) as error:
            self._note_unstarted(run, str(error))

    def _note_unstarted(self, run: _Run, why: str) -> None:
        with contextlib.suppress(OSError):
            run.printed.stderr.write_text(f"{why}\n")
        self._ended(run, JobFailed.exit_code)

    def _ended(self, run: _Run, code: int) -> None:
        child, run.child = run.child, None
        if run is self._run:
            self._driver.life.note_run("")
        if child is not None and child.failure:
            self._note_unstarted(run, child.failure)
            return
        report: dict[str, Any] = {"code": code if code >= 0 else 128 - code}
        with contextlib.suppress(OSError):
            fd = open_file(run.base / "work" / WEIGHTS)
            try:
                report["weights"] = os.read(fd, 64).decode("ascii", "replace")
            finally:
                os.close(fd)
        log(f"run {run.launch.job}: the script ended with exit code {report['code']}")
        self._keep(run, partial(self._make_report, run, report))

    def _make_report(self, run: _Run, report: dict[str, Any]) -> None:
        """Make the report once the files of the script are kept, or cannot be."""
        if run.left.why:
            report["not_kept"] = run.left.why
        elif run.left.removed:
            report["removed"] = run.left.removed
        run.report = orjson.dumps(report)
        if run is self._run and run.started is not None:
            run.started.shown.forward_own(run.name, run.printed)
            run.started.note_end(run.name, run.report)

    # ---- frames

    def take_frame(self, source: bytes, frame: wire.Frame) -> None:
        """A SCRIPT frame without a view that came up."""
        run, now, body = self._run, self._driver.now, frame.body
        if run is None or not isinstance(body, wire.Script) or body.run != run.number:
            return
        if frame.header.network != self._driver.life.node.network:
            return
        if body.step in (ScriptStep.SEEN, ScriptStep.KILL):
            members = [mac for _, mac in run.launch.hosts]
            if body.rank != run.launch.rank or source not in members:
                return
            if body.step == ScriptStep.SEEN:
                run.sender.acknowledge(now, body.at)
            else:
                self._kill(run)
        elif run.started is not None:
            run.started.take_output(now, source, body, bytes(frame.tail))

    def _send(
        self,
        run: _Run,
        step: ScriptStep,
        at: int,
        rank: int,
        tail: bytes = b"",
        stream: ScriptStream = ScriptStream.STDOUT,
    ) -> None:
        header = wire.Header(network=self._driver.life.node.network)
        waits = int(step == ScriptStep.OUTPUT and self._forming())
        body = wire.Script(run.number, at, step, rank, waits, stream)
        self._send_frame(wire.pack(header, body, tail=tail))

    # ---- time

    def tick(self) -> None:
        """Send the output, and check for lost hosts."""
        run, now = self._run, self._driver.now
        if run is None:
            return
        if run.started is not None:
            if run.started.tick(now, self._forming(), self._in_group()):
                self._kill(run)
            if run.started.over:
                self._close(run)
            return
        if run.cancelled and now >= run.told_at + _TICK_S:
            run.told_at = now
            for rank in set(range(len(run.launch.hosts))) - {run.launch.rank}:
                self._send(run, ScriptStep.KILL, 0, rank)
        run.sender.note_output(run.printed.measure(), ended=run.report is not None)
        for piece in run.sender.due(now):
            tail = self._read(run, piece)
            if piece.step == ScriptStep.OUTPUT and len(tail) < piece.length:
                run.sender.cut(piece.at + len(tail))
                run.printed.cut(piece.at + len(tail))
            stream = run.printed.stream(piece.at)
            self._send(run, piece.step, piece.at, run.launch.rank, tail, stream)
        if run.report is not None and (run.sender.done or run.sender.given_up):
            if run.sender.given_up:
                name = run.launch.hosts[run.launch.starter][0]
                log(f"run {run.launch.job}: {name}, which has started it, is not heard")
            self._close(run)

    def _read(self, run: _Run, piece: Piece) -> bytes:
        if piece.step == ScriptStep.END:
            assert run.report is not None
            return run.report
        return run.printed.read(piece.at, piece.length)

    # ---- the end

    def forget(self, peer: Peer) -> None:
        """`nicps run` has gone: the run ends with it."""
        run = self._run
        if run is not None and run.started is not None and run.started.shown.submission:
            if peer.submission == run.started.shown.submission:
                self.cancel("`nicps run` was ended")

    def cancel(self, reason: str) -> bool:
        """End the scripts at all hosts; return whether there is a run."""
        run = self._run
        if run is None:
            return False
        if run.started is None:
            run.cancelled = True  # all are told, since the host that has started it may be lost
        else:
            run.started.end(self._driver.now, Cancelled(reason))
        self._kill(run)
        return True

    def close(self) -> None:
        """The agent ends: end the script here, and those of other hosts if the run was started here."""
        run = self._run
        if run is None:
            return
        if run.started is not None:
            self.cancel("the agent stops")
            run.started.kill_all()
            run.started.shown.send(Error.of(Cancelled("the agent of this host has stopped")))
        self._close(run)

    def _kill(self, run: _Run) -> None:
        if run.started is not None:
            run.started.end(self._driver.now, Cancelled("cancelled on another host"))
        if run.child is not None:
            run.child.kill()  # `_ended` follows

    def _keep(self, run: _Run, then: Callable[[], None]) -> None:
        """Keep the files that it has left, once no process writes any more."""

        def begin() -> None:
            run.printed.cut(run.printed.measure())
            self._loop.background(run.left.keep, then)

        run.left.begun = True
        self._children.once_gone(begin)

    def _close(self, run: _Run) -> None:
        """Keep the files that it has left, and remove its folder."""
        self._run = None
        self._driver.life.note_run("")
        if run.child is not None:
            self._children.end(run.child)
        if not run.left.begun:
            self._keep(run, lambda: None)
        self._children.once_gone(lambda: self._loop.background(run.left.clear, lambda: None))


def run_number(job: str) -> int:
    """A run's number on the wire, computed from its name, which ends with random digits."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "big")
