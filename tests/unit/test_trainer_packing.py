# SPDX-License-Identifier: Apache-2.0
"""The job as one file, and its records as shards: what is packed, unpacked and dealt out, and what is refused."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.errors import UsageProblem
from tests.unit.test_trainer_prepare import make
from trainer import JobError
from trainer.__main__ import main
from trainer.prepare import MAX_JOB_BYTES, pack, unpack
from trainer.records import Order, Records, shard, write


def test_pack_refuses_links_and_too_much(tmp_path: Path) -> None:
    job = make(tmp_path / "job")
    big = job / "big"
    big.touch()
    os.truncate(big, MAX_JOB_BYTES + 1)
    with pytest.raises(JobError, match="more than 64 MiB: keep data elsewhere"):
        pack(job, tmp_path / "job.tar")
    big.unlink()
    (job / "link").symlink_to("/etc/passwd")
    with pytest.raises(JobError, match="link is not a plain file"):
        pack(job, tmp_path / "job.tar")
    wrong_use = ["prepare", "--job", str(job), "--out", str(tmp_path)]
    assert main(wrong_use) == UsageProblem.exit_code


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../x", tarfile.REGTYPE), ("/tmp/x", tarfile.REGTYPE), ("x", tarfile.SYMTYPE)],
)
def test_unpack_stays_in_its_folder(tmp_path: Path, name: str, kind: Any) -> None:
    with tarfile.open(tmp_path / "job.tar", "w") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc/passwd"
        archive.addfile(entry, io.BytesIO())
    with pytest.raises(JobError, match="is not a plain file inside the job"):
        unpack(tmp_path / "job.tar", tmp_path / "in")


def test_unpack_refuses_garbage(tmp_path: Path) -> None:
    (tmp_path / "job.tar").write_bytes(b"garbage" * 200)
    with pytest.raises(JobError, match="cannot unpack"):
        unpack(tmp_path / "job.tar", tmp_path / "in")


def test_a_shard_that_is_cut_off(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((4, 3), np.uint16)}
    fields = [{"name": "x", "dtype": "uint16", "shape": [3]}]
    assert write(tmp_path / "x.bin", arrays, np.arange(4)) == 6
    os.truncate(tmp_path / "x.bin", 23)
    with pytest.raises(JobError, match="is cut off: 23 bytes, 6 a record"):
        Records(tmp_path / "x.bin", fields)
    with pytest.raises(JobError, match="no data in"):
        Records(tmp_path / "y.bin", fields)
    os.truncate(tmp_path / "x.bin", 0)
    assert len(Records(tmp_path / "x.bin", fields)) == 0


def test_the_order_takes_every_sample_once_an_epoch() -> None:
    order = Order(7, seed=3, number=2)
    taken = np.concatenate([order.take(first, 5) for first in range(0, 35, 5)])
    for epoch in range(5):
        assert sorted(taken[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert np.array_equal(order.take(13, 16), taken[13:29])  # any position, any time
    assert not np.array_equal(taken, Order(7, seed=3, number=1).take(0, 35))
    assert len(order.take(0, 0)) == 0


def test_shards_cover_everything() -> None:
    parts = [shard(10, number, 4) for number in range(1, 5)]
    assert parts == [(0, 2), (2, 5), (5, 7), (7, 10)]
