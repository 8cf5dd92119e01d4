# SPDX-License-Identifier: Apache-2.0
"""What factors of low rank give on this processor: for processes of their own, which import little."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from nicps.torch.factors import Matrix, accelerate

ROWS, COLUMNS = 60, 90


def results(threads: int) -> str:
    """A hash of what must be the same at all members; of sizes that leave a rest in every vector unit.

    Whether the matrices have compiled loops depends on `nicps.torch.factors.LEAST_NUMBERS`.
    """
    torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for rank in (1, 2, 3, 4):
        for rows, columns in ((ROWS, COLUMNS), (301, 1203), (3, 70_001)):
            random = np.random.default_rng(rank)
            matrix = Matrix(rows, columns, rank, 9)
            accelerate([matrix])
            digest.update(matrix.start.numpy().tobytes())
            assert matrix.take_basis(random.standard_normal((rank, rows), np.float32))
            value = torch.zeros(rows, columns)
            matrix.apply(random.standard_normal((rank, columns), np.float32), value, commit=True)
            digest.update(value.numpy().tobytes() + matrix.start.numpy().tobytes())
    return digest.hexdigest()
