# SPDX-License-Identifier: Apache-2.0
"""The files that a script of `nicps run` leaves at this host: its output, and its folder `out`."""

from __future__ import annotations

from pathlib import Path

from nicps.agent.driver import log
from nicps.agent.folders import remove
from nicps.agent.printed import Printed
from nicps.agent.records import copy_tree, keep_files
from nicps.errors import explain
from nicps.job.text import one_line

OUTPUT = "output.log"  # the output of a script, in the run's folder of its host
_MOST_TEXT = 500  # bytes of the reason why it could not be kept, which goes into a frame


class Left:
    """The files are copied once the script has ended, and read until the run has. Both are slow: not for the agent's
    loop.

    Args:
        base: the folder in which all of them are.
        kept: the host's part of the run's folder.

    Attributes: `begun`, they are being kept. `why`, once that is over: why they could not be kept, and where they are
    then; empty if they were.
    """

    def __init__(self, printed: Printed, base: Path, kept: Path) -> None:
        self._printed, self._base, self._kept = printed, base, kept
        self.begun = False
        self.why = ""

    @property
    def _aside(self) -> Path:
        return self._base.with_name(f"nicps-left-{self._kept.parent.name}-{self._kept.name}")

    def keep(self) -> None:
        """Copy them into the run's folder."""
        try:
            self._printed.write_as_one(self._base / OUTPUT)
            keep_files(self._base, self._kept, {OUTPUT: OUTPUT})
            copy_tree(self._base / "work" / "out", self._kept / "out")
        except Exception as error:  # the run ends with any error, and reports it
            text = f"{explain('keep what the script has left', error)}; it is in {self._aside}"
            self.why = one_line(text).encode()[:_MOST_TEXT].decode(errors="ignore")

    def clear(self) -> None:
        """Remove the folder, or move it aside if it holds files that could not be kept."""
        if not self.why:
            remove(self._base)
            return
        log(self.why)
        try:
            self._base.rename(self._aside)
        except OSError as error:
            log(f"{explain('put that folder aside', error)}; it is {self._base}")
