# SPDX-License-Identifier: Apache-2.0
"""Means in narrow lanes without a network: vectors and sums drawn from a seed, and all that a round writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.collective import Group, GroupClosed
from nicps.collective.feedback import Form
from nicps.session.lanes import F32, LaneFormat
from nicps.session.sized import Outcome, Rest
from nicps.wire import NOT_FINITE
from tests.collectives import Meeting, together


def gradients(rank: int, steps: int, length: int) -> list[F32]:
    """That rank's, of very different sizes."""
    random = np.random.default_rng([7, rank])
    scale = 10.0 ** random.integers(-6, 3, length)
    return [(random.standard_normal(length) * scale).astype(np.float32) for _ in range(steps)]


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


def results(form: Form, length: int, width: int, seed: int) -> list[bytes]:
    """All that a round of such a form writes: own lanes and exponents, means, residual. One NaN is as good as another.

    `form` gets NumPy's arrays, and writes into them.
    """
    random = np.random.default_rng([seed, length, width])
    format = LaneFormat(length, width)
    rows, per = format.fragments, format.per_fragment
    vector = numbers(random, length, finite=False)
    residual = numbers(random, length, finite=True) * np.float32(1e-3)
    round_ = form(vector, residual, width)
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
    vector[np.isnan(vector)] = np.nan
    return [each.tobytes() for each in (*own, vector, residual)]


def checked(meeting: Meeting, program: Callable[[Group], Any]) -> list[Any]:
    """As `together`; what one has raised is raised here, unless the group is over at it, as it was lost."""
    found = together(meeting, program)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, GroupClosed):
            raise each
    return found
