# SPDX-License-Identifier: Apache-2.0
"""`nicps lab up --priorities`: ports of the lab's switch that send what has a higher 802.1p priority first."""

from __future__ import annotations

import struct
import time
from functools import partial

from nicps.lab import Lab, LabSettings, links, priorities
from nicps.lab.links import port_name
from tests.netns.labs import ROOT
from tests.netns.members import Network, tiny_job
from tests.netns.test_shape import _raw, inside
from tests.netns.test_wire_order import SETTINGS
from tests.reaper import fresh_name

ETHERTYPE = b"\x88\xb6"  # of `_raw`


def sent(lab: Lab, host: int) -> dict[int, int]:
    """Frames that the host's port has sent, by priority."""

    def read(ipr: object) -> dict[int, int]:
        return priorities.sent(ipr, links.index_of(ipr, port_name(host)))

    return links.with_netlink(lab.switch_netns, read)


def test_a_higher_priority_overtakes_a_lower_one() -> None:
    """400 frames wait at 10 Mbit/s (0.48 s); priority 1 is below 0, and a frame without a tag has 0."""
    shape = LabSettings(fresh_name(), 2, rate_bps=10_000_000, priorities=True)
    with Lab(shape) as lab:
        first, second = lab.hosts
        head = b"\xff" * 6 + bytes.fromhex(first.mac.replace(":", ""))

        def frame(name: bytes, priority: int | None, size: int = 60) -> bytes:
            tag = b"" if priority is None else struct.pack(">HH", 0x8100, priority << 13)
            return head + tag + ETHERTYPE + name + bytes(size)

        listener = inside(lab, second.name, partial(_raw, 0))
        sender = inside(lab, first.name, partial(_raw, 0))
        for at in range(400):
            sender.send(frame(b"1" if at % 2 else b"0", at % 2, 1485))
        for name, priority in ((b"n", None), (b"2", 2), (b"7", 7)):
            sender.send(frame(name, priority))
        order, until = "", time.monotonic() + 10.0
        listener.settimeout(5.0)
        while len(order) < 403 and time.monotonic() < until:
            got = listener.recv(2048)
            if got[12:14] == ETHERTYPE:
                order += chr(got[14])
        for each in (listener, sender):
            each.close()
        assert sorted(map(order.count, "01n27")) == [1, 1, 1, 200, 200]
        assert max(order.index("7"), order.index("2")) < 60
        assert order.index("n") > 150, "it waits behind all others of priority 0"
        assert order.rindex("0") < order.rindex("1")
        assert order[-50:] == "1" * 50
        assert sent(lab, 2) == {0: 201, 1: 200, 2: 1, 7: 1} | dict.fromkeys((3, 4, 5, 6), 0)


def test_the_frames_of_a_job_are_in_their_queues() -> None:
    """Of hosts with tags: control frames, and a channel that is urgent in half of the steps; not those of XDP only."""
    program = ROOT / "tests" / "netns" / "urgent_program.py"
    with Network(2, program=program, arguments=("--silence", "20", "--tags")) as network:
        network.lab = Lab(LabSettings(fresh_name(), 2, rate_bps=200_000_000, priorities=True))
        network.up()
        run = network.train(tiny_job(network.folder), **SETTINGS)
        assert run.result["weights_identical"]
        frames = sent(network.lab, 2)
        assert frames[7] > 20
        # Five steps: half of the 500 fragments go to h2, and their sums to h2 or from it.
        assert frames[2] > 5 * 250
        assert frames[0] > 10 * 800
