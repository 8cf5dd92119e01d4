# SPDX-License-Identifier: Apache-2.0
"""`--reduce nicps`: the workers are tasks of Apache Spark, and the kernels of the executors' hosts add.

An epoch is one job of Spark in barrier mode: a task on each executor, all at the same time. A task works on its splits
with threads, as a run without Spark does, and is a member of a group of nicps (docs/collective.md). Each mean of the
epoch is an all-reduce of the hosts' sums. They are of integers, and exact modulo 2**64, so they are the sums that
Spark's driver would make, bit for bit. Weights leave a host in that all-reduce only: the driver sends them at the
beginning of an epoch, and takes them from one task at its end.

If an executor, an agent or a task is lost, the epoch begins again, with the executors that are there then.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nicps.collective import Group, MemberLost
from nicps.errors import NetworkProblem
from trainer.dbn.cluster import await_executor, disconnect, executors, watched
from trainer.dbn.reduce import ByParts
from trainer.dbn.reduce_local import LocalReducer
from trainer.dbn.shards import Splits
from trainer.dbn.vectors import Mean, Means, Vector
from trainer.dbn.work import Frame, Task, Work, work
from trainer.errors import JobError

if TYPE_CHECKING:
    from pyspark import SparkContext

FORMING_S = 60.0  # for the group of an epoch
TRIES = 5  # of an epoch
PAUSE_S = 2.0  # between them: what is left of the group before ends

Epoch = tuple[Means, float]


class NicpsReducer:
    """The driver's side."""

    def __init__(self, context: SparkContext, splits: Splits, function: Work = work) -> None:
        self._context = context
        self._work = function
        self._splits = {split: context.broadcast(shard) for split, shard in splits.items()}
        self._sent: Any = None  # the frame
        self._run, self._jobs = secrets.token_hex(4), 0

    def begin(self, frame: Frame) -> None:
        """See `Reducer`, here and below."""
        if self._sent is not None:
            self._sent.destroy()
        self._sent = self._context.broadcast(frame)

    def epoch(self, phase: int, epoch: int, means: Means) -> Epoch:
        for left in reversed(range(TRIES)):
            try:
                found = self._try(phase, epoch, means)
                break
            except (JobError, NetworkProblem) as error:
                if not left:
                    raise
                print(f"nicps: the epoch begins again: {error}", file=sys.stderr, flush=True)
                time.sleep(PAUSE_S)
        wrong = [each for each in found if isinstance(each, JobError)]
        if wrong:
            raise wrong[0]
        return next(each for each in found if isinstance(each, tuple))

    def _try(self, phase: int, epoch: int, means: Means) -> list[Epoch | JobError | None]:
        function, frame, dealt = self._work, self._sent, self._splits
        self._jobs += 1
        name = f"dbn-{self._run}-{self._jobs}"
        await_executor(self._context)
        sent = self._context.broadcast(means)

        def run(splits: Iterable[int]) -> Iterator[Epoch | JobError | None]:
            mine = {split: dealt[split].value for split in splits}
            yield _take_part(name, mine, function, frame.value, (phase, epoch, sent.value))

        tasks = min(len(dealt), max(1, executors(self._context)))  # local[N] has none
        parts = self._context.parallelize(list(dealt), tasks).barrier().mapPartitions(run)
        try:
            with watched(self._context):
                return list(parts.collect())
        finally:
            with contextlib.suppress(Exception):  # Spark may have ended
                sent.destroy()

    def close(self) -> None:
        disconnect(self._context)


def _take_part(
    name: str, splits: Splits, function: Work, frame: Frame, what: tuple[int, int, Means]
) -> Epoch | JobError | None:
    """A host's part of an epoch; what came of it, from the first task only.

    An error of the training is returned: what a task raises ends the others' in the middle of whatever they do.
    """
    from pyspark import BarrierTaskContext

    here = BarrierTaskContext.get()
    hosts = [task.address.rpartition(":")[0] for task in here.getTaskInfos()]
    if len(set(hosts)) < len(hosts):
        raise NetworkProblem(
            f"--reduce nicps takes one executor a host, and has {', '.join(sorted(hosts))}"
        )
    try:
        group = Group.form(len(hosts), name=name, forming_s=FORMING_S)
    except NetworkProblem as error:
        raise NetworkProblem(f"{hosts[here.partitionId()]}: {error}") from None
    local = LocalReducer(splits, function)
    local.begin(frame)
    with group:
        member = Member(local, list(splits), group)
        try:
            found = member.epoch(*what)
        except JobError as error:
            return error if error is member.wrong else None
        finally:
            local.close()
    return found if here.partitionId() == 0 else None


class Member(ByParts):
    """One host: its own workers' sum, added to those of the others.

    Attributes: `wrong`, the error of a worker here.
    """

    def __init__(self, local: LocalReducer, splits: list[int], group: Group) -> None:
        self._local, self._splits, self._group = local, splits, group
        self.frame = local.frame
        self.wrong: JobError | None = None

    def reduce(self, task: Task, start: Vector) -> Mean:
        """One all-reduce: the sum, a place for each worker's error, and how many samples, members and mistakes."""
        size, workers = len(start), self.frame.settings.workers
        words = np.zeros(size + workers + 3, np.int64)
        counts = words[size + workers :]
        counts[1] = 1
        try:
            mean = self._local.reduce(task, start)
        except JobError as error:
            self.wrong, counts[2] = error, 1
        else:
            words[:size] = mean.total
            words[size : size + workers].view(np.float64)[self._splits] = mean.errors
            counts[0] = mean.samples
        words = self._group.all_reduce(words).result()
        samples, members, mistakes = map(int, words[size + workers :])
        if members < self._group.size:
            raise MemberLost("an executor's host was lost in an all-reduce")
        if mistakes:
            raise self.wrong or JobError("training diverges at another host")
        errors = words[size : size + workers].view(np.float64)
        whole = Mean()
        whole.merge(Mean(words[:size], samples, errors.tolist()))
        return whole
