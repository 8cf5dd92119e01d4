# SPDX-License-Identifier: Apache-2.0
"""Files, accumulators and results of a job. Actions that take time are done in the background."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nicps import wire
from nicps.agent.bundle import OutStream
from nicps.agent.children import Children
from nicps.agent.driver import Driver, JobNotOpen
from nicps.agent.jobfiles import CHECKPOINTS, JobFiles, Reserved
from nicps.agent.lives import earlier_files, keep_programs
from nicps.agent.loop import Loop
from nicps.agent.metrics import METRICS, check_metrics, pushes_of
from nicps.agent.prepared import read_prepared
from nicps.agent.process import User
from nicps.agent.records import TimeLine, keep_files
from nicps.agent.report import PICTURE, Report
from nicps.agent.result import summarise
from nicps.agent.sender import Sender
from nicps.agent.served_room import ServedRoom
from nicps.agent.settings import AgentSettings
from nicps.agent.waits import Waits
from nicps.dataplane import DataPlane
from nicps.errors import BpfLoadError, explain
from nicps.job import actions as act
from nicps.job import slow_work
from nicps.job.checkpoints import CHECKPOINT, STATE

#: The trained model, as the training program leaves it: a state_dict of PyTorch, and the same in another format.
MODELS = ("model.pt", "model.safetensors")


class Executor:
    """The job that is here, on the disk and in the kernel.

    Args:
        prepared: the folder of a submitted job that its preparation has filled.
        load_direct: loads what a group needs for direct calls.

    Attributes: `job`, its files. `streams`, the open files to be handed out, by number. `served`, what the job has of
    parameter servers.
    """

    def __init__(
        self,
        driver: Driver,
        loop: Loop,
        children: Children,
        dataplane: DataPlane,
        sender: Sender,
        served: ServedRoom,
        timeline: TimeLine,
        waits: Waits,
        settings: AgentSettings,
        user: User,
        prepared: Callable[[], Path],
        load_direct: Callable[[], None],
    ) -> None:
        self._driver, self._life, self._loop, self._children = driver, driver.life, loop, children
        self._dataplane, self._sender, self._timeline = dataplane, sender, timeline
        self._waits = waits
        self._settings, self._user, self._prepared = settings, user, prepared
        self._load_direct = load_direct
        self.job: JobFiles | None = None
        self.served = served
        self.streams: dict[int, OutStream] = {}
        self._before = 0, 0  # for this job: the token's turns, and fragments sent again

    # ---- a job comes and goes

    def open_job(self, action: act.OpenJob) -> None:
        """Make its working folder."""
        self._before = self._life.turns, self._sender.again
        self._waits.begin_job()
        settings, now = self._settings, self._driver.now
        run, name = settings.runs / action.job, self._life.node.name
        self.job = JobFiles(action.job, name, settings.work, run, self._user, now)
        self._timeline.records = self.job.records

    def close_job(self, action: act.CloseJob) -> None:
        """Remove its files, once its programs are gone and the thread is done with them."""
        job, self.job = self.job, None
        streams, self.streams = self.streams, {}
        self._timeline.records = None
        if job is not None:
            clear = partial(job.clear, streams, action.keep_records, action.saved)
            stripes = self._dataplane.maps.stripes
            stripes.retire()
            self.served.retire()

            def end() -> None:
                self._loop.background(stripes.release, _nothing)
                self._loop.background(self.served.release, _nothing)
                self._loop.background(clear, _nothing)

            self._children.once_gone(end)
            return
        for stream in streams.values():  # those of a job whose folder could not be made
            stream.close()

    @property
    def _here(self) -> JobFiles:
        if self.job is None:
            raise JobNotOpen
        return self.job

    # ---- at once

    def note_event(self, action: act.NoteEvent) -> None:
        """Note an event for the time line, which the report shows."""
        records = self._here.records
        records.event(action.kind, self._driver.now, action.round, **action.values)

    def note_commit(self, action: act.NoteCommit) -> None:
        """Note a time for the time line."""
        now = self._driver.now
        self._timeline.note("test" if action.test else "commit", now, now, action.round)

    def receive(self, action: act.Receive) -> None:
        """Open the receiving end of a hand-out."""
        former = self._here.receive(action)
        if former is not None:
            self._loop.background(former.close, _nothing)

    def close_stream(self, action: act.CloseStream) -> None:
        """Leave the closing of the files to the thread, which may still be reading from them."""
        stream = self.streams.pop(action.stream, None)
        if stream is not None:
            self._loop.background(stream.close, _nothing)

    def remove_state(self, _: act.RemoveState) -> None:
        """The state of another member has been loaded."""
        (self._here.folder / STATE).unlink(missing_ok=True)

    def count_fragments(self, action: act.CountFragments) -> None:
        """The fragments that the kernel has taken, in the view that it is in."""
        maps = self._dataplane.maps
        view = int(maps.config["view"])
        if action.listed is None:
            self._here.added += maps.count(action.round, view, 0, action.channel)
        else:
            self._here.added += self.served.note_commit(action.round, view, action.listed)

    def use_accumulators(self, action: act.UseAccumulators) -> None:
        """Use new accumulators; the old ones are freed once no process reads them any more."""
        self._here.reserved.pop(action.accumulators).use(self._dataplane)
        driver = self._driver  # this host may now enter a list, since it has places
        driver.carry_out(self._life.room_made(driver.now))

    def drop_accumulators(self, action: act.DropAccumulators) -> None:
        """Release accumulators that are not needed."""
        self._here.reserved.pop(action.accumulators).close()

    def renew_accumulators(self, action: act.RenewAccumulators) -> None:
        """Allocate other accumulators at once, because the round goes on."""
        rooms = action.rooms or _one(action.room)
        Reserved.make(self._dataplane, action.blocks, rooms).use(self._dataplane)

    def retire_places(self, _: act.RetirePlaces) -> None:
        """Take the places of the own stripe out of use: contributions to it are dropped until it has other ones."""
        self._dataplane.maps.stripes.retire_places()

    # ---- in the background

    def begin_task(self, action: act.BeginTask) -> None:
        """Begin a task; its outcome is an event."""
        ticket, task = action.ticket, action.task
        if isinstance(task, slow_work.DrawReport):
            self._draw(ticket, task)
            return
        outcome: list[Any] = []
        failure: list[Exception] = []
        do = self._prepare(ticket, task)

        def run() -> None:
            try:
                outcome.append(do())
            except Exception as error:  # files written by programs can contain anything
                failure.append(error)

        def then() -> None:
            if failure:
                self._end(ticket, _explain(task, failure[0]))
            else:
                driver = self._driver
                driver.carry_out(self._life.task_done(driver.now, ticket, outcome[0]))

        self._loop.background(run, then)

    def _end(self, ticket: int, error: str) -> None:
        driver, life = self._driver, self._life
        done = life.task_failed(driver.now, ticket, error) if error else None
        driver.carry_out(life.task_done(driver.now, ticket) if done is None else done)

    def _prepare(self, ticket: int, task: slow_work.Task) -> Callable[[], Any]:
        """Make the function that the thread runs; it works on the job that is here now."""
        match task:
            case slow_work.ReserveAccumulators(blocks, room, places, rooms, stripes):
                reserved = self._here.reserved
                sizes = rooms or _one(room), stripes or _one(places)
                part = self._life.part
                group = part is not None and part.job.group

                def reserve() -> int | slow_work.StripesRefused:
                    if group:
                        self._load_direct()
                    try:
                        reserved[ticket] = Reserved.make(self._dataplane, blocks, *sizes)
                    except BpfLoadError as error:
                        return slow_work.StripesRefused(str(error))
                    return ticket

                return reserve
            case slow_work.ReserveServed():
                return partial(self.served.reserve, ticket, task)
            case slow_work.FillPart():
                return partial(self.served.fill, ticket, task)
            case slow_work.ReadPart():
                return partial(self.served.read, task)
            case slow_work.OpenStream(stream, folder, files):
                return partial(_open, self.streams, stream, self._folder(folder), files)
            case slow_work.StoreWindow():
                return self._prepare_window(task)
            case slow_work.KeepCheckpoint(name):
                return partial(keep_checkpoint, self._here, name)
            case slow_work.KeepResidual():
                return self._here.keep_residual
            case slow_work.KeepRecords(facts, last_round):
                facts = {**self._facts(), **facts}
                if "served" in facts:
                    facts["served"] = {**facts["served"], **self.served.facts()}
                return partial(_keep_records, self._here, facts, last_round)
            case slow_work.MakeResult():
                run = self._settings.runs / task.job
                return partial(_make_result, run, self._life.node.name, task)
            case _:
                return _nothing

    def _folder(self, folder: slow_work.Folder) -> Path:
        if folder is slow_work.Folder.PREPARED:
            return self._prepared()
        if folder is slow_work.Folder.WORK:
            return self._here.folder
        return self._here.kept

    def _prepare_window(self, task: slow_work.StoreWindow) -> Callable[[], slow_work.Stored | None]:
        job, incoming = self._here, self._here.incoming
        assert incoming is not None
        out = self.streams.get(task.stream) if task.stream else None
        bank = self._dataplane.maps.accumulators[task.round & 1]

        def store() -> slow_work.Stored | None:
            if out is not None:
                data = out.read(task.window, 0, task.fragments).reshape(-1)
            else:
                data = bank.view(np.uint8).reshape(-1)
            incoming.write(data[: task.size])
            if not task.last:
                return None
            digest = incoming.finish()
            return slow_work.Stored(digest, read_prepared(job.folder) if task.reads_job else {})

        return store

    def _facts(self) -> dict[str, Any]:
        turns, again = self._before
        return {
            "name": self._life.node.name,
            "number": self._life.node.number,
            "mac": wire.mac_text(self._life.node.mac),
            "xdp_mode": self._dataplane.mode,
            "fragments_added": self._here.added,
            "fragments_sent_again": self._sender.again - again,
            "token_turns": self._life.turns - turns,
            "waited": self._waits.facts(self._life.node.members),
            "counters": self._dataplane.maps.counters(),
        }

    def _draw(self, ticket: int, task: slow_work.DrawReport) -> None:
        run = self._settings.runs / task.job
        ended = partial(self._end, ticket)
        report = Report(
            self._loop, self._children, self._settings.work, self._user, run, task.entry, ended
        )
        self._children.once_gone(report.draw)  # as records are, after an alarm


def _one(size: int) -> tuple[int, ...]:
    """That size by channel, for one channel; empty if it is 0."""
    return (size,) if size else ()


def _nothing() -> None:
    """`Settle` is done when all tasks before it are done."""


def _open(
    streams: dict[int, OutStream], number: int, folder: Path, files: Any
) -> slow_work.StreamSize:
    stream = streams[number] = OutStream(folder, files)
    return slow_work.StreamSize(stream.size, len(stream.index))


def keep_checkpoint(job: JobFiles, name: str) -> None:
    names = {"job.tar": "job.tar", "prepared.json": "prepared.json", name: CHECKPOINT}
    keep_files(job.folder, job.run / CHECKPOINTS, names)


def _keep_records(job: JobFiles, facts: dict[str, Any], last_round: int) -> list[str]:
    names = job.records.keep(job.folder / "out", job.base, facts, job.kept)
    keep_programs(job.base, job.kept)
    check_metrics(job.kept / METRICS, last_round, pushes_of(facts))
    return [*names, *earlier_files(job.kept)]


def _make_result(folder: Path, own: str, task: slow_work.MakeResult) -> dict[str, Any]:
    about = {"report": str(folder / PICTURE)}
    made = summarise(folder, task.names, task.last_round) | about | dict(task.about)
    (folder / "result.json").write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2))
    for name in MODELS:
        if (folder / own / name).exists():
            shutil.copyfile(folder / own / name, folder / name)
    return made


def _explain(task: slow_work.Task, error: Exception) -> str:
    """The reason for a task's failure, in one line."""
    if isinstance(task, slow_work.MakeResult):
        return f"cannot make the summary of the run: {error}"
    if isinstance(task, slow_work.KeepCheckpoint | slow_work.KeepResidual) and isinstance(
        error, OSError
    ):
        about = f"{error.filename}: " if error.filename else ""
        return f"{about}{error.strerror}"
    return explain("go on with the job here", error)
