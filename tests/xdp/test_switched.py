# SPDX-License-Identifier: Apache-2.0
"""The real XDP program behind a switch's model: what both count, and the sums (`tests.switched`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests import replay, sums, switch_frames, switched
from tests.differences import ROWS, Row
from tests.xdp.target import XdpTarget

BLOCKS = 8


@pytest.fixture(scope="module")
def program() -> Iterator[XdpTarget]:
    target = XdpTarget(BLOCKS)
    yield target
    target.close()


def test_every_difference_is_written_down(program: XdpTarget) -> None:
    """In the sequences of tests/vectors/ and in 1,000 random ones; and none is that does not occur."""
    met: Counter[Row] = Counter()
    reached: Counter[str] = Counter()
    for path in replay.SEQUENCES:
        for adding in (False, True):
            sequence = replay.load(path)
            macs, key = replay.member_macs(sequence), replay.view_key(sequence)
            program.begin(sequence["config"], macs, key)
            host = replay.Both(program, replay.ModelTarget(sequence["config"], macs, key))
            bench = switched.model_bench()
            met += switched.sequence_agrees(sequence, adding, bench, host).met

    @settings(
        max_examples=1000,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(frames=switch_frames.sequences)
    def agrees(frames: list[tuple[int, switch_frames.Frame]]) -> None:
        program.begin(switched.CONFIG, switched.MACS)
        host = replay.Both(program, replay.ModelTarget(switched.CONFIG, switched.MACS))
        bench = switched.model_bench()
        bench.record(switch_frames.MEMBERS)
        behind = switched.frames_agree(frames, bench, host)
        reached.update(behind.reached())
        met.update(behind.met)

    agrees()
    sums.reached_enough(reached, switch_frames.LEAST)
    assert not set(ROWS) - met.keys()
