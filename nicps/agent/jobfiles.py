# SPDX-License-Identifier: Apache-2.0
"""The files of one job at this host: what is handed out, what its programs write, and what stays of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nicps.agent.bundle import InStream, OutStream
from nicps.agent.driver import log
from nicps.agent.folders import remove, working_folder
from nicps.agent.lives import keep_life
from nicps.agent.process import User
from nicps.agent.records import Records
from nicps.dataplane import DataPlane
from nicps.dataplane.maps import Accumulators
from nicps.dataplane.stripes import StripesRoom
from nicps.errors import explain
from nicps.job.actions import Receive


@dataclass(frozen=True, slots=True)
class Reserved:
    """Memory of the kernel's that nothing uses yet."""

    accumulators: Accumulators | None
    stripes: StripesRoom | None

    @classmethod
    def make(cls, dataplane: DataPlane, blocks: int, room: int) -> Self:
        """Accumulators of so many blocks a bank, and what stripes of so many fragments need; 0: none.

        Raises:
            EnvironmentProblem: there is not enough memory.
            BpfLoadError: the kernel refuses the program that takes stripes.
        """
        accumulators = dataplane.maps.reserve(blocks) if blocks else None
        try:
            if room:
                dataplane.open_stripes()
            return cls(accumulators, dataplane.maps.stripes.reserve(room) if room else None)
        except BaseException:
            if accumulators is not None:
                accumulators.close()
            raise

    def close(self) -> None:
        """It is not needed after all."""
        for made in (self.accumulators, self.stripes):
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
        """Open the receiving end of a hand-out; the former one, which the thread may still be using.

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

    def clear(self, streams: dict[int, OutStream], keep_records: bool) -> None:
        """Close all that is open, these streams too, and remove the folder. In the thread that may be using it.

        Args:
            keep_records: keep what agent and programs have written down.
        """
        for stream in (self.incoming, *streams.values()):
            if stream is not None:
                stream.close()
        for accumulators in self.reserved.values():
            accumulators.close()
        try:
            self.records.close()
            if keep_records:
                keep_life(self.base, self.kept)
        except OSError as error:
            log(explain("keep the job's records", error))
        finally:
            remove(self.base)
