# SPDX-License-Identifier: Apache-2.0
"""Files in a folder that belongs to the training user: whatever it puts there, the agent goes on."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from nicps.agent.folders import remove
from nicps.agent.jobfiles import JobFiles
from nicps.agent.lives import keep_life
from nicps.agent.preparation import read_preparation
from nicps.agent.prepared import read_prepared
from nicps.agent.process import User
from nicps.agent.records import copy_tree
from nicps.errors import JobFailed
from nicps.job.actions import CloseJob, OpenJob, Receive
from nicps.job.slow_work import StoreWindow
from tests.parts import Host
from tests.rooms import Rooms

GOOD = {"job": "tiny", "files": [], "settings": {"batch": 8, "lane": "i8"}}
DEEP = 1500


def limited(work: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What `work` comes to, unless it waits for ever."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(work())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert came, "it still waits"
    return came[0]


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    secret = path.with_name("secret")
    secret.write_bytes(orjson.dumps(GOOD))
    path.symlink_to(secret)


def an_endless_one(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's address is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def a_large_one(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PUTS = [a_fifo, a_link, an_endless_one, a_folder, a_socket, a_large_one]


@pytest.mark.parametrize("puts", PUTS)
def test_what_is_no_file_is_not_read(tmp_path: Path, puts: Callable[[Path], None]) -> None:
    puts(tmp_path / "prepared.json")
    failed = limited(lambda: read_prepared(tmp_path))
    assert isinstance(failed, JobFailed)
    what = "More than 16777216 bytes" if puts is a_large_one else "Not a regular file"
    assert str(failed) == f"there is no readable prepared.json: {what}"


@pytest.mark.parametrize(("text", "said"), [("{", "readable"), ("[]", "no JSON object")])
def test_what_is_no_object_is_not_taken(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prepared.json").write_text(text)
    with pytest.raises(JobFailed, match=said):
        read_prepared(tmp_path)


@pytest.mark.parametrize("puts", PUTS)
def test_a_job_keeps_what_was_handed_out(tmp_path: Path, puts: Callable[[Path], None]) -> None:
    """It is read once the last window is stored, before the training program starts, and never again."""
    (tmp_path / "agent").mkdir()
    rooms, part = Rooms(tmp_path / "agent"), Host()
    rooms.executor.open_job(OpenJob("job"))
    job = rooms.executor.job
    assert job is not None
    rooms.executor.receive(Receive(9, 9, 1, 2, keep=False))
    assert job.incoming is not None
    job.incoming.write(np.frombuffer(b"[]       ", np.uint8).copy())
    path = job.folder / "prepared.json"
    path.write_bytes(orjson.dumps(GOOD))
    outcomes, errors = rooms.begin(StoreWindow(1, 0, 1, 0, True, 0, True))
    rooms.until(lambda: outcomes or errors)
    assert not errors and outcomes[0].prepared == GOOD
    path.unlink()
    puts(path)
    part.has_job(outcomes[0].prepared)
    assert limited(lambda: part.part.job.settings) == GOOD["settings"]
    assert limited(lambda: part.part.job.prepared) == GOOD
    rooms.executor.close_job(CloseJob())
    rooms.until(lambda: not list((tmp_path / "agent" / "work").iterdir()), "its files are gone")
    rooms.close()


def a_long_name(path: Path) -> None:
    path.write_bytes(orjson.dumps(GOOD | {"job": "x" * 300}))


@pytest.mark.parametrize("puts", [*PUTS, a_long_name])
def test_a_preparation_that_leaves_something_else(
    tmp_path: Path, puts: Callable[[Path], None]
) -> None:
    """`nicps submit` is told so, in one line."""
    puts(tmp_path / "prepared.json")
    error = limited(lambda: read_preparation(tmp_path))
    assert isinstance(error, JobFailed)
    why = "the job's name has 300 bytes" if puts is a_long_name else "there is no readable prepared"
    assert str(error).startswith(f"the job's preparation is not usable: {why}")


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder with files, links and folders in one another; `rm` removes it however the test ends."""
    base = tmp_path / "base"
    (base / "work").mkdir(parents=True)
    folder = os.open(base / "work", os.O_RDONLY)
    for _ in range(DEEP):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
        os.symlink("/", "link", dir_fd=folder)
        os.mkdir("a", dir_fd=folder)
        inner = os.open("a", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    yield base
    subprocess.run(["rm", "-rf", tmp_path / "base", tmp_path / "copy"], check=True)


def test_folders_that_are_very_deep_are_removed(deep: Path) -> None:
    """An agent begins with that, too."""
    remove(deep)
    assert not deep.exists()
    remove(deep)  # nothing is there


def test_what_lies_very_deep_is_not_kept(deep: Path) -> None:
    copy = deep.with_name("copy")
    copy_tree(deep, copy)
    assert (copy / "work" / "a" / "file").exists()


def test_what_is_nested_too_deeply_for_a_message_is_no_preparation(tmp_path: Path) -> None:
    """It can be read, but an event that holds it could not be sent."""
    nested = b"[" * 600 + b"]" * 600
    (tmp_path / "prepared.json").write_bytes(
        b'{"files": [], "settings": {}, "data": ' + nested + b"}"
    )
    with pytest.raises(JobFailed, match="no readable"):
        read_prepared(tmp_path)


def test_a_disk_that_stays_full_keeps_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lines of the time line cannot be written; all else is removed, which makes room."""
    work = tmp_path / "work"
    work.mkdir()
    files = JobFiles(
        "job",
        "h1",
        work,
        tmp_path / "runs" / "job",
        User.named(pwd.getpwuid(os.getuid()).pw_name),
        0.0,
    )

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.records, "close", full)
    files.clear({}, keep_records=True)
    assert not list(work.iterdir())


@pytest.mark.parametrize("name", ["earlier-x.timeline.jsonl", "earlier-.timeline.jsonl"])
def test_a_name_without_a_number_is_no_life(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "base" / "work" / "out").mkdir(parents=True)
    (tmp_path / "base" / "timeline.jsonl").touch()
    keep_life(tmp_path / "base", tmp_path)
    assert (tmp_path / "earlier-1.timeline.jsonl").exists()
