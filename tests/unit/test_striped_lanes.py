# SPDX-License-Identifier: Apache-2.0
"""Lanes with absolute exponents, both ways, and the bound of the exponents, against `tests/striped_reference.py`."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from nicps.errors import NonFinite
from nicps.session.absolute import (
    LEAST_EXPONENT,
    AbsoluteQuantiser,
    AbsoluteSummer,
    largest_finite,
)
from nicps.session.lanes import BATCH_VALUES, LaneFormat, Quantiser, Residual
from nicps.session.loops import loops_for
from nicps.wire import NOT_FINITE
from tests import striped_reference as reference
from tests.conversions import conversion  # noqa: F401

WIDTHS = (32, 16, 8)
F32 = reference.F32
MOST = float(np.finfo(np.float32).max)


class Converted:
    """A quantiser with what it has written."""

    def __init__(self, lanes: int, width: int) -> None:
        self.format = LaneFormat(lanes, width)
        self.residual = Residual(self.format)
        self.quantiser = AbsoluteQuantiser(self.format, self.residual)
        self.quantiser.loops = loops_for(self.format)
        shape = (self.format.fragments, self.format.per_fragment)
        self.lanes = np.full(shape, 99, self.format.wire)
        self.exponents = np.full(shape[0], 99, np.int8)

    def convert(self, vector: F32, batch: int = 1 << 30) -> None:
        """In batches, the last one first."""
        self.vector = vector
        self.quantiser.begin()
        count = min(batch, self.format.batch)
        for first in reversed(range(0, self.format.fragments, count)):
            now = min(count, self.format.fragments - first)
            self.quantiser.batch(vector, first, now, self.lanes, self.exponents)

    def keep(self, *lost: int) -> None:
        gone = np.isin(np.arange(self.format.fragments), lost) | (self.exponents == NOT_FINITE)
        self.quantiser.keep(self.vector, self.lanes, self.exponents, gone)

    @property
    def highest(self) -> int:
        """The largest exponent of a finite fragment."""
        finite = self.exponents[self.exponents != NOT_FINITE]
        return int(finite.max()) if len(finite) else LEAST_EXPONENT

    def read(self) -> F32:
        out = np.full(self.format.lanes, 5, np.float32)
        summer = AbsoluteSummer(self.format)
        summer.loops = loops_for(self.format)
        for first in range(0, self.format.fragments, self.format.batch):
            now = min(self.format.batch, self.format.fragments - first)
            summer.batch(self.lanes, self.exponents, first, now, out)
        return out


def scales(rng: np.random.Generator, lanes: int) -> F32:
    """Numbers of very different sizes, a range of them alike."""
    each = np.repeat(2.0 ** rng.uniform(-140, 60, -(-lanes // 500)), 500)[:lanes]
    return (rng.standard_normal(lanes) * each).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lanes", [1, 359, 1440, 5003])
def test_it_is_what_the_reference_says(width: int, lanes: int) -> None:
    rng = np.random.default_rng(lanes * width)
    found, member = Converted(lanes, width), reference.Member(width, np.zeros(lanes, np.float32))
    for round_ in range(6):
        vector = scales(rng, lanes)
        if round_ in (2, 3) and lanes > 1000:
            vector[[3, -1]] = np.nan, -np.inf
        found.convert(vector, batch=3)
        pieces = member.convert(vector)
        assert found.exponents.tolist() == [piece.exponent for piece in pieces]
        whole = np.concatenate([piece.lanes for piece in pieces])
        assert (found.lanes.reshape(-1)[:lanes] == whole).all()
        assert not found.lanes.reshape(-1)[lanes:].any()
        values = np.concatenate([piece.values() for piece in pieces])
        assert (found.read().view(np.uint32) == values.view(np.uint32)).all()
        if round_ % 2:
            continue  # not counted
        found.keep()
        member.counted(pieces)
        kept = found.residual.kept
        assert (kept[:lanes].view(np.uint32) == member.residual.view(np.uint32)).all()
        assert not kept[lanes:].any() and np.isfinite(kept).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_smallest_exponent(width: int) -> None:
    """A lane's end, one float32 above it, and the ends of float32."""
    found = Converted(1, width)
    for x in (-120, -119, -1, 0, 1, 90):
        end = np.float32(reference.LARGEST[width] * 2.0**x)
        for value, exponent in ((end, x), (np.nextafter(end, np.float32(np.inf)), x + 1)):
            found.convert(np.array([value], np.float32))
            assert found.exponents[0] == exponent
            found.convert(np.array([-value], np.float32))
            assert found.exponents[0] == exponent
    for value in (0.0, 1e-45, -1e-38):
        found.convert(np.array([value], np.float32))
        assert found.exponents[0] == -120


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_numbers(width: int) -> None:
    """They are sent if they are finite once rounded, and what is kept of them always is."""
    found = Converted(2, width)
    found.convert(np.array([MOST, -MOST], np.float32))
    found.keep()
    assert (found.exponents[0] == NOT_FINITE) == (width < 32), "24 bits need no rounding there"
    assert not found.residual.kept.any()
    vector = np.array([0.99 * MOST, -0.98 * MOST], np.float32)
    found.convert(vector)
    found.keep()
    assert found.exponents[0] <= 122 and np.isfinite(found.read()).all()
    assert (found.read().astype(np.float64) + found.residual.kept[:2] == vector).all()
    found.residual.kept[0] = 1e38
    found.convert(vector)  # together too large
    assert found.exponents[0] == NOT_FINITE and not found.lanes.any()


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_not_finite_leaves_the_residual_alone(width: int) -> None:
    """The fragment's own, and where the sum is not finite; and only those fragments'."""
    found = Converted(3 * 1440, width)
    per, rng = found.format.per_fragment, np.random.default_rng(1)
    vector = rng.standard_normal(found.format.lanes).astype(np.float32)
    vector[::2] *= np.float32(1e-5)
    found.convert(vector)
    found.keep()
    before = found.residual.kept.copy().reshape(-1, per)
    assert before.any(axis=1).all()
    for bad in (np.nan, np.inf, -np.inf):
        worse = vector.copy()
        worse[per + 3] = bad
        found.convert(worse)
        assert found.exponents[1] == NOT_FINITE and not found.lanes[1].any()
    found.keep(2)
    after = found.residual.kept.reshape(-1, per)
    same = (before == after).all(axis=1)
    assert same[1] and same[2] and not same[0]
    values = found.read().reshape(-1, per)
    assert np.isnan(values[1]).all() and np.isfinite(values[[0, 2]]).all()


# ---- the bound


@pytest.mark.parametrize("width", WIDTHS)
def test_no_exponent_is_above_the_bound(width: int) -> None:
    """Whatever the numbers are, whichever vectors count, and whatever is added to the residual meanwhile."""
    rng = np.random.default_rng(width)
    met = set()
    for _ in range(40):
        found = Converted(int(rng.integers(1, 4000)), width)
        fragments = found.format.fragments
        for _ in range(25):
            vector = rng.standard_normal(found.format.lanes) * 2.0 ** rng.uniform(-150, 10)
            kind = str(rng.choice(["plain", "sparse", "huge", "not finite", "zeros", "one size"]))
            if kind == "sparse":
                vector *= rng.random(len(vector)) < 0.001
            elif kind == "huge":
                vector[rng.integers(len(vector))] = MOST * rng.uniform(0.5, 1) * rng.choice([-1, 1])
            elif kind == "not finite":
                vector[rng.integers(len(vector), size=2)] = rng.choice([np.nan, np.inf, -np.inf])
            elif kind == "zeros":
                vector[:] = 0
            elif kind == "one size":
                vector[:] = reference.LARGEST[width] * 2.0 ** rng.integers(-60, 20)
            as_float = vector.astype(np.float32)
            bound = found.quantiser.bound(as_float)
            found.convert(as_float)
            assert found.highest <= bound <= 122, kind
            met.add((kind, bound == found.highest))
            if rng.random() < 0.7:
                found.keep(*rng.choice(fragments, rng.integers(2)))
            if rng.random() < 0.5:
                first = int(rng.integers(fragments))
                exponents = rng.integers(-40, 8, fragments - first).astype(np.int8)
                unit = int(exponents.min())
                step = np.int64(1) << (exponents.astype(np.int64) - unit)[:, None]
                rest = rng.integers(1 - step, step, (len(exponents), found.format.per_fragment))
                used = rng.random(len(exponents)) < 0.7
                found.quantiser.add(first, rest, exponents, used, unit)
            assert np.abs(found.residual.kept).max() <= found.residual.limit
    assert len(met) > 8


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bound_is_near(width: int) -> None:
    """Of n numbers alike it is at most log2(n) / 2 and a bit too large."""
    found = Converted(20_000, width)
    rng = np.random.default_rng(1)
    for _ in range(5):
        vector = rng.uniform(-1, 1, found.format.lanes).astype(np.float32)
        bound = found.quantiser.bound(vector)
        found.convert(vector)
        found.keep()
        assert bound - found.highest <= 8
    assert found.quantiser.bound(np.zeros(found.format.lanes, np.float32)) < found.highest


@pytest.mark.parametrize("width", WIDTHS)
def test_what_leaves_nothing_over_is_not_in_the_bound(width: int) -> None:
    """A fragment that was lost, and the remainders of a sum that was not rounded: there are none."""
    found = Converted(20_000, width)
    per, rng = found.format.per_fragment, np.random.default_rng(2)
    vector = rng.uniform(-1, 1, found.format.lanes).astype(np.float32)
    found.convert(vector)
    found.keep()
    near = found.quantiser.bound(vector)
    huge = vector.copy()
    huge[per] = 2.0**100
    found.convert(huge)
    found.keep(1)
    assert found.quantiser.bound(vector) == near
    exponents, used = np.full(3, 60, np.int8), np.ones(3, np.bool_)
    found.quantiser.add(2, np.zeros((3, per), np.int64), exponents, used, 60)
    assert found.quantiser.bound(vector) == near


def test_a_residual_of_another_exchange_is_in_the_bound() -> None:
    """Its largest magnitude is found out; afterwards it is known again."""
    found = Converted(720, 16)
    quantiser = Quantiser(found.format, found.residual)
    vector = np.full(720, 1.4, np.float32)
    quantiser.batch(vector, 0, 0, np.empty((1, 1440), np.uint8), np.empty(1, np.uint8))
    quantiser.keep()
    assert math.isinf(found.residual.limit) and found.residual.kept[0] == vector[0] - 1
    zeros = np.zeros(720, np.float32)
    bound = found.quantiser.bound(zeros)
    found.convert(zeros)
    assert bound == found.highest == -16
    assert found.read()[0] == pytest.approx(0.4, abs=1e-5)


def test_a_vector_that_must_be_finite() -> None:
    found = Converted(100, 16)
    vector = np.ones(100, np.float32)
    vector[7] = np.inf
    with pytest.raises(NonFinite) as error:
        found.quantiser.bound(vector, finite=True)
    assert error.value.index == 7
    assert found.quantiser.bound(vector) >= -14
    vector[7] = MOST
    assert found.quantiser.bound(vector, finite=True) == 114, "its square is not, but it is"


@pytest.mark.parametrize("width", WIDTHS)
def test_reading_a_value_beyond_float32(width: int) -> None:
    found = Converted(3, width)
    found.lanes[0, :3] = 2 ** (width - 1) - 1, -(2 ** (width - 1)), 0
    found.exponents[0] = 126
    assert found.read().tolist() == [math.inf, -math.inf, 0.0]


@pytest.mark.parametrize("place", [3, BATCH_VALUES, 2 * BATCH_VALUES + 5])
def test_the_largest_number_of_a_vector_whose_norm_says_nothing(place: int) -> None:
    """Too small, or infinite: in any piece."""
    for value, others in ((2.0**-60, 0.0), (MOST, np.inf), (2.0**100, -np.inf)):
        vector = np.full(2 * BATCH_VALUES + 9, others, np.float32)
        vector[place] = -value
        assert largest_finite(vector) == value
    assert largest_finite(np.full(9, np.nan, np.float32)) == 0.0
    assert largest_finite(np.zeros(0, np.float32)) == 0.0


def test_a_residual_that_is_still_zero_takes_no_memory_to_look_at() -> None:
    """Each channel's thread would keep what it has taken: eight channels had 16 % more memory than one."""
    vector = np.zeros(30 * BATCH_VALUES, np.float32)
    tracemalloc.start()
    try:
        largest_finite(vector)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 3 * 4 * BATCH_VALUES
