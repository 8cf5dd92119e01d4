# SPDX-License-Identifier: Apache-2.0
"""MNIST: 60,000 handwritten digits of 28 x 28, a small convolutional network, 98.5 % and better.

The IDX files, plain or .gz, are in the folder that --data or NICPS_DATA names, or in its mnist/.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer import Settings, idx


@dataclass(frozen=True, kw_only=True)
class MnistSettings(Settings):
    """`lr` is the largest learning rate; it rises to it over the first quarter, then falls."""

    lr: float = 0.01


settings = MnistSettings(batch=500, epochs=4)


def data(path):
    def load(part):
        images = idx.read(path, f"{part}-images-idx3-ubyte")
        return {"image": images, "label": idx.read(path, f"{part}-labels-idx1-ubyte")}

    return load("train"), load("t10k")


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),  # 28 x 28 -> 14 x 14
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),  # -> 7 x 7
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    image = (batch["image"].float() / 255 - 0.1307) / 0.3081
    return model(image.unsqueeze(1))


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
