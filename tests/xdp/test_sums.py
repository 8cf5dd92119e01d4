# SPDX-License-Identifier: Apache-2.0
"""The hosts' sums and those of a switch's model are the same, by the real XDP program (`tests.sums`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests import sums
from tests.switched import model_bench
from tests.xdp.target import XdpTarget


@pytest.fixture(scope="module")
def program() -> Iterator[XdpTarget]:
    target = XdpTarget(sums.FRAGMENTS)
    yield target
    target.close()


def agree(program: XdpTarget, sequence: sums.Gradients) -> Counter[str]:
    bench = model_bench()
    bench.record(sums.MEMBERS)

    def begin(config: Mapping[str, Any]) -> XdpTarget:
        program.begin(config, sums.MACS)
        return program

    return sums.sums_agree(sequence, begin, bench.model, bench.exchange)


@pytest.mark.parametrize("width", [32, 16, 8])
def test_all_send(program: XdpTarget, width: int) -> None:
    reached = agree(program, sums.all_send(width))
    assert reached["summed"] == sums.FRAGMENTS and reached["answered"] >= 3 * sums.FRAGMENTS


def test_random_sequences(program: XdpTarget) -> None:
    reached: Counter[str] = Counter()

    @settings(
        max_examples=1000,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(sequence=sums.sequences())
    def agrees(sequence: sums.Gradients) -> None:
        reached.update(agree(program, sequence))

    agrees()
    sums.reached_enough(reached, sums.LEAST)
