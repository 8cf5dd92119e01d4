# SPDX-License-Identifier: Apache-2.0
"""A small network in NumPy on scikit-learn's digits, trained by a group of hosts: no PyTorch, and no job.

    nicps run docs/examples/mlp/numpy_group.py --epochs 20

Each host has every size-th image. After every step all hosts hold the same weights, bit for bit: the mean that comes
back is the same everywhere, and so is what is made of it. A host that is lost does not stop the others.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from nicps.collective import Group

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class Mlp:
    """Two layers. Weights, velocity and gradient are one vector each, in which the layers have their places."""

    SHAPES = ((64, 32), (32,), (32, 10), (10,))

    def __init__(self) -> None:
        random = np.random.default_rng(1)  # the same on every host
        sizes = [int(np.prod(shape)) for shape in self.SHAPES]
        self.weights = random.standard_normal(sum(sizes), np.float32) * np.float32(0.1)
        self.velocity, self.gradient = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self._ends = np.cumsum(sizes)[:-1]

    def _layers(self, vector: F32) -> list[F32]:
        parts = np.split(vector, self._ends)
        return [part.reshape(shape) for part, shape in zip(parts, self.SHAPES, strict=True)]

    def scores(self, images: F32) -> tuple[F32, F32]:
        """The hidden layer (n, 32), and the scores (n, 10)."""
        w1, b1, w2, b2 = self._layers(self.weights)
        hidden = np.maximum(images @ w1 + b1, 0)
        return hidden, hidden @ w2 + b2

    def compute(self, images: F32, labels: I64) -> None:
        """The gradient of the mean cross entropy, into `gradient`."""
        hidden, back = self.scores(images)
        np.exp(back - back.max(1, keepdims=True), out=back)
        back /= back.sum(1, keepdims=True)
        back[np.arange(len(labels)), labels] -= 1
        back /= np.float32(len(labels))
        below = (back @ self._layers(self.weights)[2].T) * (hidden > 0)
        found = images.T @ below, below.sum(0), hidden.T @ back, back.sum(0)
        for place, value in zip(self._layers(self.gradient), found, strict=True):
            place[...] = value

    def step(self, rate: float, momentum: float) -> None:
        """SGD along `gradient`: single operations in float32, which come to the same bits on every processor."""
        self.velocity *= np.float32(momentum)
        self.velocity += self.gradient
        self.weights -= np.float32(rate) * self.velocity


def main() -> None:
    """Train, test, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="of each host")
    parser.add_argument("--lane", default="i8", help="i8, i16 or i32: integers on the wire")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int64)
    held_out = np.arange(len(labels)) % 5 == 4
    model = Mlp()
    residual = np.zeros_like(model.gradient)  # what rounding has left over at this host

    with Group.form(int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"])) as group:
        mine = np.flatnonzero(~held_out)[group.rank :: group.size]
        steps = (np.count_nonzero(~held_out) // group.size) // args.batch  # the same on every host
        for epoch in range(args.epochs):
            order = np.random.default_rng([epoch, group.rank]).permutation(mine)
            for step in range(steps):
                now = order[step * args.batch :][: args.batch]
                model.compute(images[now], labels[now])
                group.average(model.gradient, residual, lane=args.lane).result()
                model.step(rate=0.1, momentum=0.9)

        right = float((model.scores(images[held_out])[1].argmax(1) == labels[held_out]).mean())
        digest = hashlib.sha256(model.weights.tobytes()).hexdigest()[:16]
        lost = f", without {', '.join(group.names[k] for k in group.lost)}" if group.lost else ""
        print(f"rank {group.rank} of {group.size}: {right:.2%}, weights {digest}{lost}", flush=True)


if __name__ == "__main__":
    main()
