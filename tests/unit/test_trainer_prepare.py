# SPDX-License-Identifier: Apache-2.0
"""R5, R6: what the starter makes of a job's folder, and what it refuses in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import JobError, weights
from trainer.__main__ import main
from trainer.prepare import prepare, unpack
from trainer.records import Records, fields_of, write

NOBODY = 65534
JOB = """\
import numpy as np
import torch
from trainer import Settings

settings = Settings(batch=20, rounds=3)

def data(path):
    x = np.arange(90, dtype=np.float32).reshape(30, 3)
    return {"x": x, "y": np.arange(30)}, {"x": x[:10], "y": np.arange(10)}

def model():
    return torch.nn.Linear(3, 2)

def loss(model, batch):
    return model(batch["x"]).square().mean()

def success(model, batch):
    return batch["y"] > 4

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.001)
"""


def make(folder: Path, text: str = JOB) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(text)
    return folder


def test_leaves_everything_that_is_handed_out(tmp_path: Path) -> None:
    job = make(tmp_path / "small")
    prepared = prepare(job, tmp_path / "out", None, {"quorum": 0.5})
    assert prepared == json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert (prepared["job"], prepared["data"]) == ("small", "small")
    assert prepared["settings"]["quorum"] == 0.5
    files = {file["path"]: file for file in prepared["files"]}
    assert set(files) == {path.name for path in (tmp_path / "out").iterdir()}
    train = {"path": "train.bin", "store": "all", "record_bytes": 20, "records": 30}
    assert files["train.bin"] == train
    own = prepare(job, tmp_path / "own", None, {"redeal": False})
    assert [file for file in own["files"] if file["path"] == "train.bin"] == [
        train | {"store": "shard"}
    ]
    assert (tmp_path / "out" / "train.bin").stat().st_size == 600
    assert prepared["train"]["fields"] == [
        {"name": "x", "dtype": "float32", "shape": [3]},
        {"name": "y", "dtype": "int64", "shape": []},
    ]
    arrays = weights.load(tmp_path / "out" / "model.npz")
    weights.check(prepared["model"], arrays)
    assert [entry["name"] for entry in prepared["model"]] == ["weight", "bias"]
    assert weights.lanes(prepared["model"]) == 8


CROSSED = """
class Crossed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(3)
        self.first = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))

def model():
    return Crossed()
"""


def test_with_priorities_the_vector_is_in_the_order_of_need(tmp_path: Path) -> None:
    job = make(tmp_path / "crossed", JOB + CROSSED)
    names = {}
    for priorities in (None, 2):
        prepared = prepare(job, tmp_path / "out", None, {"priorities": priorities})
        names[priorities] = [
            entry["name"] for entry in prepared["model"] if entry["kind"] == "parameter"
        ]
        kinds = [entry["kind"] for entry in prepared["model"]]
        assert kinds == sorted(kinds, key=["parameter", "buffer", "fixed"].index)
    modules = {None: ("last", "norm", "first"), 2: ("first", "norm", "last")}
    for priorities, found in names.items():
        assert found == [f"{m}.{what}" for m in modules[priorities] for what in ("weight", "bias")]


def test_with_servers_priorities_change_no_place_in_the_vector(tmp_path: Path) -> None:
    """It is in the order of need anyway, with each module's averaged buffers beside it."""
    job = make(tmp_path / "crossed", JOB + CROSSED)
    settings = {"system": "S", "exchange": "auto", "quorum": 1.0}
    plain, ordered = (
        prepare(job, tmp_path / "out", None, {**settings, "priorities": priorities})["model"]
        for priorities in (None, 2)
    )
    assert plain == ordered
    first, *_, last = (entry["name"] for entry in ordered if entry["kind"] == "parameter")
    assert (first, last) == ("first.weight", "last.bias")


def test_records_are_shuffled_whole(tmp_path: Path) -> None:
    prepared = prepare(make(tmp_path / "job"), tmp_path / "out", None, {})
    records = Records(tmp_path / "out" / "train.bin", prepared["train"]["fields"])
    got = records.take(slice(None))
    assert sorted(got["y"]) == list(range(30))
    assert list(got["y"]) != list(range(30))
    assert np.array_equal(got["x"][:, 0], got["y"] * 3)


def test_pytorch_takes_a_single_record(tmp_path: Path) -> None:
    arrays = {"x": np.ones((4, 3), np.float32), "y": np.arange(4, dtype=np.uint8)}  # 13 bytes
    write(tmp_path / "train.bin", arrays, np.arange(4))
    records = Records(tmp_path / "train.bin", fields_of("train", arrays))
    for index in (np.array([2]), slice(2, 3)):
        taken = {name: torch.from_numpy(array) for name, array in records.take(index).items()}
        assert (taken["x"].tolist(), taken["y"].tolist()) == ([[1.0] * 3], [2])


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    job = make(tmp_path / "job")
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(job, tmp_path / out, None, {"seed": seed})
    for name in ("job.tar", "model.npz", "train.bin", "test.bin", "prepared.json"):
        a, b, c = ((tmp_path / out / name).read_bytes() for out in "abc")
        assert a == b, name
        assert name == "job.tar" or a != c, name


def test_functions_see_the_settings_that_were_set(tmp_path: Path) -> None:
    text = JOB.replace("torch.nn.Linear(3, 2)", "torch.nn.Linear(3, settings.batch)")
    prepared = prepare(make(tmp_path / "job", text), tmp_path / "out", None, {"batch": 25})
    assert prepared["model"][0]["shape"] == [25, 3]


def test_more_pushes_to_a_synchronisation_than_rounds_to_a_test(tmp_path: Path) -> None:
    """S4: 60 records are three rounds of 20."""
    text = JOB.replace("arange(90,", "arange(180,").replace("(30, 3)", "(60, 3)")
    job = make(tmp_path / "job", text.replace('"y": np.arange(30)', '"y": np.arange(60)'))
    message = "setting sync_every is 4; it must be at most 3, as there is a test every 3 rounds"
    with pytest.raises(JobError, match=message):
        prepare(job, tmp_path / "out", None, {"system": "S", "sync_every": 4})
    prepared = prepare(job, tmp_path / "out", None, {"system": "S", "sync_every": 3})
    assert prepared["settings"]["sync_every"] == 3 and "notes" not in prepared


def test_pushes_to_a_synchronisation_that_are_not_set(tmp_path: Path) -> None:
    """S4: 30 records are one or two rounds. What is chosen is in the settings that all hosts get, and is said."""
    job = make(tmp_path / "job")
    for settings, every in (({"batch": 15}, 2), ({"test_every": 64}, 64), ({"test_every": 90}, 64)):
        prepared = prepare(job, tmp_path / "out", None, {"system": "S", **settings})
        assert prepared["settings"]["sync_every"] == every
        lowered = f"sync_every is not set, and is {every} in place of 64, as there is a test every"
        told = prepared.get("notes", [])
        assert [text.startswith(lowered) for text in told] == [True] * (every < 64)
    ring = prepare(job, tmp_path / "out", None, {})
    assert ring["settings"]["sync_every"] is None and "notes" not in ring


MADE = "\n\ndef model():\n    return Turned()"
TURNED = """
class Turned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.norm = torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(4)
        self.first, self.off = torch.nn.Linear(3, 4), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))
"""


def test_what_is_pulled_lies_in_the_order_of_the_forward_pass(tmp_path: Path) -> None:
    """Of servers. A module's averaged buffers are beside its parameters, and what is never used is last."""
    text = JOB.replace("def model():\n    return torch.nn.Linear(3, 2)", TURNED + MADE)
    job = make(tmp_path / "job", text)
    first = ["first.weight", "first.bias", "norm.weight", "norm.bias"]
    statistics, last = ["norm.running_mean", "norm.running_var"], ["last.weight", "last.bias"]
    off = ["off.weight", "off.bias"]
    served = prepare(job, tmp_path / "served", None, {"system": "S", "sync_every": 1})
    assert weights.order(served["model"]) == [*first, *statistics, *last, *off]
    ring = prepare(job, tmp_path / "ring", None, {})
    assert weights.order(ring["model"]) == [*last, *first[2:], *first[:2], *off, *statistics]


@pytest.mark.parametrize(
    ("made", "ahead"),
    [
        ("torch.nn.Sequential(torch.nn.Linear(3, 2))", True),
        ("torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2)))", False),
        ("torch.compile(torch.nn.Linear(3, 2), backend='eager')", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_whether_a_model_can_wait_module_by_module(tmp_path: Path, made: str, ahead: bool) -> None:
    """With servers. Code without Python could not be held up."""
    job = make(tmp_path / "job", JOB.replace("torch.nn.Linear(3, 2)", made))
    prepared = prepare(job, tmp_path / "out", None, {"system": "S", "sync_every": 1})
    assert prepared["ahead"] is ahead
    told = prepared.get("notes", [])
    late = "a worker computes a step once all parameters have come"
    assert [text.startswith(late) for text in told] == [True] * (not ahead)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sync_every": 8}, "sync_every is 8, and does nothing with system=R: set system=S as"),
        ({"servers": 2}, "servers is '2', and does nothing with system=R: set system=S or B as"),
        ({"servers_train": True}, "servers_train is True, and does nothing with system=R"),
        ({"staleness": False}, "staleness is False, and does nothing with system=R"),
        ({"system": "S", "partners": False}, "partners is False, and does nothing with system=S"),
    ],
)
def test_a_setting_of_servers_without_servers(
    tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    """A user who sets `sync_every` and forgets `system` is told. What job.py or a resumed run has is no mistake."""
    job = make(tmp_path / "job")
    with pytest.raises(JobError, match=said):
        prepare(job, tmp_path / "out", None, asked)
    usual = {"sync_every": None, "servers": 1, "staleness": True, "partners": True}
    prepare(job, tmp_path / "out", None, usual)
    text = JOB.replace("rounds=3", "rounds=3, system='S', servers='2', sync_every=1")
    own = make(tmp_path / "own", text)
    assert prepare(own, tmp_path / "out", None, {"system": "R"})["settings"]["servers"] == "2"


@pytest.mark.parametrize(
    ("kept", "changed", "said"),
    [
        (
            "torch.tensor([0.0, -torch.inf])",
            "self.kept + 1",
            "buffer 'kept' holds -inf, and servers",
        ),
        ("torch.tensor([0.0, 5e6])", "self.kept + 1", "buffer 'kept' holds 5e\\+06, and servers"),
        ("torch.tensor([0.0, -torch.inf])", "self.kept", ""),
    ],
)
def test_numbers_that_servers_cannot_hold(
    tmp_path: Path, kept: str, changed: str, said: str
) -> None:
    """A buffer that is not averaged stays at the hosts."""
    model = (
        f"class Model(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"
        f"        self.register_buffer('kept', {kept})\n    def forward(self, x):\n"
        f"        self.kept = {changed}\n        return super().forward(x)\n"
    )
    text = JOB.replace("torch.nn.Linear(3, 2)", "Model()") + model
    job, settings = make(tmp_path / "job", text), {"system": "S", "sync_every": 1}
    if not said:
        prepare(job, tmp_path / "out", None, settings)
        return
    with pytest.raises(JobError, match=said):
        prepare(job, tmp_path / "out", None, settings)
    assert prepare(job, tmp_path / "out", None, {})["files"]


def test_modules_beside_job_py_go_along(tmp_path: Path) -> None:
    job = make(tmp_path / "job", JOB.replace("lr=0.001", "lr=helper_of_test.LR"))
    (job / "job.py").write_text("import helper_of_test\n" + (job / "job.py").read_text())
    (job / "helper_of_test.py").write_text("LR = 0.1\n")
    (job / "__pycache__").mkdir()
    (job / "__pycache__" / "x.pyc").write_text("")
    prepare(job, tmp_path / "out", None, {})
    unpack(tmp_path / "out" / "job.tar", tmp_path / "copy")
    found = sorted(path.name for path in (tmp_path / "copy").rglob("*"))
    assert found == ["helper_of_test.py", "job.py"]


WRONG = {
    "no loss": (JOB.replace("def loss", "def lose"), "no function loss "),
    "no settings": (JOB.replace("settings =", "setting ="), "no `settings = Settings"),
    "no end": (JOB.replace(", rounds=3", ""), "no end: set `epochs` or `rounds`"),
    "bad setting": (JOB.replace("batch=20", "batch=0"), "setting batch is 0"),
    "syntax": (JOB + "\ndef x(:\n", r"SyntaxError: .* \(job.py:2\d\)"),
    "import": ("import nothing_there\n" + JOB, r"ModuleNotFoundError: .*nothing_there.*job.py:1\)"),
    "exit": ("raise SystemExit(3)\n" + JOB, r"SystemExit: 3 \(job.py:1\)"),
    "data raises": (
        JOB.replace("x = np", "x = 1 / 0 + np"),
        r"ZeroDivisionError: division by zero \(job.py:8, in data\(\)\)",
    ),
    "data of one": (JOB.replace("return {", "return 1, {"), r"data\(\) must return two sets"),
    "data of lists": (JOB.replace('"y": np.arange(30)', '"y": [1]'), r"train\['y'\] must be"),
    "objects": (JOB.replace("np.arange(30)", "np.array([None] * 30)"), r"train\['y'\] .* object"),
    "lengths": (JOB.replace("np.arange(30)", "np.arange(29)"), "different lengths: .*'y': 29"),
    "no samples": (JOB.replace("return {", 'return {"x": x[:0]}, {'), None),
    "no model": (JOB.replace("return torch.nn.Linear", "return str"), r"model\(\)|TypeError"),
    "model float64": (JOB.replace("(3, 2)", "(3, 2).double()"), "'weight' is torch.float64"),
    "frozen": (JOB.replace("(3, 2)", "(3, 2).requires_grad_(False)"), "no parameter to train"),
    "lazy": (JOB.replace("Linear(3, 2)", "LazyLinear(2)"), "'weight' has no shape yet"),
    "loss raises": (
        JOB.replace("    return model(", "    return model(0 + batch['z'], "),
        r"KeyError: 'z' \(job.py:15, in loss\(\)\)",
    ),
    "loss a vector": (JOB.replace(".square().mean()", ".square()"), r"loss\(\) must return a"),
    "success a count": (JOB.replace('["y"] > 4', '["y"].sum()'), r"success\(\) must return one"),
    "no optimizer": (JOB.replace("return torch.optim.SGD", "return str and "), "optimizer|Syntax"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses_in_one_line(tmp_path: Path, case: str) -> None:
    text, message = WRONG[case]
    if case == "no samples":
        text = JOB.replace("return {", 'return {"x": x[:0]}, {"x": x[:0]}\n    return {')
        message = "there are no training samples"
    with pytest.raises(JobError, match=message) as caught:
        prepare(make(tmp_path / "job", text), tmp_path / "out", None, {})
    assert "\n" not in str(caught.value)


def test_no_job_py(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"no job.py in {tmp_path}"):
        prepare(tmp_path, tmp_path / "out", None, {})


def test_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(JobError, match=r"cannot write .*out: File exists"):
        prepare(make(tmp_path / "job"), tmp_path / "out", None, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can prepare as another user")
@pytest.mark.parametrize(
    ("closed", "mode", "named"),
    [(".", 0o700, "job.py"), (".", 0o711, "."), ("job.py", 0o600, "job.py"), ("x", 0o600, "x")],
)
def test_a_job_that_the_training_user_cannot_read(
    open_path: Path, closed: str, mode: int, named: str
) -> None:
    """It is not one that cannot be written, and the user is told who could not."""
    job, out = make(open_path / "job"), open_path / "out"
    (job / "x").touch()
    (job / closed).chmod(mode)
    out.mkdir()
    os.chown(out, NOBODY, NOBODY)
    said = out / "said"
    if (child := os.fork()) == 0:  # who becomes another user cannot come back
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            prepare(job, out, None, {})
        except JobError as error:
            said.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert said.read_text() == (
        f"the user nobody, who trains, cannot read {job / named}: chmod it and the folders above, or join with"
        " --user NAME"
    )


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    job = make(tmp_path / "job")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.bin").symlink_to("/dev/full")
    with pytest.raises(JobError, match=r"cannot write .*: No space left on device"):
        prepare(job, tmp_path / "out", None, {})


@pytest.mark.usefixtures("one_thread")  # which puts the number back
def test_computes_with_the_threads_of_the_job(tmp_path: Path) -> None:
    """More would wait for each other without sleeping, on processors that other programs use, too."""
    check = "def loss(model, batch):\n    assert torch.get_num_threads() == settings.threads\n"
    job = make(tmp_path / "small", JOB.replace("def loss(model, batch):\n", check))
    for threads in (2, 1):
        torch.set_num_threads(3)
        prepare(job, tmp_path / "out", None, {"threads": threads})


def test_the_command(
    tmp_path: Path,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a program once, and then as its function: each program would import PyTorch."""
    job, out = str(make(tmp_path / "job")), str(tmp_path / "out")
    arguments = ["prepare", "--job", job, "--out", out]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *arguments, "--settings", '{"quorum": 2}'],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trainer: error: setting quorum is 2.0")
    assert done.stderr.count("\n") == 1
    monkeypatch.setattr("trainer.startup.import_torch", lambda: None)
    assert main(arguments) == 0
    (tmp_path / "job" / "job.py").write_text(JOB.replace("batch=20", "batch=0"))
    assert main(arguments) == 1, "the job's own mistake"
    capsys.readouterr()
    main([*arguments, "--settings", "{"])
    garbage = capsys.readouterr().err
    assert garbage.startswith("trainer: error: --settings is not JSON")
