# SPDX-License-Identifier: Apache-2.0
"""Would lanes of 4 bits do? MNIST with simulated hosts: `python -m benchmarks.four_bits --data PATH`.

Every host quantises the gradient of its part of the batch, with error feedback. In `stripes` the sum of a fragment is
rounded to a lane's width, too, and what that leaves over goes into its aggregator's residual (docs/stripes.md,
"Numbers"); in `broadcast` sums are exact. Seeds, batches and initial weights are the same for all. There is no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
_PAYLOAD_BITS = 1440 * 8
_LEAST = -120
MODES = {"float32": (0, ""), "i8": (8, "stripes"), "i4": (4, "stripes"), "i4, sums exact": (4, "")}


def cut(values: F32, width: int) -> npt.NDArray[np.float64]:
    """In fragments: (numbers,) to (fragments, lanes)."""
    per = _PAYLOAD_BITS // width
    padded = np.pad(values.astype(np.float64), (0, -len(values) % per))
    return padded.reshape(-1, per)


def quantise(values: npt.NDArray[np.float64], width: int) -> tuple[I64, I64]:
    """Lanes, and the exponent of each fragment: value = lane * 2**exponent."""
    largest, limit = np.abs(values).max(axis=1), float(2 ** (width - 1) - 1)
    exponents = np.full(len(values), _LEAST, np.int64)
    nonzero = largest > 0
    exponents[nonzero] = np.maximum(np.ceil(np.log2(largest[nonzero] / limit)), _LEAST)
    exponents += largest > limit * 2.0**exponents
    return np.rint(values / 2.0 ** exponents[:, None]).astype(np.int64), exponents


class Network:
    """Hosts with their residuals, float32 (numbers,) each.

    Args:
        width: bits of a lane.
        stripes: sums are rounded, too.
    """

    def __init__(self, hosts: int, numbers: int, width: int, *, stripes: bool) -> None:
        self._width, self._stripes = width, stripes
        self._residuals = [np.zeros(numbers, np.float32) for _ in range(hosts)]

    def sum(self, gradients: list[F32]) -> F32:
        """Of one gradient of each host."""
        numbers, parts = len(gradients[0]), []
        for number, gradient in enumerate(gradients):
            values = gradient + self._residuals[number]
            lanes, exponents = quantise(cut(values, self._width), self._width)
            sent = (lanes * 2.0 ** exponents[:, None]).reshape(-1)[:numbers]
            self._residuals[number] = (values - sent).astype(np.float32)
            parts.append((lanes, exponents))
        # Multiples of one unit: float64 holds the sum of so few hosts exactly.
        total = sum(lanes * 2.0 ** exponents[:, None] for lanes, exponents in parts)
        if not self._stripes:
            return total.reshape(-1)[:numbers].astype(np.float32)
        lanes, exponents = quantise(total, self._width)
        rounded = lanes * 2.0 ** exponents[:, None]
        self._keep((total - rounded).astype(np.float32))
        return rounded.reshape(-1)[:numbers].astype(np.float32)

    def _keep(self, rests: F32) -> None:
        """Each stripe's remainders, (fragments, lanes), go to its aggregator."""
        fragments, per = rests.shape
        hosts = len(self._residuals)
        for rank, residual in enumerate(self._residuals):
            first, end = fragments * rank // hosts, fragments * (rank + 1) // hosts
            own = rests[first:end].reshape(-1)
            here = residual[first * per : end * per]
            here += own[: len(here)]


def load_job() -> ModuleType:
    """trainer/jobs/mnist."""
    path = Path(__file__).parents[1] / "trainer" / "jobs" / "mnist" / "job.py"
    spec = importlib.util.spec_from_file_location("mnist_job", path)
    assert spec is not None and spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    return job


def train(job: ModuleType, sets: object, mode: str, seed: int, hosts: int, epochs: int) -> float:
    """The accuracy on the test set after so many epochs."""
    (images, labels), test = sets  # type: ignore[misc]
    torch.manual_seed(seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    batch = job.settings.batch
    rounds = epochs * (len(labels) // batch)
    scheduler = job.scheduler(optimizer, rounds)
    parameters = list(model.parameters())
    numbers = sum(p.numel() for p in parameters)
    width, exchange = MODES[mode]
    network = Network(hosts, numbers, width, stripes=exchange == "stripes") if width else None
    order = np.random.default_rng(seed)
    share = batch // hosts
    for round_ in range(rounds):
        if round_ % (rounds // epochs) == 0:
            permutation = order.permutation(len(labels))
        first = round_ % (rounds // epochs) * batch
        gradients = []
        for host in range(hosts):
            mine = permutation[first + host * share : first + (host + 1) * share]
            optimizer.zero_grad()
            loss = job.loss(model, {"image": images[mine], "label": labels[mine]}) * share
            loss.backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in parameters]).numpy().copy())
        total = network.sum(gradients) if network else np.sum(gradients, axis=0, dtype=np.float32)
        mean, at = torch.from_numpy(total / np.float32(share * hosts)), 0
        for p in parameters:
            p.grad = mean[at : at + p.numel()].reshape(p.shape).clone()
            at += p.numel()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return float(job.success(model, test).float().mean())


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="the folder with MNIST, or with mnist/ in it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = load_job()
    found, tested = (
        {name: torch.from_numpy(np.array(array)) for name, array in part.items()}
        for part in job.data(arguments.data)
    )
    sets = (found["image"], found["label"]), tested
    results: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in range(1, arguments.seeds + 1):
        for mode in MODES:
            accuracy = train(job, sets, mode, seed, arguments.hosts, arguments.epochs)
            results[mode].append(accuracy)
            print(f"seed {seed}  {mode:<15} {accuracy:.2%}", flush=True)
    for mode, accuracies in results.items():
        behind = statistics.mean(results["float32"]) - statistics.mean(accuracies)
        print(
            f"{mode:<15} mean {statistics.mean(accuracies):.3%}  {behind * 100:+.3f} points behind"
        )
    if arguments.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
