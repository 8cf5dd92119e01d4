# SPDX-License-Identifier: Apache-2.0
"""Stripes in the real XDP program against the model (tests/stripes.py): every sum and remainder; and stalls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.stripes import Scene
from tests.xdp.striped import Target

SEEDS, CHUNK = 400, 100


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_sequences(target: Target, first: int) -> None:
    """Each frame is treated as the model says; every sum, and what rounding left over, is the same bit for bit."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        scene = Scene(seed)
        model = scene.model
        target.begin(model)
        for _ in range(5):
            target.enter(model)
            scene.write_own()
            target.write_own(model)
            for at, frame in enumerate(scene.frames(25)):
                expected, found = model.run(frame), target.run(frame)
                assert found == expected, f"seed {seed}, frame {at}"
                reached.update(found.counters)
            target.same_state(model)
            scene.go_on()
    least = {"summed": 100, "gathered": 100, "stored": 100, "answered": 100, "unready": 10}
    least |= {
        "duplicate": 10,
        "round": 10,
        "malformed": 10,
        "shift": 10,
        "range": 10,
        "astray": 5,
        "mode": 5,
    }
    least |= {"forged": 1, "replayed": 1, "stranger": 1, "view": 1, "control": 10}
    assert {name: reached[name] for name in least if reached[name] < least[name]} == {}, reached
