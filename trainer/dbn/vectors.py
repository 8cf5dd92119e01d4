# SPDX-License-Identifier: Apache-2.0
"""Parameters as one vector, and means of vectors that do not depend on the order in which they come.

A number travels as float32. For the sum it becomes a whole multiple of 2**-32, and is added as a 64-bit integer.
Sums of integers are exact, so workers may end in any order, and be added in any grouping: the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.errors import JobError

Vector = npt.NDArray[np.float32]
Sum = npt.NDArray[np.int64]
Shape = tuple[int, ...]

UNIT = 2.0**-32  # what is smaller is rounded
LARGEST = 1024.0  # of a number's magnitude
MOST_SAMPLES = (
    1 << 20
)  # all numbers of that magnitude together: 2**10 * 2**32 * 2**20 = 2**62 units


def pack(parts: Iterable[Tensor]) -> Vector:
    """All parts, one after the other, each in the order of its rows."""
    return np.concatenate([part.detach().numpy().ravel() for part in parts]).astype(
        np.float32, copy=False
    )


def unpack(vector: Vector, shapes: Sequence[Shape]) -> list[Tensor]:
    """Tensors of these shapes, in memory of their own: so how it is aligned depends on nothing else."""
    parts, at = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(torch.tensor(vector[at : at + size]).reshape(shape))
        at += size
    if at != len(vector):
        raise ValueError(f"{len(vector)} numbers for shapes of {at}")
    return parts


@dataclass(frozen=True)
class Update:
    """What a worker returns."""

    vector: Vector  # parameters, and velocity where it is averaged
    samples: int  # its weight in the mean
    error: float  # summed over the samples


@dataclass(frozen=True)
class Means:
    """The mean of the workers' vectors, and the mean before it, if there was one."""

    last: Vector
    previous: Vector | None


@dataclass
class Mean:
    """The mean of updates, weighted by their samples (H1): exact up to units of 2**-32, in whatever order they come."""

    total: Sum | None = None
    samples: int = 0
    errors: list[float] = field(default_factory=list)

    def add(self, update: Update) -> None:
        """Count an update.

        Raises:
            JobError: a number is not finite, or too large; or there are too many samples.
        """
        self._check(update.samples)
        largest = float(np.abs(update.vector).max(initial=0.0))
        if not largest < LARGEST:
            raise JobError(
                f"training diverges: a parameter is {largest:.4g}; lower the learning rate"
            )
        units = np.multiply(update.vector, 1 / UNIT, dtype=np.float64)
        part = np.rint(units, out=units).astype(np.int64)
        part *= update.samples
        self.merge(Mean(part, update.samples, [update.error]))

    def merge(self, other: Mean) -> None:
        """Count what another mean, which is not used any more, has counted.

        Raises:
            JobError: there are too many samples.
        """
        self._check(other.samples)
        if self.total is None:
            self.total = other.total
        elif other.total is not None:
            np.add(self.total, other.total, out=self.total)
        self.samples += other.samples
        self.errors += other.errors

    def _check(self, more: int) -> None:
        if self.samples + more > MOST_SAMPLES:
            raise JobError(f"a mean takes at most {MOST_SAMPLES} samples: more --averages a pass")

    @property
    def vector(self) -> Vector:
        """The mean."""
        assert self.total is not None and self.samples
        return (self.total * (UNIT / self.samples)).astype(np.float32)

    @property
    def error(self) -> float:
        """Of a sample. The sum is rounded once (`math.fsum`), so its order does not matter either."""
        return math.fsum(self.errors) / self.samples


def ahead(mean: Vector, previous: Vector | None, momentum: float, size: int) -> Vector:
    """From where workers start: the mean, moved on in the direction in which means have moved.

    mean + momentum * (mean - previous) is Nesterov's momentum on the sequence of means: blockwise model-update
    filtering (Chen, Huo, Scalable training of deep learning machines by incremental block training with
    intra-block parallel optimization and blockwise model-update filtering, ICASSP 2016), with a block learning
    rate of 1. With a momentum of 0 it is the plain mean (H1).

    Args:
        size: only so many numbers are moved: what follows them are velocities.
    """
    if previous is None or momentum == 0.0:
        return mean
    moved = mean.copy()
    moved[:size] += np.float32(momentum) * (mean[:size] - previous[:size])
    return moved
