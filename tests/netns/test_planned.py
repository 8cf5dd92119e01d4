# SPDX-License-Identifier: Apache-2.0
"""Jobs whose steps have a plan, on two channels (docs/channels.md): real agents, and a program that only offers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nicps.collective.feedback import Compressed
from tests.collectives import make
from tests.netns.labs import ROOT
from tests.netns.members import Network, tiny_job
from tests.netns.planned_program import SIZES, drawn

PROGRAM = ROOT / "tests" / "netns" / "planned_program.py"
PLACES = [(channel, place) for channel, sizes in enumerate(SIZES) for place in range(len(sizes))]
SETTINGS = {"priorities": 2, "exchange": "stripes", "batch": 12, "quorum": 1.0}


class Planned(Network):
    """Hosts with such programs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = self.folder / "kept"
        self.kept.mkdir()
        self.kept.chmod(0o777)
        self.folder.chmod(0o755)

    def program_arguments(self, host: str) -> list[Path]:
        return [self.kept]


@pytest.fixture
def network() -> Iterator[Planned]:
    with Planned(3, program=PROGRAM) as made:
        made.up()
        yield made


def parts_of(path: Path) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, list[int]]]:
    """Each part's mean, what rounding has left over, and the members counted in it."""
    found, at = {}, 0
    with np.load(path) as kept:
        vector, residual = kept["vector"], kept["residual"]
        for channel, place in PLACES:
            here = slice(at, at + SIZES[channel][place])
            counted = kept[f"counted_{channel}_{place}"].tolist()
            found[channel, place] = vector[here], residual[here], counted
            at = here.stop
    return found


class Reference:
    """What the members' kernels and programs should come to, step by step."""

    def __init__(self, width: int, batch: int = 12) -> None:
        self.width, self.batch = width, batch
        self.residuals: dict[tuple[int, int, int], np.ndarray] = {}

    def check(self, step: int, path: dict[int, Path]) -> dict[tuple[int, int], list[int]]:
        """All members hold what the reference does, bit for bit. Returns who was counted in each part."""
        kept = {number: parts_of(each) for number, each in path.items()}
        counted = {}
        for channel, place in PLACES:
            who = kept[min(kept)][channel, place][2]
            vectors = [drawn(number, step - 1, channel, place) for number in who]
            zero = np.zeros(SIZES[channel][place], np.float32)
            errors = [
                self.residuals.setdefault((number, channel, place), zero.copy()) for number in who
            ]
            pairs = zip(vectors, errors, strict=True)
            rounds = [Compressed(v, e, self.width, mean=False) for v, e in pairs]
            made = make(rounds)  # type: ignore[arg-type]
            for rank, each in enumerate(rounds):
                each.settle(made.outcome(rank))
            mean = vectors[0] / np.float32(self.batch * len(who) // 3)
            for number, parts in kept.items():
                vector, residual, also = parts[channel, place]
                at = (step, number, channel, place)
                assert also == who, at
                assert (vector.view(np.uint32) == mean.view(np.uint32)).all(), at
                mine = self.residuals[number, channel, place]
                assert (residual.view(np.uint32) == mine.view(np.uint32)).all(), at
            counted[channel, place] = who
        return counted


@pytest.mark.parametrize("lane", ["i8", "i32"])
def test_sums_of_both_channels(network: Planned, lane: str) -> None:
    """Each part's sum is that of the reference at all members, and so is what rounding has left over."""
    run = network.train(tiny_job(network.folder), **SETTINGS, rounds=12, lane=lane)
    assert run.result["rounds"] == 12 and run.result["weights_identical"]
    reference = Reference(int(lane[1:]))
    for step in range(1, 13):
        paths = {number: network.kept / f"{number}-{step}.npz" for number in (1, 2, 3)}
        counted = reference.check(step, paths)
        assert set(map(tuple, counted.values())) == {(1, 2, 3)}
