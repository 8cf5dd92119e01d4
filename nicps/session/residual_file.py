# SPDX-License-Identifier: Apache-2.0
"""A residual as a file: what rounding has left over at one host, beside a checkpoint, for `nicps resume`.

Every host that trains has its own. It is used with the very state that it belongs to, and otherwise dropped.

A ZIP of two files that are not compressed, each with its CRC-32, as NumPy's `savez` writes it:

    residual.json   format, version, `state` (the digest of the state that it belongs to), `round` (the last one that is
                    in it, as its run numbers them), `lanes`, and `limit`: no number is larger, as far as its host
                    knew; null where it did not. A round's unit follows from it, so a resumed job has the same units
    residual.npy    float32 (lanes,)
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.lib.format as npy

from nicps.errors import JobFailed
from nicps.session.lanes import F32, Residual

NAME = "residual.npz"
_HEAD, _VALUES = "residual.json", "residual.npy"
_FORMAT, _VERSION = "nicps-residual", 1


class ResidualFile:
    """The residual of one training program's session, in its working folder.

    Args:
        settle: called before the residual is read or replaced: brings it up to date.

    Attributes: `residual`; `state`, the digest of the state that it belongs to, "" if that is not known.
    """

    def __init__(
        self,
        residual: Residual,
        lanes: int,
        folder: str,
        settle: Callable[[], object] | None = None,
    ) -> None:
        self.residual = residual
        self._settle = settle or (lambda: None)
        self.state = ""
        self._lanes, self._path = lanes, Path(folder, NAME)
        self._round = 0  # the last one that was applied
        self._written = ""  # of which state there is a file

    def applied(self, round_: int, state: str) -> None:
        """A round has been applied; the digest of the state after it, "" where there is none, as after a test."""
        if state:
            self._round, self.state = round_, state

    @property
    def changed(self) -> bool:
        """Whether it is the residual of another state than the file has."""
        return bool(self.state) and self.state != self._written

    def keep(self) -> str:
        """Write it; an error in one line, or ""."""
        self._settle()
        try:
            kept, limit = self.residual.kept[: self._lanes], self.residual.limit
            write(self._path, kept, self.state, self._round, limit)
        except OSError as error:
            return f"cannot write the residual to {self._path}: {error.strerror}"
        self._written = self.state
        return ""

    def take(self, fd: int, state: str) -> str:
        """Go on with what this host has kept; an error in one line, or ""."""
        self.state = state
        self._settle()
        try:
            self.residual.take(*read(fd, self._lanes, state))
        except JobFailed as error:
            return f"this host's residual is dropped, and rounding errors begin at zero: {error}"
        return ""

    def forget(self, state: str) -> None:
        """Another state has been read, of which nothing is left over here."""
        self._settle()
        self.residual.forget()
        self.state = state


def write(path: Path, values: F32, state: str, round_: int, limit: float = math.inf) -> None:
    """Write the file in the place of `path`, whole or not at all.

    Args:
        values: float32 (lanes,).
        state: digest of the state.
        round_: the last round whose rounding errors are in it.
        limit: an upper bound of the magnitudes; infinity: not known.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    head = {"format": _FORMAT, "version": _VERSION, "state": state, "round": round_}
    known = {"lanes": len(values), "limit": limit if math.isfinite(limit) else None}
    part = path.with_name(f"{path.name}.part")
    try:
        with zipfile.ZipFile(part, "w") as archive:
            archive.writestr(_HEAD, json.dumps(head | known))
            with archive.open(_VALUES, "w", force_zip64=True) as entry:
                npy.write_array(entry, values, allow_pickle=False)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)  # a full disk needs the room
        raise


def read(fd: int, lanes: int, state: str) -> tuple[F32, float]:
    """Read what `write` wrote: float32 (lanes,), all finite, and their limit; the descriptor is closed.

    Raises:
        JobFailed: it is damaged, of another state, or of another size.
    """
    try:
        with os.fdopen(fd, "rb") as file, zipfile.ZipFile(file) as archive:
            head = json.loads(archive.read(_HEAD))
            if (head["format"], head["version"]) != (_FORMAT, _VERSION):
                raise JobFailed(f"its version is {head['version']!r}, not {_VERSION}")
            if head["state"] != state:
                raise JobFailed(f"it is of another state, after round {head['round']} of its run")
            if head["lanes"] != lanes:
                raise JobFailed(f"it has {head['lanes']} numbers, and the model has {lanes}")
            limit = math.inf if head.get("limit") is None else float(head["limit"])
            with archive.open(_VALUES) as entry:
                values = npy.read_array(entry, allow_pickle=False)
    except (OSError, KeyError, TypeError, ValueError, EOFError) as error:
        raise JobFailed(f"it is damaged: {error}") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise JobFailed(f"it is damaged: {error}") from None
    fits = values.shape == (lanes,) and values.dtype == np.float32
    if not fits or not np.isfinite(values).all() or not limit >= 0:
        raise JobFailed("it is damaged: it does not hold what its header says")
    return values, limit
