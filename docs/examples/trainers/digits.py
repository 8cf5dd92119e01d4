# SPDX-License-Identifier: Apache-2.0
"""What the three examples train: scikit-learn's digits, 8 x 8 pixels, and a small network for them."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

BATCH, EPOCHS, RATE = 32, 8, 0.05
#: Gradients travel while the next forward pass runs (docs/priorities.md).
OVERLAP = "--overlap" in sys.argv[1:]


def data_sets() -> tuple[TensorDataset, TensorDataset]:
    """(training, test): float32 (64,) in 0 to 1, and int64 labels; every fifth image is for the test."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    held_out = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


def network() -> nn.Module:
    """64 pixels in, 10 classes out. The seed is the same on every host."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The fraction of the test images that it recognises."""
    x, y = test.tensors
    return float((model(x).argmax(1) == y).float().mean())


def digest(model: nn.Module) -> str:
    """Of the weights: hosts that have the same weights print the same."""
    whole: Any = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]
