# SPDX-License-Identifier: Apache-2.0
"""The training program of `nicps bench allreduce`: no model, one random vector a round.

It is started by the agents like any other training program: `prepare`, `run`, `report` (docs/jobs.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import orjson

from nicps.bench import workload
from nicps.bench.barrier import BarrierClient
from nicps.client import Session


def prepare(out: Path, settings: dict[str, object]) -> None:
    """Nothing but the settings is handed out."""
    prepared = {
        "job": "allreduce",
        "entry": "nicps.bench.reduce_job",
        "data": "random",
        "settings": settings,
        "files": [{"path": "prepared.json", "store": "all"}],
    }
    (out / "prepared.json").write_bytes(orjson.dumps(prepared))


def run() -> None:
    """Rounds from a common start, until the settings' number of them is done."""
    session = Session.attach()
    settings = session.settings
    params, rounds = int(settings["params"]), int(settings["rounds"])
    vector = workload.tensor(session.number, params)
    out = np.zeros(params, np.float32)
    barrier = BarrierClient(str(settings["barrier"]))
    session.ready(params, "allreduce")
    said: dict[str, object] = {}
    while (phase := session.next_phase()).kind == "train":
        for number in range(rounds):
            round_ = phase.first_round + number
            barrier.wait(said)
            session.all_reduce(round_, vector, out)
            barrier.say({"ended": time.monotonic()})
            said = {"digest": workload.digest(out)}
            if session.number == 1:
                session.decide(round_, "end" if number == rounds - 1 else "continue")
        error = workload.worst_error(out, session.members)
        barrier.say({**said, "error": error})
    Path(session.workdir, "out", "metrics.jsonl").write_bytes(
        orjson.dumps({"round": rounds, "weights_sha256": workload.digest(out)}) + b"\n"
    )


def main() -> int:
    """`prepare`, `run` or `report`, as the agent calls them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("prepare", "run", "report"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--job")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--workdir")
    args = parser.parse_args()
    if args.what == "prepare":
        prepare(args.out, orjson.loads(args.settings))
    elif args.what == "run":
        run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
