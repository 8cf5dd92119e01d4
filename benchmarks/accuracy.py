# SPDX-License-Identifier: Apache-2.0
"""What lanes cost in accuracy: real jobs in a lab against float32, `python -m benchmarks.accuracy --job NAME`.

For each seed the same job is trained in float32 by this process, which computes the gradients of all hosts' samples
itself and adds them without rounding to lanes, and by the hosts of a lab, with each exchange and lane. Seed, first
weights, batches and rounds are the same. The final figures are of the trained models on the test set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import finish
from nicps.errors import UsageProblem
from nicps.lab import Lab, LabSettings, adding
from nicps.lab.agents import AgentProcess, joined, open_folder
from nicps.session.commands import await_result
from trainer import weights
from trainer.flat import FlatModel
from trainer.job import Job, load
from trainer.prepare import prepare
from trainer.records import Part, Place, Records
from trainer.training import Training

_JOBS = Path(__file__).parents[1] / "trainer" / "jobs"
_LIMIT_S = 1200.0
_RATE_BPS = 1_000_000_000
FLOAT32 = "float32"
_EXCHANGES = "broadcast", "stripes", "switch"
_LANES = "i32", "i16", "i8"
_MADE_BY = {"switch": "linux-switch"}  # as results name an exchange
_LEAST_PART = 0.95  # of the rounds


class Prepared:
    """A job as its starter prepares it: data, first weights, settings.

    Args:
        folder: an empty one, for its files.
    """

    def __init__(
        self, source: Path, folder: Path, data: str | None, settings: Mapping[str, Any]
    ) -> None:
        said = prepare(source, folder, data, settings)
        self.job: Job = load(source, settings)
        self._records = said["train"]["records"]
        self._fields, self._folder = said["train"]["fields"], folder
        self._model = FlatModel(self.job.model(), weights.averaged(said["model"]))
        self._model.load(weights.load(folder / "model.npz"))
        self._test = Records(folder / "test.bin", said["test"]["fields"])

    def train(self, hosts: int) -> None:
        """In float32: each round the samples that so many hosts would take."""
        model, settings = self._model, self.job.settings
        training = Training(self.job, model, self._records)
        records = Records(self._folder / "train.bin", self._fields)
        shares = [settings.batch * k // hosts for k in range(hosts + 1)]
        counts = [end - first for first, end in itertools.pairwise(shares)]
        parts = [
            Part(records, Place.of(number, counts), None, settings.seed)
            for number in range(1, hosts + 1)
        ]
        while not self.job.done(training.state, self._records):
            round_ = training.state.round
            training.begin(settings.seed)
            for part, count in zip(parts, counts, strict=True):
                training.compute(part.take(part.indices(round_ * count, count)), count)
            training.step(model.finish(settings.batch), settings.batch)

    def load(self, path: Path) -> None:
        """A trained model: the state_dict that a run has left."""
        self._model.model.load_state_dict(torch.load(path, weights_only=True))

    def figures(self) -> dict[str, float]:
        """Loss and accuracy on the test set."""
        loss = right = count = 0.0
        everything = Part(self._test, Place(1, 1, 1), None, 0)
        for arrays in everything.batches(1000):
            batch, size = self._model.tensors(arrays), len(next(iter(arrays.values())))
            with self._model.testing():
                loss += self.job.loss(self._model.model, batch).item() * size
                right += self.job.success(self._model.model, batch)[0]
            count += size
        return {"loss": loss / count, "accuracy": right / count}


class Runs:
    """Figures by seed and way of training, kept in a file of JSON lines, so that what is there is not run again.

    Raises:
        UsageProblem: the file cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if path is not None:
            try:
                path.open("a").close()  # better now than after the first run
                self.rows = [json.loads(line) for line in path.read_text().splitlines()]
            except OSError as error:
                raise UsageProblem(
                    f"cannot keep rows in {path}: {error.strerror}: --out takes a file"
                ) from None
            except ValueError:
                raise UsageProblem(
                    f"{path} has a line that is not a row of this benchmark: name another file with --out"
                ) from None

    def has(self, seed: int, way: str) -> bool:
        """Whether it has been run."""
        return any((row["seed"], row["way"]) == (seed, way) for row in self.rows)

    def add(self, seed: int, way: str, figures: Mapping[str, float]) -> None:
        """Keep it, and print it."""
        self.rows.append({"seed": seed, "way": way, **figures})
        said = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(f"seed {seed}  {way:<14}{said}", file=sys.stderr, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")

    def summary(self) -> Iterator[dict[str, Any]]:
        """For each way means, and by how much it is behind float32 with the same seeds: mean, and the worst seed.

        Of the loss in percent of float32's, of the accuracy in points.
        """
        base = {row["seed"]: row for row in self.rows if row["way"] == FLOAT32}
        ways = dict.fromkeys(row["way"] for row in self.rows)
        for way in ways:
            rows = [row for row in self.rows if row["way"] == way and row["seed"] in base]
            if not rows:
                continue
            loss = [100 * (row["loss"] / base[row["seed"]]["loss"] - 1) for row in rows]
            points = [100 * (base[row["seed"]]["accuracy"] - row["accuracy"]) for row in rows]
            yield {
                "way": way,
                "seeds": len(rows),
                "loss": statistics.mean(row["loss"] for row in rows),
                "accuracy": statistics.mean(row["accuracy"] for row in rows),
                "loss_behind_percent": statistics.mean(loss),
                "loss_behind_worst": max(loss),
                "points_behind": statistics.mean(points),
                "points_behind_worst": max(points),
            }


def run_job(
    agents: list[AgentProcess], source: Path, data: str | None, settings: Mapping[str, Any]
) -> Path:
    """The job on all hosts; the folder of its run."""
    runs = agents[0].folders.runs
    before = set(runs.iterdir())
    with closing(agents[0].submit(source, settings, data=data)) as channel:
        result, _ = await_result(channel, _LIMIT_S)
    if not result["weights_identical"]:
        raise SystemExit(f"the hosts' weights differ: {result}")
    # A switch may be ready some rounds after the job has begun.
    rounds, asked = result["exchanges"], str(settings["exchange"])
    if rounds.get(_MADE_BY.get(asked, asked), 0) < _LEAST_PART * sum(rounds.values()):
        raise SystemExit(f"rounds of exchange {asked} were made by others: {rounds}")
    (folder,) = set(runs.iterdir()) - before
    return folder


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", default="mnist", help="a folder in trainer/jobs (%(default)s)")
    parser.add_argument("--data", help="what the job's data() is given; default: NICPS_DATA")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--exchange",
        default="stripes",
        help="some of broadcast,stripes,switch; with `switch` the lab has a Linux box that adds",
    )
    parser.add_argument("--lane", default="i32,i16,i8")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="JSON lines: what is there is not run again")
    parser.add_argument("--json", action="store_true")
    return finish("accuracy", compare, parser.parse_args(arguments))


def compare(args: argparse.Namespace) -> int:
    """Run what is missing, and print the table."""
    args.data = args.data or os.environ.get("NICPS_DATA")
    torch.set_num_threads(1)
    source, runs = _JOBS / args.job, Runs(args.out)
    if not (source / "job.py").is_file():
        raise UsageProblem(f"no job.py in {source}: --job takes the name of a folder in {_JOBS}")
    ways = [(x, lane) for x in args.exchange.split(",") for lane in args.lane.split(",")]
    if unknown := [x for x, _ in ways if x not in _EXCHANGES]:
        raise UsageProblem(f"--exchange takes some of {','.join(_EXCHANGES)}, not {unknown[0]!r}")
    if unknown := [lane for _, lane in ways if lane not in _LANES]:
        raise UsageProblem(f"--lane takes some of {','.join(_LANES)}, not {unknown[0]!r}")
    common = {"quorum": 1.0, **dict(text.split("=", 1) for text in args.set)}
    adds = any(exchange == "switch" for exchange, _ in ways)
    shape = LabSettings("accuracy", args.hosts, _RATE_BPS, switch="xdp" if adds else "bridge")
    with ExitStack() as stack:
        folder = stack.enter_context(open_folder("nicps-accuracy-"))
        lab = stack.enter_context(Lab(shape))
        if adds:
            stack.enter_context(adding.serving(lab, log=folder / "switch.log"))
        trust = adding.trusting(None) if adds else []
        agents = stack.enter_context(joined(lab, lab.hosts, folder, *trust))
        for seed in range(1, args.seeds + 1):
            settings = {**common, "seed": seed}
            prepared = Prepared(source, folder / f"seed-{seed}", args.data, settings)
            if not runs.has(seed, FLOAT32):
                prepared.train(args.hosts)
                runs.add(seed, FLOAT32, prepared.figures())
            for exchange, lane in ways:
                way = f"{exchange} {lane}"
                if not runs.has(seed, way):
                    more = {**settings, "exchange": exchange, "lane": lane}
                    prepared.load(run_job(agents, source, args.data, more) / "model.pt")
                    runs.add(seed, way, prepared.figures())
    print(
        f"{'':<14}{'seeds':>6}{'loss':>9}{'behind':>9}{'worst':>9}{'accuracy':>11}{'behind':>9}{'worst':>9}"
    )
    for row in runs.summary():
        print(
            f"{row['way']:<14}{row['seeds']:>6}{row['loss']:>9.4f}{row['loss_behind_percent']:>+8.2f}%"
            f"{row['loss_behind_worst']:>+8.2f}%{row['accuracy']:>11.3%}{row['points_behind']:>+9.3f}"
            f"{row['points_behind_worst']:>+9.3f}"
        )
    if args.json:
        print(json.dumps(list(runs.summary())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
