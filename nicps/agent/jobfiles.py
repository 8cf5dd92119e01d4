# SPDX-License-Identifier: Apache-2.0
"""The files of one job at this host: those that are handed out, those that its programs write, and those that stay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from nicps.agent.bundle import InStream, OutStream
from nicps.agent.crash import name_log
from nicps.agent.driver import log
from nicps.agent.folders import remove, working_folder
from nicps.agent.lives import keep_life
from nicps.agent.process import User
from nicps.agent.records import Records, keep_files, keep_tail, open_file
from nicps.dataplane import DataPlane
from nicps.dataplane.maps import Accumulators
from nicps.dataplane.stripes import StripesPlaces, StripesRoom
from nicps.errors import explain
from nicps.job.actions import Receive
from nicps.session import residual_file

TRAINER_LOG = "trainer.log"  # the output of training programs
CHECKPOINTS = "checkpoint"  # the folder of a run that `nicps resume` goes on from


@dataclass(frozen=True, slots=True)
class Reserved:
    """Kernel memory that is reserved and not yet in use."""

    accumulators: Accumulators | None = None
    stripes: StripesRoom | None = None
    places: StripesPlaces | None = None

    @classmethod
    def make(
        cls, dataplane: DataPlane, blocks: int, rooms: Sequence[int], places: Sequence[int] = ()
    ) -> Self:
        """Accumulators of so many blocks a bank, and the maps for stripes of so many fragments; 0: none.

        Args:
            rooms, places: by channel; empty: none. `places` are blocks a bank for the own stripe.

        Raises:
            EnvironmentProblem: there is not enough memory.
            BpfLoadError: the kernel refuses the program for stripes.
        """
        maps, made = dataplane.maps, cls()
        try:
            if blocks:
                made = replace(made, accumulators=maps.reserve(blocks))
            if rooms:
                dataplane.open_stripes()
                made = replace(made, stripes=maps.stripes.reserve(*rooms))
            if places:
                made = replace(made, places=maps.stripes.reserve_places(*places))
            return made
        except BaseException:
            made.close()
            raise

    def use(self, dataplane: DataPlane) -> None:
        """Let the program work with it from now on."""
        made = self.accumulators, self.stripes, self.places
        dataplane.maps.use(*(each for each in made if each is not None))

    def close(self) -> None:
        """Free it."""
        for made in (self.accumulators, self.stripes, self.places):
            if made is not None:
                made.close()


class JobFiles:
    """The working folder of a job; the training user owns only what is in `folder`.

    Args:
        run: the run's folder.
        name: this host's.

    Attributes: `kept`, this host's part of the run's folder. `added`, fragments that the kernel has taken in rounds
    that count. `reserved`, accumulators that are not in use yet, by number. `incoming`, the receiving end of a
    hand-out.

    Raises:
        EnvironmentProblem, OSError: the folder cannot be made.
    """

    def __init__(
        self, job_id: str, name: str, work: Path, run: Path, user: User, now: float
    ) -> None:
        self.id, self.run, self.kept = job_id, run, run / name
        self.base = working_folder(work)
        self.folder = self.base / "work"
        self._owner = (user.uid, user.gid) if os.geteuid() == 0 else (os.getuid(), os.getgid())
        try:
            for folder in (self.folder, self.folder / "out"):
                folder.mkdir()
                os.chown(folder, user.uid, user.gid)
            self.records = Records(self.base, job_id, name, now)
        except OSError:
            remove(self.base)
            raise
        self.incoming: InStream | None = None
        self.reserved: dict[int, Reserved] = {}
        self.added = 0

    def receive(self, action: Receive) -> InStream | None:
        """Open the receiving end of a hand-out; the thread may still be using the former one.

        Raises:
            OSError: the run's folder cannot be made.
        """
        folder, owner = self.folder, self._owner
        if action.collected_from:
            folder = self.run / action.collected_from
            owner = (0, 0) if os.geteuid() == 0 else self._owner
            if action.keep:
                folder.mkdir(parents=True, exist_ok=True)
        former, self.incoming = (
            self.incoming,
            InStream(
                folder,
                action.size,
                action.index_bytes,
                action.number,
                action.members,
                owner,
                action.keep,
            ),
        )
        return former

    def keep_residual(self) -> None:
        """Copy the files that the training program has written into the run's folder.

        Raises:
            OSError: it is missing, or is no regular file; the disk is full, or the folder cannot be written.
        """
        kept = self._residual_of(self.run)
        keep_files(self.folder, kept.parent, {residual_file.NAME: kept.name})

    def keep_log(self, why: str) -> str:
        """A training program has failed: copy its log into the run's folder. Return the reason and the log's path,
        in one line.
        """
        log_, kept = self.base / TRAINER_LOG, self.kept / TRAINER_LOG
        try:
            if not log_.exists() or not log_.stat().st_size:
                return why  # it has printed nothing, or was not started here
            keep_tail(log_, kept)
        except OSError as error:
            log(explain("keep the log of the training program", error))
            return why
        return name_log(why, kept)

    def open_residual(self, run: str) -> int | None:
        """A descriptor of this host's residual of that run; None, and a line in the log, if there is none."""
        path = self._residual_of(self.run.with_name(run))
        try:
            return open_file(path)
        except OSError as error:
            text = f"no residual of this host is in {path} ({error.strerror})"
            log(f"{text}: its rounding errors begin at zero")
            return None

    def _residual_of(self, run: Path) -> Path:
        """Make names unique, since hosts may share a folder for their runs."""
        return run / CHECKPOINTS / f"{self.kept.name}.{residual_file.NAME}"

    def clear(
        self, streams: dict[int, OutStream], keep_records: bool, keep_residual: bool = False
    ) -> None:
        """Close all open files, these streams too, and remove the folder. Runs in the thread that may be using it.

        Args:
            keep_records: keep the records of agent and programs.
            keep_residual: keep the training program's residual, if it has written one.
        """
        for stream in (self.incoming, *streams.values()):
            if stream is not None:
                stream.close()
        for accumulators in self.reserved.values():
            accumulators.close()
        if keep_residual and (self.folder / residual_file.NAME).exists():
            try:
                self.keep_residual()
            except OSError as error:
                log(explain("keep the residual", error))
        try:
            self.records.close()
            if keep_records:
                keep_life(self.base, self.kept)
        except OSError as error:
            log(explain("keep the job's records", error))
        finally:
            remove(self.base)
