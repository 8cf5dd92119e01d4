# SPDX-License-Identifier: Apache-2.0
"""The training program of `benchmarks.servers pulls`: workers pull all parameters again and again, and train nothing.

It is started by the agents like any other training program: `prepare`, `run`, `report` (docs/jobs.md).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from nicps.bench import program, workload
from nicps.bench.barrier import BarrierClient
from nicps.client import Commit, Served, Session
from nicps.errors import JobFailed
from nicps.session.lanes import F32

ENTRY = "benchmarks.pull_job"


def run(workdir: Path) -> None:
    """One round: pulls from common starts, then a synchronisation of steps of zeros, so that the job has an end."""
    session = Session.attach()
    params = int(session.settings["params"])
    weights = workload.tensor(1, params)
    session.ready(params, "pulls")
    while (phase := session.next_phase()).kind == "train":
        served, round_ = session.served, phase.first_round
        assert served is not None, "the job has no servers"
        served.fill(weights)
        if phase.shares[session.number - 1]:
            _work(session, served, round_, weights)
        else:
            session.applied(_commit(served, round_))
        if session.lead:
            session.decide(round_, "end")
    program.leave_record(workdir, workload.digest(weights))


def _work(session: Session, served: Served, round_: int, weights: F32) -> None:
    settings, out = session.settings, np.empty_like(weights)
    barrier = BarrierClient(str(settings["barrier"]))
    for _ in range(int(settings["pulls"])):
        barrier.wait({})
        _pull(served, round_)
        barrier.send({"ended": time.monotonic()})
    served.read(out)
    # The exponent of a fragment is that of its largest parameter, which is below 8.
    if np.abs(out - weights).max() > 2.0**-27:
        raise JobFailed("what was pulled is not what the servers were filled with")
    barrier.send({})
    served.step(round_, out, 1)
    commit = _commit(served, round_)
    _pull(served, commit.round + 1)
    session.applied(commit, workload.digest(out))


def _pull(served: Served, round_: int) -> None:
    served.pull(round_)
    if not served.wait_pulled(round_):
        raise JobFailed(f"round {round_}: another phase began before all parameters had come")


def _commit(served: Served, round_: int) -> Commit:
    ended = served.wait(round_)
    if not isinstance(ended, Commit):
        raise JobFailed(f"round {round_}: another phase began before its end")
    return ended


if __name__ == "__main__":
    sys.exit(program.main(ENTRY, run))
