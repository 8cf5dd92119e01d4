# SPDX-License-Identifier: Apache-2.0
"""What a trained classifier takes: pictures of bytes, in the shapes in which they come. Its file: test_dbn_cli.py."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from trainer.dbn.model import Model
from trainer.dbn.network import Layer
from trainer.errors import JobError

RANDOM = np.random.default_rng(1)
IMAGES = RANDOM.integers(0, 256, (5, 28, 28), np.uint8)


def model_of(pixels: int = 784) -> Model:
    """One layer, ten classes."""
    weights = torch.from_numpy(RANDOM.normal(0, 0.1, (pixels, 10)).astype(np.float32))
    return Model((Layer(weights, torch.zeros(10)),), 0.0, 255.0)


def test_pictures_in_each_shape() -> None:
    model = model_of()
    chances = model(IMAGES)
    assert chances.shape == (5, 10) and torch.allclose(chances.sum(1), torch.ones(5))
    assert torch.equal(model(IMAGES.reshape(5, 784)), chances)
    for at, image in enumerate(IMAGES):
        for one in (image, image[np.newaxis], image.reshape(784)):
            found = model(one)
            assert found.shape == (1, 10) and torch.allclose(found[0], chances[at])


def test_memory_that_is_read_only_or_backwards() -> None:
    """As np.frombuffer gives it; PyTorch warns of the one, and refuses the other."""
    model = model_of()
    read_only = np.frombuffer(IMAGES.tobytes(), np.uint8).reshape(IMAGES.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(read_only), model(IMAGES))
        assert torch.equal(model(IMAGES[::-1]), model(IMAGES).flip(0))


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (IMAGES / 255, "float64, 5 x 28 x 28"),
        (IMAGES.astype(np.int64), "int64, 5 x 28 x 28"),
        (np.zeros((5, 14, 14), np.uint8), "uint8, 5 x 14 x 14"),
        (np.zeros((30, 30), np.uint8), "uint8, 30 x 30"),
        (np.zeros((28, 28, 3), np.uint8), "uint8, 28 x 28 x 3"),
        (np.zeros((0, 28, 28), np.uint8), "uint8, 0 x 28 x 28"),
        (np.uint8(3), "uint8, one number"),
    ],
)
def test_what_is_refused(images: Any, said: str) -> None:
    wanted = (
        r"images must be bytes \(uint8, 0 to 255\), N x 28 x 28, 28 x 28 or N x 784; these are "
    )
    with pytest.raises(JobError, match=f"{wanted}{said}$"):
        model_of()(images)


def test_pictures_that_are_not_square() -> None:
    with pytest.raises(JobError, match="N x height x width, height x width or N x 30; these are"):
        model_of(30)(IMAGES)
