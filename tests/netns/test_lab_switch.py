# SPDX-License-Identifier: Apache-2.0
"""The lab whose switch adds (`--switch xdp`): cables with a middle, which is shaped, and faults on them.

h1      h2      h3
p1      p2      p3      faults; tbf towards the host
q1      q2      q3      tbf towards the switch
eth1 -- eth2 -- eth3    br0, in the switch's namespace
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from nicps import wire
from nicps.cli import main
from nicps.dataplane import bpf
from nicps.errors import UsageProblem
from nicps.lab import Lab, LabNotFound, LabSettings, links, namespaces, state
from nicps.lab.errors import NothingRuns
from tests.netns.labs import NICPS, ROOT, leftovers, nicps, own_links, raw_socket, until
from tests.reaper import fresh_name

pytestmark = pytest.mark.xdp

ETHERTYPE = 0x88B6
RATE_BPS = 10_000_000


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Three hosts; no program runs on the switch."""
    links_before, name = own_links(), fresh_name()
    with Lab(LabSettings(name, hosts=3, rate_bps=RATE_BPS, switch="xdp")) as made:
        yield made
    assert leftovers(name) == {}
    assert own_links() <= links_before


def ping(lab: Lab, source: str, target: str) -> bool:
    argv = ["ping", "-q", "-c2", "-i0.05", "-W1", lab.host(target).ip]
    return lab.run(source, argv, stdout=subprocess.DEVNULL).wait(timeout=20) == 0


def switch_hears(lab: Lab, host: str) -> bool:
    """Whether a frame to the switch's address comes out of that host's cable."""
    number = lab.host(host).number
    kind = socket.htons(ETHERTYPE)

    def listen() -> socket.socket:
        heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, kind)
        heard.bind((links.switch_port_name(number), 0x0003))  # before the bridge takes it
        heard.settimeout(0.5)
        return heard

    mac = bytes.fromhex(lab.host(host).mac.replace(":", ""))
    with namespaces.inside(lab.switch_netns, listen) as heard:
        with raw_socket(lab.host(host), ETHERTYPE) as sock:
            sock.send(wire.SWITCH + mac + struct.pack(">H", ETHERTYPE) + bytes(46))
        try:
            return heard.recv(2000)[:6] == wire.SWITCH
        except TimeoutError:
            return False


def host_hears_switch(lab: Lab, host: str) -> bool:
    """Whether a frame of the switch arrives at that host."""

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
            sock.bind((links.BRIDGE, 0))
            sock.send(wire.BROADCAST + wire.SWITCH + struct.pack(">H", ETHERTYPE) + bytes(46))

    with raw_socket(lab.host(host), ETHERTYPE) as sock:
        sock.settimeout(0.5)
        namespaces.inside(lab.switch_netns, send)
        try:
            return sock.recv(2000)[6:12] == wire.SWITCH
        except TimeoutError:
            return False


def test_a_bridge_alone_serves_hosts(lab: Lab) -> None:
    assert all(ping(lab, *pair) for pair in (("h1", "h2"), ("h3", "h1")))
    assert switch_hears(lab, "h2") and host_hears_switch(lab, "h2")


def test_both_directions_are_shaped_though_xdp_sends(lab: Lab) -> None:
    """Frames that the switch's port sends back by XDP_TX pass the queue of the cable's middle."""
    echo = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_TX, 0x95, 0, 0, 0)
    program = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], echo, 0, "echo")

    def attach(ipr: IPRoute) -> None:
        links.attach(ipr, links.index_of(ipr, links.switch_port_name(1)), program)

    def waited(interface: str) -> int:
        def read(ipr: IPRoute) -> int:
            index = links.index_of(ipr, interface)
            (qdisc,) = [q for q in ipr.get_qdiscs(index=index) if q.get_attr("TCA_KIND") == "tbf"]
            stats = qdisc.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")
            return int(stats["overlimits"])

        return links.with_netlink(lab.ports_netns, read)

    def unshape(netns: str, interface: str) -> None:
        command = ["tc", "-n", netns, "qdisc", "del", "dev", interface, "root"]
        subprocess.run(command, check=True, timeout=20)

    def send_and_wait_for(queue: str) -> None:
        before = waited(queue)
        with raw_socket(first, ETHERTYPE) as sock:

            def burst() -> bool:
                for _ in range(
                    500
                ):  # 0.7 MB, more than a bucket of 128 KB unless the sender is interrupted
                    sock.send(frame)
                return waited(queue) > before

            until(burst, f"frames have waited at {queue}", 20.0)

    links.with_netlink(lab.switch_netns, attach)
    first = lab.host("h1")
    mac = bytes.fromhex(first.mac.replace(":", ""))
    frame = wire.BROADCAST + mac + struct.pack(">H", ETHERTYPE) + bytes(1400)
    unshape(first.netns, "eth1")
    send_and_wait_for("q1")
    unshape(lab.ports_netns, "q1")
    send_and_wait_for("p1")


def test_a_cut_severs_the_switch_too(lab: Lab) -> None:
    """By default it stays with the hosts that are not cut off."""
    lab.cut("h1")
    assert not ping(lab, "h1", "h2") and ping(lab, "h2", "h3")
    assert not switch_hears(lab, "h1") and switch_hears(lab, "h2")
    assert not host_hears_switch(lab, "h1") and host_hears_switch(lab, "h2")
    lab.heal()
    until(lambda: ping(lab, "h1", "h2"), "h1 finds h2 again", 10.0)
    assert switch_hears(lab, "h1")


def test_the_switch_can_be_cut_off(lab: Lab) -> None:
    lab.cut("switch,h3")
    assert lab.switch_side() == 1
    assert ping(lab, "h1", "h2") and not ping(lab, "h1", "h3")
    assert not switch_hears(lab, "h1") and switch_hears(lab, "h3")
    assert not host_hears_switch(lab, "h2") and host_hears_switch(lab, "h3")
    lab.heal()
    assert lab.switch_side() == 0 and switch_hears(lab, "h1")


def test_a_cable_that_is_pulled_is_out_at_both_ends(lab: Lab) -> None:
    lab.link("h2", "unplugged")
    assert not lab.host("h2").read_link().carrier
    assert [link.carrier for link in lab.switch_ports().values()] == [True, False, True]
    lab.link("h2", "up")
    until(lambda: lab.switch_ports()["eth2"].carrier, "the port has its carrier back")
    until(lambda: ping(lab, "h1", "h2"), "h1 finds h2 again", 10.0)


def test_faults_and_late_frames(lab: Lab) -> None:
    lab.fault("h1", delay_ms=30)
    argv = ["ping", "-c1", "-W2", lab.host("h2").ip]
    said = lab.run("h1", argv, stdout=subprocess.PIPE).communicate(timeout=20)[0].decode()
    assert float(said.split("time=")[1].split()[0]) > 60
    assert not lab.line_lost()
    lab.fault("h1", delay_ms=0, loss=1.0)
    assert not ping(lab, "h1", "h2")
    assert lab.counters()["h1"].from_host.dropped > 0


def test_nothing_runs_at_the_switch(lab: Lab) -> None:
    with pytest.raises(NothingRuns, match="nicps lab start switch"):
        lab.kill("switch")


def test_a_plain_lab_has_no_such_switch(capsys: pytest.CaptureFixture[str]) -> None:
    name = fresh_name()
    with Lab(LabSettings(name, hosts=2)) as plain:
        for words in (["kill", "switch"], ["cut", "switch"], ["start", "switch"]):
            assert main(["lab", words[0], "--lab", name, *words[1:]]) == 2, words
        with pytest.raises(LabNotFound):
            plain.run("switch", ["true"])
    for words in (["--key"], ["--memory", "1G"], ["--switch", "xdp", "--memory", "much"]):
        assert main(["lab", "up", "--lab", name, *words]) == 2, words
    with pytest.raises(UsageProblem, match="MTU"):
        LabSettings(name, switch="xdp", mtu=1400)
    assert leftovers(name) == {}


def test_up_with_keys_kill_start_and_down() -> None:
    """As a user does it; the switch goes on with its former arguments, and nothing is left, not even keys."""
    name = fresh_name()
    at = ("--lab", name)

    def running() -> list[int]:
        (found,) = json.loads(nicps("lab", "status", *at, "--json").stdout)["labs"]
        switch = found["adding_switch"]
        assert set(switch["ports"].values()) == ({"native"} if switch["processes"] else {None})
        return [process["pid"] for process in switch["processes"]]

    try:
        words = ("--hosts", "2", "--switch", "xdp", "--key", "--memory", "64M")
        up = nicps("lab", "up", *at, *words)
        assert up.returncode == 0, up.stderr
        folder = state.LABS_DIR / f"{name}.keys"
        assert sorted(path.name for path in folder.iterdir()) == ["network.key", "switch.key"]
        assert f"--key {folder}/network.key --switch-key {folder}/switch.key" in up.stdout
        (first,) = running()
        again = nicps("lab", "start", *at, "switch")
        assert again.returncode == 2 and "runs already" in again.stderr
        assert nicps("lab", "kill", *at, "switch").stdout.startswith(f"killed {first} ")
        until(lambda: running() == [], "it has gone", 10.0)
        assert nicps("lab", "start", *at, "switch").returncode == 0
        (second,) = running()
        said = state.switch_log(name).read_text()
        assert second != first and said.count(", with a key; up to 67 MB for sums") == 2
        assert "switch" in nicps("lab", "status", *at).stdout
    finally:
        down = nicps("lab", "down", *at)
    assert "1 process ended" in down.stdout
    assert leftovers(name) == {} and not folder.exists() and not state.switch_log(name).exists()


def test_a_switch_that_cannot_start_leaves_no_lab() -> None:
    name = fresh_name()
    failed = nicps("lab", "up", "--lab", name, "--switch", "xdp", "--memory", "10")
    assert failed.returncode == 2 and "1M at least" in failed.stderr, failed.stderr
    assert leftovers(name) == {} and not state.switch_log(name).exists()


@pytest.mark.long
def test_a_job_in_such_a_lab(open_path: Path) -> None:
    """`nicps lab run`: the switch adds, and its output is beside the report; no key is left."""
    command = ["lab", "run", "trainer/jobs/digits", "--hosts", "2", "--switch", "xdp", "--key"]
    command += ["--set", "rounds=3", "--user", "root", "--runs", str(open_path), "--json"]
    done = subprocess.run([*NICPS, *command], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    run = open_path / json.loads(done.stdout.splitlines()[-1])["job_id"]
    said = (run / "switch.log").read_text()
    assert ", with a key" in said and int(said.partition("\nsummed ")[2].split()[0]) >= 3
    assert "exchange linux-switch: the switch adds" in "".join(
        log.read_text() for log in run.glob("*/agent.log")
    )
    assert not [*open_path.rglob("*.key")]
