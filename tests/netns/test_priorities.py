# SPDX-License-Identifier: Apache-2.0
"""Jobs with `priorities`: parts of the gradient on several channels (docs/channels.md). Real agents and the trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.netns.labs import until
from tests.netns.members import Network, tiny_job
from tests.netns.test_steps import same_weights

SETTINGS = {"exchange": "stripes", "lane": "i8", "quorum": 1.0}


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    """No host is taken for silent, however busy the machine is: both are counted in every step."""
    with Network(2, arguments=("--silence", "20")) as made:
        made.up()
        yield made


DROPPED = """
def model():
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4),
    )

def optimizer(parameters):
    made = torch.optim.AdamW(parameters, lr=0.01)
    HOOK
    return made

def scheduler(optimizer, rounds):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
"""


def test_parts_change_no_bit(two: Network) -> None:
    """Parameters are updated part by part while the next forward pass runs, or at once: the same weights."""
    settings = {**SETTINGS, "rounds": 12, "test_every": 5, "micro_batches": 1}
    parts = {"priorities": 3, "priority_cuts": "2,4", "bucket_mb": 0.001}
    found = []
    for name, hook in (
        ("parts", "pass"),
        ("whole", "made.register_step_post_hook(lambda *_: None)"),
    ):
        job = tiny_job(two.folder, DROPPED.replace("HOOK", hook), name)
        run = two.train(job, **settings, **parts)
        assert run.result["weights_identical"] and run.result["channels"] == 3
        found.append(same_weights(run, *two.names))
    assert len({*found[0].values()}) == 12 and found[0] == found[1]


SLOW = """
import time

class Slow(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
        self.register_full_backward_hook(lambda *_: time.sleep(0.004))

    def forward(self, x):
        time.sleep(0.002)
        return super().forward(x)

def model():
    return nn.Sequential(nn.Linear(16, 64), *(Slow() for _ in range(6)), nn.Linear(64, 4))
"""


def test_the_lead_measures_and_predicts(two: Network) -> None:
    """The first steps are measured; the result says what a step should take, and what it took."""
    settings = {**SETTINGS, "rounds": 45, "micro_batches": 1, "priorities": 2}
    run = two.train(tiny_job(two.folder, SLOW, "slow"), **settings)
    result = run.result
    assert result["weights_identical"] and len(same_weights(run, *two.names)) == 45
    assert result["step_seconds"] > 6 * 0.006 and result["wait_seconds"] >= 0
    assert result["predicted_seconds"] > 6 * 0.006
    rows = run.training("h1")
    assert rows[0]["predicted_seconds"] is None and rows[-1]["predicted_seconds"] is not None
    assert {row["channels"] for row in rows[-10:]} == {result["channels"]}
    log = (run.of("h1") / "trainer.log").read_text()
    assert log.count("trainer: need first: ") >= 1


NORMED = """
def model():
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
"""


@pytest.mark.long
def test_a_straggler_is_not_waited_for(three: Network) -> None:
    """A quorum below 1, and buffers that are averaged: each part has the same members, and the weights are the same."""
    slow = {"slow.h3": 6.0, "microbatch_seconds": 0.004, "micro_batches": 10}
    settings = {**SETTINGS, **slow, "quorum": 0.6, "rounds": 20, "priorities": 2}
    run = three.train(tiny_job(three.folder, NORMED), **settings)
    assert run.result["rounds"] == 20 and run.result["weights_identical"]
    same_weights(run, *three.names)
    counted = [row["counted"] for row in run.training("h1")]
    assert any(sum(each.values()) < 63 for each in counted), (
        "some step was closed before all had it"
    )
    assert any(row["own_samples"] < 21 for row in run.training("h3"))


def test_channels_are_seen(two: Network) -> None:
    """While a job trains, `nicps status` and `nicps top` name its channels; then each host has a row a step and channel
    in its time line."""
    cuts = {"priorities": 3, "priority_cuts": "4,10", "bucket_mb": 0.05}
    settings = {**SETTINGS, "rounds": 25, "micro_batches": 1, **cuts}
    channel = two.submit("h1", tiny_job(two.folder, SLOW, "seen"), **settings)
    try:

        def channels() -> list[dict[str, Any]]:
            status = two.status("h2") or {"activity": {}}
            found: list[dict[str, Any]] = status["activity"].get("channels", [])
            return found if any(each["rounds"] > 2 for each in found) else []

        seen = until(channels, "rounds of channels")
        shown = two.command("h1", "top", "--once", "--interval", "0.3").out
        run = two.finished(channel)
    finally:
        channel.close()
    assert [each["urgency"] for each in seen] == [0, 1, 2] and seen[0]["places"] > 1
    assert all(each["bytes"] >= 1440 * each["rounds"] > 0 for each in seen)
    line = r"^channel 2   urgency 2  \w+ +round \d of \d  [\d.]+/s  [\d.]+ k?B/s"
    assert re.search(line, shown, re.M) and "a step" in shown, shown
    assert run.result["channels"] == 3
    report = (run.of("h1").parent / "report.html").read_text()
    assert "<h2>Channels</h2>" in report and report.count(">channel 2</text>") >= 2
    for name in two.names:
        text = (run.of(name) / "timeline.jsonl").read_text()
        rows = [row for row in map(json.loads, text.splitlines()) if row["kind"] == "rounds"]
        for number in range(3):
            mine = [row for row in rows if row.get("channel", 0) == number]
            assert len(mine) == 25 and {len(row["rounds"]) for row in mine} == {
                seen[number]["places"]
            }
        for row in rows:
            for offered, listed, whole, committed, last, mark in row["rounds"]:
                assert 0 <= offered <= listed <= committed and whole <= committed
                assert {last, mark} <= ({1, 2} if "channel" in row else {1, 2, None})
