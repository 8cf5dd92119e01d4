# SPDX-License-Identifier: Apache-2.0
"""Random frames through an XDP program and its model, step by step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

FRAMES = 25  # between two phases


def compared(
    target: Any, scene: Any, seed: int, phases: int
) -> Iterator[tuple[bytes, Collection[str]]]:
    """Each frame, and what the program has counted it as: the same as the model. The maps are, too, after each phase.

    Args:
        target: the program.
        scene: what sends the frames, with its `model`.
    """
    model = scene.model
    target.begin(model)
    for _ in range(phases):
        target.enter(model)
        scene.write_own()
        target.write_own(model)
        for at, frame in enumerate(scene.frames(FRAMES)):
            expected, found = model.run(frame), target.run(frame)
            assert found == expected, f"seed {seed}, frame {at}"
            yield frame, found.counters
        target.same_state(model)
        scene.go_on()
