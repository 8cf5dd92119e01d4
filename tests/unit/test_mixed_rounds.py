# SPDX-License-Identifier: Apache-2.0
"""A job that is checked after each of its scenes: what was looked at is not compared again, if it is as it was."""

from __future__ import annotations

import numpy as np
import pytest

from tests import mixed_rounds
from tests.mixed_rounds import Checked, check
from tests.unit.test_striped_reference import LISTS, Rounds, saved_rounds

WIDTH = 16


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """Six rounds, of which all but the last two are kept."""
    monkeypatch.setattr(mixed_rounds, "_LAST", 2)
    return saved_rounds(WIDTH)


def first(rounds: Rounds, count: int) -> Rounds:
    """The maps are new ones in each check."""
    return {
        round_: (dict(offers), dict(sums))
        for round_, (offers, sums) in rounds.items()
        if round_ <= count
    }


def damaged(rounds: Rounds, round_: int) -> None:
    """A member has saved that sum anew."""
    sums = rounds[round_][1]
    total = sums[3]["total"].copy()
    total.view(np.uint32)[5] ^= 1
    sums[3] = sums[3] | {"total": total}


def test_it_goes_on_to_what_it_is_from_the_beginning(rounds: Rounds) -> None:
    """Residuals go on, and end with a life."""
    checked = Checked()
    for count in (0, 1, 3, 3, 5, 6, 2, 6):
        here = first(rounds, count)
        assert check(WIDTH, here, None, checked) == check(WIDTH, here)
        assert [*checked.rounds] == [*range(1, count - 1)]
    assert checked.gradients.total() == sum(map(len, LISTS[:4]))


@pytest.mark.parametrize("round_", [1, 3, 5, 6])
def test_what_changes_is_seen(rounds: Rounds, round_: int) -> None:
    """In a round that was looked at, and in one that is new."""
    checked = Checked()
    check(WIDTH, first(rounds, 5), None, checked)
    damaged(rounds, round_)
    with pytest.raises(AssertionError):
        check(WIDTH, first(rounds, 6), None, checked)


def test_what_comes_late_is_seen(rounds: Rounds) -> None:
    """A host that stood still saves its sum of an early round, in which it was not counted, after the others."""
    checked = Checked()
    late = rounds[3][1].pop(3)
    check(WIDTH, first(rounds, 5), None, checked)
    rounds[3][1][3] = late
    check(WIDTH, first(rounds, 5), None, checked)
    damaged(rounds, 3)
    with pytest.raises(AssertionError):
        check(WIDTH, first(rounds, 5), None, checked)


def test_a_round_that_is_kept_is_not_compared_again(rounds: Rounds) -> None:
    checked = Checked()
    check(WIDTH, first(rounds, 5), None, checked)
    rounds[1][1][3]["total"][:] = 7
    check(WIDTH, first(rounds, 6), None, checked)


def test_another_boot_of_a_view_begins_anew(rounds: Rounds) -> None:
    checked = Checked()
    check(WIDTH, first(rounds, 5), {1: 1}, checked)
    assert checked.begins(first(rounds, 6), {1: 1, 2: 2})
    assert not checked.begins(first(rounds, 6), {1: 2})
    assert not checked.begins(first(rounds, 6), None)
