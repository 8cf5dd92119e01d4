# SPDX-License-Identifier: Apache-2.0
"""`--master local`: the workers are threads of this process, as many at a time as there are processors."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from trainer.dbn.reduce import ByParts
from trainer.dbn.shards import Splits
from trainer.dbn.vectors import Mean, Vector
from trainer.dbn.work import Frame, Task, Work, work


class LocalReducer(ByParts):
    """Threads: PyTorch computes without the interpreter's lock."""

    def __init__(self, splits: Splits, function: Work = work) -> None:
        self._splits = splits
        self._work = function
        # One thread in each of PyTorch's operations: with more of them a product's bits are others.
        self._pool = ThreadPoolExecutor(
            min(len(splits), len(os.sched_getaffinity(0))),
            initializer=torch.set_num_threads,
            initargs=(1,),
        )

    def begin(self, frame: Frame) -> None:
        """See `Reducer`, here and below."""
        self.frame = frame

    def reduce(self, task: Task, start: Vector) -> Mean:
        updates = self._pool.map(
            lambda split: self._work(self.frame, task, start, split, self._splits[split]),
            self._splits,
        )
        mean = Mean()
        for update in updates:
            mean.add(update)
        return mean

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
