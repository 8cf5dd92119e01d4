# SPDX-License-Identifier: Apache-2.0
"""Two Inception-like blocks of four parallel branches each, on MNIST where it is given, else on the digits.

Packed by their parameters the branches make two sets that differ by less than 5 % (docs/servers.md, B1). MNIST's IDX
files, plain or .gz, are in the folder that --data or NICPS_DATA names, or in its mnist/.
"""

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer import Settings, idx


@dataclass(frozen=True, kw_only=True)
class BranchesSettings(Settings):
    """`lr` is the largest learning rate: it rises to it over the first quarter, then falls. `width`: of the blocks."""

    lr: float = 0.01
    width: int = 8


settings = BranchesSettings(batch=120, epochs=12, quorum=1.0, micro_batches=1)
IMAGES = "train-images-idx3-ubyte"


def data(path):
    if path and (not os.path.isdir(path) or idx.find(path, IMAGES) is not None):
        return mnist(path, "train"), mnist(path, "t10k")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    test = np.arange(len(labels)) % 5 == 4
    return tuple({"image": images[of], "label": labels[of]} for of in (~test, test))


def mnist(path, part):
    images = idx.read(path, f"{part}-images-idx3-ubyte")
    return {"image": images, "label": idx.read(path, f"{part}-labels-idx1-ubyte")}


def conv(inputs: int, outputs: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Block(nn.Module):
    """Four ways from `inputs` channels to 4 * `width`; no parameter is on two of them."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = conv(inputs, width, 1)
        self.three = nn.Sequential(conv(inputs, width, 1), conv(width, width, 3))
        self.twice = nn.Sequential(
            conv(inputs, width, 1), conv(width, width, 3), conv(width, width, 3)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv(inputs, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.three(x), self.twice(x), self.pool(x)), 1)


def model() -> nn.Module:
    width = settings.width
    return nn.Sequential(
        conv(1, width, 3),
        Block(width, width),
        nn.MaxPool2d(2),
        Block(4 * width, width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4 * 4 * width, 10),
    )


def scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["image"].float().unsqueeze(1) / 255)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(scores(model, batch), batch["label"].long())


def success(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return scores(model, batch).argmax(1) == batch["label"]


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=settings.lr)


def scheduler(optimizer, rounds):
    if rounds is None:
        return None
    up = max(1, rounds // 4)

    def factor(round_: int) -> float:
        return max(0.01, min((round_ + 1) / up, (rounds - round_) / (rounds - up + 1)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
