# SPDX-License-Identifier: Apache-2.0
"""Percentages that stand side by side are 100 together."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nicps.need_first import Plan
from trainer.channels import _shares
from trainer.percents import percents
from trainer.report import _hosts


@pytest.mark.parametrize(
    ("parts", "digits", "expected"),
    [
        ([0.335, 0.335, 0.33], 0, ["34%", "33%", "33%"]),
        ([0.996, 0.004], 1, ["99.6%", "0.4%"]),
        ([1, 1, 1], 0, ["34%", "33%", "33%"]),
        ([2, 0], 0, ["100%", "0%"]),
        ([0.0, 0.0], 0, ["0%", "0%"]),
        ([], 0, []),
    ],
)
def test_what_is_written(parts: list[float], digits: int, expected: list[str]) -> None:
    assert percents(parts, digits) == expected


@given(
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=8), st.integers(0, 2)
)
def test_they_are_100_together_and_each_is_near(parts: list[float], digits: int) -> None:
    found = [float(each.removesuffix("%")) for each in percents(parts, digits)]
    if sum(parts) > 0:
        assert sum(found) == pytest.approx(100)
        for part, shown in zip(parts, found, strict=True):
            assert abs(100 * part / sum(parts) - shown) < 10**-digits + 1e-6


def test_members_that_were_last_to_offer() -> None:
    """Two of three named: their parts are of all."""
    assert _shares(Counter({1: 67, 2: 67, 3: 66}), {1: "h1", 2: "h2", 3: "h3"})[:2] == [
        "h1 34%",
        "h2 33%",
    ]


def test_what_a_host_has_spent_its_time_with() -> None:
    seconds = {"compute": 33.5, "wait": 33.5, "network": 33.0}
    host: Any = SimpleNamespace(
        name="h1", number=1, rounds=[], token=[], agent={}, seconds=seconds.get, final={}
    )
    run: Any = SimpleNamespace(hosts=[host], served=False, result={})
    assert "34% / 33% / 33%" in _hosts(run)


def test_the_bytes_of_a_plans_channels() -> None:
    plan = Plan((335, 670, 1000), (2, 1, 0), 1.0, 1.0)
    assert percents(plan.shares) == ["33%", "34%", "33%"]
