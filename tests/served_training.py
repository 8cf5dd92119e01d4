# SPDX-License-Identifier: Apache-2.0
"""Training with servers once more, in whole numbers, from the order of pulls and pushes alone.

Written from docs/servers.md ("Numbers", "Counting"), with plain modules, optimizers of PyTorch and Python's integers;
nothing in it is the trainer's but a job's functions and the order of the data.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.job import Job
from trainer.records import Part, Place, Records

PARAMETERS = 360  # in a fragment that is pulled
LARGEST = {8: 127, 16: 32767, 32: 2147483520}
Fragment = tuple[list[int], int]  # lanes, exponent


def half_up(number: int, divisor: int) -> int:
    """The whole number that is nearest to the quotient; of two the larger one."""
    return (2 * number + divisor) // (2 * divisor)


def weight(parts: int) -> int:
    """Of one of so many."""
    return half_up(2**30, parts)


def to_lanes(values: np.ndarray, width: int) -> Fragment:
    """Lanes of a step's fragment under the least exponent, from -120 on, under which all fit."""
    largest = Fraction(float(np.abs(values).max()))
    exponent = -120
    while largest > LARGEST[width] * Fraction(2) ** exponent:
        exponent += 1
    exact = np.ldexp(values.astype(np.float64), -exponent)  # float32: no bit is lost
    return [int(v) for v in np.rint(exact)], exponent


def to_floats(units: Sequence[int]) -> np.ndarray:
    """What a pull of these parameters gives: 31 bits and a sign for the largest, and float32 at last."""
    bits = max((u if u >= 0 else -u - 1).bit_length() for u in units)
    step = 2 ** max(0, bits - 31)
    lanes = [min(half_up(u, step), 2**31 - 1) for u in units]
    return np.array([np.float32(lane) for lane in lanes]) * np.float32(step * 2.0**-40)


class _Worker:
    """One worker: its model, its optimizer, what rounding has left over."""

    part: Part
    share: int

    def __init__(self, job: Job, rounds: int | None, order: Sequence[str]) -> None:
        self.job, self.order = job, order
        self.model = job.model()
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.buffers = [b for b in self.model.buffers() if b.dtype == torch.float32]
        self.optimizer = job.optimizer(self.parameters)
        self.scheduler = job.scheduler(self.optimizer, rounds)
        self.scheduled = self.worked = self.steps = self.version = 0
        self.store = np.zeros(0, np.float32)
        self.versions: dict[int, int] = {}
        self.residual = np.zeros(0, np.float32)
        self.lanes: list[Fragment] = []
        self.left = np.zeros(0, np.float32)
        self.before: dict[str, Any] | None = None  # the optimizer's state, where a test may come

    def tensors(self) -> Iterable[torch.Tensor]:
        """In the vector's order."""
        return in_order(self.model, self.order)

    def step(self, trained: int, width: int, *, due: bool) -> None:
        """Compute the next step from what is in the store, and its lanes; `due`: a test is, after the last commit."""
        first = 0
        for tensor in self.tensors():
            flat = torch.from_numpy(self.store[first : first + tensor.numel()].copy())
            tensor.copy_(flat.view(tensor.shape))
            first += tensor.numel()
        before = [buffer.clone() for buffer in self.buffers]
        indices = self.part.indices(self.worked * self.share, self.share)
        batch = {name: torch.from_numpy(a) for name, a in self.part.take(indices).items()}
        for parameter in self.parameters:
            parameter.grad = None
        (self.job.loss(self.model, batch) * self.share).backward()
        for parameter in self.parameters:
            parameter.grad /= self.share
        for buffer, old in zip(self.buffers, before, strict=True):
            buffer.copy_(old + (buffer - old) * self.share / self.share)
        while self.scheduler is not None and self.scheduled < trained:
            self.scheduler.step()
            self.scheduled += 1
        if due and not self.steps:
            self.before = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.step()
        vector = np.concatenate([tensor.reshape(-1).numpy() for tensor in self.tensors()])
        difference = np.zeros(len(self.store), np.float32)
        difference[: len(vector)] = vector - self.store[: len(vector)]
        wanted = difference + self.residual
        per = 11520 // width
        self.lanes = [to_lanes(wanted[at : at + per], width) for at in range(0, len(wanted), per)]
        sent = [lane * 2.0**x for lanes, x in self.lanes for lane in lanes]
        self.left = (wanted - np.array(sent)).astype(np.float32)

    def keep(self) -> None:
        """The step is whole."""
        self.residual, self.before = self.left, None
        self.worked, self.steps = self.worked + 1, self.steps + 1


class Reference:
    """A run, replayed.

    Args:
        initial: the vector that was handed out.
        workers: their numbers.
        servers: how many there are.
        order: names of what is in the vector; by default parameters, then float32 buffers.

    Attributes: `commits`: the SHA-256 of the weights after each, in order; `staleness`: of each push at each server;
    `rounds`: trained, after each commit.
    """

    def __init__(
        self,
        job: Job,
        initial: np.ndarray,
        records: Records,
        workers: Iterable[int],
        servers: int,
        order: Sequence[str] = (),
    ) -> None:
        self.job, self.settings, self.records = job, job.settings, records
        self.width = int(job.settings.lane.removeprefix("i"))
        per = 11520 // self.width
        self.fragments = -(-len(initial) // per)
        self.lanes, self.servers = len(initial), servers
        padded = [*map(float, initial), *[0.0] * (self.fragments * per - len(initial))]
        self.units = [round(Fraction(value) * 2**40) for value in padded]
        rounds = job.settings.planned_rounds(len(records))
        self.planned = rounds
        self.workers = {number: _Worker(job, rounds, order) for number in workers}
        for worker in self.workers.values():
            worker.store = np.zeros(len(padded), np.float32)
            worker.residual = np.zeros(len(padded), np.float32)
        self.versions = [0] * servers
        self.trained = self.beyond = 0
        self.due = False
        self.commits: list[str] = []
        self.rounds: list[int] = []
        self.staleness: list[tuple[int, int, int]] = []

    def replay(self, log: Iterable[tuple[Any, ...]]) -> None:
        """All events in their order."""
        for what, *about in log:
            if what in ("phase", "commit", "barrier") or about[0] in self.workers:
                getattr(self, f"_{what}")(*about)

    def _part(self, rank: int) -> range:
        per = 11520 // self.width
        first, end = (self.fragments * k // self.servers * per for k in (rank, rank + 1))
        return range(first, end)

    def _lost(self, number: int) -> None:
        del self.workers[number]

    def _phase(self, shares: Sequence[int]) -> None:
        self.versions, self.due = [0] * self.servers, False
        for number, worker in self.workers.items():
            if worker.before is not None:
                worker.optimizer.load_state_dict(worker.before)
                worker.before = None
            place = Place.of(number, shares)
            worker.part = Part(self.records, place, None, self.settings.seed)
            worker.share = place.share
            worker.versions, worker.version, worker.steps = {}, 0, 0

    def _waits(self, number: int, first: int, end: int) -> None:
        """In the middle of a forward pass, which no bit depends on."""

    def _pull(self, number: int, rank: int) -> None:
        worker, part = self.workers[number], self._part(rank)
        for at in part[::PARAMETERS]:
            worker.store[at : at + PARAMETERS] = to_floats(self.units[at : at + PARAMETERS])
        worker.versions[rank] = self.versions[rank]

    def _step(self, number: int) -> None:
        worker = self.workers[number]
        ahead = (self.beyond + worker.version) // len(self.workers)
        worker.step(self.trained + ahead, self.width, due=self.due)

    def _push(self, number: int, rank: int) -> None:
        worker = self.workers[number]
        staleness = max(1, self.versions[rank] + 1 - worker.versions.get(rank, 0))
        self.staleness.append((number, rank, staleness))
        parts = staleness if self.settings.staleness else 1
        self._add(worker.lanes, self._part(rank), parts)
        self.versions[rank] += 1
        worker.version = max(self.versions[rank], worker.version if rank else 0)
        if rank == self.servers - 1:
            worker.keep()

    def _add(self, lanes: list[Fragment], part: range, parts: int) -> None:
        per, weighs = 11520 // self.width, weight(parts)
        for at in part:
            of, exponent = lanes[at // per]
            number, power = of[at % per] * weighs, exponent + 40 - 30
            self.units[at] += half_up(number * 2 ** max(0, power), 2 ** max(0, -power))

    def _commit(self, members: Sequence[int]) -> None:
        for number in members:
            self._add(self.workers[number].lanes, range(len(self.units)), len(members))
        for number in members:
            self.workers[number].keep()
        steps = sum(self.workers[number].steps for number in members)
        self._count(steps, len(members))

    def _barrier(self) -> None:
        self._count(len(self.workers) * self._rounds_to_test() - self.beyond, len(self.workers))

    def _rounds_to_test(self) -> int:
        every = self.settings.rounds_between_tests(len(self.records))
        left = every - self.trained % every
        return left if self.planned is None else max(1, min(left, self.planned - self.trained))

    def _count(self, steps: int, workers: int) -> None:
        before, every = self.trained, self.settings.rounds_between_tests(len(self.records))
        self.trained, self.beyond = (
            self.trained + (self.beyond + steps) // workers,
            (self.beyond + steps) % workers,
        )
        ends = self.planned is not None and self.trained >= self.planned
        self.due |= ends or self.trained // every > before // every
        self.versions = [0] * self.servers
        for worker in self.workers.values():
            worker.versions, worker.version, worker.steps = {}, 0, 0
        self.rounds.append(self.trained)
        floats = [
            to_floats(self.units[at : at + PARAMETERS])
            for at in range(0, len(self.units), PARAMETERS)
        ]
        sha = hashlib.sha256(np.concatenate(floats)[: self.lanes].tobytes())
        for buffer in self.job.model().buffers():
            if buffer.dtype != torch.float32:
                sha.update(buffer.numpy().tobytes())
        self.commits.append(sha.hexdigest())


def in_order(model: nn.Module, order: Sequence[str] = ()) -> list[torch.Tensor]:
    """Parameters and float32 buffers, in that order or as the model has them."""
    buffers = [(name, b) for name, b in model.named_buffers() if b.dtype == torch.float32]
    tensors = {name: p.data for name, p in model.named_parameters()} | dict(buffers)
    return [tensors[name] for name in order or tensors]


def vector_of(model: nn.Module, order: Sequence[str] = ()) -> np.ndarray:
    """All their numbers."""
    return np.concatenate([tensor.reshape(-1).numpy() for tensor in in_order(model, order)])
