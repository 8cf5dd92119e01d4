# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of factors of low rank, with PyTorch's operations and with the compiled loops."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nicps.torch import factors
from nicps.torch.factors import Matrix, accelerate, orthonormalise, pays
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


@pytest.mark.short(
    *("torch-1", "torch-2", "torch-3", "torch-4"), *("compiled-1", "compiled-2", "compiled-4")
)
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


def test_loops_are_for_ranks_that_the_compiler_unrolls() -> None:
    pytest.importorskip("numba")
    large = [Matrix(1024, 1024, rank, 0) for rank in (16, 17)]
    accelerate(large)
    assert [matrix.loops is not None for matrix in large] == [True, False]
