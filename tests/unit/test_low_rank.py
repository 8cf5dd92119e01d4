# SPDX-License-Identifier: Apache-2.0
"""Factors of low rank: the arithmetic, and the hook with members in threads in place of DDP and agents."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nicps.collective import Group
from nicps.errors import UsageProblem
from nicps.torch import factors
from nicps.torch.factors import Matrix, accelerate, orthonormalise, pays
from nicps.torch.low_rank import LowRank
from tests.collectives import Meeting, together
from tests.far import Far, stage
from tests.low_rank_results import COLUMNS, ROWS, results

SIZE = 3


def gradients(step: int, rows: int = ROWS, columns: int = COLUMNS) -> list[Any]:
    """Of all members: something of rank 3 that they share, and noise of their own."""
    random = torch.Generator().manual_seed(step)
    left, right = torch.randn(rows, 3, generator=random), torch.randn(3, columns, generator=random)
    noise = [torch.randn(rows, columns, generator=random) for _ in range(SIZE)]
    return [left @ right + 0.3 * each for each in noise]


def step(matrices: list[Matrix], values: list[Any]) -> None:
    """One of all members, in which sums are NumPy's; `values` become the result."""
    total = sum(m.project(v).copy() for m, v in zip(matrices, values, strict=True))
    taken = [m.take_basis(total) for m in matrices]
    mean = sum(m.project_back().copy() for m in matrices)
    mean /= np.float32(len(matrices))
    commit = all(taken) and bool(np.isfinite(mean).all())
    for matrix, value in zip(matrices, values, strict=True):
        matrix.apply(mean, value, commit=commit)


# ---- the arithmetic: PyTorch's, and that of the compiled loops


Make = Callable[..., list[Matrix]]


@pytest.fixture(params=["torch", "compiled"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the matrix of each member. The loops do the same for these as for larger ones."""
    compiled = request.param == "compiled"
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.setattr(factors, "LEAST_NUMBERS", 0 if compiled else 1 << 30)

    def members(rank: int, number: int = 0, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Any:
        found = [Matrix(*shape, rank, number) for _ in range(SIZE)]
        accelerate(found)
        assert {matrix.loops is not None for matrix in found} == {compiled}
        return found

    return members


def test_a_scripts_own_defaults_are_not_those_of_factors() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            matrices = [Matrix(ROWS, COLUMNS, 1, 0) for _ in range(SIZE)]
    finally:
        torch.set_default_dtype(before)
    step(matrices, gradients(0))
    assert {(m.error.dtype, m.error.device.type) for m in matrices} == {(torch.float32, "cpu")}


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_it_is_powersgd(rank: int, make: Make) -> None:
    """Ten steps against algorithm 2 of the paper in float64, with the same first Q."""
    matrices = make(rank, 4)
    q = matrices[0].start.numpy().T.astype(np.float64)
    errors = [np.zeros((ROWS, COLUMNS)) for _ in range(SIZE)]
    for k in range(10):
        values = gradients(k)
        wide = [v.numpy() + e for v, e in zip(values, errors, strict=True)]
        step(matrices, values)
        p, _ = np.linalg.qr(sum(v @ q for v in wide))
        own = [v.T @ p for v in wide]
        q = sum(own) / SIZE
        errors = [v - p @ each.T for v, each in zip(wide, own, strict=True)]
        for value in values:
            np.testing.assert_allclose(value, p @ q.T, atol=1e-4)
            assert torch.equal(value, values[0])
        for matrix, error in zip(matrices, errors, strict=True):
            np.testing.assert_allclose(matrix.error, error, atol=1e-4)


def test_nothing_is_lost(make: Make) -> None:
    """What was applied, and the mean of the errors, are the mean of all gradients."""
    matrices = make(2)
    given, applied = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    for k in range(20):
        values = gradients(k)
        given += sum(values) / SIZE
        step(matrices, values)
        applied += values[0]
    left = sum(matrix.error for matrix in matrices) / SIZE
    assert left.abs().max() > 0.1
    torch.testing.assert_close(applied + left, given, atol=1e-4, rtol=0)


def test_an_error_that_is_asked_for_in_the_middle_of_a_step_changes_nothing(make: Make) -> None:
    """A job's program writes it while it waits for a sum: whichever buffer it is in, and again."""
    asked, other = make(2), make(2)
    for k in range(4):
        before = [matrix.error.clone() for matrix in other] if k != 2 else None
        found = []
        for matrices in (asked, other):
            values = gradients(k)
            total = sum(m.project(v).copy() for m, v in zip(matrices, values, strict=True))
            for matrix in matrices:
                matrix.take_basis(total)
            if matrices is asked:
                errors = [matrix.error.clone() for matrix in asked]
                assert before is None or all(map(torch.equal, errors, before))
                assert all(map(torch.equal, (matrix.error for matrix in asked), errors))
            mean = sum(m.project_back().copy() for m in matrices) / np.float32(SIZE)
            for matrix, value in zip(matrices, values, strict=True):
                matrix.apply(mean, value, commit=True)
            found.append([*values, *(matrix.start for matrix in matrices)])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_at_one_is_nan_at_all_and_changes_nothing(
    wrong: float, make: Make
) -> None:
    matrices = make(2)
    step(matrices, gradients(0))
    before = [(m.error.clone(), m.start.clone()) for m in matrices]
    values = gradients(1)
    values[1][7, 3] = wrong
    step(matrices, values)
    assert all(value.isnan().all() for value in values)
    for matrix, (error, start) in zip(matrices, before, strict=True):
        assert torch.equal(matrix.error, error) and torch.equal(matrix.start, start)
    step(matrices, values := gradients(2))
    assert all(value.isfinite().all() for value in values)


def test_a_step_of_zeros_and_one_of_rank_one_do_not_end_a_column(make: Make) -> None:
    matrices = make(2)
    step(matrices, values := [torch.zeros(ROWS, COLUMNS) for _ in range(SIZE)])
    assert not any(value.any() for value in values)
    one = torch.outer(torch.arange(ROWS) + 1.0, torch.arange(COLUMNS) - 20.0)
    step(matrices, values := [one.clone() for _ in range(SIZE)])
    torch.testing.assert_close(values[0], one, atol=1e-2, rtol=1e-5)
    step(matrices, gradients(1))
    assert all((matrix.start.abs().amax(dim=1) > 0.1).all() for matrix in matrices)


def test_a_basis_is_orthonormal() -> None:
    columns = np.random.default_rng(1).standard_normal((4, 777))
    columns[2] = 3 * columns[0] - columns[1]
    kept = orthonormalise(columns)
    assert kept.tolist() == [1.0, 1.0, 0.0, 1.0]
    np.testing.assert_allclose(columns @ columns.T, np.diag(kept), atol=1e-12)


def test_small_matrices_are_not_worth_it() -> None:
    assert pays(2048, 2048, 4) and pays(64, 300, 2)
    assert not pays(8, 300, 4) and not pays(1, 10_000, 1) and not pays(0, 5, 1)


def test_the_result_is_the_same_bits_on_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX and with two threads, which both change what BLAS and PyTorch's fused operations give; compiled."""
    code = "from tests.low_rank_results import results; print(results(2))"
    threads = torch.get_num_threads()
    try:
        found = {results(1)}
        if importlib.util.find_spec("numba"):
            monkeypatch.setattr(factors, "LEAST_NUMBERS", 0)
            assert factors._compiled(2) is not None
            found.add(results(1))
    finally:
        torch.set_num_threads(threads)
    for capability in ("default", "avx2"):
        env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        if capability == "default":
            env["NPY_DISABLE_CPU_FEATURES"] = _numpy_features()
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        found.add(done.stdout.strip())
    assert len(found) == 1


def _numpy_features() -> str:
    """All that NumPy has found here beyond its baseline."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])


def test_a_step_allocates_nothing_of_the_matrix_s_size(make: Make) -> None:
    """NumPy's share; what PyTorch allocates is asked of its profiler."""
    matrices = make(2, shape=(600, 700))[:1]
    value = torch.randn(600, 700)
    step(matrices, [value])
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(matrices, [value])
    tracemalloc.start()
    step(matrices, [value])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    most = max(event.self_cpu_memory_usage for event in profile.events())
    assert peak < 600_000 and most < 600_000 < value.numel() * 4


# ---- the hook


@dataclass
class Bucket:
    """As DDP gives it."""

    place: int
    last: bool
    held: list[Any]
    flat: Any

    def index(self) -> int:
        return self.place

    def is_last(self) -> bool:
        return self.last

    def parameters(self) -> list[Any]:
        return self.held

    def buffer(self) -> Any:
        return self.flat


class Wrapped:
    """What the handle needs of a model that DDP has wrapped."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        torch.manual_seed(1)
        self.module = torch.nn.Sequential(torch.nn.Linear(90, 60), torch.nn.Linear(60, 70))
        self.module.to(dtype)
        self.dtype = dtype

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hook = lambda bucket: hook(state, bucket)

    def backward(self, gradients: Any, buckets: int) -> Any:
        """Through the hook in so many buckets, in DDP's order: what the optimizer sees, (n,)."""
        parameters = list(reversed(list(self.module.parameters())))
        per = len(parameters) // buckets
        flat, at, made = gradients.clone().to(self.dtype), 0, []
        for k in range(buckets):
            held = parameters[k * per : (k + 1) * per]
            size = sum(p.numel() for p in held)
            made.append(Bucket(k, k == buckets - 1, held, flat[at : at + size]))
            at += size
        futures = [self.hook(bucket) for bucket in made]
        return torch.cat([future.wait() for future in futures])


NUMBERS = 90 * 60 + 60 + 60 * 70 + 70


def flat_of(step: int, rank: int) -> Any:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(100 * step + rank))


def steps(group: Group, rank: int, buckets: Iterator[int], handle_rank: int = 2) -> Any:
    model = Wrapped()
    handle = LowRank(model, group, handle_rank, lane="i32")
    found = [model.backward(flat_of(k, rank), n) for k, n in enumerate(buckets)]
    return handle, found


def test_all_factors_go_in_two_rounds_whatever_the_buckets() -> None:
    """One bucket, and several of which DDP makes others after the first step: the same result."""

    def program(group: Group) -> Any:
        counted: list[int] = []
        call = group.average
        group.average = lambda v, *a, lane: counted.append(len(v)) or call(v, *a, lane=lane)  # type: ignore
        return *steps(group, group.rank, iter((4, 1, 2, 2))), counted

    several = together(Meeting(3), program)
    one = together(Meeting(3), lambda group: steps(group, group.rank, iter((1, 1, 1, 1))))
    for handle, found, counted in several:
        assert counted == [2 * 360, 3 * 360] * 4, "each begins with a fragment"
        assert all(torch.equal(a, b) for a, b in zip(found, several[0][1], strict=True))
        assert handle.figures.numbers == 4 * NUMBERS
    for k in range(4):
        torch.testing.assert_close(several[0][1][k], one[0][1][k], atol=1e-4, rtol=1e-4)
    mean = sum(flat_of(0, rank) for rank in range(3)) / 3
    torch.testing.assert_close(several[0][1][0][:70], mean[:70])  # a bias, as it is


def test_in_the_warmup_gradients_are_averaged_in_lanes() -> None:
    """What their rounding leaves over goes with the first factors: nothing of a bias is lost."""

    def program(group: Group) -> Any:
        counted: list[str] = []
        call = group.average
        group.average = lambda v, *a, lane: counted.append(lane) or call(v, *a, lane=lane)  # type: ignore
        model = Wrapped()
        handle = LowRank(model, group, 2, None, 2, "i32")
        found = [model.backward(flat_of(k, group.rank), n) for k, n in enumerate((4, 1, 2))]
        assert counted.count("i32") == 2, "the first factors are of the third step"
        late = LowRank(Wrapped(), group, 2, None, 2)
        late.warm_start.load_state_dict(handle.warm_start.state_dict())
        assert late.warm_start.steps == 2
        return found

    ranks = together(Meeting(3), program)
    for k in range(3):
        assert all(torch.equal(found[k], ranks[0][k]) for found in ranks)
    means = [sum(flat_of(k, rank) for rank in range(3)) / 3 for k in range(3)]
    for k in range(2):
        torch.testing.assert_close(ranks[0][k], means[k], atol=0.1, rtol=0)
        assert not torch.allclose(ranks[0][k], means[k], atol=1e-4, rtol=0)
    whole = sum(ranks[0]) - sum(means)
    torch.testing.assert_close(whole[:70], torch.zeros(70), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lane", ["i8", "i16", "i32"])
def test_narrow_lanes_lose_nothing(lane: str) -> None:
    """What was applied, and the mean of what is left over at the ranks, are the mean of all gradients."""

    def program(group: Group) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, lane=lane)
        found = [model.backward(flat_of(k, group.rank), 2) for k in range(12)]
        left = handle.state_dict()["error"]
        names = [name for name, _ in model.module.named_parameters()]
        return found, torch.cat([left[name].reshape(-1) for name in reversed(names)])

    ranks = together(Meeting(3), program)
    assert all(
        torch.equal(a, b) for found, _ in ranks for a, b in zip(found, ranks[0][0], strict=True)
    )
    given = sum(flat_of(k, rank) for k in range(12) for rank in range(3)) / 3
    left = sum(each for _, each in ranks) / 3
    torch.testing.assert_close(sum(ranks[0][0]) + left, given, atol=1e-4, rtol=0)
    biases = left[:70].abs().max()
    assert biases < {"i8": 0.1, "i16": 1e-3, "i32": 1e-6}[lane] and left[70:].abs().max() > 1.0
    assert biases > 1e-4 or lane != "i8"


@pytest.mark.parametrize("least", [1e-2, 1e-4])
def test_a_matrix_of_small_gradients_is_not_lost_beside_one_of_large_ones(least: float) -> None:
    """Their factors share no fragment, so in 8 bits the small one follows its gradients as it does in 32."""

    def program(group: Group, lane: str) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, lane=lane)
        found = []
        for k in range(20):
            # As DDP has them: the second layer's bias and matrix, and then the first one's.
            layers = flat_of(0, 0) + 0.3 * flat_of(k + 1, group.rank)
            layers[70 + 4200 :] *= least
            found.append(model.backward(layers, 1)[70 + 4200 + 60 :])
        return found, handle.state_dict()["error"]["0.weight"].norm()

    narrow, wide = (
        together(Meeting(2), lambda g, lane=lane: program(g, lane))[0] for lane in ("i8", "i32")
    )
    assert all(each.any() for each in narrow[0])
    assert narrow[1] < 1.2 * wide[1]


def test_a_parameter_may_have_been_frozen_and_a_script_may_have_other_defaults() -> None:
    def program(group: Group) -> Any:
        model = Wrapped()
        bias = model.module[0].bias
        bias.requires_grad_(False)
        torch.set_default_dtype(torch.float64)
        try:
            handle = LowRank(model, group, 2, lane="i32")
        finally:
            torch.set_default_dtype(torch.float32)
        bias.requires_grad_(True)
        return model.backward(flat_of(0, group.rank), 1), set(handle.state_dict()["error"])

    for found, names in together(Meeting(1), program):
        torch.testing.assert_close(found[:70], flat_of(0, 0)[:70])
        assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_loops_are_for_ranks_that_the_compiler_unrolls() -> None:
    pytest.importorskip("numba")
    large = [Matrix(1024, 1024, rank, 0) for rank in (16, 17)]
    accelerate(large)
    assert [matrix.loops is not None for matrix in large] == [True, False]


def test_a_warmup_that_is_rolled_back_goes_on() -> None:
    """All ranks load a checkpoint of the warm-up after its end: they, and a late one, average in lanes again."""

    def program(group: Group) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, None, 2)
        model.backward(flat_of(0, group.rank), 1)
        saved = handle.state_dict()
        first = [model.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        handle.load_state_dict(saved)
        again = [model.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        handle.forget()
        error = handle.state_dict()["error"]
        assert not any(each.any() for each in error.values())
        return all(torch.equal(*pair) for pair in zip(first, again, strict=True))

    assert together(Meeting(2), program) == [True, True]


def test_a_step_that_is_skipped_keeps_what_the_warmup_has_left_over() -> None:
    def program(group: Group) -> Any:
        model = Wrapped()
        handle = LowRank(model, group, 2, None, 1)
        model.backward(flat_of(0, group.rank), 1)
        left = handle.state_dict()["residual"]
        bad = flat_of(1, group.rank)
        bad[3] = float("inf")
        model.backward(bad, 1)
        error = handle.state_dict()["error"]
        return all(torch.equal(e.reshape(-1), left[name]) and e.any() for name, e in error.items())

    assert together(Meeting(2), program) == [True, True]


def test_buckets_of_a_gpu_go_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = stage(monkeypatch)

    def program(group: Group) -> Any:
        near, far = Wrapped(), Wrapped()
        for model in (near, far):
            LowRank(model, group, 2)
        gradients = flat_of(0, group.rank)
        found = far.backward(gradients.as_subclass(Far), 2)
        return torch.equal(near.backward(gradients, 2), found.as_subclass(torch.Tensor))

    assert together(Meeting(2), program) == [True, True]
    assert copied == [torch.float32] * 8  # two buckets of each rank, there and back


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("warmup_steps", [0, 1, 2, 3])
def test_a_checkpoint_goes_on_where_it_was(
    warmup_steps: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits, though an error that is asked for is computed sooner."""
    if compiled:
        pytest.importorskip("numba")
        monkeypatch.setattr(factors, "LEAST_NUMBERS", 0)

    def program(group: Group) -> Any:
        model, other = Wrapped(), Wrapped()
        handle = LowRank(model, group, 2, None, warmup_steps)
        model.backward(flat_of(0, group.rank), 1)
        saved = {k: {n: t.clone() for n, t in v.items()} for k, v in handle.state_dict().items()}
        first = [model.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        again = LowRank(other, group, 2, None, warmup_steps)
        again.load_state_dict(saved)
        second = [other.backward(flat_of(k, group.rank), 1) for k in (1, 2)]
        with pytest.raises(UsageProblem, match="that of another model or rank"):
            LowRank(Wrapped(), group, 1).load_state_dict(saved)
        return all(torch.equal(*pair) for pair in zip(first, second, strict=True))

    assert together(Meeting(2), program) == [True, True]


def test_a_checkpoint_without_residuals_of_the_rest_is_taken() -> None:
    """As they were before factors had narrow lanes."""

    def program(group: Group) -> Any:
        model, other = Wrapped(), LowRank(Wrapped(), group, 2)
        handle = LowRank(model, group, 2)
        model.backward(flat_of(0, group.rank), 1)
        other.forget()
        saved = handle.state_dict()
        biases = [name for name in saved["error"] if name.endswith("bias")]
        old = {name: each for name, each in saved["error"].items() if name not in biases}
        other.load_state_dict({**saved, "error": old})
        found = other.state_dict()["error"]
        assert all(torch.equal(found[name], each) for name, each in old.items())
        return len(biases), any(found[name].any() for name in biases)

    assert together(Meeting(2), program) == [(2, False)] * 2


def test_a_scaler_s_overflow_reaches_all_and_errors_follow_its_scale() -> None:
    class Scale:
        now = 1.0

        def get_scale(self) -> float:
            return self.now

    def program(group: Group) -> Any:
        scale, model = Scale(), Wrapped()
        handle = LowRank(model, group, 2, scale)
        model.backward(flat_of(0, group.rank), 1)
        before = handle.state_dict()["error"]
        bad = flat_of(1, group.rank)
        if group.rank == 1:
            bad[3] = float("inf")  # of a bias: no matrix knows it
        told = model.backward(bad, 1).isfinite().all().item()
        kept = all(torch.equal(t, before[n]) for n, t in handle.state_dict()["error"].items())
        scale.now = 4.0
        big = model.backward(flat_of(2, group.rank) * 4.0, 1) / 4.0
        return told, kept, big

    plain = together(Meeting(2), lambda group: _without_overflow(group))
    for (told, kept, big), expected in zip(together(Meeting(2), program), plain, strict=True):
        assert not told and kept
        torch.testing.assert_close(big, expected, atol=1e-5, rtol=1e-5)


def _without_overflow(group: Group) -> Any:
    model = Wrapped()
    LowRank(model, group, 2)
    model.backward(flat_of(0, group.rank), 1)
    return model.backward(flat_of(2, group.rank), 1)


def test_a_group_that_ends_is_an_error_out_of_every_future() -> None:
    def program(group: Group) -> Any:
        model = Wrapped()
        LowRank(model, group, 2)
        group.close()
        with pytest.raises(RuntimeError, match="the group is closed"):
            model.backward(flat_of(0, group.rank), 2)
        return True

    assert together(Meeting(2), program) == [True, True]


def test_wrong_settings_are_refused() -> None:
    for rank in (0, -1, True, 1.5):
        with pytest.raises(UsageProblem, match="rank must be a whole number from 1 on"):
            LowRank(Wrapped(), None, rank)  # type: ignore[arg-type]
    for steps_ in (-1, 2.5, True):
        with pytest.raises(UsageProblem, match="warmup_steps must be a whole number from 0 on"):
            LowRank(Wrapped(), None, 1, None, steps_)  # type: ignore[arg-type]
    with pytest.raises(UsageProblem, match=r"is torch\.float64"):
        LowRank(Wrapped(torch.float64), None, 1)  # type: ignore[arg-type]
