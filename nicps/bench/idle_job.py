# SPDX-License-Identifier: Apache-2.0
"""The training program of `nicps bench idle`: nothing for a while, then single gradients."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from nicps.bench import program
from nicps.bench.barrier import BarrierClient
from nicps.bench.program import leave_record
from nicps.client import Session
from nicps.errors import JobFailed

_LANES = 360
_PARK_S = 0.05  # more than an idle turn takes


def run(workdir: Path) -> None:
    """Wait for the message; then one host after the other offers a gradient in an idle ring."""
    session = Session.attach()
    wakes = int(session.settings["wakes"])
    barrier = BarrierClient(str(session.settings["barrier"]))
    session.ready(_LANES, "idle")
    phase = session.next_phase()
    barrier.wait({})
    waits: list[float] = []
    vector = np.ones(_LANES, np.float32)
    first_round = phase.first_round
    for number in range(wakes):
        round_ = first_round + number
        began = 0.0
        if number % session.members == session.number - 1:
            time.sleep(_PARK_S)
            began = time.monotonic()
            session.contribute(round_, vector, 1)
        while (commit := session.wait_commit(round_)) is None:  # the view has changed
            phase = session.next_phase()
            if (phase.kind, phase.first_round) != ("train", round_):
                raise JobFailed(f"round {round_} is not run again: {phase.kind} comes next")
            if began:
                began = time.monotonic()
                session.contribute(round_, vector, 1)
        if began:
            waits.append(session.sending_since(round_) - began)
        session.sum(commit)
        session.applied(commit)
        if session.number == 1:
            session.decide(round_, "end" if number == wakes - 1 else "continue")
    session.next_phase()
    barrier.send({"wakes": waits})
    leave_record(workdir, "idle")


if __name__ == "__main__":
    sys.exit(program.main("nicps.bench.idle_job", run))
