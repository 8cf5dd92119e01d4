# SPDX-License-Identifier: Apache-2.0
"""Transmission in order of priority (P3): two channels between real agents."""

from __future__ import annotations

from tests.netns.labs import ROOT
from tests.netns.members import Keeping, tiny_job
from tests.netns.test_shape import classes
from tests.netns.urgent_program import STEPS

SETTINGS = {"priorities": 2, "exchange": "stripes", "batch": 8, "quorum": 1.0, "lane": "i32"}
SETTINGS |= {"rounds": 2 * STEPS}


def test_each_channel_has_its_class_in_the_hosts_queue() -> None:
    """Of equal channels all frames of contributions leave in the class of bulk, and later the urgent ones do not."""
    program = ROOT / "tests" / "netns" / "urgent_program.py"
    arguments = ("--shape", "2gbit", "--silence", "20")  # no host is taken for silent that is not
    with Keeping(2, program=program, arguments=arguments) as network:
        network.up()
        network.train(tiny_job(network.folder), **SETTINGS)
        sent = classes(network, "h1")
        assert sent["6e63:10"] > 100 and sent["6e63:20"] > 100
        assert all(sent[name] == 0 for name in ("6e63:30", "6e63:56", "6e63:86"))
