# SPDX-License-Identifier: Apache-2.0
"""`nicps key new`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nicps import cli
from nicps.auth import NetworkKey
from nicps.cli import key


def test_writes_a_key_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert cli.main(["key", "new", str(path)]) == 0
    said = capsys.readouterr()
    assert len(NetworkKey.read(path).secret) == 32
    assert said.out == ""
    assert said.err.count("\n") == 1 and f"nicps join --key {path}" in said.err
    assert path.read_text().strip() not in said.err


def test_a_relative_name_is_said_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["key", "new", "key"]) == 0
    assert str(tmp_path / "key") in capsys.readouterr().err


def failed(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, str]:
    code = cli.main(["key", "new", str(path)])
    text = capsys.readouterr().err
    assert text.startswith("nicps: error: ") and text.count("\n") == 1
    return code, text


def test_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    path.write_text("precious")
    code, text = failed(capsys, path)
    assert code == 2 and f"{path} is there already" in text
    assert path.read_text() == "precious"


def test_the_folder_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = failed(capsys, tmp_path / "no" / "key")
    assert code == 3 and f"`mkdir -p -m 700 {tmp_path / 'no'}`" in text


def test_the_folder_of_the_default_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nicps" / "key"
    monkeypatch.setattr(key, "DEFAULT_KEY", path)
    assert cli.main(["key", "new"]) == 0
    assert f"wrote {path}: " in capsys.readouterr().err
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(NetworkKey.read(path).secret) == 32
    assert cli.main(["key", "new"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_the_folder_of_the_default_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nicps").touch()
    monkeypatch.setattr(key, "DEFAULT_KEY", tmp_path / "nicps" / "key")
    assert cli.main(["key", "new"]) == 3
    text = capsys.readouterr().err
    assert f"cannot make the folder {tmp_path / 'nicps'}" in text and text.count("\n") == 1


def test_the_folder_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code, text = failed(capsys, tmp_path / "file" / "key")
    assert code == 3 and "Not a directory" in text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_is_there_already(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = failed(capsys, Path("/dev/full"))
    assert code == 2 and "is there already" in text


def test_new_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["key"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("nicps: error: ")
