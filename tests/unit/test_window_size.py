# SPDX-License-Identifier: Apache-2.0
"""How the window to an aggregator follows losses, at members of whom each decides alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from nicps.protocol.exchange import window_size
from nicps.protocol.exchange.window_size import LEAST, WindowSize
from nicps.protocol.exchange.windows import RoundTrip, Window

pytestmark = pytest.mark.unit

MOST, FRAGMENTS = 28, 5000
#: The part that is lost, and how many come a second, in a window of that size.
Line = Callable[[int], tuple[float, float]]


def sizes_of(
    line: Line, rounds: int, members: int = 1, most: int = MOST, seed: int = 1
) -> list[int]:
    """The window of all, round by round: the smallest. Whoever has proposed another one does not judge the round."""
    odds, windows = random.Random(seed), [WindowSize(most) for _ in range(members)]
    found = []
    for _ in range(rounds):
        size = min(each.size for each in windows)
        found.append(size)
        loss, rate = line(size)
        for each in [each for each in windows if each.size == size]:
            expected = FRAGMENTS * loss
            lost = max(0, round(odds.gauss(expected, math.sqrt(expected * (1 - loss)))))
            took_s = FRAGMENTS / rate * odds.uniform(0.95, 1.05)
            each.note_round(FRAGMENTS, lost, took_s)
    return found


def short_queue(room: int) -> Line:
    """A queue that loses nothing of windows up to that size. The line is busy from 4 on."""
    return lambda size: (max(0.0, (size - room) / 400), 1e4 * min(1.0, size / 4))


@pytest.mark.parametrize("members", [1, 3, 63])
@pytest.mark.parametrize("room", [7, 14])
def test_it_becomes_as_small_as_a_short_queue_needs(room: int, members: int) -> None:
    sizes = sizes_of(short_queue(room), 300, members)
    assert sizes[0] == MOST and sizes[8] == room
    assert sum(size > room for size in sizes) < 30, "to find out whether it may be larger"
    assert sizes.count(room) > 250, "and it is never smaller"


def test_it_is_no_smaller_than_what_keeps_the_line_busy() -> None:
    """A queue of one frame."""
    sizes = sizes_of(lambda size: ((size / 120) ** 1.3, 1e4 * min(1.0, size / 7)), 300)
    assert sizes.count(7) > 200
    assert sizes.count(3) < 10


def test_two_hosts_begin_with_a_large_one() -> None:
    assert sizes_of(short_queue(11), 100, 2, most=85)[8] == 10


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("loss", [0.01, 0.05, 0.34])
def test_of_a_bad_line_it_stays_as_it_is(loss: float, members: int) -> None:
    """A third of all fragments show a gap where each port loses 5 %."""
    for seed in range(5):
        sizes = sizes_of(lambda _: (loss, 1e4), 300, members, seed=seed)
        assert sizes.count(MOST) > 200, "but for trials"


def test_a_slow_host_or_line_without_losses_makes_nothing_smaller() -> None:
    rates = random.Random(2)
    assert set(sizes_of(lambda _: (0.0, rates.uniform(100, 1e4)), 100)) == {MOST}


def test_few_lost_ones_make_nothing_smaller() -> None:
    assert set(sizes_of(lambda _: (0.0005, 1e4), 300)) == {MOST}


@pytest.mark.parametrize("members", [1, 3])
def test_it_grows_once_there_is_room(members: int) -> None:
    """Another program has had the queue for itself, for 50 rounds."""
    rounds = iter(range(1000))
    sizes = sizes_of(lambda size: short_queue(7 if next(rounds) < 50 else 100)(size), 600, members)
    assert sizes[45] == 7 and sizes[-1] == MOST


def test_trials_become_rare() -> None:
    """One that fails costs a round."""
    sizes = sizes_of(short_queue(7), 1000)
    assert sum(size > 7 for size in sizes[500:]) <= 6


def test_small_rounds_are_judged_together() -> None:
    size = WindowSize(MOST)
    for _ in range(window_size.ENOUGH // 8 - 1):
        size.note_round(8, 2, 0.001)
    assert size.size == MOST
    size.note_round(8, 2, 0.001)
    assert size.size == MOST // 2


def test_there_is_always_a_window() -> None:
    size = WindowSize(MOST)
    for divisor in range(1, 40):
        size.note_round(FRAGMENTS, FRAGMENTS // 2**divisor * 2 + 10, 0.1)
        assert LEAST <= size.size <= MOST


def test_what_is_asked_for_twice_is_lost_once_and_what_is_only_late_is_not_lost() -> None:
    """Three fragments are asked for as later ones have come, two of them again after a time-out, with another one."""
    stripe, round_trip = Window.begin(1, 0, 100), RoundTrip(0.008)
    stripe.sent, stripe.due = 60, 1.0

    def ask(now: float, *lost: tuple[int, int]) -> list[tuple[int, int]]:
        return stripe.find_lost(now, round_trip, 10, lambda *_: [*lost])

    assert ask(1.0) == [(0, 4)] and not stripe.lost, "nothing has come"
    stripe.note_come(1.1, 5, 30, round_trip)
    assert ask(1.1, (5, 2), (9, 1)) and stripe.lost == 3
    assert ask(9.0, (6, 1), (9, 1), (25, 1)) and stripe.lost == 4
