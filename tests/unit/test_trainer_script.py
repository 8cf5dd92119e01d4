# SPDX-License-Identifier: Apache-2.0
"""The scripts of `nicps run`: what is packed, and what is said of a folder that cannot be."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.errors import FolderError
from trainer.prepare import MAX_JOB_BYTES
from trainer.script import prepare

SETTINGS = {"script": {"path": "it.py", "arguments": []}}


def test_advice_is_for_scripts(tmp_path: Path) -> None:
    folder, out = tmp_path / "script", tmp_path / "out"
    for made in (folder, out):
        made.mkdir()
    (folder / "it.py").write_text("")
    big = folder / "big"
    big.touch()
    os.truncate(big, MAX_JOB_BYTES + 1)
    with pytest.raises(FolderError) as error:
        prepare(folder, out, SETTINGS)
    assert str(error.value) == (
        f"the script's folder {folder} holds more than 64 MiB: keep data elsewhere, and name it with --data PATH,"
        " which is not sent"
    )
    big.unlink()
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(FolderError, match="link is not a plain file: a script's folder is sent"):
        prepare(folder, out, SETTINGS)


def test_a_neighbour_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole folder travels, which surprises who has a script beside other things: exit code 2, and what to do."""
    folder, out = tmp_path / "script", tmp_path / "out"
    for made in (folder / "private", out):
        made.mkdir(parents=True)
    (folder / "it.py").write_text("")

    def walk(
        top: Path, onerror: Callable[[OSError], None]
    ) -> Iterator[tuple[str, list[str], list[str]]]:
        yield str(top), ["private"], ["it.py"]
        onerror(PermissionError(13, "Permission denied", str(folder / "private")))

    monkeypatch.setattr("trainer.prepare.os.walk", walk)
    with pytest.raises(FolderError) as error:
        prepare(folder, out, SETTINGS)
    assert error.value.exit_code == 2
    assert str(error.value) == (
        f"the script's whole folder {folder} goes to every host, and the training user cannot read {folder}/private: "
        "Permission denied; put the script into a folder of its own"
    )


def test_a_disk_that_is_full_is_no_fault_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "it.py").write_text("")
    with pytest.raises(OSError, match=re.escape("out/job.tar")):
        prepare(folder, tmp_path / "out", SETTINGS)
