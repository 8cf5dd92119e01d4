# SPDX-License-Identifier: Apache-2.0
"""Jobs whose steps take several rounds, under seeded schedules of faults.

A seed that fails names itself: `python -m tests.simulator --seed N --steps --trace 200`.
"""

from __future__ import annotations

from typing import Any

import pytest

from nicps.job.course import Course
from tests.simulator.drill import run

pytestmark = pytest.mark.unit


@pytest.mark.short("0")
@pytest.mark.parametrize("first", [0, 15])
def test_seeds(first: int) -> None:
    """Nothing but a member that leaves interrupts a step; what is saved is the state between two."""
    assert run(range(first, first + 15), steps=True)["done"] >= 8


@pytest.mark.long
@pytest.mark.parametrize("first", range(20_000, 20_500, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25), steps=True)


def test_two_hosts_of_which_one_may_go_on_alone() -> None:
    run(range(30), hosts=2, steps=True)


def test_the_simulator_finds_a_lead_that_takes_every_round_for_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged = Course.round_judged

    def mistaken(self: Course, round_: int, what: str, **more: Any) -> Any:
        return judged(self, round_, "continue" if what == "more" else what, **more)

    monkeypatch.setattr(Course, "round_judged", mistaken)
    with pytest.raises(AssertionError, match="in the middle of a step"):
        run(range(40), steps=True)
