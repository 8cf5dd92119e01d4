# SPDX-License-Identifier: Apache-2.0
"""How published networks distribute parameters and computing over their layers, and what a step takes at least.

- `even`: 24 layers of a transformer, all alike.
- `resnet50`: He et al. 2015, "Deep residual learning for image recognition", table 1; images of 224 x 224.
- `vgg16`: Simonyan and Zisserman 2014, "Very deep convolutional networks", table 1, column D.

Normalisation layers and biases are left out: they have under 0.3 % of the parameters.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Backward takes twice as long as forward: gradients of inputs, and of weights.
BACKWARD = 2 / 3


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its parameters, and multiplications of one sample's forward pass."""

    parameters: int
    multiplications: int


def _convolution(size: int, inputs: int, outputs: int, side: int) -> Layer:
    """`side`: of its output, in pixels."""
    weights = size * size * inputs * outputs
    return Layer(weights, weights * side * side)


def _dense(inputs: int, outputs: int) -> Layer:
    return Layer(inputs * outputs, inputs * outputs)


def _even() -> list[Layer]:
    return [Layer(1, 1)] * 24


def _resnet50() -> list[Layer]:
    layers, inputs = [_convolution(7, 3, 64, 112)], 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            # The stride is in the 3 x 3 convolution of the stage's first block.
            first = 2 * side if block == 0 and width > 64 else side
            layers += [
                _convolution(1, inputs, width, first),
                _convolution(3, width, width, side),
                _convolution(1, width, 4 * width, side),
            ]
            if block == 0:
                layers.append(_convolution(1, inputs, 4 * width, side))
            inputs = 4 * width
    return [*layers, _dense(2048, 1000)]


def _vgg16() -> list[Layer]:
    layers, inputs = [], 3
    for width, count, side in (
        (64, 2, 224),
        (128, 2, 112),
        (256, 3, 56),
        (512, 3, 28),
        (512, 3, 14),
    ):
        for _ in range(count):
            layers.append(_convolution(3, inputs, width, side))
            inputs = width
    return [*layers, _dense(512 * 7 * 7, 4096), _dense(4096, 4096), _dense(4096, 1000)]


NETWORKS = {"even": _even, "resnet50": _resnet50, "vgg16": _vgg16}


@dataclass(frozen=True, slots=True)
class Shape:
    """A network at one size and speed, layers in the order of the forward pass.

    Attributes:
        numbers: parameters of each layer.
        forward, backward: seconds of each layer.
    """

    numbers: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @classmethod
    def of(cls, network: str, numbers: int, compute: float) -> Shape:
        """All layers scaled alike, so that there are about `numbers` parameters and a pass takes `compute` seconds."""
        layers = NETWORKS[network]()
        scale = numbers / sum(layer.parameters for layer in layers)
        work = compute / sum(layer.multiplications for layer in layers)
        return cls(
            tuple(max(1, round(layer.parameters * scale)) for layer in layers),
            tuple(layer.multiplications * work * (1 - BACKWARD) for layer in layers),
            tuple(layer.multiplications * work * BACKWARD for layer in layers),
        )

    @property
    def compute(self) -> float:
        """Seconds of both passes."""
        return sum(self.forward) + sum(self.backward)

    def released(self) -> list[float]:
        """When each layer's gradient is there, in seconds from the beginning of backward."""
        ends = list(accumulate(reversed(self.backward)))
        return ends[::-1]

    def after(self) -> list[float]:
        """Seconds of forward from the beginning of each layer to the end of the pass."""
        return list(accumulate(reversed(self.forward)))[::-1]

    def bounds(self, wire: float) -> dict[str, float]:
        """Seconds of a step if nothing but the line and computing took time, by what may overlap.

        `none`: nothing. `backward`: a gradient travels while backward goes on, the first to be there first; forward
        begins once all are there. `priorities`: a layer's forward begins once its own are there, and what is needed
        first interrupts what is needed later (Jackson's rule, which is best for one line).

        Args:
            wire: seconds of all parameters on the line.
        """
        took = [wire * n / sum(self.numbers) for n in self.numbers]
        at = 0.0
        for release, seconds in sorted(zip(self.released(), took, strict=True)):
            at = max(at, release) + seconds
        return {
            "none": self.compute + wire,
            "backward": at + sum(self.forward),
            "priorities": _interrupted(self.released(), took, self.after()),
        }


def _interrupted(released: Sequence[float], took: Sequence[float], after: Sequence[float]) -> float:
    """When all is done, if the line always serves what is needed first of what is there."""
    coming = sorted(range(len(took)), key=lambda layer: released[layer], reverse=True)
    ready: list[int] = []  # a heap: the front layer is the most urgent
    left, at, end = list(took), 0.0, 0.0
    while coming or ready:
        if not ready:
            at = max(at, released[coming[-1]])
        while coming and released[coming[-1]] <= at:
            heapq.heappush(ready, coming.pop())
        layer, until = ready[0], released[coming[-1]] if coming else float("inf")
        if at + left[layer] > until:
            left[layer] -= until - at
            at = until
            continue
        at += left[layer]
        heapq.heappop(ready)
        end = max(end, at + after[layer])
    return max(end, max(released) + max(after))
