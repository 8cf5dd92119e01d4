# SPDX-License-Identifier: Apache-2.0
"""A small network on scikit-learn's digits, for members with PyTorch and without: numpy_trainer.py.

Both must make the same weights out of the same sum, bit for bit. PyTorch computes w - lr * v with or without a
rounding in between, as the processor has it; where lr is a power of two the product is exact, and it is the same.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer import JobError, Settings


@dataclass(frozen=True, kw_only=True)
class MlpSettings(Settings):
    lr: float = 0.25  # a power of two
    momentum: float = 0.9


settings = MlpSettings(batch=128, epochs=20, test_every=60)


def data(path):
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)  # 0 to 16
    labels = digits.target.astype(np.uint8)
    test = np.arange(len(labels)) % 5 == 4
    train = ~test
    return (
        {"image": images[train], "label": labels[train]},
        {"image": images[test], "label": labels[test]},
    )


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def scores(model, batch):
    return model(batch["image"].float() / 16)


def loss(model, batch):
    return cross_entropy(scores(model, batch), batch["label"].long())


def success(model, batch):
    return scores(model, batch).argmax(1) == batch["label"]


def optimizer(parameters):
    if np.frexp(settings.lr)[0] != 0.5:
        raise JobError(f"lr is {settings.lr}; it must be a power of two, such as 0.25")
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum)
