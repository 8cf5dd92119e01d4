# SPDX-License-Identifier: Apache-2.0
"""IDX files, MNIST's form: reading them, and one clear line for each that cannot be read."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from trainer import JobError, idx


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return header + array.tobytes()


IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("folder", ["", "mnist"])
@pytest.mark.parametrize("packed", [False, True])
def test_reads_plain_and_gz_in_the_folder_or_its_mnist(
    tmp_path: Path, folder: str, packed: bool
) -> None:
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    content = idx_bytes(IMAGES)
    if packed:
        (place / "images.gz").write_bytes(gzip.compress(content))
    else:
        (place / "images").write_bytes(content)
    assert np.array_equal(idx.read(str(tmp_path), "images"), IMAGES)


def test_other_types_are_big_endian(tmp_path: Path) -> None:
    values = np.array([1, -2, 300], dtype=">i4")
    (tmp_path / "x").write_bytes(idx_bytes(values, 0x0C))
    read = idx.read(str(tmp_path), "x")
    assert read.tolist() == [1, -2, 300]
    assert read.dtype == np.int32


CONTENT = idx_bytes(IMAGES)
DAMAGED = {
    "empty": (b"", "cut off: 0 bytes"),
    "header cut off": (CONTENT[:10], "cut off: 10 bytes, its header has 16"),
    "values cut off": (CONTENT[:-1], "cut off: 39 bytes, its header promises 40"),
    "too long": (CONTENT + b"x", "too long: 41 bytes"),
    "wrong magic": (b"\x89PNG" + CONTENT, "no IDX file: it begins with 89504e47"),
    "unknown type": (b"\0\0\x0a\x01" + CONTENT, "no IDX file: it begins with 00000a01"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_refuses(tmp_path: Path, case: str) -> None:
    content, message = DAMAGED[case]
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(JobError, match=message):
        idx.read(str(tmp_path), "x")


def test_refuses_damaged_gz(tmp_path: Path) -> None:
    packed = gzip.compress(CONTENT)
    (tmp_path / "x.gz").write_bytes(packed[:-9])
    with pytest.raises(JobError, match=r"x\.gz is cut off"):
        idx.read(str(tmp_path), "x")
    (tmp_path / "x.gz").write_bytes(packed[:12] + b"\xff" * 9 + packed[21:])
    with pytest.raises(JobError, match=r"x\.gz is damaged"):
        idx.read(str(tmp_path), "x")
    (tmp_path / "x.gz").write_bytes(CONTENT)
    with pytest.raises(JobError, match=r"x\.gz is damaged"):
        idx.read(str(tmp_path), "x")


def test_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"no x or x.gz in {tmp_path} or {tmp_path}/mnist"):
        idx.read(str(tmp_path), "x")
    with pytest.raises(JobError, match="no such data folder: /nowhere"):
        idx.read("/nowhere", "x")
    with pytest.raises(JobError, match=r"--data .* NICPS_DATA"):
        idx.read(None, "x")
