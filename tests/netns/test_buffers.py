# SPDX-License-Identifier: Apache-2.0
"""A transformer whose causal mask is a float buffer with -inf in it, beside BatchNorm's statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.netns.labs import until
from tests.netns.members import Network
from tests.transformer import JOB

#: One of h3's training programs is killed in its third round; another takes the state from the others.
KILLED_ONCE = """
import os, signal

calls = 0

def loss(model, batch):
    global calls
    if model.training and "NICPS_SOCKET" in os.environ:
        calls += 1
        with open("/sys/class/net/eth1/address") as file:
            third = file.read().strip().endswith("3")
        if third and calls > 25 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].long().flatten())

def done(state):
    return os.path.exists({end!r})
"""


def test_a_float_mask_survives(three: Network, open_path: Path) -> None:
    """Its values are the same bits on all hosts to the end, also on one that has come back."""
    job = open_path / "transformer"
    job.mkdir()
    end = open_path / "end"
    (job / "job.py").write_text(JOB + KILLED_ONCE.replace("{end!r}", repr(str(end))))
    channel = three.submit(
        "h1", job, rounds=100000, test_every=10, micro_batches=10, microbatch_seconds=0.005
    )
    try:
        three.in_training()

        def state_of_h3() -> str:
            status = three.status("h1")
            states = {m["name"]: m["state"] for m in status["members"]} if status else {}
            return str(states.get("h3"))

        until(lambda: state_of_h3() == "left", "h3 has left", 60.0)
        until(lambda: state_of_h3() == "sent", "h3 trains again", 60.0)
        end.touch()
        run = three.finished(channel)
    finally:
        channel.close()
    assert run.result["weights_identical"] and len(run.members) == 3
    assert "SIGKILL has ended it in round" in three.log("h3")
    hashes: dict[int, set[str]] = {}
    for host in run.members:
        for row in run.metrics(host):
            hashes.setdefault(row["round"], set()).add(row["weights_sha256"])
    assert all(len(of) == 1 for of in hashes.values())
    for host in run.members:
        state = torch.load(run.of(host) / "model.pt", weights_only=True)
        mask = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
        assert np.array_equal(state["attention.mask"].numpy(), mask), host
        assert state["norm.running_mean"].any(), host
