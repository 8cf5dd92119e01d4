# SPDX-License-Identifier: Apache-2.0
"""The output of a script: two files, read as one stream whose pieces are of stdout or of stderr (docs/run.md).

The files are read at intervals. Pieces of the two are in the order in which they were seen.
"""

from __future__ import annotations

import bisect
from array import array
from pathlib import Path

from nicps.agent.relay import MOST_BYTES
from nicps.wire import ScriptStream

_STREAMS = tuple(ScriptStream)
_PIECE = 1 << 20


class Printed:
    """The output of one script, in files of this folder.

    Attributes: `stdout`, `stderr`, the files; `size`, bytes of both that were seen, at most `MOST_BYTES`.
    """

    def __init__(self, folder: Path) -> None:
        self.stdout, self.stderr = folder / "stdout.log", folder / "stderr.log"
        self.size = 0
        self._paths = self.stdout, self.stderr
        self._most = MOST_BYTES
        self._seen = [0 for _ in _STREAMS]
        # Of each run of bytes of one file: where it ends in the stream, which file it is, where it begins there.
        self._ends, self._of, self._at = array("Q"), array("B"), array("Q")

    def measure(self) -> int:
        """Count what has been printed since; return `size`."""
        for stream, path in zip(_STREAMS, self._paths, strict=True):
            try:
                size = path.stat().st_size
            except OSError:
                continue
            new = min(size - self._seen[stream], self._most - self.size)
            if new <= 0:
                continue
            if self._of and self._of[-1] == stream:
                self._ends[-1] += new
            else:
                self._ends.append(self.size + new)
                self._of.append(stream)
                self._at.append(self._seen[stream])
            self._seen[stream] += new
            self.size += new
        return self.size

    def cut(self, at: int) -> None:
        """The script has shortened a file: there are no more bytes than these."""
        self._most = self.size = min(self.size, at)

    def stream(self, at: int) -> ScriptStream:
        """The file that byte `at` belongs to."""
        place = bisect.bisect_right(self._ends, at)
        return ScriptStream(self._of[place]) if place < len(self._of) else ScriptStream.STDOUT

    def reach(self, at: int) -> int:
        """The number of bytes from `at` on that are of one file."""
        place = bisect.bisect_right(self._ends, at)
        return min(self._ends[place], self.size) if place < len(self._ends) else self.size

    def read(self, at: int, length: int) -> bytes:
        """Bytes from `at` on, all of one file; fewer at its end, or where the script has shortened it."""
        place = bisect.bisect_right(self._ends, at)
        length = min(length, self.reach(at) - at)
        if place == len(self._ends) or length <= 0:
            return b""
        begins = self._ends[place - 1] if place else 0
        try:
            with self._paths[self._of[place]].open("rb") as file:
                file.seek(self._at[place] + at - begins)
                return file.read(length)
        except OSError:
            return b""

    def write_as_one(self, path: Path) -> None:
        """Both files as one, in the order in which they were seen.

        Raises:
            OSError: it cannot be written.
        """
        with path.open("wb") as file:
            at = 0
            while piece := self.read(at, _PIECE):
                file.write(piece)
                at += len(piece)
