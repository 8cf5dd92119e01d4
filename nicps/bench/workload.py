# SPDX-License-Identifier: Apache-2.0
"""The tensors of the all-reduce benchmark: random, different on every host, the same for both engines."""

from __future__ import annotations

import hashlib

import numpy as np

from nicps.session.lanes import F32

_PIECE = 1 << 20


def tensor(number: int, params: int) -> F32:
    """Standard normal float32 (params,) of host `number`."""
    return np.random.default_rng(number).standard_normal(params, dtype=np.float32)


def worst_error(result: F32, hosts: int) -> float:
    """Largest distance of `result` from the sum of all hosts' tensors, in float64."""
    generators = [np.random.default_rng(number) for number in range(1, hosts + 1)]
    worst = 0.0
    for at in range(0, len(result), _PIECE):
        part = result[at : at + _PIECE]
        exact = sum(
            g.standard_normal(len(part), dtype=np.float32).astype(np.float64) for g in generators
        )
        worst = max(worst, float(np.abs(part - exact).max()))
    return worst


def digest(result: F32) -> str:
    """SHA-256 of the bytes: the same on all hosts, or the sum is wrong somewhere."""
    return hashlib.sha256(result.data).hexdigest()
