# SPDX-License-Identifier: Apache-2.0
"""The size of a round's window in the exchange `stripes` (docs/stripes.md), at one member."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps.protocol import SendFragments
from nicps.protocol.exchange import StripesExchanger, exchanger_of
from tests.striped_member import (
    CONVERSION,
    FRAGMENTS,
    PHASE,
    ROUND,
    TIMINGS,
    VIEW,
    WINDOW,
    Kernel,
    closed,
    member,
    only,
)


def lossy_round(
    part: StripesExchanger, kernel: Kernel, lost: set[int], took_s: float = 1.0
) -> tuple[int, int]:
    """A round of member 2: the fragments of its first windows to members 4 and 1. `lost` are asked for, and come."""
    part.open(ROUND)
    part.agree_on(part.proposed_window)
    part.conversion, kernel.sums, kernel.next_ = CONVERSION, set(), {}
    first = only(part.on_token(0.0, closed(1, 2, 4)))
    kernel.next_ = {4: 3000, 1: 1000}
    kernel.sums = {*range(FRAGMENTS)} - lost
    asked = [a for a in part.advance(0.9 * took_s) if isinstance(a, SendFragments) and a.asks]
    assert bool(asked) == bool(lost)
    kernel.sums = {*range(FRAGMENTS)}
    assert part.advance(took_s) == []
    (_, to_4), (_, to_1) = first.ranges
    return to_4, to_1


LOST = {*range(2000, 2900, 10)}  # of the 2,000 fragments of others


def test_the_windows_of_a_member_that_loses_much_become_smaller_after_some_rounds() -> None:
    """Three of these are judged together."""
    kernel = Kernel()
    part = member(kernel=kernel)
    assert [lossy_round(part, kernel, LOST) for _ in range(3)] == [(WINDOW, WINDOW)] * 3
    assert [lossy_round(part, kernel, set()) for _ in range(9)] == [(WINDOW // 2, WINDOW // 2)] * 9


def test_and_larger_again_if_they_lose_as_much_or_take_longer() -> None:
    for lost, took_s in ((LOST, 1.0), (set[int](), 2.0)):
        kernel = Kernel()
        part = member(kernel=kernel)
        for _ in range(3):
            lossy_round(part, kernel, LOST)
        for _ in range(3):
            assert lossy_round(part, kernel, lost, took_s) == (WINDOW // 2, WINDOW // 2)
        assert lossy_round(part, kernel, lost) == (WINDOW, WINDOW)


def test_the_windows_are_smaller_on_a_slow_line() -> None:
    """A stripe of a thousand fragments in two seconds: a window takes 84 ms, and half of one 42 ms."""
    kernel = Kernel()
    part = member(kernel=kernel)
    windows = [lossy_round(part, kernel, set(), took_s=2.0) for _ in range(20)]
    assert windows == [(WINDOW, WINDOW)] + [(WINDOW // 2, WINDOW // 2)] * 19


def test_all_members_have_the_least_window_that_one_has_proposed() -> None:
    """And while none is known, the one before. A round with another's window shows nothing of the own one."""
    kernel = Kernel()
    part = member(kernel=kernel)
    windows = []
    for agreed in (9, 0, 9, 0, 200):
        part.open(ROUND)
        part.agree_on(agreed)
        part.conversion, kernel.sums, kernel.next_ = CONVERSION, set(), {}
        action = only(part.on_token(0.0, closed(1, 2, 4)))
        windows.append(action.ranges[0][1])
        kernel.next_, kernel.sums = {4: 3000, 1: 1000}, {*range(FRAGMENTS)} - LOST
        part.advance(0.5)
        part.agree_on(3)  # it has begun
        kernel.sums = {*range(FRAGMENTS)}
        part.advance(1.0)
        assert part.proposed_window == WINDOW
    assert windows == [9, 9, 9, 9, WINDOW]


def test_the_agent_is_woken_as_often_as_the_rounds_window_needs() -> None:
    """In a small round after half a window, so before the others of it have used up theirs."""
    part = member(kernel=Kernel())
    part.open(ROUND)
    assert part.clock == max(WINDOW // 2, FRAGMENTS // 32)
    part.agree_on(2)
    part.on_token(0.0, closed(1, 2, 4))
    assert part.clock == 256 * 2 // WINDOW
    phase = replace(PHASE, fragments=12, last_fragments=12)
    small = exchanger_of(phase, VIEW, 2, Kernel(), TIMINGS, 0.0)
    small.open(ROUND)
    assert small.clock == WINDOW // 2
    small.agree_on(2)
    small.on_token(0.0, closed(1, 2, 4))
    assert small.clock == 1


@pytest.mark.parametrize(("window", "clock"), [(WINDOW, 256), (21, 128), (3, 18), (2, 12), (1, 6)])
def test_in_a_large_round_the_agent_is_woken_after_as_many_windows(window: int, clock: int) -> None:
    """Two lost ones stop a stripe whose window is of two."""
    phase = replace(PHASE, fragments=64_000, last_fragments=64_000)
    part = exchanger_of(phase, VIEW, 2, Kernel(), TIMINGS, 0.0)
    part.open(ROUND)
    assert part.clock == 256
    part.agree_on(window)
    part.on_token(0.0, closed(1, 2, 4))
    assert part.clock == clock


def test_with_a_smaller_window_fewer_later_sums_show_a_loss() -> None:
    kernel, small = Kernel(), WINDOW // 2
    part = member(kernel=kernel)
    for _ in range(3):
        lossy_round(part, kernel, LOST)
    part.open(ROUND)
    part.agree_on(part.proposed_window)
    part.conversion, kernel.sums, kernel.next_ = CONVERSION, set(), {}
    assert only(part.on_token(0.0, closed(1, 2, 4))).ranges == ((2000, small), (0, small))
    kernel.next_[4] = 2000 + WINDOW
    kernel.sums = {*range(2001, 2000 + small - 1)}
    assert part.advance(0.001) == []
    kernel.sums |= {2000 + small - 1}
    assert only(part.advance(0.002)).ranges == ((2000, 1),)


def test_rounds_of_others_alone_show_nothing_of_the_windows() -> None:
    """This member has sent nothing in them."""
    kernel = Kernel()
    part = member(kernel=kernel)
    for _ in range(4):
        part.open(ROUND)
        kernel.sums = set()
        part.on_token(0.0, closed(1, 4))
        kernel.sums = {*range(FRAGMENTS)} - LOST
        part.advance(part.deadline())
        kernel.sums = {*range(FRAGMENTS)}
        part.advance(1.0)
    assert lossy_round(part, kernel, set()) == (WINDOW, WINDOW)
