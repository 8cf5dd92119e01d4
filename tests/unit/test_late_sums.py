# SPDX-License-Identifier: Apache-2.0
"""Whom the sums of stripes, or of a Linux switch, wait for, as one member can tell."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.protocol.signals import Late
from tests.striped_member import FRAGMENTS, TIMINGS, WINDOW, Kernel, closed, member
from tests.unit import test_switch_exchanger as switch

pytestmark = pytest.mark.unit


def test_all_stripes_on_their_way_wait_for_nobody() -> None:
    part = member()
    assert part.find_late() == {}
    part.on_token(0.0, closed(1, 2, 4))
    assert part.find_late() == {}
    part.on_dropped()
    assert part.find_late() == {}


def test_an_aggregator_whose_sums_alone_lack_is_late() -> None:
    kernel = Kernel()
    part = member(kernel=kernel)
    part.on_token(0.0, closed(1, 2, 4))
    kernel.sums = set(range(2010))
    assert part.find_late() == {4: Late.SUMS}
    kernel.sums = set(range(FRAGMENTS))
    assert part.find_late() == {}


def test_who_has_not_contributed_to_a_sum_is_late_and_not_its_aggregator() -> None:
    """Unless the aggregator lacks what this member has sent, too: then it takes nothing."""
    kernel = Kernel()
    part = member(kernel=kernel)
    part.on_token(0.0, closed(1, 2, 4))
    kernel.sums = set(range(2000))
    for absent, late in ((0b0001, {1: Late.GRADIENT}), (0b0011, {4: Late.SUMS})):
        part.on_lacking(0.01, wire.Lacking(absent, 2000, FRAGMENTS, 1, 16, 0, -40))
        assert part.find_late() == late


def test_an_aggregator_that_answers_no_more_is_late_and_reported_itself() -> None:
    """Its port has failed, say. What it has told before is as old as that."""
    kernel = Kernel()
    kernel.next_ = {4: 2000 + WINDOW, 1: 1000}
    part, token = member(kernel=kernel), closed(1, 2, 4)
    part.on_token(0.0, token)
    kernel.sums, told = set(range(2000)), wire.Lacking(0b0001, 2000, FRAGMENTS, 1, 16, 0, -40)
    for _ in range(2):
        now, asked_at = part.deadline(), list[float]()
        part.advance(now)
        part.on_lacking(now, told)
        while part.find_late() == {1: Late.GRADIENT} and len(asked_at) < 20:
            asked_at.append(part.deadline())
            part.advance(asked_at[-1])
        assert part.find_late() == {4: Late.SUMS}
        assert len(asked_at) == 5 and asked_at[-1] - now < 1.1
    while not (lacks := part.take_report(now, token)):
        now = part.deadline()
        part.advance(now)
    assert lacks == {4: FRAGMENTS - 2000}


def test_in_the_own_stripe_the_kernel_knows_who_is_late() -> None:
    """It is this host if the contributions of all others lack, though they have sums of its contributions."""
    kernel = Kernel()
    part = member(kernel=kernel)
    part.on_token(0.0, closed(1, 2, 4))
    kernel.sums = set(range(FRAGMENTS)) - {1500}
    for lacking, late in (
        ({1: 1, 4: 0}, {1: Late.GRADIENT}),
        ({1: 1, 4: 1}, {2: Late.SUMS}),
    ):
        kernel.lacking = lacking
        assert part.find_late() == late


def test_aggregators_of_which_nothing_comes_for_longer_than_an_answer_takes_are_late() -> None:
    part = member()
    part.on_token(0.0, closed(1, 2, 4))
    part.advance(part.deadline())
    assert part.find_late() == {1: Late.SUMS, 4: Late.SUMS}


def test_a_switch_whose_sums_do_not_come_is_late_unless_it_names_members() -> None:
    """Its sums are the only ones: that they lack shows nothing until they are overdue."""
    part = switch.member()
    part.on_token(0.0, closed(1, 2, 4))
    assert part.find_late() == {}
    part.advance(part.deadline())
    assert part.find_late() == {0: Late.SUMS}
    for absent, late in ((0b1000, {4: Late.GRADIENT}), (0b1010, {0: Late.SUMS})):
        part.on_lacking(0.1, wire.Lacking(absent, 0, FRAGMENTS, 1, 16, 0, -40))
        assert part.find_late() == late


@pytest.mark.parametrize("lacking", [1, 4, 1000])
def test_members_report_as_early_as_an_aggregator_however_few_sums_lack(lacking: int) -> None:
    """Otherwise it would be judged by the aggregator's report alone, and so the aggregator itself would have to go."""
    kernel, lost = Kernel(), wire.Lacking(0b0001, 2000, FRAGMENTS, 1, 16, 0, -40)
    part, token = member(kernel=kernel), closed(1, 2, 4)
    part.on_token(0.0, token)
    kernel.sums = set(range(FRAGMENTS)) - set(range(2000, 2000 + lacking))
    now = 0.0
    while not (lacks := part.take_report(now, token)):
        now = part.deadline()
        part.advance(now)
        part.on_lacking(now, lost)
    assert lacks == {1: 1}
    assert TIMINGS.silence_most_s <= now < TIMINGS.silence_most_s * 7 / 6
