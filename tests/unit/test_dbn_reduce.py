# SPDX-License-Identifier: Apache-2.0
"""Iterative reduce (H1, H2): exact means, work that is done again, and a run that goes on."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.errors import EnvironmentProblem, NetworkProblem
from trainer.dbn import checkpoint, master, reduce_nicps, shards, vectors
from trainer.dbn.checkpoint import State
from trainer.dbn.reduce_local import LocalReducer
from trainer.dbn.settings import Settings
from trainer.dbn.shards import Data, Shard
from trainer.dbn.vectors import Mean, Means, Update, Vector
from trainer.dbn.work import Frame, Task, work
from trainer.errors import FolderError, JobError

SMALL = Settings(
    workers=3, layers=(7, 5), epochs=2, finetune=3, batch=4, averages=2, head_epochs=1, seed=3
)


def shard(count: int, seed: int) -> Shard:
    """Pictures of 4 x 4 pixels; of each label the pixels of one row are bright."""
    random = np.random.default_rng(seed)
    labels = (np.arange(count) % 4).astype(np.uint8)
    images = random.integers(0, 90, (count, 4, 4), np.uint8)
    images[np.arange(count), labels] += 150
    return Shard(images.reshape(count, 16), labels)


DATA = Data(shard(50, 1), shard(20, 2), (4, 4))


def run(state: State, after: Any = lambda _: None) -> Vector:
    reducer = LocalReducer(shards.deal(DATA.train, state.settings))
    try:
        return master.train(state, DATA, reducer, after)
    finally:
        reducer.close()


# ---- means


def test_the_mean_is_exact_in_every_order() -> None:
    random = np.random.default_rng(1)
    updates = [
        Update(random.normal(0, 10.0**power, 50).astype(np.float32), samples, 0.1 * samples)
        for power, samples in ((-4, 7), (-1, 600), (1, 599), (2, 1))
    ]
    found = set()
    for order in permutations(updates):
        mean = Mean()
        for update in order:
            mean.add(update)
        found.add((mean.vector.tobytes(), mean.error))
        for split in range(5):  # in two groups, of which one may be empty
            whole = Mean()
            for group in (order[:split], order[split:]):
                part = Mean()
                for update in group:
                    part.add(update)
                whole.merge(part)
            found.add((whole.vector.tobytes(), whole.error))
    assert len(found) == 1
    total = sum(update.samples for update in updates)
    for at in range(50):
        exact = sum(Fraction(float(u.vector[at])) * u.samples for u in updates) / total
        assert abs(Fraction(float(mean.vector[at])) - exact) <= abs(exact) / 2**24 + Fraction(
            1, 2**32
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1024.0])
def test_a_mean_refuses_what_diverges(value: float) -> None:
    with pytest.raises(JobError, match="training diverges"):
        Mean().add(Update(np.array([0.0, value], np.float32), 1, 0.0))


def test_a_mean_refuses_more_samples_than_its_sum_can_hold() -> None:
    mean = Mean()
    largest = np.array([-np.nextafter(np.float32(1024), np.float32(0))], np.float32)
    mean.add(Update(largest, vectors.MOST_SAMPLES, 0.0))
    assert mean.vector == largest
    with pytest.raises(JobError, match="at most 1048576 samples"):
        mean.add(Update(largest, 1, 0.0))


def test_momentum_of_the_means_leaves_velocities_alone() -> None:
    mean, before = np.float32([2.0, 3.0, 9.0]), np.float32([1.0, 5.0, 1.0])
    assert vectors.ahead(mean, before, 0.5, 2).tolist() == [2.5, 2.0, 9.0]
    assert vectors.ahead(mean, None, 0.5, 2) is mean
    assert vectors.ahead(mean, before, 0.0, 2) is mean


def test_one_worker_needs_no_momentum_of_means() -> None:
    found = [
        replace(SMALL, workers=n, master_momentum=m) for n, m in ((1, None), (2, None), (2, 0))
    ]
    assert [each.momentum_of_master for each in found] == [0.0, 0.5, 0.0]
    assert replace(SMALL, workers=1, master_momentum=0.7).momentum_of_master == 0.7


# ---- splits and work


def test_splits_and_parts_take_each_sample_once() -> None:
    numbered = Shard(np.arange(50, dtype=np.uint8).reshape(50, 1), np.zeros(50, np.uint8))
    dealt = shards.deal(numbered, SMALL)
    assert [len(split) for split in dealt.values()] == [17, 17, 16]
    assert sorted(np.concatenate([split.images[:, 0] for split in dealt.values()])) == list(
        range(50)
    )
    parts = [shards.rows_of(SMALL, 1, 17, 0, 0, part) for part in range(SMALL.averages)]
    assert sorted(np.concatenate(parts)) == list(range(17))
    assert not np.array_equal(parts[0], shards.rows_of(SMALL, 1, 17, 0, 1, 0))


@pytest.mark.parametrize("phase", [0, 1, 2])
def test_work_that_is_done_again_gives_the_same_bits(phase: int) -> None:
    """Whatever was done before; another epoch, part or split gives others."""
    form = master.form_of(SMALL, DATA)
    below = [master.begin(State(SMALL, "", phase=at), form) for at in range(2)]
    state = State(SMALL, "", phase=phase, done=below)
    start = np.concatenate([master.begin(state, form), np.zeros(form.size(phase), np.float32)])
    frame = Frame(SMALL, form, tuple(below[:phase]) if phase < 2 else ())
    dealt = shards.deal(DATA.train, SMALL)

    def done(epoch: int, part: int, split: int) -> tuple[bytes, float]:
        found = work(frame, Task(phase, epoch, part), start.copy(), split, dealt[split])
        assert np.array_equal(start[form.size(phase) :], np.zeros(form.size(phase)))
        return found.vector.tobytes(), found.error

    places = [(2, 0, 1), (2, 1, 1), (2, 0, 0), (1, 0, 1)]
    first = [done(*place) for place in places]
    again = [done(*place) for place in reversed(places)]
    assert first == again[::-1]
    assert len({bits for bits, _ in first}) == len(places)


@pytest.mark.parametrize("phase", [0, 2])
def test_random_numbers_are_those_of_the_place(phase: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that have the same samples in the same order still draw numbers of their own."""
    monkeypatch.setattr(shards, "rows_of", lambda *_: np.arange(8))
    form = master.form_of(SMALL, DATA)
    below = [master.begin(State(SMALL, "", phase=at), form) for at in range(2)]
    start = master.begin(State(SMALL, "", phase=phase, done=below), form)
    frame = Frame(SMALL, form, ())
    found = {
        work(frame, Task(phase, 2, part), start, split, DATA.train).vector.tobytes()
        for part in range(2)
        for split in range(2)
    }
    assert len(found) == 4


def test_one_worker_without_momentum_of_means_is_plain_training() -> None:
    """Its one update an epoch is the next start: nothing is lost or scaled on the way."""
    settings = replace(SMALL, workers=1, averages=1, epochs=1, finetune=0)
    form = master.form_of(settings, DATA)
    state = State(settings, "")
    run(state)
    split = shards.deal(DATA.train, settings)[0]
    start = np.concatenate([master.begin(State(settings, ""), form), np.zeros(form.size(0))])
    alone = work(Frame(settings, form, ()), Task(0, 0, 0), start.astype(np.float32), 0, split)
    np.testing.assert_allclose(state.done[0], alone.vector[: form.size(0)], atol=2**-32)


def test_workers_count_by_their_samples() -> None:
    def worker(frame: Frame, task: Task, start: Vector, split: int, part: Shard) -> Update:
        return Update(np.full(1, float(split), np.float32), len(part), 0.0)

    reducer = LocalReducer(shards.deal(DATA.train, SMALL), worker)
    reducer.begin(Frame(SMALL, master.form_of(SMALL, DATA), ()))
    found = reducer.reduce(Task(0, 0, 0), np.zeros(1, np.float32)).vector
    reducer.close()
    assert found == np.float32((0 * 17 + 1 * 17 + 2 * 16) / 50)


# ---- runs


def test_a_run_learns() -> None:
    changes: dict[str, Any] = {"layers": (12,), "epochs": 10, "finetune": 40, "lr": 0.3}
    changes |= {"dropout": 0.0, "input_dropout": 0.0}
    state = State(replace(SMALL, **changes), "")
    run(state)
    errors = [row["error"] for row in state.rows if row["phase"] == 0]
    assert errors[-1] < errors[0]
    assert state.rows[-1]["test_error"] <= 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"velocity": "average", "visible": "gaussian", "pretrain_lr": 0.01},
        {"optimizer": "cg", "epochs": 1, "finetune": 1},
        {"epochs": 0},
    ],
    ids=["default", "average, gaussian", "cg", "no pre-training"],
)
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = replace(SMALL, **changes)
    whole = State(settings, "")
    wanted = run(whole)

    class Stop(Exception):
        pass

    def save_and_stop(state: State) -> None:
        checkpoint.save(state, tmp_path)
        raise Stop

    state, times = State(settings, ""), 0
    while True:
        try:
            found = run(state, save_and_stop)
            break
        except Stop:
            times += 1
            state = checkpoint.load(tmp_path)
    assert times == len(whole.rows) == len(settings.layers) * settings.epochs + settings.finetune
    assert found.tobytes() == wanted.tobytes()
    assert [{**row, "seconds": 0} for row in state.rows] == [
        {**row, "seconds": 0} for row in whole.rows
    ]


def test_checkpoints_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="has no checkpoint"):
        checkpoint.load(tmp_path)
    path = tmp_path / checkpoint.NAME
    checkpoint.save(State(SMALL, "", mean=np.zeros(1000, np.float32)), tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"PK\3\4 and then nothing", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(JobError, match=r"^cannot read .*checkpoint.npz: ") as raised:
            checkpoint.load(tmp_path)
        assert raised.value.exit_code == 5
    path.write_bytes(whole)
    with np.load(path) as file:
        told = str(file["told"])
    for text in ("[]", "{}", told.replace('"workers": 3', '"workers": 0')):
        np.savez(path, told=np.array(text))
        with pytest.raises(JobError, match=r"^cannot read .*checkpoint.npz: ") as raised:
            checkpoint.load(tmp_path)
        assert raised.value.exit_code == 5


@pytest.mark.parametrize(
    ("error", "tries"), [(NetworkProblem, 5), (JobError, 5), (EnvironmentProblem, 1)]
)
def test_an_epoch_begins_again_where_that_can_help(
    error: type[Exception],
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each time it says why. What is not installed does not come by itself."""
    made: list[int] = []

    def fail(*_: Any) -> None:
        made.append(1)
        raise error("no luck")

    monkeypatch.setattr(reduce_nicps.NicpsReducer, "_try", fail)
    monkeypatch.setattr(reduce_nicps, "PAUSE_S", 0.0)
    context: Any = None
    reducer = reduce_nicps.NicpsReducer(context, {})
    with pytest.raises(error, match="no luck"):
        reducer.epoch(0, 0, Means(np.zeros(1), np.zeros(1)))
    assert len(made) == tries
    assert capsys.readouterr().err == "nicps: the epoch begins again: no luck\n" * (tries - 1)
