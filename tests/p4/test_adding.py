# SPDX-License-Identifier: Apache-2.0
"""Hosts with `--mode switch` train through a real `simple_switch` that adds; what becomes of it when that fails."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyroute2 import IPRoute

from nicps import wire
from nicps.bench.bmv2 import CONTROLLER, in_place_of_the_bridge
from nicps.dataplane import bpf
from nicps.lab import links
from nicps.session.events import Warned
from nicps.switch import program
from nicps.switch.runtime import Switch
from tests import reference
from tests.netns.labs import until
from tests.netns.members import Run, tiny_job
from tests.netns.scenes import Drill
from tests.netns.stage import SUMMING, Stage
from tests.netns.wires import run
from tests.p4.bmv2 import controller

#: A gradient of 12 fragments (i32), in the middle of which a fault can strike.
LONG = """
def model():
    return nn.Sequential(nn.Linear(16, 160), nn.ReLU(), nn.Linear(160, 8), nn.ReLU(), nn.Linear(8, 4))
"""
FRAGMENTS = 12

#: What hosts say of it, once an incident.
NOT_COME = "sums of the switch have not come: sending their fragments again"

#: From the sixth round on the gradient counts eight times as much.
JUMPING = """
calls = 0

def factor():
    global calls
    calls += 1
    return 8.0 if calls > 50 else 1.0
"""


class Rig:
    """Three hosts at a switch that has a controller, and a job that trains on them until it is told to end."""

    def __init__(self, config: Path | None = None, *arguments: str, **options: Any) -> None:
        self.stage = Stage(3, arguments=("--mode", "switch", *arguments), **options)
        self.drill = Drill(self.stage, LONG, settings={"lane": "i32"})
        self.log = self.stage.folder / "controller.log"
        self._config = config
        self._said: dict[str, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rig:
        with contextlib.ExitStack() as stack:
            stack.callback(self.stage.close)
            stack.callback(self.drill.close)
            self.bmv2 = stack.enter_context(in_place_of_the_bridge(self.stage.lab, self._config))
            key = ("--key", str(self.stage.key)) if self.stage.keyed else ()
            stack.enter_context(controller(self.bmv2, self.log, *key))
            self.stage.ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def counters(self) -> dict[str, int]:
        """The switch's."""
        with self.bmv2.connect() as switch:
            return switch.counters()

    def goes_on(self) -> None:
        """All three train, with sums from the switch, and all sums so far were exact."""
        before = self.counters()["summed"]
        self.drill.goes_on(*self.stage.names, timeout_s=40.0)
        assert self.drill.exact() > 0
        assert self.counters()["summed"] >= before + 2 * FRAGMENTS

    def begun(self) -> tuple[int, list[int]]:
        """The round in the switch, and the members whose gradients are in each of its sums (a bit each)."""
        with self.bmv2.connect() as switch:
            name = "NicpsIngress.adding.slot_seen"
            seen = switch._standard.bm_register_read_all(0, name)[:FRAGMENTS]
            return switch.registers()["round"], seen

    @contextlib.contextmanager
    def half_added(self, host: str, room: int = FRAGMENTS) -> Iterator[int]:
        """In the middle of a round, which it gives: half of its sums are whole, the others lack that host.

        Of a switch with `room` for fewer only these are looked at.
        """
        drill = self.drill
        everybody = sum(1 << drill.number(name) - 1 for name in self.stage.names)
        others = everybody & ~(1 << drill.number(host) - 1)
        half = FRAGMENTS // 2
        seen = ([everybody] * half + [others] * (FRAGMENTS - half))[:room]
        with drill.half_sent(host) as round_:
            until(lambda: self.begun() == (round_, seen), "half of the sums")
            yield round_

    def started_again(self) -> None:
        """Kill the switch; it is set up anew by the controller when this is over."""
        before = self.log.read_text().count("set up anew")
        self.bmv2.stop()
        self.bmv2.start()
        until(lambda: self.log.read_text().count("set up anew") > before, "the controller")

    def said(self, host: str) -> str:
        """What the agent there has said since this was asked last."""
        before = self._said.get(host, 0)
        text = self.stage.log(host)
        self._said[host] = len(text)
        return text[before:]

    def remove(self, switch: Switch, port: int) -> None:
        """Take a port from the switch, which forwards nothing for that moment.

        BMv2 waits for ever where a frame comes in just then: its receiving thread then waits for the lock that this
        holds, and this for an answer of that thread (behavioral-model, src/BMI/bmi_port.c, at 1.15).
        """
        self._at_ports(bpf.XDP_DROP)
        try:
            time.sleep(0.02)  # for what has come in already
            switch._standard.bm_dev_mgr_remove_port(port)
        finally:
            self._at_ports(bpf.XDP_PASS)

    def _at_ports(self, verdict: int) -> None:
        """What becomes of every frame from a host before BMv2 sees it."""
        code = struct.pack("=BBhiBBhi", 0xB7, 0, 0, verdict, 0x95, 0, 0, 0)
        fd = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], code, bpf.F_XDP_HAS_FRAGS, "verdict")
        attributes = [("IFLA_XDP_FD", fd), ("IFLA_XDP_FLAGS", bpf.XDP_FLAGS_DRV_MODE)]

        def attach(ipr: IPRoute) -> None:
            for host in self.stage.lab.hosts:
                index = links.index_of(ipr, links.port_name(host.number))
                ipr.link("set", index=index, xdp={"attrs": attributes})

        links.with_netlink(self.bmv2.netns, attach)
        os.close(fd)

    def inside(self, command: str) -> None:
        """`ip ...` where the switch is."""
        run(f"ip netns exec {self.bmv2.netns} ip {command}")


@pytest.fixture(scope="module")
def made() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.fixture
def rig(made: Rig) -> Rig:
    """With all three in training."""
    made.drill.ready()
    return made


@pytest.fixture(scope="module")
def made_patient() -> Iterator[Rig]:
    with Rig(None, "--silence", "5") as rig:
        yield rig


@pytest.fixture
def patient(made_patient: Rig) -> Rig:
    """All three in training; they wait longer for each other than the switch needs to be started again."""
    made_patient.drill.ready()
    for host in made_patient.stage.names:
        made_patient.said(host)
    return made_patient


def train(rig: Rig, **settings: object) -> Run:
    rig.drill.close()
    rig.stage.ready()
    return rig.stage.train(tiny_job(rig.stage.folder), save_gradients=True, **settings)


def warnings(done: Run) -> list[str]:
    return [event.message for event in done.events if isinstance(event, Warned)]


def all_send_again(rig: Rig, round_: int, view: int) -> None:
    """That round is everybody's, nobody has left, and all have said that its sums had not come."""
    assert rig.drill.committed(round_) == set(rig.stage.names)
    assert rig.drill.status("h1")["view"] == view
    for host in rig.stage.names:
        assert f"round {round_}: {NOT_COME}" in rig.said(host), host


@pytest.mark.parametrize("lane", ["i32", "i16", "i8"])
def test_a_job_is_trained(made: Rig, lane: str) -> None:
    """All sums come from the switch, and are what the gradients come to."""
    before = made.counters()
    done = train(made, lane=lane)
    counters = {name: count - before[name] for name, count in made.counters().items()}
    assert done.result["weights_identical"] is True
    rounds = done.gradients()
    assert reference.check(int(lane[1:]), rounds) >= 9
    counted = [saved for saved in rounds.values() if len(saved[1]["counted"])]
    assert counters["summed"] >= len(counted) and counters["added"] >= 2 * len(counted)
    assert all(int(saved[1]["members"]) == 3 for saved in rounds.values())
    assert not warnings(done)


def test_gradients_that_jump(made: Rig) -> None:
    """Eight times as large from one round to the next: what does not fit is cut off, counted, and sent later."""
    made.drill.close()
    made.stage.ready()
    job = tiny_job(made.stage.folder, hooks=JUMPING)
    done = made.stage.train(job, save_gradients=True, lane="i16", rounds=10)
    assert done.result["weights_identical"] is True
    assert reference.check(16, done.gradients()) == 10 * 3
    for host in done.members:
        saturated = [row["saturated"] for row in done.training(host)]
        assert saturated[4] == 0 < saturated[5], "the jump"
        assert all(len(row["counted"]) == 3 for row in done.training(host)[1:]), "nobody is skipped"


def test_the_step_follows_the_gradients(made: Rig) -> None:
    """The first round only finds out how large gradients are; then hardly a lane is too large."""
    done = train(made, lane="i16", rounds=20)
    rows = done.training("h1")
    assert rows[0]["counted"] == {} and all(len(row["counted"]) == 3 for row in rows[1:])
    units = [int(saved[1]["unit"]) for _, saved in sorted(done.gradients().items())]
    assert units[0] == -40 and units[1] > -40 and min(units[1:]) < max(units[1:])
    lanes = 16 * 8 + 8 + 8 * 4 + 4
    assert rows[-1]["saturated"] < len(rows) * lanes / 100


def test_the_switch_is_killed_in_mid_round(rig: Rig) -> None:
    """Members, token and sums are gone; the controller sets it up anew, and the round is run again.

    Whom the others have not heard of for too long is evicted meanwhile, and comes back.
    """
    rig.said("h1")
    with rig.half_added("h2") as round_:
        rig.started_again()
    rig.drill.all_train(timeout_s=60.0)
    rig.goes_on()
    assert NOT_COME in (said := rig.said("h1")) or "network nicps: view" in said
    assert len(rig.drill.committed(round_)) >= 2, "a majority"


def test_only_the_registers_are_lost(patient: Rig) -> None:
    """Sums that some have got and others have not are made again, out of the same gradients: nobody leaves."""
    view = patient.drill.status("h1")["view"]
    with patient.bmv2.connect() as switch:
        members = switch.members()
        ports = sorted(member.port for member in members.values())

        def forget() -> None:
            switch.setup(wire.network_id("nicps"), ports, CONTROLLER)
            switch.record(members)

        with patient.half_added("h2") as round_:
            forget()
        for moment in range(20):
            done = patient.drill.last("h1")
            forget()
            until(lambda done=done: patient.drill.last("h1") > done, "another round", 60.0)
            time.sleep(moment / 400)  # up to the length of a round
    patient.goes_on()
    all_send_again(patient, round_, view)


def test_the_switch_is_killed_and_hosts_wait_for_it(patient: Rig) -> None:
    """All send again, and the very round that was cut has everybody's gradient."""
    view = patient.drill.status("h1")["view"]
    with patient.half_added("h2") as round_:
        patient.started_again()
    patient.goes_on()
    all_send_again(patient, round_, view)
    done = patient.drill.end()
    again = {host: done.facts(host)["sums_asked_again"] for host in patient.stage.names}
    assert min(again.values()) >= FRAGMENTS // 2
    assert done.result["sums_asked_again"] == sum(again.values())


def test_a_port_is_lost(rig: Rig) -> None:
    """The others go on without the host behind it, and say so; it comes back with its port."""
    for host in rig.stage.names:
        rig.said(host)
    with rig.bmv2.connect() as switch:
        rig.remove(switch, 3)
        try:
            rig.drill.goes_on("h1", "h2")
        finally:
            switch._standard.bm_dev_mgr_add_port(links.port_name(3), 3, "")
    assert all("not in it: h3" in rig.said(host) for host in ("h1", "h2"))
    rig.drill.all_train(timeout_s=60.0)
    rig.goes_on()


def test_two_hosts_change_ports(rig: Rig) -> None:
    """Plugged in elsewhere they are strangers, until the hosts have agreed on a new view."""

    def plug(ports: dict[int, int]) -> None:
        with rig.bmv2.connect() as switch:
            for port in ports:
                rig.remove(switch, port)
            for port, host in ports.items():
                switch._standard.bm_dev_mgr_add_port(links.port_name(host), port, "")

    for ports in ({2: 3, 3: 2}, {2: 2, 3: 3}):
        plug(ports)
        rig.goes_on()
        with rig.bmv2.connect() as switch:
            found = {m.mac[-1]: m.port for m in switch.members().values()}
        assert found == {1: 1} | {host: port for port, host in ports.items()}


def test_an_interface_of_the_switch_goes_down(rig: Rig) -> None:
    """BMv2 then stands still as a whole: so do the hosts, until it goes on."""
    rig.inside(f"link set {links.port_name(3)} down")
    try:
        rig.drill.until(
            lambda: "cannot be heard" in rig.drill.status("h1")["trouble"], "h1 is alone"
        )
    finally:
        rig.inside(f"link set {links.port_name(3)} up")
    rig.goes_on()


def test_a_bridge_in_place_of_the_switch(made: Rig) -> None:
    """Killed, and what is there in its place does not add: the hosts find out, say so, and add themselves."""
    made.drill.close()
    made.drill.begin()
    try:
        made.bmv2.stop()
        made.inside(f"link add {links.BRIDGE} type bridge mcast_snooping 0 forward_delay 0")
        made.inside(f"link set {links.BRIDGE} up")
        for number in (1, 2, 3):
            made.inside(f"link set {links.port_name(number)} master {links.BRIDGE}")
        made.drill.goes_on(*made.stage.names, timeout_s=40.0)
        assert made.drill.exact() > 0
        lead = made.drill.lead()
        assert "the switch does not add" in made.stage.log(lead)
        last = max(
            made.stage.records(lead).glob("[0-9]*.sum.npz"), key=lambda path: int(path.stem[:-4])
        )
        with np.load(last) as saved:
            assert int(saved["members"]) == 0 and int(saved["unit"]) == -40, "the job's own"
    finally:
        made.inside(f"link del {links.BRIDGE}")
        made.bmv2.start()
        made.drill.close()


def test_a_host_that_comes_back_and_believes_no_switch(rig: Rig) -> None:
    """It leaves the others to their job, and says what it would take; it takes part in the next, without a switch."""
    stage = rig.stage
    assert stage.leave("h3") == 0
    try:
        rig.drill.goes_on("h1", "h2")
        stage.arguments = ()
        stage.join("h3")
        until(lambda: "with --mode switch there too" in stage.log("h3"), "h3 says so", 40.0)
        rig.drill.goes_on("h1", "h2")
        assert rig.drill.end("h1", "h2").result["weights_identical"] is True
        done = stage.train(tiny_job(stage.folder), host="h3")
        assert set(done.members) == set(stage.names)
        assert stage.leave("h3") == 0
    finally:
        stage.arguments = ("--mode", "switch")
    stage.join("h3")
    rig.drill.begin()
    rig.goes_on()


@pytest.mark.p4("simple_switch", "p4c-bm2-ss")
def test_out_of_window(tmp_path: Path) -> None:
    """A switch with room for 4 sums: what it has no room for it refuses, and gets again; also when it is killed."""
    small = tmp_path / "small.json"
    source = program.folder() / "nicps.p4"
    command = ["p4c-bm2-ss", "--std", "p4-16", "-DNICPS_SLOTS=4", "-o", str(small), str(source)]
    subprocess.run(command, check=True, capture_output=True, cwd=source.parent.parent)
    with Rig(small, "--silence", "5") as rig:
        rig.drill.begin()
        rig.goes_on()
        assert rig.counters()["window"] > 0
        for host in rig.stage.names:
            assert rig.said(host).count(NOT_COME) == 1, "once, not in every round"
        with rig.half_added("h2", room=4) as round_:
            rig.started_again()
        rig.goes_on()
        assert rig.counters()["window"] > 0
        assert rig.drill.committed(round_) == set(rig.stage.names)
        assert rig.drill.end().result["sums_asked_again"] > 0


def test_with_a_key() -> None:
    """Hosts that have one believe the switch only if they are told to; what they send is signed."""
    with Rig(None, "--trust-switch", keyed=True) as rig:
        rig.drill.begin()
        rig.goes_on()


def test_all_reduce() -> None:
    """The program of docs/jobs.md: the first round has no sum, and all know; then every round has one."""
    with Rig(None, "--silence", "5", program=SUMMING) as rig:
        before = rig.counters()
        done = rig.stage.train(tiny_job(rig.stage.folder), batch=3, lane="i32")
        assert [text for text in warnings(done) if "no report" not in text] == []
        rounds = sorted(rig.stage.recorded().items())
        first, others = rounds[0][1], dict(rounds[1:])
        assert not any("total" in own for own in first.values())
        assert len(others) == 10 and reference.check(32, others) == 30
        assert all(own["members"] == 3 for of in others.values() for own in of.values())
        assert rig.counters()["summed"] >= before["summed"] + 10 * 3  # 1,000 lanes, 360 a fragment
