# SPDX-License-Identifier: Apache-2.0
"""One rank that trains a job of the trainer's with DistributedDataParallel, on Gloo or (lowrank, changes) on nicps.

`python -m benchmarks.ddp_rank`: model, first weights, data, their order, shards, loss, optimizer, schedule, tests and
end are the job's, out of the files that `trainer prepare` makes. `benchmarks.time_to_accuracy` starts one on each host,
with GLOO_SOCKET_IFNAME in its environment.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.model_averaging import utils
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import nicps.torch
from benchmarks.ways import Way, parse_way
from nicps.startup import leave
from trainer import state, weights
from trainer.flat import FlatModel
from trainer.job import Job, load
from trainer.records import Part, Place, Records
from trainer.settings import State

#: PowerSGD on Gloo aborts with several buckets, as their callbacks run in different orders at the ranks.
_ONE_BUCKET_MB = 200.0
_NO_OPTIMIZER = {"param_groups": []}  # with local SGD each rank's has a state of its own


class Averager:
    """Local SGD's averages of the models, every so many steps."""

    def __init__(self, periodic: PeriodicModelAverager) -> None:
        self._periodic = periodic

    def after_step(self, model: nn.Module) -> None:
        """The optimizer has stepped."""
        self._periodic.average_parameters(model.parameters())

    def before_test(self, model: nn.Module) -> None:
        """All ranks test the same model: the average, also where the period is not over."""
        periodic = self._periodic
        last = periodic.step - 1 - periodic.warmup_steps
        if last <= 0 or last % periodic.period == 0:
            return
        if isinstance(periodic, nicps.torch.ChangeAverager):
            periodic.average(model.parameters())
        else:
            utils.average_parameters(iter(model.parameters()), periodic.process_group)


def wrap(model: nn.Module, way: Way) -> tuple[DistributedDataParallel, Averager | None]:
    """DDP with the hook of that way, which must name its start iteration."""
    cap = _ONE_BUCKET_MB if way.kind in ("powersgd", "lowrank") else None
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    averager = None
    start = way.start or 0
    if way.kind == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif way.kind == "powersgd":
        powers = power.PowerSGDState(
            None, matrix_approximation_rank=way.number, start_powerSGD_iter=start
        )
        ddp.register_comm_hook(powers, power.powerSGD_hook)
    elif way.kind == "lowrank":
        nicps.torch.compress(ddp, rank=way.number, warmup_steps=start)
    elif way.kind in ("local", "changes"):
        # A host has one rank, so that there is nobody to add its gradients to between two averages.
        local = post_local.PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(local, post_local.post_localSGD_hook)
        kind = nicps.torch.ChangeAverager if way.kind == "changes" else PeriodicModelAverager
        averager = Averager(kind(way.number, start))
    return ddp, averager


@dataclass
class Rank:
    """A rank's training of a job.

    Attributes: `state`, how far it is; `tests`, of each the steps before it, when its result was known (seconds on
    CLOCK_MONOTONIC), and the accuracy.
    """

    job: Job
    model: DistributedDataParallel
    averager: Averager | None
    train: Part
    test: Part
    records: int
    share: int

    def __post_init__(self) -> None:
        self.optimizer = self.job.optimizer(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        )
        self.planned = self.job.settings.planned_rounds(self.records)
        self.scheduler = self.job.scheduler(self.optimizer, self.planned)
        self.state = State()
        self.tests: list[tuple[int, float, float]] = []

    def run(self, clock: Callable[[], float] = time.monotonic) -> float:
        """Train until the job is done; when the first step began."""
        began = clock()
        every = self.job.settings.rounds_between_tests(self.records)
        while True:
            self._step()
            round_ = self.state.round
            if round_ % every == 0 or round_ == self.planned:
                self._test(clock, began)
                if self.job.done(self.state, self.records):
                    return began

    def _step(self) -> None:
        indices = self.train.indices(self.state.round * self.share, self.share)
        batch = FlatModel.tensors(self.train.take(indices))
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model, batch)
        self.job.backward(loss)
        self.optimizer.step()
        if self.averager is not None:
            self.averager.after_step(self.model.module)
        if self.scheduler is not None:
            self.scheduler.step()
        round_ = self.state.round + 1
        epoch = round_ * self.job.settings.batch / self.records
        self.state = replace(self.state, round=round_, epoch=epoch, loss=loss.item())

    def _test(self, clock: Callable[[], float], began: float) -> None:
        """Every rank its part of the test set; then all know the whole, and how long rank 0 has trained."""
        if self.averager is not None:
            self.averager.before_test(self.model.module)
        self.model.eval()
        # Three numbers that all add up: seconds are rank 0's, or ranks would end at different tests.
        known = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for arrays in self.test.batches(self.job.settings.test_batch):
                counts = self.job.success(self.model.module, FlatModel.tensors(arrays))
                known[:2] += torch.tensor(counts, dtype=torch.float64)
        if dist.get_rank() == 0:
            known[2] = clock() - began
        dist.all_reduce(known)
        right, wrong, seconds = known.tolist()
        accuracy = right / max(1.0, right + wrong)
        best = max(accuracy, self.state.best or 0.0)
        self.state = replace(self.state, accuracy=accuracy, best=best, seconds=seconds)
        self.tests.append((self.state.round, clock(), accuracy))


def _bytes(parameter: nn.Parameter) -> memoryview:
    return parameter.detach().contiguous().view(-1).numpy().data.cast("B")


def main() -> int:
    """Train, and write what came of it into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--master", required=True, help="ADDRESS:PORT")
    parser.add_argument("--way", type=parse_way, required=True)
    parser.add_argument("--job", type=Path, required=True, help="the job's folder")
    parser.add_argument("--prepared", type=Path, required=True, help="what was prepared of it")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    args = parser.parse_args()
    prepared = json.loads((args.prepared / "prepared.json").read_text())
    job = load(args.job, prepared["settings"], prepared["job"])
    settings = job.settings
    torch.set_num_threads(settings.threads)
    ranks = {"rank": args.rank, "world_size": args.hosts}
    if args.way.needs_agents:
        dist.init_process_group("nicps", init_method="nicps://", **ranks)
    else:
        dist.init_process_group("gloo", init_method=f"tcp://{args.master}", **ranks)
    model = job.model()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, array in weights.load(args.prepared / "model.npz").items():
            tensors[name].copy_(torch.from_numpy(array))
    share = settings.batch // args.hosts
    place = Place(args.rank + 1, args.hosts, share)
    train, test = (
        Records(args.prepared / f"{what}.bin", prepared[what]["fields"])
        for what in ("train", "test")
    )
    ddp, averager = wrap(model, args.way)
    rank = Rank(
        job,
        ddp,
        averager,
        Part(train, place, None, settings.seed),
        Part(test, place, None, settings.seed),
        prepared["train"]["records"],
        share,
    )
    torch.manual_seed(settings.seed + args.rank)  # of dropout
    dist.barrier()
    began = rank.run()
    digest = state.digest(rank.state.round, (_bytes(p) for p in model.parameters()), _NO_OPTIMIZER)
    said = {"began": began, "tests": rank.tests, "weights": digest}
    args.out.write_text(json.dumps(said) + "\n")
    dist.barrier()  # a rank that leaves early would break a late one's connection
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(
        main()
    )  # PyTorch's averagers hold the group: its threads would be destroyed while they run
