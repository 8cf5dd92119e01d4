# SPDX-License-Identifier: Apache-2.0
"""Transmission in order of priority (P3): two channels between real agents."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nicps.dataplane import bpf
from nicps.lab import Lab, LabSettings
from nicps.layout import layout
from tests.netns.labs import ROOT
from tests.netns.members import Network, tiny_job
from tests.netns.test_shape import classes
from tests.netns.urgent_program import STEPS
from tests.reaper import fresh_name

PROGRAM = ROOT / "tests" / "netns" / "urgent_program.py"
SETTINGS = {"priorities": 2, "exchange": "stripes", "batch": 8, "quorum": 1.0, "lane": "i32"}
SETTINGS |= {"rounds": 2 * STEPS}


def test_each_channel_has_its_class_in_the_hosts_queue() -> None:
    """Of equal channels all frames of contributions leave in the class of bulk, and later the urgent ones do not."""
    arguments = ("--shape", "2gbit", "--silence", "20")  # no host is taken for silent that is not
    with Network(2, program=PROGRAM, arguments=arguments) as network:
        network.up()
        network.train(tiny_job(network.folder), **SETTINGS)
        sent = classes(network, "h1")
        assert sent["6e63:10"] > 100 and sent["6e63:20"] > 100
        assert all(sent[name] == 0 for name in ("6e63:30", "6e63:56", "6e63:86"))


def narrowed(network: Network) -> Iterator[Any]:
    """Of each host's agent, by channel, bank and aggregator: how many sums the XDP program lets pass without a
    contribution.
    """
    ids = set[int]()
    for process in itertools.chain(*network.lab.processes().values()):
        with contextlib.suppress(FileNotFoundError):  # it has ended
            for path in Path(f"/proc/{process.pid}/fdinfo").iterdir():
                lines = map(str.split, path.read_text().splitlines())
                ids |= {int(line[1]) for line in lines if line[0] == "map_id:"}
    for each in sorted(ids):
        fd = bpf.map_by_id(each)
        info = bpf.map_info(fd)
        if info.name == "sent":
            memory = bpf.map_memory(fd, writable=False)
            words = np.frombuffer(memory, layout().records["sent"], info.entries)["swallow"]
            yield words.reshape(layout().limits["CHANNELS"], -1)
        os.close(fd)


def test_bulk_has_a_small_window_while_an_urgent_round_is_open() -> None:
    """Each agent says so to the program that sends contributions as sums come; of the urgent channel all windows are
    whole.
    """
    with Network(2, program=PROGRAM, arguments=("--silence", "20")) as network:
        network.lab = Lab(LabSettings(fresh_name(), 2, rate_bps=20_000_000))
        network.up()
        words = [*narrowed(network)]
        assert len(words) == 2
        seen = [np.zeros_like(each) for each in words]
        with ThreadPoolExecutor() as pool:
            run = pool.submit(network.train, tiny_job(network.folder), **SETTINGS)
            while not run.done():
                for most, each in zip(seen, words, strict=True):
                    np.maximum(most, each, out=most)
                time.sleep(0.0005)
        assert run.result().result["weights_identical"]
        assert [each.any(axis=1).tolist() for each in seen] == [[True] + [False] * 7] * 2
