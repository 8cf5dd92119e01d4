# SPDX-License-Identifier: Apache-2.0
"""MNIST, dealt to the workers, and the random numbers of each piece of work."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer import idx
from trainer.dbn.settings import Settings
from trainer.errors import JobError, SettingError

Bytes = npt.NDArray[np.uint8]

#: What random numbers are for: the first word of each seed after the run's.
DEAL, START, ORDER, WORK = range(4)


@dataclass(frozen=True)
class Shard:
    """A part of the data; pixels are stored as bytes, N x V, and become (pixel - shift) / scale."""

    images: Bytes
    labels: Bytes  # N
    shift: float = 0.0
    scale: float = 255.0

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, rows: npt.NDArray[np.int64] | slice) -> Tensor:
        """These rows as float32, N x V."""
        pixels = torch.from_numpy(self.images[rows]).float()
        return pixels.sub_(self.shift).div_(self.scale)

    def answers(self, rows: npt.NDArray[np.int64] | slice) -> Tensor:
        """Their labels, N, int64."""
        return torch.from_numpy(self.labels[rows].astype(np.int64))


Splits = dict[int, Shard]  # workers' parts of the data, by their numbers


@dataclass(frozen=True)
class Data:
    """What is trained on, what is tested with, and what judges settings (`--held-out`)."""

    train: Shard
    test: Shard
    side: tuple[int, int]  # height and width of a picture, in pixels
    held_out: Shard | None = None

    @property
    def judges(self) -> Shard:
        """What judges the classifier after each epoch: where samples are held out, no test is made before the end."""
        return self.test if self.held_out is None else self.held_out

    @property
    def classes(self) -> int:
        """How many labels there are: one more than the largest."""
        shards = [self.train, self.judges, self.test]
        return int(max(shard.labels.max() for shard in shards)) + 1

    @property
    def digest(self) -> str:
        """SHA-256 over all of it, in hexadecimal."""
        found = hashlib.sha256()
        for shard in (self.train, self.held_out, self.test):
            if shard is not None:
                found.update(shard.images.tobytes() + shard.labels.tobytes())
        return found.hexdigest()


def read(folder: str | None, settings: Settings) -> Data:
    """MNIST in that folder, or in its mnist/ (trainer/idx.py).

    Raises:
        JobError: it is not there, damaged, or not pictures with a label each.
        SettingError: there are too few samples for the settings.
    """
    (images, labels), test = (_pairs(folder, part) for part in ("train", "t10k"))
    if images.shape[1:] != test[0].shape[1:]:
        raise JobError(
            f"pictures for training are {images.shape[1:]}, for the test {test[0].shape[1:]}"
        )
    if settings.samples is not None:
        if settings.samples > len(labels):
            raise SettingError(f"--samples {settings.samples}: there are {len(labels)}")
        images, labels = images[: settings.samples], labels[: settings.samples]
    trained = len(labels) - settings.held_out
    if trained < 1:
        raise SettingError(f"--held-out {settings.held_out}: there are {len(labels)} samples")
    least = trained // settings.workers
    if least < settings.averages:
        raise SettingError(
            f"{trained} samples are too few for --workers {settings.workers} with --averages {settings.averages}"
        )
    shift, scale = 0.0, 255.0
    if settings.visible == "gaussian":
        shift, scale = float(images[:trained].mean()), float(images[:trained].std()) or 1.0

    def flat(pictures: Bytes, answers: Bytes) -> Shard:
        return Shard(pictures.reshape(len(pictures), -1), answers, shift, scale)

    return Data(
        flat(images[:trained], labels[:trained]),
        flat(*test),
        (images.shape[1], images.shape[2]),
        flat(images[trained:], labels[trained:]) if settings.held_out else None,
    )


def _pairs(folder: str | None, part: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    images = idx.read(folder, f"{part}-images-idx3-ubyte")
    labels = idx.read(folder, f"{part}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.ndim != 1 or images.dtype != np.uint8 or labels.dtype != np.uint8:
        raise JobError(f"{part}-images-idx3-ubyte in {folder} does not hold pictures of bytes")
    if len(images) != len(labels) or not len(images):
        raise JobError(f"{folder} has {len(images)} pictures and {len(labels)} labels ({part})")
    return images, labels


def deal(shard: Shard, settings: Settings) -> Splits:
    """A split for each worker: a random order of all samples, dealt out like cards."""
    order = np.random.default_rng([settings.seed, DEAL]).permutation(len(shard))
    rows = [order[split :: settings.workers] for split in range(settings.workers)]
    return {
        split: Shard(shard.images[mine], shard.labels[mine], shard.shift, shard.scale)
        for split, mine in enumerate(rows)
    }


def rows_of(
    settings: Settings, split: int, count: int, phase: int, epoch: int, part: int
) -> npt.NDArray[np.int64]:
    """The samples of a split, of `count`, that a part of an epoch takes, in their order: parts make up one pass."""
    order = np.random.default_rng([settings.seed, ORDER, phase, epoch, split]).permutation(count)
    return order[part * count // settings.averages : (part + 1) * count // settings.averages]


def generator(*path: int) -> torch.Generator:
    """Random numbers that depend on these numbers alone: so work that is done again gives the same bits (H4)."""
    seed = np.random.SeedSequence(path).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))
