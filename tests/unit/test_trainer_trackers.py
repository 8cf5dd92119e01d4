# SPDX-License-Identifier: Apache-2.0
"""A job's figures in TensorBoard, and in a class of the job's own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboardX.proto.event_pb2 import Event

from nicps.errors import EnvironmentProblem
from tests.netns.members import tiny_job
from tests.trainer_lab import Outcome, run_job
from trainer import run as trainer_run
from trainer.errors import JobError
from trainer.prepare import prepare
from trainer.settings import Settings, merge
from trainer.trackers import Trackers, find

OWN = """
import json

class Lines:
    def __init__(self, folder, job, settings):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "own.jsonl").open("w")
        self.file.write(json.dumps([job, settings["batch"]]) + "\\n")

    def log(self, step, values):
        self.file.write(json.dumps([step, values]) + "\\n")

    def close(self):
        self.file.write('"closed"')
        self.file.close()

class Breaks(Lines):
    def log(self, step, values):
        raise OSError(28, "No space left on device")

class Unmade:
    def __init__(self, *_):
        raise RuntimeError("not today")
"""


def job_with_trackers(folder: Path) -> Path:
    job = tiny_job(folder)
    (job / "lines_of_this_test.py").write_text(OWN)
    return job


def events(folder: Path) -> Iterator[Any]:
    """What is in TensorBoard's event files: records of a length, its checksum, an event and its checksum."""
    for path in sorted(folder.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Values by name and step."""
    found: dict[str, dict[int, float]] = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two members, TensorBoard and the job's own; rounds that take longer than the time between two reports."""
    folder = tmp_path_factory.mktemp("trackers")
    settings = {"trackers": "tensorboard, lines_of_this_test:Lines", "test_every": 2}
    more = {"rounds": 4, "microbatch_seconds": 0.03}
    outcome = run_job(job_with_trackers(folder), folder / "run", 2, **settings, **more)
    assert outcome.errors == [None, None]
    return outcome


def test_the_lead_writes_what_tensorboard_shows(ended: Outcome) -> None:
    out = ended.folders[0] / "out"
    shown = scalars(out / "tensorboard")
    rows = [row for row in ended.metrics(1) if row["phase"] == "train"]
    assert shown["loss"] == {row["trained_rounds"]: pytest.approx(row["loss"]) for row in rows}
    tests = {r["trained_rounds"]: r["accuracy"] for r in ended.metrics(1) if r["phase"] == "test"}
    assert tests.keys() == {2, 4}
    assert shown["accuracy"] == pytest.approx(tests)
    assert shown["samples_per_second"].keys() == {1, 2, 3, 4}
    assert shown["test_seconds"].keys() == {2, 4}
    assert 0.25 < shown["round_seconds"][1] < 60
    assert any("settings" in v.tag for e in events(out / "tensorboard") for v in e.summary.value)
    assert not (ended.folders[1] / "out" / "tensorboard").exists()


def test_the_jobs_own_gets_the_same(ended: Outcome) -> None:
    lines = (ended.folders[0] / "out" / "own.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == ["tiny", 64]
    assert json.loads(lines[-1]) == "closed"
    steps = [json.loads(line) for line in lines[1:-1]]
    assert {step for step, _ in steps} == {1, 2, 3, 4}
    assert all(isinstance(value, float) for _, values in steps for value in values.values())


def test_the_model_as_safetensors(ended: Outcome) -> None:
    """Each member has it, with the tensors of model.pt, bit for bit."""
    for folder in ended.folders:
        path = folder / "out" / "model.safetensors"
        state = torch.load(folder / "out" / "model.pt", weights_only=True)
        loaded = load_file(path)
        assert sorted(loaded) == sorted(state)
        assert all(torch.equal(loaded[name], state[name]) for name in state)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        assert not list(path.parent.glob("*.part"))
    first, second = (f / "out" / "model.safetensors" for f in ended.folders)
    assert first.read_bytes() == second.read_bytes()


def test_a_model_that_safetensors_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """model.pt is there all the same, and one line says why the other is not."""

    class Sparse:
        model = torch.nn.Module()

    Sparse.model.register_buffer("table", torch.eye(3).to_sparse())
    trainer_run.save(Sparse(), {"rounds": 1}, tmp_path / "out")  # type: ignore[arg-type]
    text = capsys.readouterr().err
    assert text.startswith("trainer: warning: there is no model.safetensors: ")
    assert text.count("\n") == 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["final.json", "model.pt"]


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("wandb", "must be tensorboard or module:Class"),
        ("no_such_module_here:Class", "No module named"),
        ("lines_of_this_test:Missing", "module lines_of_this_test has no Missing"),
        ("lines_of_this_test:json", "is not a class"),
    ],
)
def test_a_tracker_that_is_not_there(setting: str, why: str, tmp_path: Path) -> None:
    """The job is refused where it starts, before anything is handed out."""
    with pytest.raises(JobError, match=why):
        prepare(job_with_trackers(tmp_path), tmp_path / "out", None, {"trackers": setting})


def test_tensorboard_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'nicps\[tensorboard\]'"):
        find("tensorboard")


def test_a_folder_for_them(tmp_path: Path) -> None:
    settings = merge(Settings(rounds=1), {"trackers": "tensorboard", "tracker_dir": str(tmp_path)})
    trackers = Trackers(settings, "digits", tmp_path / "out", pytest.fail)
    trackers.log(3, {"loss": 0.5, "text": "no figure", "yes": True})
    trackers.close()
    (run,) = tmp_path.iterdir()
    assert run.name.startswith("digits-")
    assert scalars(run / "tensorboard") == {"loss": {3: 0.5}}
    with pytest.raises(JobError, match="tracker_dir is 'here'; it must be an absolute path"):
        merge(Settings(rounds=1), {"tracker_dir": "here"})


def test_a_tracker_that_fails_is_a_warning(tmp_path: Path) -> None:
    job = job_with_trackers(tmp_path)
    names = ("Breaks", "Unmade", "Lines")
    setting = ",".join(f"lines_of_this_test:{name}" for name in names)
    outcome = run_job(job, tmp_path / "run", 1, trackers=setting)
    assert outcome.errors == [None]
    warnings = [r["warning"] for r in outcome.sessions[0].reports if "warning" in r]
    assert [text.split()[1] for text in warnings] == [
        "lines_of_this_test:Unmade",
        "lines_of_this_test:Breaks",
    ]
    assert "RuntimeError: not today" in warnings[0] and "No space left" in warnings[1]
    assert (outcome.folders[0] / "out" / "own.jsonl").read_text().endswith('"closed"')
