# SPDX-License-Identifier: Apache-2.0
"""Transmission in order of priority (P3): two channels between real agents, over a link of 100 Mbit/s."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from nicps.lab import Lab, LabSettings
from tests.netns.labs import ROOT
from tests.netns.members import Keeping, tiny_job
from tests.netns.test_shape import classes
from tests.netns.urgent_program import STEPS
from tests.reaper import fresh_name

SETTINGS = {"priorities": 2, "exchange": "stripes", "batch": 8, "quorum": 1.0, "lane": "i32"}
SETTINGS |= {"rounds": 2 * STEPS}


@dataclass
class TwoHosts(Keeping):
    """Two hosts whose cables have that rate; no host is taken for silent that is not."""

    rate_bps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lab = Lab(LabSettings(fresh_name(), self.hosts, rate_bps=self.rate_bps))
        self.program = ROOT / "tests" / "netns" / "urgent_program.py"
        self.arguments = (*self.arguments, "--silence", "20")


def test_an_urgent_part_takes_the_line_from_bulk() -> None:
    """At 100 Mbit/s the small part takes 60 ms alone, and twice as long where both channels are equal."""
    with TwoHosts(2, rate_bps=100_000_000) as network:
        network.up()
        run = network.train(tiny_job(network.folder), **SETTINGS)
        assert run.result["weights_identical"]
        for number in (1, 2):
            took = json.loads((network.kept / f"{number}.json").read_text())
            equal, urgent = statistics.median(took[:STEPS]), statistics.median(took[STEPS:])
            assert urgent < 0.8 * equal, took


def test_each_channel_has_its_class_in_the_hosts_queue() -> None:
    """Of equal channels all frames of contributions leave in the class of bulk, and later the urgent ones do not."""
    with TwoHosts(2, arguments=("--shape", "2gbit")) as network:
        network.up()
        network.train(tiny_job(network.folder), **SETTINGS)
        sent = classes(network, "h1")
        assert sent["6e63:10"] > 100 and sent["6e63:20"] > 100
        assert all(sent[name] == 0 for name in ("6e63:30", "6e63:56", "6e63:86"))
