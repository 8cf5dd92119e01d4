# SPDX-License-Identifier: Apache-2.0
"""The next byte of a text after the 16 before it: a small language model of 1.2 million parameters.

The text is that of the files in the folder text/ in what --data or NICPS_DATA names; without it the modules of this
Python's standard library, which every host has. Every twentieth file is for the test.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer import Settings

CONTEXT = 16
_SAMPLES, _TESTS = 500_000, 20_000


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """`lr` is the highest learning rate; it rises to it over the first twentieth, then falls. `width`: of a layer."""

    lr: float = 0.003
    width: int = 768


settings = TextSettings(batch=512, rounds=1500, test_every=250)


def data(path):
    folder = Path(path, "text") if path and Path(path, "text").is_dir() else None
    folder, what = (folder, "*") if folder else (Path(sysconfig.get_path("stdlib")), "*.py")
    files = [file for file in sorted(folder.glob(what)) if file.is_file()]
    kept = [file for number, file in enumerate(files) if number % 20], files[::20]
    return windows(kept[0], _SAMPLES), windows(kept[1], _TESTS)


def windows(files, most):
    """Bytes and what follows them, at places that are spread evenly over the files."""
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    every = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    chosen = every[np.linspace(0, len(every) - 1, min(most, len(every))).astype(int)]
    return {"context": chosen[:, :CONTEXT], "next": chosen[:, CONTEXT]}


def model() -> nn.Module:
    width = settings.width
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(CONTEXT * 32, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 256),
    )


def scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["context"].long())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(scores(model, batch), batch["next"].long())


def success(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return scores(model, batch).argmax(1) == batch["next"]


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=settings.lr)


def scheduler(optimizer, rounds):
    if rounds is None:
        return None
    up = max(1, rounds // 20)

    def factor(round_: int) -> float:
        return max(0.01, min((round_ + 1) / up, (rounds - round_) / (rounds - up + 1)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
