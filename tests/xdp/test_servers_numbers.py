# SPDX-License-Identifier: Apache-2.0
"""The numbers of a server's steps, held against whole numbers, through the program and through the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nicps import wire
from tests.servers import Home
from tests.stripes import LANES
from tests.xdp.served import Target
from tests.xdp.served_host import ROUND, Host, numbers, payload_of, said, start


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("staleness", [1, 2, 3, 7, 64, 1000, 10**6])
def test_addends_in_whole_numbers(target: Target, width: int, staleness: int) -> None:
    """For every shift: exactly what integers of any size come to, half a unit rounded up."""
    most = 1 << width - 1
    rng = np.random.default_rng(width * staleness)
    lanes = rng.integers(-most, most, LANES[width])
    lanes[:5] = -most, most - 1, 0, 1, -1
    weight = (2 * 2**30 + staleness) // (2 * staleness)
    for number, down in enumerate(range(66), 1):
        host = Host(target, width=width, room=32 // width, version=(ROUND, staleness - 1))
        host.push(lanes, number=number, exponent=22 - width - down)
        by = min(down, 63)
        half = 2**by // 2
        top = 2 ** (32 - width)
        expected = [
            int(before) + (int(lane) * top * weight + half) // 2**by
            for before, lane in zip(start(width=width), lanes, strict=True)
        ]
        assert host.parameters().tolist() == expected, down


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("workers", [1, 2, 3, 63])
def test_averages_in_whole_numbers(target: Target, width: int, workers: int) -> None:
    """Each addend is rounded by itself, so that their order is of no matter."""
    senders = range(2, workers + 2)
    members = sum(1 << k - 1 for k in senders)
    rng = np.random.default_rng(width * workers)
    most, down = 1 << width - 1, 11
    sent = {k: rng.integers(-most, most, LANES[width]) for k in senders}
    weight = (2 * 2**30 + workers) // (2 * workers)
    host = Host(target, live=frozenset(range(1, 65)), width=width, room=32 // width)
    for k in rng.permutation(senders).tolist():
        body = wire.Contribution(members, 0, 1, 9, width, 22 - width - down, 0)
        found = host.give(host.frames.make(body, payload_of(sent[k], width), k))
    assert found.counters == ("summed",)
    assert (host.parameters() == start(width=width)).all(), "until it is committed"
    host.commit()
    host.pull()
    top, half = 2 ** (32 - width), 2**down // 2
    expected = [
        int(before) + sum((int(lane) * top * weight + half) // 2**down for lane in lanes)
        for before, *lanes in zip(start(width=width), *sent.values(), strict=True)
    ]
    assert host.parameters().tolist() == expected
    host.bells()


@pytest.mark.parametrize("largest", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**61 - 1, 2**62])
@pytest.mark.parametrize("sign", [1, -1])
def test_parameters_are_shown_as_32_bits(target: Target, largest: int, sign: int) -> None:
    """The nearest of as many lanes as fit; they themselves stay as they are."""
    values = np.array([sign * largest * k // 359 for k in range(360)], np.int64)
    host = Host(target, homes={0: Home(values, np.zeros(360, np.int64))}, room=1)
    found = host.pull()
    body = said(found)
    step = 2 ** (body.exponent + 40)
    assert body.exponent >= -40 and (step == 1 or largest >= step << 30)
    lanes = (numbers(found) / 2.0**body.exponent).astype(np.int64)
    for lane, value in zip(lanes.tolist(), values.tolist(), strict=True):
        assert lane == min((2 * value + step) // (2 * step), 2**31 - 1)
    assert (host.parameters() == values).all()
