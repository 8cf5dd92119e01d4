# SPDX-License-Identifier: Apache-2.0
"""A training program with a large part on channel 0 and a small one on channel 1, which is offered a little later.

For `STEPS` steps both channels have the same urgency; then the lead decides on a plan in which the small part goes
first.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from nicps.client import Session
from nicps.flows import Flows, Part, plan_of

STEPS = 5
#: Numbers of each part, in fragments of 360.
BULK, URGENT = 1600 * 360, 500 * 360
_LATER_S = 0.02


def main() -> None:
    session = Session.attach()
    vector, residual = np.zeros(BULK + URGENT, np.float32), np.zeros(BULK + URGENT, np.float32)
    cut = slice(0, BULK), slice(BULK, None)
    parts = [[Part(vector[here], residual[here])] for here in cut]
    urgent = plan_of(parts, 32)
    equal = tuple(replace(channel, urgency=0) for channel in urgent)
    session.ready(BULK, "begin", residual=residual, plan=equal)
    flows, rows = Flows(session, parts, 32), []
    while (phase := session.next_phase()).kind != "end":
        rounds = [channel.open for channel in phase.channels]
        if phase.kind == "test":
            session.tally(phase.first_round, 1, 0)
            session.decide(phase.first_round, "end")
        for at in range(STEPS if phase.kind == "train" else 0):
            flows.begin(phase, [round_ + at for round_ in rounds])
            vector[:] = session.number
            share = phase.share_of(session.number)
            session.progress(rounds[0] + at, share)
            flows.offer(0, share)
            time.sleep(_LATER_S)
            flows.offer(1, share)
            commit = flows.finish()
            digest = hashlib.sha256(vector.tobytes()).hexdigest()
            session.applied(commit, digest)
            rows.append({"round": commit.round, "weights_sha256": digest})
            if len(rows) == 2 * STEPS:
                session.decide(commit.round, "test")
            elif len(rows) == STEPS:
                session.decide(commit.round, "plan", plan=urgent)
            else:
                session.decide(commit.round, "continue")
    flows.close()
    rows.append({"round": rows[-1]["round"] + 1, "weights_sha256": ""})
    Path("out", "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
