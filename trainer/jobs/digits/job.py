# SPDX-License-Identifier: Apache-2.0
"""The 1,797 handwritten digits of 8 x 8 that are inside scikit-learn: needs no files."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer import Settings

settings = Settings(batch=120, epochs=30, test_every=60)


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


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["image"].float() / 16)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(scores(model, batch), batch["label"].long())


def success(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return scores(model, batch).argmax(1) == batch["label"]


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)
