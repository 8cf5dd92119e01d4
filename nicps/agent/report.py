# SPDX-License-Identifier: Apache-2.0
"""The picture of a run. A module of the trainer's floor, which the job names, draws it; so it runs as the training
user.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from nicps.agent.children import Children
from nicps.agent.folders import remove, working_folder
from nicps.agent.lives import EARLIER
from nicps.agent.loop import Loop
from nicps.agent.process import Child, User, python
from nicps.agent.records import COLLECTED, copy_file
from nicps.errors import NicpsError

PICTURE = "report.html"
_LIMIT_S = 300.0


class Report:
    """Draws a run in a folder of its own, from copies of its records, and moves the picture into the run's folder.

    Args:
        work: the folder in which that folder is made.
        user: the user that draws.
        run: the run's folder.
        entry: the module that draws: `python -m ENTRY report FOLDER`.
        then: called in the end, with an error or an empty text.
    """

    def __init__(
        self,
        loop: Loop,
        children: Children,
        work: Path,
        user: User,
        run: Path,
        entry: str,
        then: Callable[[str], None],
    ) -> None:
        self._loop, self._children, self._work, self._user = loop, children, work, user
        self._run, self._entry, self._then = run, entry, then
        self._log = run / "report.log"
        self._base: Path | None = None
        self._child: Child | None = None
        self._error = ""

    def draw(self) -> None:
        """Start the drawing program."""
        self._in_background(self._copy, self._start)

    @property
    def _folder(self) -> Path:
        assert self._base is not None
        return self._base / self._run.name

    def _copy(self) -> None:
        """Give the records to the training user, and last of all their folders."""
        self._base = working_folder(self._work)
        user, folders = self._user, [self._folder]
        found = [path for name in (*COLLECTED, EARLIER) for path in self._run.glob(f"*/{name}")]
        result = self._run / "result.json"  # a run that an alarm has ended has none
        for path in (*found, *([result] if result.exists() else [])):
            copy = self._folder / path.relative_to(self._run)
            if copy.parent not in folders:
                folders.insert(0, copy.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, copy)
            os.chown(copy, user.uid, user.gid)
        for folder in folders:
            os.chown(folder, user.uid, user.gid)

    def _start(self) -> None:
        if self._error:
            self._end()
            return
        folder, argv = self._folder, python(self._entry, "report", str(self._folder))
        try:
            self._child = self._children.spawn(
                argv, folder, self._log, self._drawn, limit_s=_LIMIT_S
            )
        except (OSError, NicpsError) as error:
            self._error = str(error)
            self._end()

    def _drawn(self, code: int) -> None:
        assert self._child is not None
        if code:
            self._error = self._child.last_line()
            self._end()
        else:
            self._in_background(self._fetch_picture, self._end)

    def _fetch_picture(self) -> None:
        copy_file(self._folder / PICTURE, self._run / PICTURE)
        self._log.unlink(missing_ok=True)

    def _end(self) -> None:
        if self._base is not None:
            base = self._base
            self._loop.background(lambda: remove(base), lambda: None)
        self._then(self._error)

    def _in_background(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """An error in this step costs only the picture."""

        def guarded() -> None:
            try:
                work()
            except (OSError, NicpsError) as error:
                self._error = str(error)

        self._loop.background(guarded, then)
