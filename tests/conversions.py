# SPDX-License-Identifier: Apache-2.0
"""Tests of lanes with absolute exponents run twice: with NumPy's code, and with the compiled loops."""

from __future__ import annotations

import pytest

from nicps.session import loops


@pytest.fixture(autouse=True, params=["numpy", "compiled"])
def conversion(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of them converts here, however short the vectors are."""
    kind: str = request.param
    if kind == "compiled":
        pytest.importorskip("numba")
        monkeypatch.setattr(loops, "LEAST_NUMBERS", 0)
    else:  # whatever another test has compiled
        monkeypatch.setattr(loops, "_made", dict.fromkeys((8, 16, 32)))
    return kind
