# SPDX-License-Identifier: Apache-2.0
"""The classifier as a file, and how to use it.

from trainer.dbn.model import read

model = read("runs/20261125-101500-dbn-0a1b")
chances = model(images)  # N x C; `images`: N x 28 x 28 bytes, as MNIST has them, or one 28 x 28, or N x 784
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trainer.dbn.network import Layer, Network
from trainer.dbn.shards import Bytes, Shard
from trainer.dbn.work import predictions
from trainer.errors import JobError

NAME = "model.safetensors"


@dataclass(frozen=True)
class Model:
    """A classifier, and what becomes of its pixels: (pixel - shift) / scale."""

    network: Network
    shift: float
    scale: float

    def __call__(self, images: Bytes) -> Tensor:
        """N x C: the probability of each class.

        Args:
            images: N x V, N pictures of V pixels, or one picture, which is N = 1; bytes from 0 to 255.

        Raises:
            JobError: they have another shape, or are no bytes.
        """
        given = np.asarray(images)
        size = len(self.network[0].weights)
        count = 1 if given.size == size else len(given) if given.ndim else 0
        if given.dtype != np.uint8 or not count or given.size != count * size:
            side = math.isqrt(size)
            one = f"{side} x {side}" if side**2 == size else "height x width"
            raise JobError(
                f"images must be bytes (uint8, 0 to 255), N x {one}, {one} or N x {size}; these are "
                f"{given.dtype}, {' x '.join(map(str, given.shape)) or 'one number'}"
            )
        labels = np.zeros(count, np.uint8)  # nobody asks for them
        # PyTorch takes no memory that is read-only, as that of np.frombuffer is.
        pixels = np.require(given.reshape(count, size), requirements=["C", "W"])
        return predictions(self.network, Shard(pixels, labels, self.shift, self.scale))


def write(model: Model, folder: Path) -> None:
    """Write it into a run's folder; an OSError is the caller's."""
    tensors = {
        f"{at}.{name}": part
        for at, layer in enumerate(model.network)
        for name, part in zip(layer._fields, layer, strict=True)
    }
    pixels = {name: repr(getattr(model, name)) for name in ("shift", "scale")}
    (folder / NAME).write_bytes(save(tensors, metadata=pixels))


def read(folder: str | os.PathLike[str]) -> Model:
    """The classifier that a run has left in its folder.

    Raises:
        JobError: it is not there, or damaged.
    """
    path = Path(folder) / NAME
    try:
        with safe_open(path, "pt") as file:
            pixels = file.metadata()
            layers = [
                Layer(*(file.get_tensor(f"{at}.{name}") for name in Layer._fields))
                for at in range(len(file.keys()) // len(Layer._fields))
            ]
        return Model(tuple(layers), float(pixels["shift"]), float(pixels["scale"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise JobError(f"cannot read {path}: {error}") from None
