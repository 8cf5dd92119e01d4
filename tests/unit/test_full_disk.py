# SPDX-License-Identifier: Apache-2.0
"""A host's disk is full: the error names the file or the folder, as a host has several disks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nicps.agent.bundle import InStream, OutStream
from nicps.agent.records import TIMELINE, Records
from nicps.errors import explain

pytestmark = pytest.mark.unit


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def said(error: OSError) -> str:
    return explain("go on with the job here", error)


def told(path: Path) -> str:
    return f"cannot go on with the job here: {path}: No space left on device"


def test_the_time_line(tmp_path: Path) -> None:
    (tmp_path / TIMELINE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as failed:
        Records(tmp_path, "job", "h1", 0.0)
    assert said(failed.value) == told(tmp_path / TIMELINE)


def test_the_run_as_its_files_are_copied_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.pt").write_bytes(b"weights")
    records, kept = Records(tmp_path, "job", "h1", 0.0), tmp_path / "run" / "h1"
    monkeypatch.setattr("shutil.copyfileobj", refuse)
    with pytest.raises(OSError, match="No space left") as failed:
        records.keep(tmp_path / "out", tmp_path, {}, kept)
    records.close()
    assert said(failed.value) == told(kept)


def test_the_files_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"rows")
    sent = OutStream(tmp_path, [{"path": "metrics.jsonl"}])
    data = sent.read(0, 0, 1).reshape(-1)
    sent.close()
    kept = tmp_path / "run" / "h2"
    kept.mkdir(parents=True)
    owner = os.getuid(), os.getgid()
    incoming = InStream(kept, sent.size, len(sent.index), 1, 2, owner)
    monkeypatch.setattr("os.pwrite", refuse)
    with pytest.raises(OSError, match="No space left") as failed:
        incoming.write(data)
    incoming.close()
    assert said(failed.value) == told(kept)
