# SPDX-License-Identifier: Apache-2.0
"""IDX files, the form in which MNIST is published: plain or .gz."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.errors import JobError

TYPES = {
    0x08: ">u1",
    0x09: ">i1",
    0x0B: ">i2",
    0x0C: ">i4",
    0x0D: ">f4",
    0x0E: ">f8",
}


def find(folder: str | None, name: str) -> Path | None:
    """`name` or `name.gz` in `folder` or its mnist/; None if it is in neither."""
    if folder is None:
        return None
    for place in (Path(folder), Path(folder) / "mnist"):
        for candidate in (place / name, place / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    return None


def read(folder: str | None, name: str) -> npt.NDArray[Any]:
    """The array in `folder`'s IDX file `name` (or .gz, or in mnist/).

    Raises:
        JobError: it is not there, no IDX file, or cut off.
    """
    if folder is None:
        raise JobError(
            f"no data: name the folder that holds {name} with --data or in the environment "
            f"variable NICPS_DATA"
        )
    if not os.path.isdir(folder):
        raise JobError(f"no such data folder: {folder}")
    path = find(folder, name)
    if path is None:
        raise JobError(f"no {name} or {name}.gz in {folder} or {os.path.join(folder, 'mnist')}")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except EOFError:
        raise JobError(f"{path} is cut off: its gzip data ends too early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise JobError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}") from None
    return parse(content, str(path))


def parse(content: bytes, path: str) -> npt.NDArray[Any]:
    """An IDX file's array in the machine's byte order.

    Raises:
        JobError: it is no IDX file, or shorter or longer than its header says.
    """
    if len(content) < 4:
        raise JobError(f"{path} is cut off: {len(content)} bytes")
    if content[:2] != b"\0\0" or content[2] not in TYPES:
        raise JobError(f"{path} is no IDX file: it begins with {content[:4].hex()}")
    kind = np.dtype(TYPES[content[2]])
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise JobError(f"{path} is cut off: {len(content)} bytes, its header has {header}")
    shape = tuple(int(size) for size in np.frombuffer(content[4:header], ">u4"))
    due = header + math.prod(shape) * kind.itemsize
    if len(content) != due:
        state = "cut off" if len(content) < due else "too long"
        raise JobError(f"{path} is {state}: {len(content)} bytes, its header promises {due}")
    values = np.frombuffer(content, kind, offset=header).reshape(shape)
    return values.astype(kind.newbyteorder("="))
