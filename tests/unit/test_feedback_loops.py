# SPDX-License-Identifier: Apache-2.0
"""Vectors of collectives with compiled loops, and with NumPy: the same bits."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from nicps.collective.feedback import Compressed
from nicps.collective.lanes import Floats
from nicps.session import loops
from nicps.session.lanes import LaneFormat
from nicps.session.loops import Loops
from nicps.session.sized import Outcome
from tests.averages import numbers, records, results

pytest.importorskip("numba")


@cache
def compiled(width: int) -> Loops:
    return Loops(width)


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("length", [1, 359, 1440, 1441, 7000, 200_003])
def test_averages(width: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8):
        found, form = [], partial(Compressed, mean=bool(seed % 2))
        for made in (None, compiled(width)):
            monkeypatch.setattr(loops, "_made", {width: made})
            found.append(results(form, length, width, seed))
        assert found[0] == found[1]


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
