# SPDX-License-Identifier: Apache-2.0
"""The training program of `nicps bench memory --channels`: no model, one random vector a step, cut into equal rounds.

Each channel has one round, so all rounds of a step together have the room of the whole vector.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from nicps.bench import program, workload
from nicps.bench.barrier import BarrierClient
from nicps.bench.program import leave_record
from nicps.client import Session
from nicps.collective.lanes import PER_FRAGMENT
from nicps.errors import JobFailed
from nicps.flows import Flows, Part, plan_of
from nicps.session.lanes import F32


def ends_of(params: int, channels: int, grain: int) -> list[int]:
    """Ends of at most so many parts, about equal; all but the last one are a multiple of `grain`."""
    fragments = -(-params // grain)
    count = min(channels, fragments)
    return [min(params, fragments * at // count * grain) for at in range(1, count + 1)]


def cut(vector: F32, residual: F32, ends: Sequence[int]) -> list[list[Part]]:
    """A part a channel, the front of the vector on the most urgent one."""
    cuts = [slice(*each) for each in pairwise((0, *ends))]
    return [[Part(vector[here], residual[here])] for here in reversed(cuts)]


def run(workdir: Path) -> None:
    """Steps from a common start, until the settings' number of them is done."""
    session = Session.attach()
    settings = session.settings
    params, steps = int(settings["params"]), int(settings["rounds"])
    width = int(str(settings["lane"]).removeprefix("i"))
    vector, residual = workload.tensor(session.number, params), np.zeros(params, np.float32)
    ends = ends_of(params, int(settings["priorities"]), PER_FRAGMENT * 32 // width)
    parts = cut(vector, residual, ends)
    barrier = BarrierClient(str(settings["barrier"]))
    session.ready(
        len(parts[0][0].vector), "allreduce", residual=residual, plan=plan_of(parts, width)
    )
    flows = Flows(session, parts, width)
    said: dict[str, object] = {}
    while (phase := session.next_phase()).kind == "train":
        rounds = [channel.open for channel in phase.channels]
        for step in range(steps):
            barrier.wait(said)
            flows.begin(phase, rounds)
            flows.offer_rest(phase.share_of(session.number))
            commit = flows.finish()
            if session.number not in commit.counted:
                raise JobFailed(f"round {commit.round} was closed without this host")
            session.applied(commit)
            barrier.send({"ended": time.monotonic(), "exchange": commit.exchange.name})
            said = {"digest": workload.digest(vector)}
            if session.number == 1:
                session.decide(commit.round, "end" if step == steps - 1 else "continue")
            rounds = [r + len(c.rounds) for r, c in zip(rounds, phase.channels, strict=True)]
        barrier.send(said)
    flows.close()
    leave_record(workdir, workload.digest(vector))


if __name__ == "__main__":
    sys.exit(program.main("nicps.bench.planned_job", run))
