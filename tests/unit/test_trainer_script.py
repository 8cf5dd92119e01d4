# SPDX-License-Identifier: Apache-2.0
"""The scripts of `nicps run`: what is packed, and what is said of a folder that cannot be."""

from __future__ import annotations

import os
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
