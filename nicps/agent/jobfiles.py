# SPDX-License-Identifier: Apache-2.0
"""The files of one job at this host: what is handed out, what its programs write, and what stays of it."""

from __future__ import annotations

import os
from pathlib import Path

from nicps.agent.bundle import InStream, OutStream
from nicps.agent.driver import log
from nicps.agent.folders import remove, working_folder
from nicps.agent.lives import keep_life
from nicps.agent.process import User
from nicps.agent.records import Records
from nicps.dataplane.maps import Accumulators
from nicps.errors import explain
from nicps.job.actions import Receive


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
        self.reserved: dict[int, Accumulators] = {}
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
