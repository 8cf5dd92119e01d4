# SPDX-License-Identifier: Apache-2.0
"""How the window to an aggregator follows losses, at members of whom each decides alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from nicps.protocol.exchange import window_size
from nicps.protocol.exchange.window_size import LEAST, WindowSize
from nicps.protocol.exchange.windows import RoundTrip, Window, share_of

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


def test_a_slow_host_without_losses_makes_nothing_smaller() -> None:
    """As long as a window takes less than 50 ms."""
    rates = random.Random(2)
    assert set(sizes_of(lambda _: (0.0, rates.uniform(MOST / 0.04, 1e4)), 100)) == {MOST}


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
        return stripe.find_lost(now, round_trip, 10, lambda *_: [*lost], 4)

    assert ask(1.0) == [(0, 4)] and not stripe.lost, "nothing has come"
    stripe.note_come(1.1, 5, 30, round_trip)
    assert ask(1.1, (5, 2), (9, 1)) and stripe.lost == 3
    assert ask(9.0, (6, 1), (9, 1), (25, 1)) and stripe.lost == 4


# ---- how long a window takes


def sum_rate(mbit: float) -> float:
    """Sums of others' stripes a second at a port that has as many contributions to pass on."""
    return mbit * 1e6 / (1520 * 8) / 2


def slow_line(mbit: float, hosts: int = 2) -> Line:
    """It is busy with one fragment on the way to each aggregator. Nothing is lost."""
    return lambda size: (0.0, sum_rate(mbit) / (hosts - 1))


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("mbit", [0.1, 1, 10, 20, 40])
def test_a_window_takes_about_50_ms_at_the_most(mbit: float, members: int) -> None:
    """And no less than half of that, as far as there are such sizes. Rounds take 5 % more or less."""
    sizes = sizes_of(slow_line(mbit), 200, members, most=85)
    assert sizes[0] == 85
    took_s = [size / sum_rate(mbit) / window_size.LONGEST_S for size in sizes[6:]]
    if mbit > 1:
        assert min(took_s) > 0.4 and max(took_s) < 1.06
    else:
        assert {*sizes[6:]} == {LEAST}


@pytest.mark.parametrize("hosts", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("mbit", [100, 1000])
def test_on_a_fast_line_it_stays_as_it_is(mbit: float, hosts: int) -> None:
    most = share_of(2 * (hosts - 1))
    assert set(sizes_of(slow_line(mbit, hosts), 100, hosts, most=most)) == {most}


@pytest.mark.parametrize("members", [1, 3])
def test_it_grows_once_the_line_is_fast(members: int) -> None:
    """It carries 1 Mbit/s, and after 50 rounds 1 Gbit/s."""
    rounds = iter(range(1000))
    sizes = sizes_of(
        lambda size: slow_line(1 if next(rounds) < 50 else 1000)(size), 80, members, 85
    )
    assert sizes[49] == LEAST and sizes[70:] == [85] * 10


def test_it_stays_as_it_is_where_another_program_fills_the_queue() -> None:
    """A smaller window has a smaller part of the line, and waits as long."""
    sizes = sizes_of(lambda size: (0.0, size / 0.3), 300, most=85)
    assert sizes.count(85) > 280 and set(sizes) == {85, 42}


def test_losses_on_a_slow_line_make_it_smaller_still() -> None:
    sizes = sizes_of(lambda size: (max(0.0, (size - 5) / 400), sum_rate(10)), 300, most=85)
    assert sizes.count(5) > 250


def test_a_second_of_a_slow_line_is_enough() -> None:
    """There are a few hundred fragments in it."""
    size = WindowSize(85)
    rate, sizes = sum_rate(10), [85]
    for _ in range(16):
        size.note_round(100, 0, 100 / rate)
        sizes.append(size.size)
    assert sizes == [85] * 5 + [42] * 5 + [21] * 5 + [10] * 2


def test_short_rounds_do_not_show_how_long_a_window_takes() -> None:
    """Of a few fragments, where a host is late."""
    size = WindowSize(MOST)
    for _ in range(3000):
        size.note_round(3 * (MOST - 1), 0, 0.2, stripes=3)
    assert size.size == MOST
    for _ in range(5):
        size.note_round(3 * MOST, 0, 0.2, stripes=3)
    assert size.size == MOST // 2
