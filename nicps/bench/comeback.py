# SPDX-License-Identifier: Apache-2.0
"""`nicps bench return`: from `nicps join` on a host that was killed to its first counted gradient, step by step."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from nicps.bench.arguments import host_count, whole
from nicps.bench.barrier import median
from nicps.bench.watch import Metrics
from nicps.errors import NetworkProblem
from nicps.lab import Lab, LabSettings, signals
from nicps.lab.agents import AgentProcess, joined, open_folder, start_agent

DESCRIPTION = """\
Four hosts train a model of a million parameters (digits; SGD with momentum, so that the state is twice the model). One
is killed; once the others have gone on, `nicps join` is run there again. Seconds from its start to the commit of the
first round in which a gradient of that host counts, and when each step on the way was done, as seen from outside."""

_SETTLED = 20  # rounds with all hosts before one is killed, and without it before it comes back
_TIMEOUT_S = 120.0
_POLL_S = 0.005

#: 1,010,602 parameters.
_JOB = """
import torch
from torch import nn
from trainer import Settings
from torch.nn.functional import cross_entropy

settings = Settings(batch=120, epochs=1e6)


def data(path):
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = digits.images.astype("uint8"), digits.target.astype("uint8")
    return {"x": x[:1437], "y": y[:1437]}, {"x": x[1437:], "y": y[1437:]}


def model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 968), nn.ReLU(), nn.Linear(968, 968), nn.ReLU(), nn.Linear(968, 10)
    )


def scores(model, batch):
    return model(batch["x"].float() / 16)


def loss(model, batch):
    return cross_entropy(scores(model, batch), batch["y"].long())


def success(model, batch):
    return scores(model, batch).argmax(1) == batch["y"]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
"""

STEPS = (
    "agent answers",
    "in the view",
    "files here",
    "program started",
    "model built",
    "state here",
    "state loaded",
    "gradient counted",
)


@dataclass(frozen=True)
class Return:
    """One return: seconds from `nicps join` to the end of each of `STEPS`; `round_s` of the others meanwhile."""

    done: dict[str, float]
    round_s: float

    @property
    def seconds(self) -> float:
        """The median of all returns."""
        return self.done[STEPS[-1]]


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser("return", help="a host comes back", description=DESCRIPTION)
    parser.add_argument("--hosts", type=host_count(), default=4)
    parser.add_argument("--repeat", type=whole(1), default=5, help="returns (%(default)s)")
    parser.add_argument(
        "--rounds", type=whole(1), default=_SETTLED, help="before each (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    out = sys.stderr if args.json else sys.stdout
    returns = measure(args.hosts, args.repeat, args.rounds)
    whole = [one.seconds for one in returns]
    print(
        f"{median(whole):.2f} s (median), {max(whole):.2f} s (worst of {len(whole)}) from `join` to the first counted"
        f" gradient; the others' rounds take {median([one.round_s for one in returns]) * 1e3:.0f} ms meanwhile",
        file=out,
    )
    print(f"{'done':<20}{'after (median)':>15}{'it took':>10}", file=out)
    before = 0.0
    for step in STEPS:
        after = median([one.done[step] for one in returns])
        print(f"{step:<20}{after:>13.2f} s{after - before:>8.2f} s", file=out)
        before = after
    if args.json:
        print(orjson.dumps({"hosts": args.hosts, "results": [asdict(r) for r in returns]}).decode())
    return 0


def measure(hosts: int, repeat: int, rounds: int) -> list[Return]:
    """Measure in a lab of its own, always with the last host."""
    with open_folder("nicps-bench-") as folder:
        job = folder / "million"
        job.mkdir()
        (job / "job.py").write_text(_JOB)
        with (
            Lab(LabSettings(f"return-{os.getpid()}", hosts)) as lab,
            joined(lab, lab.hosts, folder) as agents,
        ):
            channel = agents[0].submit(job, settings={})
            lead = Metrics(agents[0])
            returns = []
            for _ in range(repeat):
                _rounds_of(lead, hosts, rounds)
                victim = agents.pop()
                running = lab.processes()[victim.host]
                signals.kill(signals.choose(victim.host, running, "both"))
                _rounds_of(lead, hosts - 1, rounds)
                agents.append(start_agent(lab, victim.host, victim.folders))
                returns.append(_watch(agents[-1], lead))
            channel.close()
    return returns


def _rounds_of(metrics: Metrics, members: int, rounds: int) -> None:
    """Wait for so many rounds in which so many members count."""
    left = rounds

    def fits(row: dict[str, Any]) -> bool:
        nonlocal left
        left -= len(row.get("counted", ())) == members
        return left <= 0

    metrics.until(fits, f"{rounds} rounds of {members} hosts", _TIMEOUT_S)


def _watch(agent: AgentProcess, lead: Metrics) -> Return:
    """Note the time of each visible step until the host is counted."""
    began = time.monotonic()
    own = Metrics(agent)
    at = agent.log.stat().st_size  # the end of the former agent's output
    work, first = agent.folders.work, list[float]()

    def said(text: bytes) -> bool:
        return text in agent.log.read_bytes()[at:]

    def exists(name: str) -> bool:
        pattern = f"nicps-{agent.process.pid}-*/{name}"
        return next(work.glob(pattern), None) is not None

    def counted() -> bool:
        row = next((r for r in own.fresh() if r.get("own_samples")), None)
        if row is not None:
            first.append(row["t_commit"])
        return row is not None

    looks: dict[str, Callable[[], bool]] = {
        "agent answers": agent.answers,
        "in the view": lambda: said(b": view "),
        "files here": lambda: exists("work/prepared.json"),
        "program started": lambda: exists("trainer.log"),
        "model built": lambda: exists("work/out/metrics.jsonl"),
        "state here": lambda: exists("work/state.npz"),
        "state loaded": lambda: not exists("work/state.npz"),
        "gradient counted": counted,
    }
    done: dict[str, float] = {}
    for step, read in looks.items():
        while not read():
            if agent.process.poll() is not None or time.monotonic() > began + _TIMEOUT_S:
                raise NetworkProblem(f"the host has not come so far: {step}; {agent.last_words()}")
            time.sleep(_POLL_S)
        done[step] = time.monotonic() - began
    done[STEPS[-1]] = first[0] - began
    rounds = [row["t_commit"] for row in lead.fresh()]
    inside = [t for t in rounds if began <= t <= first[0]]
    return Return(done, (inside[-1] - inside[0]) / max(1, len(inside) - 1) if inside else 0.0)
