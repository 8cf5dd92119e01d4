# SPDX-License-Identifier: Apache-2.0
"""What a run is made of. The same settings, data and versions give the same bits; docs/dbn.md explains each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from trainer.errors import SettingError

if TYPE_CHECKING:  # the options' help needs no PyTorch
    from trainer.dbn.rbm import Visible

SLOW_EPOCHS = 5  # of a layer, with FIRST_MOMENTUM: the program of [HS06] (trainer/dbn/rbm.py)
FIRST_MOMENTUM = 0.5
MASTER_MOMENTUM = 0.5
#: Larger numbers are refused: neither they nor a rate times a decay may be too large for a float32.
LARGEST_RATE, LARGEST_DECAY, LARGEST_SIZE = 1e30, 1e6, 10**6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Rates are for one step of a worker. `epochs` are passes over all data: for each layer, then `finetune`."""

    workers: int = 10
    layers: tuple[int, ...] = (500, 500, 2000)
    epochs: int = 50
    finetune: int = 150
    batch: int = 25
    samples: int | None = None
    held_out: int = 0
    seed: int = 0
    averages: int = 5
    master_momentum: float | None = None
    velocity: Literal["average", "reset"] = "reset"
    visible: Visible = "binary"
    cd: int = 1
    pretrain_lr: float = 0.1
    pretrain_momentum: float = 0.9
    pretrain_decay: float = 0.0002
    optimizer: Literal["sgd", "cg"] = "sgd"
    lr: float = 0.2
    momentum: float = 0.9
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: float = 0.0
    dropout: float = 0.5
    input_dropout: float = 0.2
    max_norm: float | None = None
    head_epochs: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            SettingError: a value that is out of its range, by the name of its option.
        """

        def check(name: str, fits: bool, what: str) -> None:
            if not fits:
                option = name.replace("_", "-")
                value = getattr(self, name)
                said = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise SettingError(f"--{option} must be {what}, not {said}")

        check("workers", 1 <= self.workers <= 10_000, "1 to 10000")
        check("layers", bool(self.layers) and min(self.layers) >= 1, "numbers of 1 or more")
        check("layers", max(self.layers) <= LARGEST_SIZE, f"numbers of at most {LARGEST_SIZE}")
        for name in ("batch", "averages", "cd"):
            check(name, getattr(self, name) >= 1, "1 or more")
        check("batch", self.batch <= LARGEST_SIZE, f"at most {LARGEST_SIZE}")
        for name in ("epochs", "finetune", "held_out", "seed", "head_epochs"):
            check(name, getattr(self, name) >= 0, "0 or more")
        check("samples", self.samples is None or self.samples >= 1, "1 or more")
        for name in ("pretrain_lr", "lr", "pretrain_decay", "weight_decay"):
            value = getattr(self, name)
            check(name, math.isfinite(value) and value >= 0, "0 or more")
            largest = LARGEST_DECAY if name.endswith("decay") else LARGEST_RATE
            check(name, value <= largest, f"at most {largest:g}")
        for name in ("pretrain_momentum", "momentum", "dropout", "input_dropout"):
            check(name, 0 <= getattr(self, name) < 1, "from 0 to below 1")
        given = self.master_momentum
        check("master_momentum", given is None or 0 <= given < 1, "from 0 to below 1")
        norm = self.max_norm
        check("max_norm", norm is None or (math.isfinite(norm) and norm > 0), "above 0")
        check("max_norm", norm is None or norm <= LARGEST_RATE, f"at most {LARGEST_RATE:g}")

    @property
    def momentum_of_master(self) -> float:
        """`master_momentum`, or 0.5, which doubles a steady move of the means; one worker needs none (docs/dbn.md)."""
        if self.master_momentum is not None:
            return self.master_momentum
        return MASTER_MOMENTUM if self.workers > 1 else 0.0

    def pretrain_momentum_in(self, epoch: int) -> float:
        """A worker's momentum in a layer's epoch, which counts from 0."""
        return (
            min(FIRST_MOMENTUM, self.pretrain_momentum)
            if epoch < SLOW_EPOCHS
            else self.pretrain_momentum
        )

    def lr_at(self, epoch: int, part: int) -> float:
        """The learning rate of fine-tuning in a part of an epoch; both count from 0."""
        done = (epoch + part / self.averages) / max(1, self.finetune)
        return self.lr * SCHEDULES[self.schedule](done)

    @property
    def first_epochs(self) -> int:
        """Epochs of fine-tuning in which only the last layer learns.

        At most a quarter of the epochs are such, and none without pre-training, which leaves nothing to be kept.
        """
        return min(self.head_epochs, self.finetune // 4) if self.epochs else 0

    def in_force(self) -> dict[str, str]:
        """All settings as they are shown, with what is taken where none is given."""
        shown = {
            **asdict(self),
            "layers": ",".join(map(str, self.layers)),
            "master_momentum": self.momentum_of_master,
            "head_epochs": self.first_epochs,
        }
        return {name: "none" if value is None else str(value) for name, value in shown.items()}

    def frozen_in(self, epoch: int, layers: int) -> int:
        """How many of the classifier's layers are held fixed in an epoch: all but the last one at first."""
        return layers - 1 if epoch < self.first_epochs else 0


#: The factor of the learning rate, by the share of the fine-tuning that is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
