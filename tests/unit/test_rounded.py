# SPDX-License-Identifier: Apache-2.0
"""The models of stripes and of a Linux switch round sums by one rule (tests/rounded.py)."""

from __future__ import annotations

import pytest

from tests import rounded
from tests.rounded import CASES, RESTS, ROUND, Case, Rest
from tests.stripes import I64


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stripes(case: Case) -> None:
    model = rounded.stripes_model(case)
    outcomes = [model.run(frame) for frame in rounded.stripes_frames(case)]
    rounded.agrees(case, outcomes, model.gathers[ROUND & 1, 0].total)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_switch(case: Case) -> None:
    model = rounded.switch_model(case)
    outcomes = [model.run(frame) for frame in rounded.switch_frames(case)]
    place = model.places[0][0]
    assert place is not None
    rounded.agrees(case, outcomes, place.total)


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_what_a_switch_adds_of_the_round_before(rest: Rest) -> None:
    model = rounded.switch_model(rest.case)

    def left() -> I64:
        place = model.places[0][1]
        assert place is not None
        return place.total

    rounded.check_rest(rest, model.run, left)


def test_the_cases_reach_what_they_are_for() -> None:
    """Sums that are cut down, remainders of both signs, and each reason to leave one out."""
    shifts = {case.expected().exponent - case.unit for case in CASES}
    assert {0, 1} <= shifts and max(shifts) > 50
    assert any(min(case.expected().rest) < 0 < max(case.expected().rest) for case in CASES)
    assert any(rest.carried() is None for rest in RESTS)
    assert any(any(rest.carried() or []) for rest in RESTS)
