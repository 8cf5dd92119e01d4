# SPDX-License-Identifier: Apache-2.0
"""What rounding has left over, as a file that a resumed job goes on with."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nicps.errors import JobFailed
from nicps.job.checkpoints import resumed_from
from nicps.session.absolute import AbsoluteQuantiser
from nicps.session.lanes import F32, LaneFormat, Residual
from nicps.session.residual_file import NAME, ResidualFile, read, write

LANES = 3 * 1440 + 7
WRONG = [("../r", "s"), ("", "s"), ("..", "s"), (1, "s"), ("r", None), (None, "s")]


@pytest.fixture
def values() -> F32:
    return np.random.default_rng(1).normal(0, 1e-3, LANES).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path, values: F32) -> Path:
    write(tmp_path / NAME, values, "abc", 12)
    return tmp_path / NAME


def taken(path: Path, state: str = "abc", lanes: int = LANES) -> F32:
    return read(os.open(path, os.O_RDONLY), lanes, state)[0]


def test_it_is_read_as_it_was_written(path: Path, values: F32) -> None:
    assert (taken(path).view(np.uint32) == values.view(np.uint32)).all()
    with np.load(path) as archive:  # a standard format
        assert archive["residual"].dtype == np.float32 and archive["residual"].shape == (LANES,)
    assert [found.name for found in path.parent.iterdir()] == [NAME]


@pytest.mark.parametrize("known", [0.75, math.inf])
def test_a_resumed_job_announces_the_same_exponent(tmp_path: Path, known: float) -> None:
    """It follows from what is known of the residual, which is more than what is in it."""
    format = LaneFormat(LANES, 32)
    before = Residual(format)
    before.kept[3], before.limit = -0.25, known
    write(tmp_path / NAME, before.kept[:LANES], "abc", 12, before.limit)
    after = Residual(format)
    file = os.open(tmp_path / NAME, os.O_RDONLY)
    assert ResidualFile(after, LANES, str(tmp_path)).take(file, "abc") == ""
    vector = np.zeros(LANES, np.float32)
    vector[5] = 0.5
    exponents = [AbsoluteQuantiser(format, each).bound(vector) for each in (before, after)]
    assert exponents[0] == exponents[1]
    assert before.limit == after.limit


@pytest.mark.parametrize("limit", ["-1.0", "NaN", "[]"])
def test_a_limit_that_is_none_is_damage(tmp_path: Path, values: F32, limit: str) -> None:
    write(tmp_path / NAME, values, "abc", 12, 123.0)
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content["residual.json"] = content["residual.json"].replace(b"123.0", limit.encode())
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(JobFailed, match="damaged"):
        taken(tmp_path / NAME)


@pytest.mark.parametrize(
    ("state", "lanes", "why"),
    [
        ("abd", LANES, r"another state, after round 12 of its run"),
        ("abc", LANES + 1, rf"it has {LANES} numbers, and the model has {LANES + 1}"),
    ],
)
def test_it_is_for_one_state_and_one_size(path: Path, state: str, lanes: int, why: str) -> None:
    with pytest.raises(JobFailed, match=why):
        taken(path, state, lanes)


@pytest.mark.parametrize("part", range(16))
def test_a_damaged_file_is_not_used(path: Path, part: int) -> None:
    """Wherever in the file a bit differs, or where it ends early. The names in the archive's index are not read."""
    content = bytearray(path.read_bytes())
    content[len(content) * part // 16 + 60] ^= 4
    path.write_bytes(content)
    with pytest.raises(JobFailed, match=r"damaged|version|another state"):
        taken(path)
    path.write_bytes(path.read_bytes()[: len(content) * part // 16])
    with pytest.raises(JobFailed, match="damaged"):
        taken(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_no_residual_can_be_is_not_used(path: Path, values: F32, value: float) -> None:
    values[17] = value
    write(path, values, "abc", 12)
    with pytest.raises(JobFailed, match="damaged"):
        taken(path)


def test_a_full_disk_leaves_the_former_one(path: Path, values: F32) -> None:
    part = path.with_name(f"{NAME}.part")
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write(path, values * 2, "abd", 13)
    assert not part.exists()
    assert (taken(path) == values).all()


def test_it_is_written_once_for_each_state(tmp_path: Path, values: F32) -> None:
    residual = Residual(LaneFormat(LANES, 8))
    file = ResidualFile(residual, LANES, str(tmp_path))
    assert not file.changed  # no state is known
    file.applied(12, "")
    assert not file.changed
    residual.kept[:LANES] = values
    file.applied(12, "abc")
    file.applied(13, "")  # a test round
    assert file.changed and file.keep() == "" and not file.changed
    with pytest.raises(JobFailed, match="after round 12 of its run"):
        taken(tmp_path / NAME, "abd")
    residual.kept[:] = 0
    file.applied(13, "abd")
    residual.keep()  # of a round after that
    assert file.changed and file.keep() == ""
    assert not taken(tmp_path / NAME, "abd").any()
    (tmp_path / NAME).unlink()
    tmp_path.joinpath(f"{NAME}.part").symlink_to("/dev/full")
    file.applied(14, "abe")
    for _ in range(2):  # it is tried again
        assert file.changed and "No space" in file.keep()
        tmp_path.joinpath(f"{NAME}.part").symlink_to("/dev/full")


def test_a_session_goes_on_with_it(path: Path, values: F32) -> None:
    residual = Residual(LaneFormat(LANES, 16))
    file = ResidualFile(residual, LANES, str(path.parent))
    assert file.take(os.open(path, os.O_RDONLY), "abc") == ""
    assert (residual.kept[:LANES] == values).all() and not residual.kept[LANES:].any()
    assert residual.largest() == np.abs(values).max()


def test_a_session_goes_on_without_it(path: Path) -> None:
    residual = Residual(LaneFormat(LANES, 16))
    file = ResidualFile(residual, LANES, str(path.parent))
    assert "dropped" in file.take(os.open(path, os.O_RDONLY), "abd")
    assert not residual.kept.any() and not residual.largest()
    assert file.state == "abd"


@pytest.mark.parametrize("found", [None, "r", {}, *({"run": r, "state": s} for r, s in WRONG)])
def test_a_run_that_no_job_goes_on_from(found: object) -> None:
    """What was handed out names a folder of this host's: no other than a run's."""
    assert resumed_from({"resume": found}) == ("", "")


def test_the_run_that_a_job_goes_on_from() -> None:
    about = {"round": 5, "unit": None, "run": "digits-1", "state": "abc"}
    assert resumed_from({"resume": about}) == ("digits-1", "abc")
    assert resumed_from({}) == ("", "")
