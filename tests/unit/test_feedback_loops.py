# SPDX-License-Identifier: Apache-2.0
"""Vectors of collectives with compiled loops, and with NumPy: the same bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nicps.collective.feedback import Compressed
from nicps.collective.lanes import Floats
from nicps.session import loops
from nicps.session.lanes import F32, LaneFormat
from nicps.session.loops import Loops
from nicps.session.sized import Outcome, Rest
from nicps.wire import NOT_FINITE

pytest.importorskip("numba")


@cache
def compiled(width: int) -> Loops:
    return Loops(width)


def numbers(random: np.random.Generator, length: int, *, finite: bool) -> F32:
    """Of very different sizes, some of them zero or denormal, and few not finite."""
    found = random.standard_normal(length) * 10.0 ** random.integers(-42, 30, length)
    made = found.astype(np.float32)
    made[random.random(length) < 0.1] = -0.0
    if not finite:
        made[random.random(length) < 1e-4] = random.choice([np.nan, np.inf, -np.inf, 3.4e38])
    return made


def records(random: np.random.Generator, format: LaneFormat, rows: int) -> tuple[Any, Any]:
    """Lanes and exponents of so many fragments, some of which are not finite."""
    most = format.largest_lane
    lanes = random.integers(-most, most, (rows, format.per_fragment), endpoint=True)
    exponents = random.integers(-120, 90, rows).astype(np.int8)
    exponents[random.random(rows) < 0.2] = NOT_FINITE
    return lanes.astype(format.wire), exponents


def results(length: int, width: int, seed: int, made: dict[int, Loops | None]) -> list[bytes]:
    """All that a round writes."""
    random = np.random.default_rng([seed, length, width])
    format = LaneFormat(length, width)
    rows, per = format.fragments, format.per_fragment
    loops._made = made
    vector = numbers(random, length, finite=False)
    residual = numbers(random, length, finite=True) * np.float32(1e-3)
    round_ = Compressed(vector, residual, width, mean=bool(seed % 2))
    own: tuple[Any, Any] = np.zeros((rows, per), format.wire), np.zeros(rows, np.int8)
    for first in range(0, rows, format.batch):
        round_.write(first, min(format.batch, rows - first), *own)
    sums, exponents = records(random, format, rows)
    exponents[own[1] == NOT_FINITE] = NOT_FINITE
    first = rows // 3
    rest = None
    if seed % 3:
        left: npt.NDArray[np.int64] = random.integers(-(1 << 40), 1 << 40, (rows - first, per))
        rest = Rest(first, left, random.random(rows - first) < 0.7)
    outcome = Outcome(rows, sums, exponents, *own, 3, -60, rest, counted=seed % 4 != 0)
    with np.errstate(over="ignore"):
        round_.settle(outcome)
    return [each.tobytes() for each in (*own, vector, residual)]


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("length", [1, 359, 1440, 1441, 7000, 200_003])
def test_averages(width: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_made", {})
    for seed in range(8):
        plain = results(length, width, seed, {width: None})
        assert results(length, width, seed, {width: compiled(width)}) == plain


@pytest.mark.parametrize("length", [1, 360, 361, 200_003])
def test_sums_of_floats(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a sum is not finite."""
    found = []
    for made in (None, compiled(32)):
        monkeypatch.setattr(loops, "_made", {32: made})
        random = np.random.default_rng(length)
        format = LaneFormat(length, 32)
        rows, out = format.fragments, np.empty(length, np.float32)
        marred = np.zeros(rows, np.bool_)
        floats = Floats(numbers(random, length, finite=False), out, marred)
        own: tuple[Any, Any] = (
            np.zeros((rows, format.per_fragment), format.wire),
            np.zeros(rows, np.int8),
        )
        for first in range(0, rows, format.batch):
            floats.write(first, min(format.batch, rows - first), *own)
        sums = records(random, format, rows)
        floats.settle(Outcome(rows, *sums, *own, 2, -60))
        found.append([each.tobytes() for each in (*own, out, marred)])
    assert found[0] == found[1]


def test_short_vectors_use_loops_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for them."""
    monkeypatch.setattr(loops, "_made", {})
    short = LaneFormat(5, 16)
    assert loops.loops_for(short) is None
    monkeypatch.setitem(loops._made, 16, compiled(16))
    assert loops.loops_for(short) is compiled(16)
