# SPDX-License-Identifier: Apache-2.0
"""`nicps dbn`: from its options to its result, and what it says of bad input. Spark is in test_dbn_spark.py."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps import extras
from tests.unit.test_trainer_state import no_file_larger_than
from trainer.dbn import checkpoint, cli, cluster, model, pictures, shards
from trainer.dbn.settings import Settings
from trainer.errors import JobError

#: A run of seconds: three workers, two small layers.
TINY = (
    *("--workers", "3", "--layers", "8,6", "--epochs", "1", "--finetune", "2"),
    *("--batch", "5", "--averages", "2"),
)


def write_idx(path: Path, values: np.ndarray) -> None:
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(head + values.tobytes())


def write_data(folder: Path, train: int = 40, size: tuple[int, int] = (6, 5)) -> Path:
    random = np.random.default_rng(1)
    for part, count in (("train", train), ("t10k", 30)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)
        pictures = random.integers(0, 256, (count, *size), np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte", pictures)
    return folder


@pytest.fixture(autouse=True)
def whole_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch without its compiler is for processes of their own: here other tests need all of it."""
    monkeypatch.setattr(cli.startup, "import_torch", lambda: None)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NICPS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist").mkdir()
    return write_data(tmp_path / "mnist").parent


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error, without what was said before."""
    printed = capsys.readouterr()
    assert printed.out == ""
    *before, last = printed.err.splitlines()
    assert last.startswith("nicps: error: ") and not any(
        line.startswith("nicps: error") for line in before
    )
    return last.removeprefix("nicps: error: ")


def test_a_run_from_the_command(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nicps", "dbn", "--data", str(data), *TINY, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["master"] == "local" and result["reduce"] == "local"
    assert (result["workers"], result["epochs"], result["finetune"]) == (3, 1, 2)
    assert (result["test_error"] * 30) % 1 == pytest.approx(0, abs=1e-9)
    assert 0 <= result["test_error"] <= 1 and result["seconds"] > 0
    report = Path(result["report"])
    page = report.read_text()
    for title in ("Filters", "Reconstructions", "Layer 2", "test error", "Confusion", "Worst"):
        assert title in page
    assert page.count("data:image/png;base64,") >= 3
    assert "background:rgb(217 72 56 / 100%)" in page, "the most frequent mistake"
    folder = report.parent
    kept = json.loads((folder / "result.json").read_text())
    assert len(kept["history"]) == 4 and kept["weights_sha256"] == result["weights_sha256"]
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1 and {"model.safetensors", "checkpoint.npz"} <= set(os.listdir(folder))
    assert "master_momentum=0.5<" in page and "head_epochs=0<" in page and "max_norm=none<" in page
    said = done.stderr.splitlines()
    assert [line.split("  ")[0] for line in said[1:]] == [
        *("nicps: layer 1/2", "nicps: layer 2/2", "nicps: fine-tuning", "nicps: fine-tuning")
    ]
    assert all(line.endswith(" left") for line in said[1:])

    # The run has ended: going on with it trains nothing, and the result is the same.
    words = ("--resume", str(folder), "--data", str(data), "--json")
    again = subprocess.run(
        [sys.executable, "-m", "trainer.dbn", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(again.stdout)["weights_sha256"] == result["weights_sha256"]
    assert again.stderr == f"nicps: {folder.name} is done already: no epoch is left to train\n"


def test_samples_that_are_held_out(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They judge each epoch, in the place of the test; no weight depends on them."""
    arguments = ["--data", str(data), *TINY, "--held-out", "10", "--visible", "gaussian", "--json"]
    path = data / "mnist" / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    found = []
    for content in (whole, whole[:-300] + bytes(300)):  # ten pictures of 6 x 5
        path.write_bytes(content)
        assert cli.main(arguments) == 0
        printed = capsys.readouterr()
        found.append(json.loads(printed.out))
        assert "test error" not in printed.err and "validation error" in printed.err
    first, second = found
    assert first["weights_sha256"] == second["weights_sha256"]
    assert (first["validation_error"] * 10) % 1 == pytest.approx(0, abs=1e-9)
    folder = Path(first["report"]).parent
    rows = json.loads((folder / "result.json").read_text())["history"]
    assert rows[-1]["validation_error"] == first["validation_error"]
    assert not any("test_error" in row for row in rows)
    assert "Fine-tuning: validation error" in Path(first["report"]).read_text()


def test_the_table_for_people(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--data", str(data), *TINY, "--finetune", "0", "--epochs", "0"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["master"].strip() == "local" and "%" in rows["test"]
    page = Path(rows["report"].strip()).read_text()
    assert "Reconstructions" not in page and "After" not in page, "nothing was trained"


def test_pictures_are_png_files() -> None:
    """Of two pictures beside one another, by the chunks of the file."""
    values = np.array([[-1.0, 0.0], [1.0, 9.0]], np.float32)
    picture = pictures.grey(values, -1.0, 1.0)
    assert picture.tolist() == [[0, 128], [255, 255]]
    content = pictures.png(pictures.sheet([picture, picture], 2))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    found, at = {}, 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        assert content[at + 8 + size : at + 12 + size] == struct.pack(">I", zlib.crc32(kind + body))
        found[kind], at = body, at + 12 + size
    assert list(found) == [b"IHDR", b"IDAT", b"IEND"]
    assert found[b"IHDR"] == struct.pack(">IIBBBBB", 5, 2, 8, 0, 0, 0, 0)
    lines = zlib.decompress(found[b"IDAT"])
    assert list(lines) == [0, 0, 128, 96, 0, 128, 0, 255, 255, 96, 255, 255]


def test_help_of_the_command_is_the_application_s() -> None:
    command = [sys.executable, "-m", "nicps", "dbn", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--pretrain-decay" in done.stdout and "spark://HOST:PORT" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--workers", "0"], 2, "--workers must be 1 to 10000, not 0"),
        (["--layers", "5,0"], 2, "--layers must be numbers of 1 or more, not 5,0"),
        (["--layers", "5,x"], 2, "numbers with commas between them, not '5,x'"),
        (["--dropout", "1"], 2, "--dropout must be from 0 to below 1, not 1.0"),
        (["--lr", "nan"], 2, "--lr must be 0 or more, not nan"),
        (["--pretrain-lr", "1e300"], 2, "--pretrain-lr must be at most 1e+30, not 1e+300"),
        (["--weight-decay", "1e9"], 2, "--weight-decay must be at most 1e+06, not 1000000000.0"),
        (["--max-norm", "1e39"], 2, "--max-norm must be at most 1e+30, not 1e+39"),
        (["--batch", "1" + "0" * 30], 2, "--batch must be at most 1000000, not 1"),
        (
            ["--layers", "5,1000001"],
            2,
            "--layers must be numbers of at most 1000000, not 5,1000001",
        ),
        (["--layers", "1000000,1000000,1000000"], 5, "there is too little memory: take smaller"),
        (["--workers", "30"], 2, "40 samples are too few for --workers 30 with --averages 5"),
        (["--samples", "41"], 2, "--samples 41: there are 40"),
        (["--held-out", "40"], 2, "--held-out 40: there are 40"),
        (["--held-out", "-1"], 2, "--held-out must be 0 or more, not -1"),
        (["--held-out", "30"], 2, "10 samples are too few for --workers 3 with --averages 5"),
        (["--no-such"], 2, "unrecognized arguments: --no-such"),
        (["--epoch", "3"], 2, "unrecognized arguments: --epoch: did you mean --epochs?"),
        (["--data", "elsewhere"], 5, "no such data folder: elsewhere"),
        (["--data", "empty"], 5, "no train-images-idx3-ubyte"),
        (["--resume", "elsewhere"], 2, "elsewhere has no checkpoint.npz"),
        (["--reduce", "nicps"], 2, "--reduce nicps needs Spark: name its --master"),
        (["--master", "mesos://h:1"], 2, "--master must be local (without Spark), local[N]"),
        (["--master", "spark://h"], 2, "--master must be local (without Spark), local[N]"),
        (["--master", "local[0]"], 2, "--master must be local (without Spark), local[N]"),
        (["--master", "yarn"], 3, "HADOOP_CONF_DIR or YARN_CONF_DIR"),
        (["--master", "spark://no-such-host.invalid:7077"], 4, "no-such-host.invalid:7077"),
        (["--master", "spark://.no-name:7077"], 4, "no Spark master answers at .no-name:7077 ("),
        ([*TINY, "--epochs", "0", "--lr", "1e30"], 5, "fine-tuning, epoch 1: training diverges"),
    ],
)
def test_bad_input(
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    (data / "empty").mkdir()
    try:
        ended = cli.main(["--data", str(data), "--workers", "3", "--epochs", "0", *arguments])
    except SystemExit as stop:
        ended = stop.code
    assert ended == code
    assert said in one_line(capsys)
    assert not (data / "runs").exists() or not list((data / "runs").iterdir())


def test_no_data_is_named(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 5
    assert "--data" in one_line(capsys)


def test_a_master_that_is_not_there(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # a port that nobody listens at
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main(["--data", str(data), *TINY, "--master", f"spark://{place}"]) == 4
    assert f"no Spark master answers at {place} (" in one_line(capsys)


def test_no_pyspark(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda _: None)
    assert cli.main(["--data", str(data), *TINY, "--master", "local[2]"]) == 3
    assert one_line(capsys).endswith(extras.install_command("spark"))


def test_no_java_or_an_old_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "require_extra", lambda _: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["--data", str(data), *TINY, "--master", "local[2]"]
    assert cli.main(arguments) == 3
    assert "Spark needs java (Debian package openjdk-17-jre-headless)" in one_line(capsys)

    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert cli.main(arguments) == 3
    assert f"cannot start Java: {java}: No such file" in one_line(capsys)

    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    assert cli.main(arguments) == 3
    assert f"Spark needs Java 17 or newer, and the version of {java} is 11" in one_line(capsys)


def test_a_run_keeps_its_settings_and_its_data(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--data", str(data), *TINY]) == 0
    (folder,) = (data / "runs").iterdir()
    capsys.readouterr()
    resume = ["--resume", str(folder), "--data", str(data)]
    assert cli.main([*resume, "--workers", "4"]) == 2
    assert "was begun with 3; a run keeps its settings" in one_line(capsys)
    path = data / "mnist" / "train-images-idx3-ubyte"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert cli.main(resume) == 2
    assert "are not those that" in one_line(capsys)


def test_a_folder_that_cannot_be_written(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--data", str(data), *TINY, "--runs", "/proc/runs"]) == 5
    assert "cannot make /proc/runs" in one_line(capsys)


def test_a_disk_that_becomes_full(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is what the disk has; the run goes on from there, without being told where the data are."""
    arguments = ["--data", str(data), *TINY]
    whole = run_to_its_end(capsys, *arguments)
    saves = []
    save = checkpoint.save

    def fail_in_the_third(state: checkpoint.State, folder: Path) -> None:
        saves.append(state.epoch)
        with no_file_larger_than(1000) if len(saves) == 3 else nullcontext():
            save(state, folder)

    monkeypatch.setattr(checkpoint, "save", fail_in_the_third)
    assert cli.main([*arguments, "--runs", "full"]) == 5
    *_, kept, error = capsys.readouterr().err.splitlines()
    (folder,) = (data / "full").iterdir()
    assert (
        kept
        == f"nicps: 2 epochs are kept: `nicps dbn --resume full/{folder.name}` goes on after them"
    )
    assert error.endswith("checkpoint.npz: File too large")
    assert os.listdir(folder) == ["checkpoint.npz"]
    assert (
        run_to_its_end(capsys, "--resume", str(folder))["weights_sha256"] == whole["weights_sha256"]
    )


def test_a_full_disk_from_the_beginning(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with no_file_larger_than(1000):
        assert cli.main(["--data", str(data), *TINY]) == 5
    assert "checkpoint.npz: File too large" in one_line(capsys)
    assert not list((data / "runs").iterdir())


def run_to_its_end(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_model_is_used_as_it_was_trained(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file says what becomes of a pixel."""
    arguments = ["--data", str(data), *TINY, "--visible", "gaussian", "--pretrain-lr", "0.01"]
    result = run_to_its_end(capsys, *arguments)
    test = shards.read(str(data), Settings(workers=3, averages=2)).test
    trained = model.read(Path(result["report"]).parent)
    chances = trained(test.images.reshape(-1, 6, 5))
    assert chances.shape == (30, 10)
    wrong = (chances.argmax(1).numpy() != test.labels).mean()
    assert wrong == pytest.approx(result["test_error"])
    assert trained.scale != 255.0 and trained.shift > 0.0


def test_a_model_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read .*model.safetensors: "):
        model.read(tmp_path)
    (tmp_path / model.NAME).write_bytes(b"nothing")
    with pytest.raises(JobError, match=r"cannot read .*model.safetensors: "):
        model.read(tmp_path)


@pytest.mark.parametrize("verbose", [False, True])
def test_what_nobody_has_foreseen_is_one_line(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(shards, "read", fail)
    assert cli.main(["--data", str(data), *["--verbose"] * verbose]) == 1
    said = capsys.readouterr().err
    assert said.endswith(
        "nicps: error: unexpected RuntimeError: out of luck (--verbose shows where)\n"
    )
    assert ("Traceback" in said) == verbose


def test_a_reader_that_has_gone(data: Path) -> None:
    """The result cannot be printed; it is in the run's folder."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "trainer.dbn", "--data", str(data), *TINY, "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(write)
    assert done.returncode == 1 and done.stderr.endswith(" left\n")
