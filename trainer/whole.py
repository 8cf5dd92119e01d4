# SPDX-License-Identifier: Apache-2.0
"""A file that is there whole or not at all: state files and checkpoints, which a run goes on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from trainer.errors import JobError


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file in the place of `path`, whole or not at all, whatever ends the process or the machine meanwhile.

    Raises:
        JobError: it cannot be written; what was there is there still.
    """
    part = path.with_name(path.name + ".part")
    try:
        try:
            with part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)  # a full disk needs the room
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # or a power cut could take the new name back
        finally:
            os.close(folder)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from None
