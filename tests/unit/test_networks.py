# SPDX-License-Identifier: Apache-2.0
"""Published networks, and what a step takes at least (benchmarks/networks.py)."""

from __future__ import annotations

import pytest

from benchmarks.networks import NETWORKS, Shape

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("network", "layers", "parameters", "multiplications"),
    [("resnet50", 54, 25.50e6, 4.09e9), ("vgg16", 16, 138.34e6, 15.47e9)],
)
def test_sizes_are_the_published_ones(
    network: str, layers: int, parameters: float, multiplications: float
) -> None:
    """torchvision gives 25.56 and 138.36 million with biases and normalisation, 4.09 and 15.47 GFLOPs."""
    made = NETWORKS[network]()
    assert len(made) == layers
    assert sum(layer.parameters for layer in made) == pytest.approx(parameters, rel=1e-3)
    assert sum(layer.multiplications for layer in made) == pytest.approx(multiplications, rel=1e-3)


@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("network", list(NETWORKS))
def test_bounds_are_those_of_a_line_in_small_steps(network: str, ratio: float) -> None:
    shape = Shape.of(network, 1_000_000, 1.0)
    assert shape.compute == pytest.approx(1.0) and abs(sum(shape.numbers) - 1_000_000) < 60
    bounds = shape.bounds(ratio)
    assert bounds["none"] == pytest.approx(1 + ratio)
    for way in ("backward", "priorities"):
        assert bounds[way] == pytest.approx(_played(shape, ratio, way == "priorities"), abs=0.01)


def _played(shape: Shape, wire: float, priorities: bool) -> float:
    """The step, a thousandth of a second after the other."""
    step, layers = 1e-3, range(len(shape.numbers))
    left = [wire * n / sum(shape.numbers) for n in shape.numbers]
    ready = [sum(shape.backward[layer:]) for layer in layers]
    at, computing, computed = 0.0, 0, 0.0
    while computing < len(left):
        at, room = at + step, step
        there = [layer for layer in layers if ready[layer] < at and left[layer] > 0]
        for layer in there if priorities else sorted(there, reverse=True):
            sent = min(room, left[layer])
            left[layer] -= sent
            room -= sent
        if at < ready[0] or (not priorities and any(left)):
            continue
        computed += step
        while (
            computing < len(left) and not left[computing] and computed >= shape.forward[computing]
        ):
            computed -= shape.forward[computing]
            computing += 1
        if computing < len(left) and left[computing]:
            computed = 0.0
    return at
