# SPDX-License-Identifier: Apache-2.0
"""The training program of `nicps bench allreduce`: no model, one random vector a round.

It is started by the agents like any other training program: `prepare`, `run`, `report` (docs/jobs.md).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from nicps.bench import program, workload
from nicps.bench.barrier import BarrierClient
from nicps.bench.program import leave_record
from nicps.client import Session


def run(workdir: Path) -> None:
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
            barrier.send({"ended": time.monotonic()})
            said = {"digest": workload.digest(out)}
            if session.number == 1:
                session.decide(round_, "end" if number == rounds - 1 else "continue")
        error = workload.worst_error(out, session.members)
        barrier.send({**said, "error": error})
    leave_record(workdir, workload.digest(out))


if __name__ == "__main__":
    sys.exit(program.main("nicps.bench.reduce_job", run))
