# SPDX-License-Identifier: Apache-2.0
"""What hosts add and what a switch's model adds are the same, by the real XDP program (`tests.sums`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from nicps import wire
from tests import sums
from tests.xdp.target import XdpTarget


@pytest.fixture(scope="module")
def program() -> Iterator[XdpTarget]:
    target = XdpTarget(sums.FRAGMENTS)
    yield target
    target.close()


def agree(program: XdpTarget, steps: Sequence[sums.Step]) -> int:
    model = sums.model_switch()

    def begin(config: Mapping[str, Any]) -> XdpTarget:
        program.begin(config, sums.MACS)
        return program

    def exchange(port: int, frame: bytes) -> list[bytes]:
        out = model.take(port, frame).get(sums.HEARS)
        return [out] if out is not None and out[15] == wire.FrameType.FRAGMENT else []

    return sums.sums_agree(steps, begin, model, exchange)


@pytest.mark.parametrize("width", [32, 16, 8])
def test_all_send(program: XdpTarget, width: int) -> None:
    assert agree(program, sums.all_send(width)) == sums.FRAGMENTS


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=sums.sequences())
def test_random_sequences(program: XdpTarget, steps: Sequence[sums.Step]) -> None:
    agree(program, steps)
