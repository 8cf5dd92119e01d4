# SPDX-License-Identifier: Apache-2.0
"""A training program whose steps have a plan of two channels (docs/channels.md), and that keeps what comes of them.

python -P planned_program.py FOLDER

In step s member k contributes vectors that only k, s and the part's place say (`drawn`). FOLDER/NUMBER-STEP.npz: each
part's mean, the members counted in its round, and the residual after it. As long as there is FOLDER/hold, the host
that it names waits before it offers the part of the step that it names ("h2 0.2 3"), and makes FOLDER/held once all
that it has offered in that step is committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nicps.client import F32, Session
from nicps.flows import Flows, Part, plan_of
from nicps.job.checkpoints import STATE
from nicps.steps import StepEnded

#: Numbers of each part: of channel 0, and of channel 1.
SIZES = ((60_000, 4000, 700), (900, 15_000))
Plan = Sequence[Sequence[tuple[int, int]]]
#: The parts of each channel, and those of a later plan, named by their place in the first one.
FIRST: Plan = [[(c, p) for p in range(len(sizes))] for c, sizes in enumerate(SIZES)]
OTHER: Plan = [[(0, 1), (1, 1)], [(0, 2)], [(1, 0), (0, 0)]]
#: The step after which that comes into force, if there is FOLDER/plan.
REPLANNED = 5


def drawn(number: int, step: int, channel: int, place: int) -> F32:
    """What that member contributes."""
    rng = np.random.default_rng((number, step, channel, place))
    return rng.standard_normal(SIZES[channel][place], np.float32)


def main(folder: Path) -> None:
    session = Session.attach()
    width = int(str(session.settings["lane"]).removeprefix("i"))
    steps, total = int(session.settings["rounds"]), sum(map(sum, SIZES))
    vector, residual = np.zeros(total, np.float32), np.zeros(total, np.float32)
    weights, parts, at = np.zeros(total, np.float32), [], 0
    for sizes in SIZES:
        parts.append([])
        for size in sizes:
            here = slice(at, at + size)
            parts[-1].append(Part(vector[here], residual[here]))
            at += size
    plan = plan_of(parts, width)
    session.ready(max(SIZES[0]), "begin", residual=residual, plan=plan)
    plans = {0: parts, 1: [[parts[c][p] for c, p in channel] for channel in OTHER]}
    names = {0: FIRST, 1: OTHER}
    flows, step, rows = Flows(session, parts, width), 0, []
    which = 0  # of the plans
    while (phase := session.next_phase()).kind != "end":
        if phase.kind == "test":
            session.tally(phase.first_round, 1, 0)
            session.decide(phase.first_round, "end")
            rows.append({"round": phase.first_round, "weights_sha256": ""})
            continue
        if phase.kind == "save":
            Path(STATE).write_bytes(weights.tobytes())
            session.saved(phase.number, step, hashlib.sha256(weights.tobytes()).hexdigest())
            continue
        rounds = [channel.open for channel in phase.channels]
        if len(rounds) != len(flows.plan):
            flows.close()
            which = 1
            flows = Flows(session, plans[which], width)
        while True:
            flows.begin(phase, rounds)
            for channel, sizes in enumerate(SIZES):
                for place in range(len(sizes)):
                    parts[channel][place].vector[:] = drawn(session.number, step, channel, place)
            session.progress(rounds[0], phase.share_of(session.number))
            if not which:
                for channel, place in ((1, 0), (0, 0), (0, 1), (1, 1), (0, 2)):
                    hold(folder, session, step, f"{channel}.{place}", flows)
                    flows.offer(channel, phase.share_of(session.number))
            flows.offer_rest(phase.share_of(session.number))
            try:
                commit = flows.finish()
            except StepEnded:
                break
            weights -= vector
            step += 1
            keep(folder, session, step, vector, residual, flows, names[which])
            digest = hashlib.sha256(weights.tobytes()).hexdigest()
            session.applied(commit, digest)
            rows.append({"round": commit.round, "weights_sha256": digest})
            if step >= steps:
                session.decide(commit.round, "test")
            elif step == REPLANNED and (folder / "plan").exists():
                session.decide(commit.round, "plan", plan=plan_of(plans[1], width))
            else:
                session.decide(commit.round, "continue")
                rounds = [r + len(c.rounds) for r, c in zip(rounds, phase.channels, strict=True)]
                continue
            break
    flows.close()
    Path("out", "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def hold(folder: Path, session: Session, step: int, part: str, flows: Flows) -> None:
    """Wait as long as the file says so; it is held once what it has offered is committed."""
    file, held = folder / "hold", folder / "held"

    def said() -> str:
        try:
            return file.read_text()
        except FileNotFoundError:  # it may go at any time
            return ""

    while said() == f"{session.name} {part} {step}":
        if flows.settled and not held.exists():
            held.touch()
        session.alive()
        time.sleep(0.005)


def keep(
    folder: Path,
    session: Session,
    step: int,
    vector: F32,
    residual: F32,
    flows: Flows,
    names: Plan,
) -> None:
    counted = {}
    for (channel, place), commit in flows.commits.items():
        first, at = names[channel][place]
        counted[f"counted_{first}_{at}"] = np.array(sorted(commit.counted), np.int64)
    part = folder / f".{session.number}-{step}.npz"
    with part.open("wb") as file:
        np.savez(file, vector=vector, residual=residual, **counted)
    os.replace(part, folder / f"{session.number}-{step}.npz")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
