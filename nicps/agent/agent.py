# SPDX-License-Identifier: Apache-2.0
"""`nicps join`: the host's agent, an event loop around the life of a job.

Frames, time, the training program's messages and commands come in. The agent carries out the actions of the life of the
job: small frames and fragments through the sender, settings through the XDP program's maps, files in a background
thread. This module puts these parts together.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from nicps import wire
from nicps.agent.children import Children
from nicps.agent.commands import Commands
from nicps.agent.control import Access, ControlSocket
from nicps.agent.direct import DirectRoom
from nicps.agent.driver import Driver, log
from nicps.agent.executor import Executor
from nicps.agent.exporter import Exporter
from nicps.agent.flows import FlowWatch
from nicps.agent.folders import check_runs, check_work, sweep
from nicps.agent.frames import Frames
from nicps.agent.group import Groups
from nicps.agent.keyring import Keyring
from nicps.agent.lives import rescue
from nicps.agent.loop import Events, Loop
from nicps.agent.notifier import Notifier
from nicps.agent.preparation import Preparation
from nicps.agent.probe import STEP_S, Prober
from nicps.agent.process import User, set_nice
from nicps.agent.program import Program
from nicps.agent.records import TimeLine
from nicps.agent.scripts import Scripts
from nicps.agent.served_room import ServedRoom
from nicps.agent.settings import AgentSettings
from nicps.agent.status import note_pushes, status_of
from nicps.agent.stores import Stores
from nicps.agent.tally import Tally
from nicps.agent.waits import Waits
from nicps.auth import nonce
from nicps.dataplane import DataPlane
from nicps.dataplane.loader import need_root
from nicps.errors import explain
from nicps.job import Life, LifeSettings
from nicps.job import actions as act
from nicps.job.script import LaunchScript
from nicps.protocol import Narrow, Send
from nicps.session.messages import Status

_WAKE_S = 0.05  # so this host gives a sign of life at least this often while a ring is under way
_IDLE_S = 1.0
_NICE = -15  # a token that waits for a processor delays all members
_RETRY_S = 0.001  # the interface's queue was full
_MORE = 3  # times that events are handled before all else that a turn has to do,
_MORE_S = 0.002  # unless they take longer than this: timers must not wait for several long ones
_KEY_S = 0.01  # between two looks at the numbers of a view's key
_HURRY_S = 0.01  # processes that do not end at once are being ended


class Agent:
    """One host of the network. Use as a context manager; `run` returns when it is told to stop."""

    def __init__(self, settings: AgentSettings) -> None:
        need_root()  # before errors that only a missing root causes
        self.settings = settings
        user = User.named(settings.user)
        access = Access.of(user.uid, settings.group)
        self._keys = Keyring.read(settings.key, settings.switch_key)
        sweep(settings.work, self._rescue)
        check_work(settings.work, user)
        check_runs(settings.runs)
        self._stopping = False
        self._look_at_key = 0.0
        self._loop = Loop(self._fail_work)
        set_nice(os.getpid(), _NICE)  # and the compiler's: members wait for a host that returns
        self._exporter: Exporter | None = None
        with contextlib.ExitStack() as stack:
            if settings.metrics:
                self._exporter = Exporter(settings.metrics, self._loop.watch, self._loop.unwatch)
                stack.callback(self._exporter.close)
            self.dataplane = stack.enter_context(
                DataPlane(
                    settings.iface,
                    wire.network_id(settings.network),
                    ethertype=settings.ethertype,
                    destination=settings.destination,
                    keyed=self._keys.keyed,
                    tagged=settings.tagged,
                    shape_bps=settings.shape_bps,
                )
            )
            self._loop.on_signals(self.stop)  # before the socket answers
            self._control = ControlSocket(
                settings.socket, access, self._loop.watch, self._loop.unwatch
            )
            stack.callback(self._control.close)
            self._stack = stack.pop_all()
        self.life = Life(self.dataplane.mac, self._life_settings(), self.dataplane.maps, nonce)
        self._driver = Driver(self.life)
        self.children = Children(user, self._loop, self._clock, self._control.adopt)
        self._assemble(user)

    def _life_settings(self) -> LifeSettings:
        settings = self.settings
        return LifeSettings(
            settings.name,
            settings.network,
            exchange=settings.exchange,
            believes_switch=settings.believes_switch,
            keyed=self._keys.keyed,
            runs=str(settings.runs),
            timings=settings.timings,
        )

    def _assemble(self, user: User) -> None:
        """The rooms, and the table of actions that each of them carries out."""
        settings, driver, loop, children = self.settings, self._driver, self._loop, self.children
        timeline, tally = TimeLine(), Tally(driver.now)
        served, flows = ServedRoom(self.dataplane), FlowWatch(self.life.node, timeline)
        self._waits = waits = Waits(self.life.node, flows, driver.now)
        self._frames = frames = Frames(
            driver,
            self.dataplane,
            self._keys,
            loop,
            timeline,
            served,
            flows,
            self._take_aside,
        )
        self._prober = Prober(self.life, self.dataplane, settings.destination, frames.send_control)
        preparation = Preparation(driver, loop, children, settings.work, settings.runs, user)
        direct = DirectRoom(self.dataplane, loop, settings.timings.urgent_share)
        executor = Executor(
            driver,
            loop,
            children,
            self.dataplane,
            frames.sender,
            served,
            timeline,
            waits,
            settings,
            user,
            lambda: preparation.folder,
            direct.load,
        )
        self._stores = stores = Stores(driver, self._control, frames.send_control, nonce)
        program = Program(
            driver,
            loop,
            children,
            self.dataplane,
            executor,
            settings.trainer,
            stores.open,
            direct,
        )
        self._scripts = Scripts(
            driver,
            loop,
            children,
            executor,
            self._control,
            settings,
            frames.send_control,
            lambda: self._groups.waiting,
            lambda: self.life.part is not None and self.life.part.job.group,
        )
        self._groups = Groups(driver, self._control, preparation, program, self.dataplane)
        notifier = Notifier(self._control, children, settings)

        def status() -> Status:
            now = time.monotonic()
            about = self.life, frames, self._keys, self.dataplane, tally, flows, waits
            return status_of(*about, preparation.job, now, self._scripts.job)

        commands = Commands(
            driver,
            self._control,
            program,
            preparation,
            self._groups,
            self._scripts,
            stores,
            self._prober,
            self.dataplane,
            user.name,
            status,
            self.stop,
        )
        if self._exporter is not None:
            self._exporter.serve(status)

        def note_commit(action: act.NoteCommit) -> None:
            note_pushes(self.life, tally)
            tally.note_commit(driver.now, action, self.life.node.members)
            executor.note_commit(action)

        def note_round(action: act.NoteRound) -> None:
            if self.life.part is not None:
                own = self.life.part.contributions[action.commit.channel]
                flows.note_commit(driver.now, action.commit, own)

        def enter_view(action: act.EnterView) -> None:
            tally.note_view(action)
            flows.enter_view()
            frames.enter_view(action)

        def close_job(action: act.CloseJob) -> None:
            tally.note_network_gone()
            flows.close()
            frames.close_lines()
            executor.close_job(action)

        def transmit(action: act.Transmit) -> None:
            tally.note_repairs(action.fragments, action.phase, self.life.node.members)
            frames.transmit(action, program.source_of(action))

        driver.assign(
            {
                Send: frames.send,
                Narrow: frames.narrow,
                act.Transmit: transmit,
                act.TransmitServed: frames.transmit_served,
                act.DropFragments: frames.drop_fragments,
                act.EnterView: enter_view,
                act.LeaveView: frames.leave_view,
                act.CountFragments: executor.count_fragments,
                act.UseAccumulators: executor.use_accumulators,
                act.DropAccumulators: executor.drop_accumulators,
                act.RenewAccumulators: executor.renew_accumulators,
                act.RetirePlaces: executor.retire_places,
                act.UseServed: served.use,
                act.DropServed: served.drop,
                act.BeginServing: served.begin,
                act.Settled: served.settle,
                act.StartProgram: program.start,
                act.EndProgram: program.end,
                act.ShareArena: program.share_arena,
                act.ShowNeed: program.show_need,
                act.ShowClosed: program.show_closed,
                act.Welcome: program.welcome,
                act.Post: program.post,
                act.EnterPhase: program.enter_phase,
                act.OpenJob: executor.open_job,
                act.CloseJob: close_job,
                act.NoteEvent: executor.note_event,
                act.NoteCommit: note_commit,
                act.NoteRound: note_round,
                act.Receive: executor.receive,
                act.CloseStream: executor.close_stream,
                act.RemoveState: executor.remove_state,
                act.CloseSubmission: preparation.close,
                act.GroupCalled: self._groups.note_call,
                act.BeginTask: executor.begin_task,
                LaunchScript: self._scripts.launch,
                act.Log: notifier.log,
                act.Publish: notifier.publish,
                act.RunHook: notifier.run_hook,
            }
        )
        self._control.serve(commands.take_message, commands.forget)

    def _take_aside(self, source: bytes, frame: bytes) -> None:
        if frame[1] != wire.FrameType.SCRIPT:
            self._prober.take_frame(source, frame)
            return
        script = wire.unpack(frame)
        room = self._stores if script.header.view else self._scripts
        room.take_frame(source, script)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the loop

    def run(self) -> None:
        """Serve until SIGINT, SIGTERM, SIGHUP or `nicps leave`."""
        self._driver.carry_out(self.life.join(time.monotonic()))
        while not self._stopping:
            self._step()
        self._leave()

    def stop(self) -> None:
        """Leave the loop."""
        self._stopping = True

    def _clock(self) -> float:
        return self._driver.now

    def _step(self) -> None:
        began = time.monotonic()
        self._handle(began, self._loop.wait(self._seconds_to_wait()))
        until = self._driver.now + _MORE_S
        for _ in range(_MORE):  # for what has come meanwhile others wait, too
            began = time.monotonic()
            late = began >= until or self._frames.sender.more
            if late or not (events := self._loop.wait(0.0)):
                break
            self._handle(began, events)
        driver, life = self._driver, self.life
        now = driver.now
        driver.carry_out(life.renew_view(now, self._key_is_spent(now)))
        driver.carry_out(life.tick(now, self._frames.sender.waits))
        self.children.tick(now)
        self._prober.tick()
        self._groups.tick()
        self._loop.guard(self._scripts.tick)
        self._stores.tick()
        if doubt := self._keys.find_doubt(now):
            driver.carry_out(life.warn(now, doubt))
        self._frames.pump_rest()
        self._control.flush()
        self._waits.look(time.monotonic())

    def _handle(self, began: float, events: Events) -> None:
        """Handle what has come, waited for since `began`, and send what follows from it: other work comes after."""
        self._driver.now = now = time.monotonic()
        self._waits.note(now, now - began)
        self._loop.handle(events)
        self._frames.sync_from_kernel()
        self._frames.pump()

    def _key_is_spent(self, now: float) -> bool:
        """Whether the view needs another key. Even the fastest line is far from that for minutes."""
        if now < self._look_at_key:
            return False
        self._look_at_key = now + _KEY_S
        maps = self.dataplane.maps
        return self._keys.is_spent(maps.sequence, maps.sequence_of_switch)

    def _seconds_to_wait(self) -> float:
        sender, wait = self._frames.sender, _IDLE_S
        if self.life.node.ring is not None:
            wait = _WAKE_S
        if sender.refused:
            wait = _RETRY_S
        if self._scripts.job:
            wait = min(wait, self._scripts.wait_s)
        if (store_s := self._stores.wait_s) is not None:
            wait = min(wait, store_s)
        if self._prober.running:
            wait = STEP_S
        wait = min(wait, max(0.0, self.life.deadline() - time.monotonic()))
        if self.children.hurry:
            wait = min(wait, _HURRY_S)
        return 0.0 if sender.more else wait

    def _fail_work(self, reason: Exception) -> None:
        """An error in background work that is not a job's task."""
        driver = self._driver
        driver.carry_out(
            self.life.action_failed(driver.now, explain("go on with the job here", reason))
        )

    def _rescue(self, folder: Path) -> None:
        """An agent on this host was killed in the middle of a job. This agent may come back to that job."""
        try:
            rescue(folder, self.settings.runs)
        except OSError as error:
            log(explain("keep the records of an agent that was killed", error))

    # ---- leaving

    def _leave(self) -> None:
        """In the middle of a job: the others go on without this host, or the job stops for all if they cannot."""
        driver, life = self._driver, self.life
        driver.now = now = time.monotonic()
        driver.carry_out(life.leave(now))
        while not life.has_left(driver.now):
            self._step()
        driver.carry_out(life.end(driver.now, f"{self.settings.name} has left the network"))
        self._control.flush()

    def close(self) -> None:
        """Detach the program and close everything, so that nothing stays attached."""
        self._driver.carry_out(self.life.end(self._driver.now, "the agent stops"))
        self._scripts.close()
        self.children.close()
        self._loop.drain()
        self._stack.close()
        self._loop.close()

    def announce(self) -> None:
        """Describe this agent in the operator's log."""
        settings = self.settings
        log(
            f"{settings.name} on {settings.iface}, XDP {self.dataplane.mode} mode, network {settings.network}"
        )
        if self._exporter is not None:
            log(f"metrics at {self._exporter.url}")
        if settings.key is None:
            log(
                "WARNING: there is no key: every host on this LAN is trusted (`nicps key new`, `--key`)"
            )
