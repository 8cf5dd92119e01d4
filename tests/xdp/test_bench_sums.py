# SPDX-License-Identifier: Apache-2.0
"""`nicps bench sums` finds what is wrong with a run's sums, and nothing else. The runs are the reference's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.bench import sums
from nicps.cli import main
from nicps.errors import JobFailed
from tests import reference

LANES, UNIT = 900, -20  # two fragments of i16
#: By round, the life of either member; what it has saved ends with its contribution where there is a dagger.
LIVES = [("a", "b"), ("a", "b"), ("a", "b+"), ("a", "c"), ("d", "c"), ("d", "c")]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Folders of two members. One is killed in round 3, and another program goes on; one takes the state anew.

    The parameter: of so many a switch adds.
    """
    rng, members = np.random.default_rng(7), getattr(request, "param", 0)
    folders = [tmp_path / "h1", tmp_path / "h2"]
    lives: dict[str, reference.Member] = {}
    for round_, names in enumerate(LIVES, 1):
        total = np.zeros(LANES)
        saved: list[dict[str, Any]] = []
        for number, name in enumerate(names, 1):
            life = name.removesuffix("+")
            member = lives.setdefault(life, reference.Member(16))
            vector = rng.standard_normal(LANES).astype(np.float32) / 2**6
            whole, member.residual = member.quantise(vector, UNIT, members)
            total += whole * 2.0**UNIT
            saved.append({"number": number, "life": life, "vector": vector, "samples": 5})
        for folder, name, values in zip(folders, names, saved, strict=True):
            if not name.endswith("+"):
                values |= {"counted": [[1, 5], [2, 5]], "n": 10, "unit": UNIT, "members": members}
                values["total"] = total.astype(np.float32)
            save(folder, round_, values)
    save(folders[0], len(LIVES) + 1, {"number": 1, "life": "d", "vector": vector, "samples": 5})
    return folders


def save(folder: Path, round_: int, values: dict[str, Any]) -> None:
    path = folder / "gradients" / f"{round_}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **values)


def change(folder: Path, round_: int, work: Callable[[dict[str, Any]], object]) -> None:
    with np.load(folder / "gradients" / f"{round_}.npz") as saved:
        values = dict(saved)
    work(values)
    save(folder, round_, values)


def flip(values: dict[str, Any], name: str) -> None:
    values[name].view(np.uint32)[LANES // 2] ^= 1 << 20


def bench(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and the one line."""
    code = main(["bench", "sums", *map(str, folders), "--lane", "i16"])
    out, err = capsys.readouterr()
    assert (out + err).count("\n") == 1
    return code, out + err


@pytest.mark.parametrize("run", [0, 2], ids=["hosts add", "a switch adds"], indirect=True)
def test_programs_that_end_and_begin(run: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A correct run, though its residuals were dropped twice, and its last round never committed."""
    code, said = bench(run, capsys)
    assert code == 0, said
    assert said.startswith(f"{len(LIVES)} rounds, {2 * len(LIVES)} gradients: ")


@pytest.mark.parametrize("what", ["total", "vector"])
def test_a_bit_is_wrong(run: list[Path], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(run[1], 4, lambda values: flip(values, what))
    wrong = 2 if what == "total" else 1
    code, said = bench(run, capsys)
    assert (code, said) == (
        JobFailed.exit_code,
        f"nicps: error: round 4: member {wrong} has trained on another sum\n",
    )


def test_a_life_that_goes_on_is_heeded(run: list[Path]) -> None:
    change(run[1], 2, lambda values: values.update(life="another"))
    with pytest.raises(JobFailed, match="round 2: member 1 has trained on another sum"):
        sums.compare(sums.read(run), 16)


def test_sums_of_stripes_are_others(run: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    for folder in run:
        change(folder, 3, lambda values: values.update(exchange="stripes"))
    code, said = bench(run, capsys)
    assert code == 2
    assert said.startswith("nicps: error: round 3: the run's exchange is stripes, ")


def test_what_is_missing(run: list[Path]) -> None:
    (run[1] / "gradients" / "3.npz").unlink()
    with pytest.raises(JobFailed, match="round 3: not all the gradients that were counted"):
        sums.compare(sums.read(run), 16)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read: No data left in file"),
        (lambda path: path.write_bytes(b"PK\3\4"), "cannot be read: File is not a zip file"),
        (lambda path: path.write_text("text"), "cannot be read: "),
        (lambda path: np.save(path.open("wb"), np.ones(3)), "cannot be read: "),
        (lambda path: path.mkdir(), "cannot be read: "),
        (lambda path: np.savez(path, number=1), "lacks vector: it is no gradient"),
        (
            lambda path: np.savez(path, number=1, vector=[1.0], total=[1.0]),
            "lacks counted, members",
        ),
    ],
    ids=["empty", "cut off", "text", "an array", "a folder", "no vector", "no list"],
)
def test_a_file_that_is_no_gradient(
    tmp_path: Path, make: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gradients" / "1.npz"
    path.parent.mkdir()
    make(path)
    code, text = bench([tmp_path], capsys)
    assert code == 2 and text.startswith(f"nicps: error: {path} ") and said in text
    path.rename(path.with_name("one.npz"))
    code, text = bench([tmp_path], capsys)
    assert code == 2 and text.endswith("one.npz is not named by a round\n")


def test_nothing_stays_open(run: list[Path]) -> None:
    """After an error neither."""
    change(run[0], 1, lambda values: flip(values, "total"))
    opened = []
    for _ in range(2):
        with pytest.raises(JobFailed):
            sums.compare(sums.read(run), 16)
        opened.append(len(os.listdir("/proc/self/fd")))
    assert len(set(opened)) == 1
