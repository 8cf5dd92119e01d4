# SPDX-License-Identifier: Apache-2.0
"""A real Linux switch that adds behind a real `simple_switch` in ring mode.

h1 --- 1 +---------------+           +-----------+
h2 --- 2 | simple_switch | 4 ------- | Linux box | --- h3
         +---------------+           +-----------+
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from collections.abc import Iterator

import pytest
from pyroute2 import IPRoute

from nicps.bench.bmv2 import (
    CONTROLLER,
    NEAR_CPU,
    Bmv2,
    add_cable,
    add_controller_cable,
    quieten,
)
from nicps.dataplane import bpf
from nicps.lab import links, namespaces, processes, state
from nicps.switch.runtime import Member
from nicps.wire import SWITCH
from tests.netns.labs import ROOT, until
from tests.netns.members import NICPS
from tests.netns.scenes import Drill
from tests.netns.switched_stage import SwitchedStage
from tests.p4.bmv2 import Controller, controller

BOX = 4  # the port behind which it is
NEAR, FAR = "near-box", "far-box"
#: A gradient of 12 fragments (i32).
LONG = """
def model():
    return nn.Sequential(nn.Linear(16, 160), nn.ReLU(), nn.Linear(160, 8), nn.ReLU(), nn.Linear(8, 4))
"""


class BehindStage(SwitchedStage):
    """Its switch has h3 at one port, and all others behind the second one."""

    def start_switch(self) -> None:
        netns, log = self.lab.switch_netns, state.switch_log(self.lab.name)
        ports = f"{FAR},{links.switch_port_name(3)}"
        command = [*NICPS, "switch", "xdp", "run", "--ports", ports, "--bridge", links.BRIDGE]
        with log.open("ab") as out:
            self.adding.process = subprocess.Popen(
                processes.launcher(netns, command),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        until(lambda: "adds for nicps on" in self.said(), "the Linux switch", 40.0)

    @contextlib.contextmanager
    def laid(self) -> Iterator[Bmv2]:
        """The lab, with a BMv2 between the box and the first two hosts."""
        self.lab.up()
        netns = self.lab.switch_netns
        near = {number: links.switch_port_name(number) for number in (1, 2)} | {BOX: NEAR}

        def lay() -> None:
            add_cable(NEAR, FAR)
            add_controller_cable()
            # A veth takes what XDP sends to it only where its other end has a program, too.
            passes = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_PASS, 0x95, 0, 0, 0)
            program = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], passes, 0, "passes")
            with IPRoute() as ipr:
                for number in (1, 2):
                    ipr.link("set", index=links.index_of(ipr, near[number]), master=0)
                    quieten(near[number])
                bridge = links.index_of(ipr, links.BRIDGE)
                ipr.link("set", index=links.index_of(ipr, FAR), master=bridge)
                links.attach(ipr, links.index_of(ipr, NEAR), program)
            os.close(program)

        namespaces.inside(netns, lay)
        with Bmv2(netns, {**near, CONTROLLER: NEAR_CPU}) as bmv2:
            yield bmv2


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[BehindStage, Bmv2, Controller]]:
    stage = BehindStage(3)
    with contextlib.ExitStack() as stack:
        stack.callback(stage.close)
        bmv2 = stack.enter_context(stage.laid())
        log = stage.folder / "controller.log"
        running = stack.enter_context(controller(bmv2, log, "--linux-switch", str(BOX)))
        stage.start_switch()
        stage.ready()
        yield stage, bmv2, running


def test_a_linux_switch_adds_for_hosts_behind_a_p4_switch(
    made: tuple[BehindStage, Bmv2, Controller],
) -> None:
    """Hosts and Linux switch agree on a view through the P4 switch; contributions and sums pass, and are exact."""
    stage, bmv2, _ = made
    drill = Drill(stage, LONG, settings={"lane": "i32", "exchange": "switch"})
    try:
        drill.begin()
        drill.goes_on(*stage.names, rounds=8)
        assert drill.exact() > 8
        exchanges = {
            str(drill._load(path)["exchange"])
            for path in stage.records("h1").glob("[0-9]*.sum.npz")
        }
        assert exchanges == {"linux-switch"}
        assert drill.end().result["weights_identical"] is True
    finally:
        drill.close()
    with bmv2.connect() as switch:
        members, counters = switch.members(), switch.counters()
    assert members[0] == Member(0, SWITCH, BOX)
    ports = {member.mac[-1]: member.port for number, member in members.items() if number}
    assert sorted(ports.values()) == [1, 2, BOX]
    assert counters["stripe"] > 8 * 12 * 3, "of each round: of two hosts, and the sums"
    assert not counters["type"] + counters["malformed"] + counters["truncated"]
