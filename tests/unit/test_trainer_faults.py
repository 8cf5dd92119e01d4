# SPDX-License-Identifier: Apache-2.0
"""R18 to R22 from the trainer's side: members go and come back, the lead dies, the job stops and is resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_session import FakeNetwork
from tests.trainer_lab import LINEAR, Outcome, run_job
from trainer import JobError
from trainer.__main__ import main
from trainer.prepare import prepare
from trainer.records import Part, Place, Records, fields_of, write
from trainer.state import Saved

JOB = (
    """\
import torch
import numpy as np
from torch import nn
from trainer import Settings

settings = Settings(batch=40, rounds=22, test_every=100, quorum=1.0, checkpoint_s=0)
"""
    + LINEAR
    + """
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

def loss(model, batch):
    return (model(batch["x"].repeat(2, 1)) - batch["y"].repeat(2, 1)).square().mean()

def success(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().squeeze(1) < 0.5
"""
)
KINDS = {
    "momentum": "    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)\n",
    "Adam": "    return torch.optim.Adam(parameters, lr=0.05)\n\n"
    "def scheduler(optimizer, rounds):\n"
    "    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)\n",
}


def make(folder: Path, kind: str = "momentum") -> Path:
    folder.mkdir()
    (folder / "job.py").write_text(JOB + "\ndef optimizer(parameters):\n" + KINDS[kind])
    return folder


def checked(outcome: Outcome) -> Outcome:
    """After the invariant: the same state on all members after every committed round."""
    for error in outcome.errors:
        if error is not None:
            raise error
    assert not outcome.network.after and not outcome.network.on_commit
    for round_, digests in outcome.network.digests.items():
        assert len(set(digests.values())) == 1, round_
    hashes: dict[int, set[str]] = {}
    for number in range(1, len(outcome.folders) + 1):
        for line in outcome.metrics(number):
            hashes.setdefault(line["round"], set()).add(line["weights_sha256"])
    assert all(len(each) == 1 for each in hashes.values())
    return outcome


def rows(outcome: Outcome, number: int, phase: str = "train") -> dict[int, dict[str, Any]]:
    return {line["round"]: line for line in outcome.metrics(number) if line["phase"] == phase}


# ---- departure and return


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 3])
def test_who_comes_back_goes_on_with_the_same_bits(tmp_path: Path, kind: str, number: int) -> None:
    """Member 1: the lead, too, changes twice."""

    def script(network: FakeNetwork) -> None:
        network.after = {5: lambda: network.leave(number), 12: lambda: network.give_state(number)}

    outcome = checked(run_job(make(tmp_path / "job", kind), tmp_path / "run", 3, script=script))
    mine, others = rows(outcome, number), rows(outcome, 2)
    assert set(others) == set(range(1, 23))
    assert set(mine) == set(range(1, 6)) | set(range(13, 23))
    assert {line["own_samples"] for line in mine.values()} <= {13, 14}
    assert {others[round_]["view"] for round_ in (3, 9, 22)} == {1, 2, 3}
    assert mine[13]["trained_rounds"] == 13
    assert all(str(number) in others[round_]["counted"] for round_ in range(13, 23))
    assert set(outcome.network.digests[22]) == {1, 2, 3}


@pytest.mark.parametrize("redeal", [True, False])
def test_what_becomes_of_the_departeds_data(tmp_path: Path, redeal: bool) -> None:
    """R21: dealt out to the others; R6: not even there."""

    def script(network: FakeNetwork) -> None:
        network.after = {5: lambda: network.leave(2)}

    job = make(tmp_path / "job")
    outcome = run_job(job, tmp_path / "run", 3, script=script, rounds=9, redeal=redeal)
    assert outcome.errors[0] is None and outcome.errors[2] is None
    first, last = rows(outcome, 1)[5], rows(outcome, 1)[9]
    assert first["counted"] == {"1": 13, "2": 13, "3": 14}
    assert last["counted"] == {"1": 20, "3": 20}
    (test,) = rows(outcome, 1, "test").values()
    assert test["samples"] == (42 if redeal else 28)
    size = (outcome.folders[2] / "train.bin").stat().st_size // 16
    assert size == (161 if redeal else 54)


def test_parts_cover_everything_whoever_is_there(tmp_path: Path) -> None:
    arrays = {"x": np.arange(50, dtype=np.int32)}
    write(tmp_path / "x.bin", arrays, np.arange(50))
    records = Records(tmp_path / "x.bin", fields_of("x", arrays))
    shares = (5, 0, 5, 6)
    trained, tested = [], []
    for number in (1, 3, 4):
        part = Part(records, Place.of(number, shares), None, 1)
        trained += part.take(part.indices(0, len(part)))["x"].tolist()
        tested += [x for batch in part.batches(7) for x in batch["x"].tolist()]
    assert sorted(trained) == tested == list(range(50))
    assert Place.of(4, shares) == Place(3, 3, 6)
    for number in (2, 9):
        assert Place.of(number, shares) == Place(0, 3, 0)
        assert len(Part(records, Place.of(number, shares), None, 1)) == 0
    own = Part(records, Place.of(4, shares), 4, 1)
    assert len(own) == 50  # what is there is its own


def test_the_lead_dies_before_it_decides(tmp_path: Path) -> None:
    """R22: at the commit after which a test is due, and again in that test, whose end it was to decide."""

    def script(network: FakeNetwork) -> None:
        network.on_commit = {
            6: lambda: network.evict(1),
            14: lambda: network.evict(2),  # the test after 12 training rounds
        }

    job = make(tmp_path / "job")
    settings = {"rounds": 12, "test_every": 6}
    outcome = run_job(job, tmp_path / "run", 4, script=script, **settings)
    assert outcome.errors[2:] == [None, None]
    tests = rows(outcome, 4, "test")
    assert [line["trained_rounds"] for line in tests.values()] == [6, 12]
    assert outcome.network.decisions[-1] == (14, "end")
    assert {line["view"] for line in rows(outcome, 4).values()} == {1, 2}


def test_a_test_that_is_left_comes_again(tmp_path: Path) -> None:
    """A view change in the middle of a test: its phase ends without a result."""

    def script(network: FakeNetwork) -> None:
        def again() -> None:
            network.evict(3)
            network.tallies[7].clear()
            network.enter("test", 7)

        network.on_commit = {7: again}

    job = make(tmp_path / "job")
    outcome = run_job(job, tmp_path / "run", 3, script=script, rounds=6)
    assert outcome.errors[:2] == [None, None]
    (test,) = rows(outcome, 1, "test").values()
    assert test["samples"] == 42  # all of them, dealt among two
    assert test["view"] == 2


def test_a_state_that_cannot_be_loaded_is_no_ones_end(tmp_path: Path) -> None:
    """Who has loaded something else is not let in: its digest shows it."""

    def script(network: FakeNetwork) -> None:
        def spoil() -> None:
            network.give_state(3)
            copy, network.saved = network.saved, None  # type: ignore[method-assign, assignment]

            def saved(source: int, digest: str) -> None:
                path = Path(network.sessions[source].workdir) / "state.npz"
                path.write_bytes(path.read_bytes()[:-99])
                copy(source, digest)

            network.saved = saved  # type: ignore[method-assign]

        network.after = {5: lambda: network.leave(3), 8: spoil}

    outcome = run_job(make(tmp_path / "job"), tmp_path / "run", 3, script=script)
    assert outcome.network.reason == "member 3 has loaded another state"
    warnings = [r["warning"] for r in outcome.sessions[2].reports if "warning" in r]
    assert len(warnings) == 1 and warnings[0].startswith("cannot read the state in ")


def test_a_state_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    def script(network: FakeNetwork) -> None:
        def full() -> None:
            part = Path(network.sessions[1].workdir) / "state.npz.part"
            part.symlink_to("/dev/full")
            network.give_state(3)

        network.after = {5: lambda: network.leave(3), 8: full}

    outcome = run_job(make(tmp_path / "job"), tmp_path / "run", 3, script=script)
    reason = outcome.network.reason
    assert reason is not None and reason.endswith("state.npz: No space left on device")
    assert reason in [r.get("warning") for r in outcome.sessions[0].reports]


# ---- checkpoints and going on from them


def test_only_the_lead_writes_checkpoints(tmp_path: Path) -> None:
    def script(network: FakeNetwork) -> None:
        network.after = {10: lambda: network.leave(1)}

    outcome = run_job(make(tmp_path / "job"), tmp_path / "run", 3, script=script, checkpoint_s=1e-9)
    assert outcome.errors[1:] == [None, None]
    written = outcome.network.checkpoints
    assert [round_ for number, round_ in written if number == 1] == list(range(2, 10))
    by_second = [round_ for number, round_ in written if number == 2]
    assert by_second[0] in (
        10,
        11,
        12,
    )  # it may have been done with round 10 when it became the lead
    assert by_second == [*range(by_second[0], 23), 22]
    assert not [round_ for number, round_ in written if number == 3]


def test_checkpoints_by_interval(tmp_path: Path) -> None:
    job = make(tmp_path / "job")
    often = checked(run_job(job, tmp_path / "a", 2, checkpoint_s=3600))
    assert often.network.checkpoints == [(1, 22)]  # the end
    never = checked(run_job(job, tmp_path / "b", 2, checkpoint_s=0))
    assert never.network.checkpoints == []
    assert not list(never.folders[0].glob("checkpoint*"))


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    """The first checkpoint after round 10 fails; the former one stays, and the next one replaces it."""
    seen: list[int] = []

    def script(network: FakeNetwork) -> None:
        folder = Path(tmp_path / "run" / "h1")

        def full() -> None:
            (folder / "checkpoint.npz.part").symlink_to("/dev/full")
            seen.append((folder / "checkpoint.npz").stat().st_size)
            network.decided(10, "continue", True)

        network.after = {10: full}

    outcome = checked(
        run_job(make(tmp_path / "job"), tmp_path / "run", 2, script=script, checkpoint_s=1e-9)
    )
    assert seen and seen[0] > 1000
    warnings = [r["warning"] for r in outcome.sessions[0].reports if "warning" in r]
    assert len(warnings) == 1
    assert warnings[0].startswith("no checkpoint: cannot write ")
    assert warnings[0].endswith("checkpoint.npz: No space left on device")
    assert [r for _, r in outcome.network.checkpoints] == [*range(2, 10), *range(11, 23), 22]


def test_what_no_majority_saves_is_the_last_rounds_state(tmp_path: Path) -> None:
    """In the middle of round 11, after their own forward passes: all save the same, and nobody's training changes."""
    states: list[Saved] = []

    def script(network: FakeNetwork) -> None:
        def cut() -> None:
            for session in map(network.sessions.__getitem__, (1, 2, 3)):
                session.on_keep()
                states.append(Saved(Path(session.workdir) / "checkpoint.npz"))

        network.on_commit = {11: cut}

    job = make(tmp_path / "job")
    through = checked(run_job(job, tmp_path / "through", 3))
    outcome = checked(run_job(job, tmp_path / "run", 3, script=script))
    assert outcome.network.checkpoints == [(1, 10), (2, 10), (3, 10)]
    assert [state.head["progress"]["round"] for state in states] == [10, 10, 10]
    for name, array in states[0].model.items():
        assert all(np.array_equal(array, state.model[name]) for state in states), name
    assert rows(outcome, 2)[22]["weights_sha256"] == rows(through, 2)[22]["weights_sha256"]


def stop_after(round_: int) -> Callable[[FakeNetwork], None]:
    def script(network: FakeNetwork) -> None:
        network.after = {round_: lambda: network.session(9, {}).fail("the power is gone")}

    return script


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_job_ends_where_one_that_went_through_does(tmp_path: Path, kind: str) -> None:
    job = make(tmp_path / "job", kind)
    settings = {"test_every": 4}
    through = checked(run_job(job, tmp_path / "through", 3, **settings))
    stopped = run_job(
        job, tmp_path / "first", 3, script=stop_after(8), checkpoint_s=1e-9, **settings
    )
    assert all("the power is gone" in str(error) for error in stopped.errors)
    checkpoint = stopped.folders[0] / "checkpoint.npz"
    code = tmp_path / "first" / "prepared" / "job.tar"
    resumed = checked(run_job(code, tmp_path / "second", 3, resume=checkpoint))
    trained = stopped.network.checkpoints[-1][1]
    assert trained == 7  # round 5 is a test
    lines = list(rows(resumed, 2).values())
    assert [line["trained_rounds"] for line in lines] == list(range(8, 23))
    by_trained = {line["trained_rounds"]: line for line in rows(through, 2).values()}
    for line in lines:
        due = by_trained[line["trained_rounds"]]
        assert line["weights_sha256"] == due["weights_sha256"]
        assert line["loss"] == due["loss"]
    accuracies = [line["accuracy"] for line in rows(through, 1, "test").values()]
    assert [line["accuracy"] for line in rows(resumed, 1, "test").values()] == accuracies[1:]
    final = [
        json.loads((o.folders[0] / "out" / "final.json").read_text()) for o in (through, resumed)
    ]
    assert final[0]["weights_sha256"] == final[1]["weights_sha256"]
    assert final[0]["rounds"] == final[1]["rounds"] == 22
    assert final[1]["seconds"] > stopped.metrics(1)[-1]["t_end"] - stopped.metrics(1)[0]["t_start"]


def test_settings_of_a_resumed_job(tmp_path: Path) -> None:
    """Those that it had, and over them those that are set now."""
    job = make(tmp_path / "job")
    ended = checked(run_job(job, tmp_path / "a", 2, rounds=5, seed=9, checkpoint_s=30))
    checkpoint = ended.folders[0] / "checkpoint.npz"
    prepared = prepare(job, tmp_path / "out", None, {"rounds": "8"}, checkpoint)
    assert prepared["settings"] | {"rounds": 8, "seed": 9} == prepared["settings"]
    state = ended.network.digests[5][2]  # that every host has applied last
    assert prepared["resume"] == {"rounds": 5, "unit": -30, "run": "a", "state": state}
    assert {"path": "resume.npz", "store": "all"} in prepared["files"]
    resumed = checked(run_job(job, tmp_path / "b", 2, resume=checkpoint, rounds=8))
    assert [line["trained_rounds"] for line in rows(resumed, 1).values()] == [6, 7, 8]
    assert set(resumed.network.ready.values()) != set(ended.network.ready.values())


def test_the_resume_command(
    tmp_path: Path,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a program once, and then as its function: each program would import PyTorch."""
    ended = checked(run_job(make(tmp_path / "job"), tmp_path / "a", 2, rounds=3, checkpoint_s=30))

    def arguments(checkpoint: Path, settings: str = "{}") -> list[str]:
        job, out = tmp_path / "a" / "prepared" / "job.tar", tmp_path / "o"
        files = ["--job", str(job), "--out", str(out), "--resume", str(checkpoint)]
        return ["prepare", *files, "--settings", settings]

    checkpoint = ended.folders[0] / "checkpoint.npz"
    # After the last round, and nobody has tested or collected anything.
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *arguments(checkpoint)],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    prepared = json.loads((tmp_path / "o" / "prepared.json").read_text())
    assert prepared["job"] == "job"
    names = {file["path"] for file in prepared["files"]}
    assert names == {path.name for path in (tmp_path / "o").iterdir()}
    run = checkpoint.parent.parent
    (run / "result.json").touch()
    monkeypatch.setattr("trainer.startup.import_torch", lambda: None)
    capsys.readouterr()
    assert main(arguments(checkpoint)) == 1
    over = capsys.readouterr().err
    assert over.startswith(f"trainer: error: the job of {run} is done, after 3 rounds of ")
    assert "(rounds=3: what comes first ends it)" in over
    assert main(arguments(checkpoint, '{"rounds": 5}')) == 0
    capsys.readouterr()
    assert main(arguments(tmp_path / "nothing.npz")) == 1
    wrong = capsys.readouterr().err
    assert wrong.startswith("trainer: error: cannot read the state in ")
    assert wrong.count("\n") == 1


def test_a_checkpoint_of_another_job(tmp_path: Path) -> None:
    job = make(tmp_path / "job")
    ended = checked(run_job(job, tmp_path / "a", 2, rounds=3, checkpoint_s=30))
    (job / "job.py").write_text(
        (job / "job.py").read_text().replace("Linear(3, 4)", "Linear(3, 4, False)")
    )
    with pytest.raises(JobError, match=r"'0\.bias' is missing here|does not fit the job"):
        prepare(job, tmp_path / "out", None, {}, ended.folders[0] / "checkpoint.npz")
    assert "checkpoint" not in os.listdir(tmp_path / "out")


# ---- the norm clip


def test_clipped_gradients_are_counted(tmp_path: Path) -> None:
    job = make(tmp_path / "job")
    settings = {"rounds": 12, "save_gradients": True}
    plain = checked(run_job(job, tmp_path / "plain", 2, **settings))
    clipped = checked(run_job(job, tmp_path / "clipped", 2, clip=0.5, **settings))
    for number in (1, 2):
        norms = {}
        for outcome in (plain, clipped):
            folder = outcome.folders[number - 1] / "out" / "gradients"
            saved = [np.load(folder / f"{round_}.npz") for round_ in range(1, 13)]
            # without BatchNorm's mean and variance, which are the last 8
            norms[outcome is clipped] = [
                np.linalg.norm(s["vector"][:-8]) / s["samples"] for s in saved
            ]
    assert max(norms[False]) > 1
    assert max(norms[True]) <= 0.5 * (1 + 1e-6)
    counts = [line["clipped"] for line in rows(clipped, 2).values()]
    assert counts[0] == 1 and counts == sorted(counts)
    assert counts[-1] == sum(abs(norm - 0.5) < 1e-6 for norm in norms[True])
    assert clipped.sessions[1].reports[-1]["clipped"] == counts[-1]
    assert {line["clipped"] for line in rows(plain, 2).values()} == {0}
