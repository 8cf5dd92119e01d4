# SPDX-License-Identifier: Apache-2.0
"""The classifier as a file, and how to use it.

from trainer.dbn.model import read

model = read("runs/20261125-101500-dbn-0a1b")
chances = model(images)  # N x C; `images`: N x 784 or N x 28 x 28 bytes, as MNIST has them
"""

from __future__ import annotations

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
            images: N x V, or N pictures of V pixels; bytes.
        """
        labels = np.zeros(len(images), np.uint8)  # nobody asks for them
        pixels = images.reshape(len(images), -1)
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
