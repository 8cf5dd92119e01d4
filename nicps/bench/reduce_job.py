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
from nicps.errors import JobFailed


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
            session.contribute(round_, vector, 1, finite=False)
            converted = time.monotonic()
            commit = session.wait_commit(round_, out)
            if commit is None or session.number not in commit.counted:
                raise JobFailed(f"round {round_} was closed without this host")
            session.sum(commit, out)
            session.applied(commit)
            ended = time.monotonic()
            exchange = commit.exchange.name
            barrier.send(
                {"ended": ended, "converted": converted, "round": round_, "exchange": exchange}
            )
            said = {"digest": workload.digest(out)}
            if session.number == 1:
                session.decide(round_, "end" if number == rounds - 1 else "continue")
        error = workload.worst_error(out, session.members)
        barrier.send({**said, "error": error})
    leave_record(workdir, workload.digest(out))


if __name__ == "__main__":
    sys.exit(program.main("nicps.bench.reduce_job", run))
