# SPDX-License-Identifier: Apache-2.0
"""Partner exchange (system B) beside plain synchronous training with the same server, in labs of namespaces, as root.

    .venv/bin/python -m benchmarks.partners --workers 2,3,4,5 --rate 1gbit
    .venv/bin/python -m benchmarks.partners --sets

h1 serves, the others train a model of parallel layers with next to nothing to compute: an iteration is contributions,
and a pull. Each number of workers has a lab of its own, in which both ways take turns. Cables are shaped in their
middle, as frames sent by XDP pass no queueing discipline at their host. The server's bytes are counted at its port.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks import packed_sets
from benchmarks.command import finish
from nicps import wire
from nicps.bench.arguments import as_type, whole
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import AgentProcess, Folders, joined, open_folder
from nicps.rates import format_rate, parse_rate
from nicps.session.channel import Channel
from nicps.session.commands import await_result

_SILENCE_S = 2.0  # all hosts share a machine
_WARM_UP = 3  # rounds that are not counted, at both ends
_LOOK_S = 0.002
_WAYS = 8  # parallel layers
_INPUTS = 63

JOB = """\
import numpy as np
import torch
from torch import nn
from trainer import Settings

settings = Settings(batch={workers}, rounds={rounds}, quorum=1.0, micro_batches=1, test_every={rounds})

def data(path):
    x = np.random.default_rng(5).standard_normal((64, {inputs}), np.float32)
    return {{"x": x[:48]}}, {{"x": x[48:]}}

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear({inputs}, {width}) for _ in range({ways}))

    def forward(self, x):
        return torch.stack([way(x).square().mean(1) for way in self.ways]).sum(0)

def model():
    return Branches()

def loss(model, batch):
    return model(batch["x"]).mean()

def success(model, batch):
    return model(batch["x"]) < 1

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of workers, one way.

    Attributes:
        iteration_s: median time from commit to commit, at the first worker.
        server_bytes: that leave the server's port in an iteration, all frames with their headers.
        parameter_bytes: frames with parameters alone, of all servers, in the whole run (`server_bytes_out`).
        partner_bytes: those that workers have passed on.
        weights: the hash after the last round.
    """

    workers: int
    partners: bool
    params: int
    rate_bps: int | None
    iteration_s: float
    server_bytes: float
    parameter_bytes: int
    partner_bytes: int
    weights: str


def measure(workers: int, rate: int | None, params: int, rounds: int, lane: str) -> tuple[Row, Row]:
    """With partners, and without.

    Raises:
        JobFailed: a job has failed.
    """
    shape = LabSettings(f"partners-{os.getpid()}", workers + 1, rate, switch="xdp")
    with (
        open_folder("nicps-bench-") as folder,
        Lab(shape) as lab,
        joined(lab, lab.hosts, folder, "--silence", f"{_SILENCE_S:g}") as agents,
    ):
        job = _write_job(folder / "branches", workers, params, rounds)
        found = []
        for partners in (True, False):
            settings = {"system": "B", "servers": "h1", "lane": lane, "partners": partners}
            with contextlib.closing(agents[0].submit(job, settings)) as channel:
                found.append(_measure(lab, agents, channel, folder, rounds, partners))
    return found[0], found[1]


def _write_job(folder: Path, workers: int, params: int, rounds: int) -> Path:
    folder.mkdir()
    width = max(1, params // (_WAYS * (_INPUTS + 1)))
    values = {"workers": workers, "rounds": rounds, "width": width}
    (folder / "job.py").write_text(JOB.format(**values, ways=_WAYS, inputs=_INPUTS))
    return folder


def _measure(
    lab: Lab,
    agents: Sequence[AgentProcess],
    channel: Channel,
    folder: Path,
    rounds: int,
    partners: bool,
) -> Row:
    bytes_ = _watch(lab, agents[0], rounds)
    result, _ = await_result(channel)
    runs = Folders.below(folder / "h1").runs / result["job_id"]
    worker = result["members"][1]
    lines = (runs / worker / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["phase"] == "train"]
    commits = [row["t_commit"] for row in rows][_WARM_UP:-_WARM_UP]
    took = [after - before for before, after in itertools.pairwise(commits)]
    assert result["weights_identical"]
    return Row(
        workers=len(agents) - 1,
        partners=partners,
        params=_params(runs),
        rate_bps=lab.settings.rate_bps,
        iteration_s=round(statistics.median(took), 5),
        server_bytes=round(bytes_, 1),
        parameter_bytes=result["server_bytes_out"],
        partner_bytes=result["partner_bytes"],
        weights=result["weights_sha256"],
    )


def _params(runs: Path) -> int:
    """Of the model that was trained."""
    from safetensors import safe_open

    with safe_open(runs / "h1" / "model.safetensors", "numpy") as model:
        return sum(int(model.get_tensor(name).size) for name in model.keys())  # noqa: SIM118


def _watch(lab: Lab, agent: AgentProcess, rounds: int) -> float:
    """Bytes that come from the server in a round, from the beginning of one to that of a later one."""
    first, before, start = 0, 0, (0, 0)
    while True:
        status: dict[str, Any] = agent.status()
        if status["phase"] == "train":
            round_ = int(status["round"])
            first = first or round_
            if before and round_ > before:  # it has just begun
                now = round_, lab.counters()["h1"].link.rx_bytes
                if not start[0] and round_ - first >= _WARM_UP:
                    start = now
                if start[0] and round_ - first >= rounds - _WARM_UP:
                    return (now[1] - start[1]) / (now[0] - start[0])
            before = round_
        time.sleep(_LOOK_S)


def table(rows: Sequence[Row]) -> str:
    """For people: each number of workers with partners, and without."""
    lines = [
        f"{'rate':<10}{'workers':>8}{'parameters':>12}{'partners':>10}{'iteration':>12}{'server sends':>16}"
        f"{'of that without':>17}{'parameters only':>17}"
    ]
    for with_, without in zip(rows[::2], rows[1::2], strict=True):
        for row in (without, with_):
            bytes_, parameters = (
                row.server_bytes / without.server_bytes,
                row.parameter_bytes / without.parameter_bytes,
            )
            lines.append(
                f"{format_rate(row.rate_bps):<10}{row.workers:>8}{row.params:>12,}{'yes' if row.partners else 'no':>10}"
                f"{row.iteration_s * 1e3:>9.1f} ms{row.server_bytes / 1e6:>13.2f} MB{bytes_:>17.1%}{parameters:>17.1%}"
            )
        if with_.weights != without.weights:
            lines.append("the weights differ")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.sets:
        packed = packed_sets.measure()
        print(packed_sets.table(packed))
        if args.json:
            print(orjson.dumps([asdict(row) for row in packed]).decode())
        return 0
    rows: list[Row] = []
    for workers in args.workers:
        rows += measure(workers, args.rate, args.params, args.rounds, args.lane)
    print(table(rows))
    if args.json:
        print(orjson.dumps([asdict(row) for row in rows]).decode())
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if not all(1 <= number < wire.MAX_MEMBERS for number in found):
        raise argparse.ArgumentTypeError(f"takes numbers of workers, not {text!r}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.partners",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=_numbers, default="2,3,4,5", help="(%(default)s)")
    add("--rate", type=as_type(parse_rate), default="1gbit", help="of the line (%(default)s)")
    add("--params", type=whole(1), default=1_000_000, help="about so many (%(default)s)")
    add("--rounds", type=whole(3 * _WARM_UP), default=40, help="of training (%(default)s)")
    add("--lane", choices=("i32", "i16", "i8"), default="i32", help="of steps (%(default)s)")
    add("--sets", action="store_true", help="only show how networks are packed into two sets (B1)")
    add("--json", action="store_true", help="a JSON list as the last line")
    args = parser.parse_args(arguments)
    return finish("partners", run, args)


if __name__ == "__main__":
    sys.exit(main())
