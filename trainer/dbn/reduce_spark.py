# SPDX-License-Identifier: Apache-2.0
"""`--reduce spark`: the workers are tasks of Apache Spark, and its driver adds (H3).

Each split is a broadcast variable of its own, which only the executors that work on it unpack. A task is a partition of
an RDD of split numbers: one split, or several where the cluster runs fewer tasks at a time than there are workers.
Weights go out as a broadcast variable. A task adds the updates of its splits, and the driver adds the tasks' sums: they
are of integers, so neither the order in which tasks end matters nor which splits share a task (trainer/dbn/vectors.py).
Spark runs the task of a lost executor elsewhere, with the same bits (trainer/dbn/work.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainer.dbn.cluster import disconnect, watched
from trainer.dbn.reduce import ByParts
from trainer.dbn.shards import Splits
from trainer.dbn.vectors import Mean, Vector
from trainer.dbn.work import Frame, Task, Work, work

if TYPE_CHECKING:
    from pyspark import SparkContext


class SparkReducer(ByParts):
    """The driver's side."""

    def __init__(self, context: SparkContext, splits: Splits, function: Work = work) -> None:
        self._context = context
        self._work = function
        self._splits = {split: context.broadcast(shard) for split, shard in splits.items()}
        self._sent: Any = None  # the frame

    def begin(self, frame: Frame) -> None:
        """See `Reducer`, here and below."""
        if self._sent is not None:
            self._sent.destroy()
        self.frame, self._sent = frame, self._context.broadcast(frame)

    def reduce(self, task: Task, start: Vector) -> Mean:
        function, frame, dealt = self._work, self._sent, self._splits
        with watched(self._context):
            sent = self._context.broadcast(start)

        def run(splits: Iterable[int]) -> Iterator[Mean]:
            torch.set_num_threads(1)  # with more of them a product's bits are others
            mean = Mean()
            for split in splits:
                mean.add(function(frame.value, task, sent.value, split, dealt[split].value))
            yield mean

        tasks = min(len(dealt), self._context.defaultParallelism)
        with watched(self._context):
            means = self._context.parallelize(list(dealt), tasks).mapPartitions(run).collect()
        sent.destroy()
        whole = Mean()
        for mean in means:
            whole.merge(mean)
        return whole

    def close(self) -> None:
        disconnect(self._context)
