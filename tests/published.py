# SPDX-License-Identifier: Apache-2.0
"""Parameters and operations by layer of three published networks, in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nicps.need_first import Timing

Layers = list[tuple[int, int]]  # parameters, multiplications of one sample


def transformer(layers: int = 24) -> Layers:
    """Layers that are all the same."""
    return [(12, 12)] * layers


def vgg16() -> Layers:
    """Simonyan and Zisserman 2015, configuration D, 224 x 224."""
    found, channels, side = [], 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            found.append(_conv(channels, width, 3, side))
            channels = width
        side //= 2
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        found.append((inputs * outputs + outputs, inputs * outputs))
    return found


def resnet50() -> Layers:
    """He et al. 2016, 224 x 224; without the parameters of batch normalisation."""
    found, channels, side = [_conv(3, 64, 7, 112)], 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            found += _bottleneck(channels, width, side, first=block == 0)
            channels = 4 * width
        side //= 2
    return [*found, (2048 * 1000 + 1000, 2048 * 1000)]


def _bottleneck(channels: int, width: int, side: int, *, first: bool) -> Iterator[tuple[int, int]]:
    yield _conv(channels, width, 1, side)
    yield _conv(width, width, 3, side)
    yield _conv(width, 4 * width, 1, side)
    if first:
        yield _conv(channels, 4 * width, 1, side)


def _conv(inputs: int, outputs: int, kernel: int, side: int) -> tuple[int, int]:
    weights = inputs * outputs * kernel * kernel
    return weights, weights * side * side


def timing(layers: Sequence[tuple[int, int]], computing: float = 1.0) -> Timing:
    """Two thirds of the time backward, one third forward; each layer takes its part of the operations."""
    operations = sum(each for _, each in layers)
    needed, released, before = [], [], 0
    for _, each in layers:
        needed.append(computing / 3 * before / operations)
        released.append(2 * computing / 3 * (operations - before) / operations)
        before += each
    nbytes = tuple(4 * parameters for parameters, _ in layers)
    return Timing(nbytes, tuple(released), tuple(needed), 2 * computing / 3, computing / 3)
