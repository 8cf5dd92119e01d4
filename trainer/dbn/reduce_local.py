# SPDX-License-Identifier: Apache-2.0
"""`--master local`: the workers are threads of this process, as many at a time as there are processors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from trainer.dbn.shards import Shard
from trainer.dbn.vectors import Mean, Update, Vector
from trainer.dbn.work import Frame, Task, work

Work = Callable[[Frame, Task, Vector, int, Shard], Update]


class Reducer(Protocol):
    """What hands weights to workers, and makes the mean of what they return (H1)."""

    def begin(self, frame: Frame) -> None:
        """A phase begins."""

    def reduce(self, task: Task, start: Vector) -> Mean:
        """All workers do their part of a task."""

    def close(self) -> None:
        """The workers are needed no more."""


class LocalReducer:
    """Threads: PyTorch computes without the interpreter's lock."""

    def __init__(self, shards: Sequence[Shard], function: Work = work) -> None:
        self._shards = shards
        self._work = function
        self._frame: Frame | None = None
        # One thread in each of PyTorch's operations: with more of them a product's bits are others.
        self._pool = ThreadPoolExecutor(
            min(len(shards), len(os.sched_getaffinity(0))),
            initializer=torch.set_num_threads,
            initargs=(1,),
        )

    def begin(self, frame: Frame) -> None:
        self._frame = frame

    def reduce(self, task: Task, start: Vector) -> Mean:
        frame = self._frame
        assert frame is not None
        updates = self._pool.map(
            lambda split: self._work(frame, task, start, split, self._shards[split]),
            range(len(self._shards)),
        )
        mean = Mean()
        for update in updates:
            mean.add(update)
        return mean

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
