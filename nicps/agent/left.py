# SPDX-License-Identifier: Apache-2.0
"""The files that a script of `nicps run` leaves at this host: its output, and its folder `out`."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from nicps.agent.driver import log
from nicps.agent.folders import remove
from nicps.agent.printed import Printed
from nicps.agent.records import DEEPEST, copy_tree, keep_files
from nicps.errors import explain
from nicps.job.text import one_line

OUTPUT = "output.log"  # the output of a script, in the run's folder of its host
WEIGHTS = ".nicps-weights"  # a digest by the backend of torch.distributed, in the script's folder
BEGUN = ".begun"  # in the script's folder since the script has begun, as `trainer.script` makes it
_KEPT = "out"
_MOST_TEXT = 500  # bytes of the reason why it could not be kept, which goes into a frame
_SHOWN, _NAME_CHARACTERS = 3, 60  # names of removed files that are told
_MOST_FILES = 10_000  # that are counted


class Left:
    """The files are copied once the script has ended, and read until the run has. Both are slow: not for the agent's
    loop.

    Args:
        base: the folder in which all of them are.
        kept: the host's part of the run's folder.

    Attributes: `begun`, they are being kept. Once that is over: `why`, why they could not be kept, and where they are
    then; empty if they were. `removed`, what else the script has written (`written`).
    """

    def __init__(self, printed: Printed, base: Path, kept: Path) -> None:
        self._printed, self._base, self._kept = printed, base, kept
        self.begun = False
        self.why = ""
        self.removed: dict[str, Any] = {}

    @property
    def _aside(self) -> Path:
        return self._base.with_name(f"nicps-left-{self._kept.parent.name}-{self._kept.name}")

    def keep(self) -> None:
        """Copy them into the run's folder."""
        try:
            self._printed.write_as_one(self._base / OUTPUT)
            keep_files(self._base, self._kept, {OUTPUT: OUTPUT})
            out = self._base / "work" / _KEPT
            if os.path.lexists(out):  # the script may have removed it
                # Files of an earlier run may have been sent with the script's folder.
                copy_tree(out, self._kept / _KEPT, since_ns=_begun_ns(self._base / "work"))
        except Exception as error:  # the run ends with any error, and reports it
            text = f"{explain('keep what the script has left', error)}; it is in {self._aside}"
            self.why = one_line(text).encode()[:_MOST_TEXT].decode(errors="ignore")
        with contextlib.suppress(OSError):  # files go away meanwhile
            self.removed = written(self._base / "work")

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


def written(folder: Path) -> dict[str, Any]:
    """What a script has written into its folder outside of `out`.

    Empty files, caches and hidden ones are left out, and what is deeper than a copy would go.

    Returns:
        `files`, how many, and `first`, the names of some; empty if there are none.

    Raises:
        OSError: files go away meanwhile.
    """
    if not (begun := _begun_ns(folder)):
        return {}
    found: list[str] = []
    for at, folders, names in os.walk(folder):
        inner = Path(at).relative_to(folder)
        top, deepest = inner == Path(), len(inner.parts) >= DEEPEST
        ours = (_KEPT,) if top else ()
        folders[:] = [] if deepest else [name for name in folders if _counts(name, ours)]
        for name in names:
            about = Path(at, name).stat(follow_symlinks=False)
            new = stat.S_ISREG(about.st_mode) and about.st_size and about.st_ctime_ns > begun
            if new and _counts(name, ours):
                found.append((inner / name).as_posix())
        if len(found) >= _MOST_FILES:
            break
    if not found:
        return {}
    first = [one_line(name)[:_NAME_CHARACTERS] for name in sorted(found)[:_SHOWN]]
    return {"files": len(found), "first": first}


def _begun_ns(folder: Path) -> int:
    """When the script began; what was sent to its folder is older. 0: it has not begun, or has removed the mark."""
    try:
        return (folder / BEGUN).stat(follow_symlinks=False).st_ctime_ns
    except OSError:
        return 0


def _counts(name: str, ours: tuple[str, ...]) -> bool:
    return not (name.startswith(".") or name == "__pycache__" or name in ours)
