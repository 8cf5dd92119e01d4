# SPDX-License-Identifier: Apache-2.0
"""A member's gradient as factors of low rank, in two rounds a step (docs/jobs.md, "Low rank")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from nicps.steps import room_of
from nicps.torch.factors import Matrix, accelerate, exchange, pays
from trainer import weights
from trainer.errors import JobError

F32 = npt.NDArray[np.float32]


class Factors:
    """The parameters that are exchanged as factors, and what a member keeps of them from step to step.

    Attributes: `error`, float32 (n,): what has not been applied yet of this member's gradients, as of the last
    `settle`; `room`, numbers of a round at most.

    Args:
        layout: of the vector.

    Raises:
        JobError: there is no such parameter.
    """

    def __init__(self, layout: weights.Layout, rank: int) -> None:
        self._places: list[tuple[str, slice, tuple[int, int]]] = []  # in the vector
        self._rest: list[slice] = []
        at = rest = 0
        for entry in layout:
            if entry["kind"] not in weights.IN_VECTOR:
                continue
            size, shape = weights.size(entry), entry["shape"]
            rows = shape[0] if len(shape) > 1 else 1
            columns = size // max(rows, 1)
            if entry["kind"] == "parameter" and rows > 1 and pays(rows, columns, rank):
                self._places.append((entry["name"], slice(at, at + size), (rows, columns)))
                self._rest.append(slice(rest, at))
                rest = at + size
            at += size
        self._rest.append(slice(rest, at))
        if not self._places:
            raise JobError(
                f"rank={rank} compresses no parameter: none is a matrix of more than twice the numbers of such factors"
            )
        shapes = [shape for _, _, shape in self._places]
        self.error: F32 = np.zeros(sum(rows * columns for rows, columns in shapes), np.float32)
        self._matrices: list[Matrix] = []
        at = 0
        for number, (rows, columns) in enumerate(shapes):
            size = rows * columns
            error = torch.from_numpy(self.error[at : at + size]).view(rows, columns)
            self._matrices.append(Matrix(rows, columns, rank, number, error))
            at += size
        accelerate(self._matrices)
        others = sum(place.stop - place.start for place in self._rest)
        first = rank * sum(rows for rows, _ in shapes)
        self.room = room_of(first, rank * sum(columns for _, columns in shapes) + others)

    def settle(self) -> None:
        """Bring `error` up to date. In the middle of a step it is that of the one before."""
        for matrix in self._matrices:
            matrix.settle()

    def exchange(self, vector: F32, out: F32, add: Callable[[F32, str], F32]) -> None:
        """Exchange this member's vector, float32 (lanes,): the sum over the members, as far as its factors hold it.

        Args:
            out: float32 (lanes,), where the sum goes.
            add: sums up a vector over the members, which is called by that name.
        """
        np.copyto(out, vector)
        matrices = [
            (matrix, torch.from_numpy(out[place]).view(shape))
            for matrix, (_, place, shape) in zip(self._matrices, self._places, strict=True)
        ]
        rest = [(out[place], np.zeros_like(out[place])) for place in self._rest]
        # Sums of 32 bits: what rounding leaves over of them is not kept.
        exchange(matrices, rest, lambda p: add(p, "P"), lambda q, _: add(q, "Q"))

    # ---- with the state: what all members have alike

    def start(self) -> dict[str, torch.Tensor]:
        """The Q that the next step begins with, by parameter, float32 (rank, columns)."""
        names = (name for name, _, _ in self._places)
        return dict(zip(names, (matrix.start for matrix in self._matrices), strict=True))

    def parts(self) -> Iterator[memoryview]:
        """Their bytes."""
        for matrix in self._matrices:
            yield matrix.start.numpy().data.cast("B")

    def take(self, start: Mapping[str, torch.Tensor]) -> None:
        """Go on with that Q, if it is of the same rank; a job that is resumed with another one begins anew."""
        own = self.start()
        shapes = {name: tensor.shape for name, tensor in start.items()}
        if shapes == {name: tensor.shape for name, tensor in own.items()}:
            for name, tensor in own.items():
                tensor.copy_(start[name])
