# SPDX-License-Identifier: Apache-2.0
"""Which parameters travel on which channel: the queue, its bounds, the cuts, the choice, and when it is made again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nicps.need_first import (
    Line,
    Part,
    Timing,
    bounds,
    calibrated,
    cut,
    equal_shares,
    overlapped_seconds,
    plan_for,
    step_seconds,
)
from tests import published

pytestmark = pytest.mark.unit

EVEN = published.timing(published.transformer())


def line(timing: Timing, wire: float, latency: float = 0.0, update: float = 0.0) -> Line:
    """A line on which all bytes take `wire` seconds, and to update all parameters `update`."""
    total = sum(timing.nbytes)
    return Line(latency, wire / total, update / total)


# ---- by arithmetic: even layers, computing takes 1 (backward 2/3), the wire as long as `wire` says


@pytest.mark.parametrize(
    ("wire", "bound", "by_channels"),
    [
        (0.5, (1.5, 49 / 48, 49 / 48), {2: 1.02, 4: 1.02}),
        (1.0, (2.0, 49 / 36, 25 / 24), {2: 1.194, 3: 1.139, 4: 1.111, 8: 1.069}),
        (2.0, (3.0, 85 / 36, 49 / 24), {2: 2.097, 3: 2.069, 8: 2.042}),
    ],
)
def test_even_layers(wire: float, bound: tuple[float, ...], by_channels: dict[int, float]) -> None:
    assert bounds(EVEN, wire / sum(EVEN.nbytes)) == pytest.approx(bound)
    free = line(EVEN, wire)
    assert overlapped_seconds(EVEN, free, cut(EVEN, 24)) == pytest.approx(bound[1])
    for channels, seconds in by_channels.items():
        plan = plan_for(EVEN, free, channels=channels, hosts=2, rounds=24)
        assert plan.seconds == pytest.approx(seconds, rel=0.01)  # of these the fewest rounds


def test_the_published_gain() -> None:
    """Flow scheduling alone: up to 1.2 times as fast as backward overlap (P4), where computing takes as long."""
    plan = plan_for(EVEN, line(EVEN, 1.0), channels=4, hosts=4, rounds=24)
    rival = overlapped_seconds(EVEN, line(EVEN, 1.0), cut(EVEN, 24))
    assert rival / plan.seconds > 1.2


@pytest.mark.parametrize("layers", [published.resnet50(), published.vgg16()])
def test_bytes_at_the_rear_need_two_channels(layers: published.Layers) -> None:
    timing = published.timing(layers)
    two, eight = (
        plan_for(timing, line(timing, 1.0), channels=channels, hosts=2).seconds
        for channels in (2, 8)
    )
    assert two < 1.05 and eight > 0.96 * two
    assert overlapped_seconds(timing, line(timing, 1.0), cut(timing, 16)) > 1.3


# ---- one queue, by hand

#: Backward takes 4 s, forward 3 s: the rear of the vector (10 bytes) is released at 1, its front (10 bytes) at 4.
TWO = Timing((10, 10), (4.0, 1.0), (0.0, 1.0), 4.0, 3.0)
PARTS = [Part(0, 10, 4.0, 0.0), Part(10, 20, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("each", "latency", "channels", "seconds"),
    [
        (1.0, 0.0, (0, 0), 8.0),  # the rear is there at 2; the front at 5, 1 s late
        (4.0, 0.0, (0, 0), 12.0),  # the front waits for the rear until 5, and is there at 9
        (
            4.0,
            0.0,
            (1, 0),
            11.0,
        ),  # it overtakes: it is there at 8, the rear at 9 where forward needs it
        (4.0, 0.5, (0, 0), 13.0),  # its round is opened after the commit of the other, at 5.5
        (4.0, 0.5, (1, 0), 11.5),  # with channels of their own the latencies pass beside the line
    ],
)
def test_a_queue(each: float, latency: float, channels: tuple[int, ...], seconds: float) -> None:
    assert step_seconds(TWO, Line(latency, each / 10), PARTS, channels) == pytest.approx(seconds)


def test_updates_take_the_time_of_forward() -> None:
    """1 s for each part: backward until 4, the front is there at 5 and updated at 6, then 1 s of forward, and so on."""
    slow = Line(0.0, 0.1, 0.1)
    assert step_seconds(TWO, slow, PARTS, (1, 0)) == pytest.approx(4 + 1 + 1 + 1 + 1 + 2)
    assert overlapped_seconds(TWO, slow, PARTS) == pytest.approx(5 + 2 + 3)


@st.composite
def models(draw: st.DrawFn) -> tuple[Timing, Line]:
    count = draw(st.integers(1, 12))
    small = st.integers(0, 8).map(lambda n: n / 4)
    back, front = ([draw(small) for _ in range(count)] for _ in range(2))
    released = tuple(sum(back[index:]) for index in range(count))
    needed = tuple(sum(front[:index]) for index in range(count))
    nbytes = tuple(draw(st.integers(1, 9)) for _ in range(count))
    timing = Timing(nbytes, released, needed, sum(back), sum(front))
    return timing, Line(0.0, draw(st.integers(0, 8)) / 8)


@given(models(), st.data())
def test_nothing_is_better_than_the_bound(model: tuple[Timing, Line], data: st.DataObject) -> None:
    """However parts are dealt out; and a channel for each parameter reaches it."""
    timing, free = model
    parts = cut(timing, 24)
    channels = [data.draw(st.integers(0, 3)) for _ in parts]
    least = bounds(timing, free.pace).at_best
    assert step_seconds(timing, free, parts, channels) >= least - 1e-9
    places = [sum(timing.nbytes[:index]) for index in range(len(timing.nbytes) + 1)]
    whole = [
        Part(first, last, released, needed)
        for (first, last), released, needed in zip(
            pairwise(places), timing.released, timing.needed, strict=True
        )
    ]
    own = range(len(whole), 0, -1)
    assert step_seconds(timing, free, whole, own) == pytest.approx(least)


@given(models(), st.integers(1, 32), st.integers(1, 4))
def test_parts_are_all_bytes_in_order(model: tuple[Timing, Line], count: int, grain: int) -> None:
    timing, _ = model
    parts = cut(timing, count, grain)
    assert parts[0].first == 0 and parts[-1].last == sum(timing.nbytes)
    assert all(one.last == other.first for one, other in pairwise(parts))
    assert all(part.nbytes > 0 for part in parts) and len(parts) <= count
    assert [part.released for part in parts] == sorted((p.released for p in parts), reverse=True)
    assert [part.needed for part in parts] == sorted(part.needed for part in parts)


def test_a_large_parameter_is_cut_at_fragments() -> None:
    timing = Timing((100, 14_400, 100), (3.0, 2.0, 1.0), (0.0, 1.0, 2.0), 3.0, 3.0)
    assert [part.last for part in cut(timing, 4, 1440)] == [4320, 7200, 11_520, 14_600]


# ---- the choice


def test_where_nothing_is_gained_there_is_one_channel() -> None:
    """The wire takes less time than backward."""
    plan = plan_for(EVEN, line(EVEN, 0.3), channels=4, hosts=4)
    assert set(plan.channels) == {0} and plan.shares == (1.0,)
    assert plan.seconds == plan.single


@pytest.mark.parametrize("layers", [published.resnet50(), published.vgg16()])
def test_small_parts_in_front_hide_nearly_all(layers: published.Layers) -> None:
    """Forward waits for the front-most part, whose last gradient comes at backward's end: it has few bytes."""
    timing = published.timing(layers)
    busy = line(timing, 0.85, latency=0.002)
    plan = plan_for(timing, busy, channels=4, hosts=2, least=16)
    equal = min(equal_shares(timing, busy, 4, count).seconds for count in (16, 20, 24, 28, 32))
    assert plan.seconds < 1.015 < 1.028 < equal
    first, *_, last = [end - begins for begins, end in pairwise((0, *plan.ends))]
    assert first < last / 4


def test_parts_that_grow_need_no_more_room() -> None:
    """Than the fewest equal ones of the model: so many bytes are open at a time at most."""
    for layers in (published.resnet50(), published.vgg16(), published.transformer()):
        timing = published.timing(layers)
        busy, most = line(timing, 0.85), equal_shares(timing, Line(0.0, 0.0), 4, 16).room
        plan = plan_for(timing, busy, channels=4, hosts=2, least=16)
        assert len(plan.ends) >= 16 and plan.room < 1.15 * most


@given(models(), st.integers(1, 32), st.sampled_from([1, 2, 8, 32]))
def test_parts_grow_towards_the_rear(model: tuple[Timing, Line], count: int, growth: float) -> None:
    """As far as parameters, whose ends they prefer, let them."""
    nbytes = tuple(1440 * each for each in model[0].nbytes)
    timing = Timing(nbytes, *(getattr(model[0], name) for name in ("released", "needed")), 1.0, 1.0)
    parts = cut(timing, count, 1, growth)
    assert parts[0].first == 0 and parts[-1].last == sum(nbytes) and len(parts) <= count
    sizes = [growth ** (at / max(1, count - 1)) for at in range(count)]
    whole = [sum(sizes[:at]) / sum(sizes) * sum(nbytes) for at in range(1, count)]
    for part in parts[:-1]:
        near = min(whole, key=lambda end: abs(end - part.last))
        assert abs(part.last - near) <= max(sizes) / sum(sizes) * sum(nbytes) / 4 + 1


def test_latency_makes_rounds_fewer() -> None:
    cheap, dear = (
        plan_for(EVEN, line(EVEN, 1.0, latency), channels=4, hosts=4) for latency in (0.0, 0.05)
    )
    assert len(dear.ends) < len(cheap.ends)
    assert dear.seconds < cheap.seconds + 0.05 * len(cheap.ends)


def test_control_frames_limit_the_rounds() -> None:
    """A step of 0.1 s and 64 members: each may send 184 control frames a second, and a quarter of them for rounds."""
    short = published.timing(published.transformer(), 0.1)
    few, many = (
        len(plan_for(short, line(short, 0.1), channels=4, hosts=hosts).ends) for hosts in (64, 3)
    )
    assert few == 4 < many


def test_the_most_urgent_channel_has_the_front() -> None:
    plan = plan_for(EVEN, line(EVEN, 1.0), channels=4, hosts=4)
    assert list(plan.channels) == sorted(plan.channels, reverse=True)
    assert plan.channels[0] == 3 and plan.channels[-1] == 0
    assert sum(plan.shares) == pytest.approx(1.0) and len(plan.shares) == 4
    assert plan.seconds < equal_shares(EVEN, line(EVEN, 1.0), 4, len(plan.ends)).seconds + 1e-9


def test_too_few_rounds() -> None:
    with pytest.raises(ValueError, match="3 rounds are too few for 4 channels"):
        plan_for(EVEN, line(EVEN, 1.0), channels=4, hosts=4, rounds=3)


# ---- what is measured


def test_a_line_is_fitted() -> None:
    rounds = [(nbytes, 0.002 + nbytes * 1e-8) for nbytes in (1000, 50_000, 1_000_000)]
    found = Line.fitted(rounds, 3e-9)
    assert (found.latency, found.pace, found.update) == pytest.approx((0.002, 1e-8, 3e-9))


@pytest.mark.parametrize(
    ("rounds", "latency", "pace"),
    [
        ([(100, 2.0)], 0.0, 0.02),
        ([(100, 1.0), (100, 3.0)], 0.0, 0.02),
        ([(100, 1.0), (200, 3.0)], 0.0, 0.014),  # the best line has a latency below 0
        ([(100, 3.0), (200, 1.0)], 2.0, 0.0),  # and a pace below 0
    ],
)
def test_neither_part_of_a_line_is_below_0(
    rounds: list[tuple[int, float]], latency: float, pace: float
) -> None:
    found = Line.fitted(rounds)
    assert (found.latency, found.pace) == pytest.approx((latency, pace))


def test_no_round_no_line() -> None:
    with pytest.raises(ValueError, match="no round was measured"):
        Line.fitted([])


# ---- what rounds occupy


def test_rounds_occupy_the_processors() -> None:
    """0.5 s of each round in which nothing else gets on. The front overtakes at 4, and the rear has 2.5 s left then."""
    assert step_seconds(TWO, Line(0.0, 0.4, occupied=0.5), PARTS, (1, 0)) == pytest.approx(12)
    assert step_seconds(TWO, Line(0.5, 0.4, occupied=0.5), PARTS, (1, 0)) == pytest.approx(12)
    assert step_seconds(TWO, Line(0.5, 0.4), PARTS, (1, 0)) == pytest.approx(11.5)


@given(models(), st.integers(1, 12), st.floats(0.0, 1.0))
def test_a_line_is_calibrated(model: tuple[Timing, Line], count: int, occupied: float) -> None:
    """By how long a step took; one that was faster than its prediction changes nothing."""
    timing, free = model
    parts = cut(timing, count)
    channels = [0 if index else 1 for index in range(len(parts))]
    seconds = step_seconds(timing, replace(free, occupied=occupied), parts, channels)
    fitted = calibrated(timing, free, parts, channels, seconds)
    assert step_seconds(timing, fitted, parts, channels) == pytest.approx(seconds, abs=1e-6)
    at_once = step_seconds(timing, free, parts, channels)
    assert calibrated(timing, free, parts, channels, 0.9 * at_once) == free


def test_occupied_processors_make_rounds_fewer() -> None:
    """Latency, which other rounds hide, leaves more of them."""
    busy, late = (
        plan_for(EVEN, line_, channels=4, hosts=4)
        for line_ in (
            replace(line(EVEN, 1.0), occupied=0.02),
            replace(line(EVEN, 1.0), latency=0.02),
        )
    )
    assert len(busy.ends) < len(late.ends)
