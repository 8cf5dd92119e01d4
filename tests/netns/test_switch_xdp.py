# SPDX-License-Identifier: Apache-2.0
"""`nicps switch xdp run` on the ports of a lab's switch, without agents: its errors, its output, and its leftovers.

Hosts are played by packet sockets, which answer HELLO with grants.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nicps import wire
from nicps.dataplane import bpf
from nicps.lab import Lab, LabSettings, adding, links, state
from nicps.switchauth import SwitchKey
from nicps.wire import SwitchStep
from tests.netns.labs import NICPS, ROOT, leftovers, nicps, raw_socket, until
from tests.reaper import fresh_name

pytestmark = pytest.mark.xdp

NETWORK = wire.network_id("nicps")


@pytest.fixture(scope="module")
def made() -> Iterator[Lab]:
    name = fresh_name()
    with Lab(LabSettings(name, hosts=3, switch="xdp")) as lab:
        yield lab
    assert leftovers(name) == {}


@pytest.fixture
def lab(made: Lab) -> Iterator[Lab]:
    """Three hosts and a bridge; after each test nothing is left on the ports."""
    yield made
    with contextlib.suppress(Exception):
        made.kill("switch")
    until(lambda: modes(made) == [None, None, None], "nothing is on the ports", 10.0)


def modes(lab: Lab) -> list[str | None]:
    return [link.xdp_mode for link in lab.switch_ports().values()]


def ip(lab: Lab, *words: str) -> None:
    subprocess.run(["ip", "-n", lab.switch_netns, *words], check=True, timeout=20)


def refused(
    lab: Lab,
    *words: str,
    code: int = 3,
    env: Any = None,
    attached: Sequence[str | None] = (None,) * 3,
) -> str:
    """The one line with which it ends. Each port has the program that was there before, by mode."""
    process = lab.run(
        "switch",
        [*NICPS, "switch", "xdp", "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (out, err)
    assert out == "" and err.count("\n") == 1 and err.startswith("nicps: error: "), err
    assert modes(lab) == [*attached]
    return err


def test_ports_that_cannot_serve(lab: Lab) -> None:
    """Each in one line that says what to do; nothing has been attached."""
    assert "there is no interface eth9" in refused(lab, "--ports", "eth1,eth9")
    assert "2 to 64" in refused(lab, "--ports", "eth1", code=2)
    assert "twice" in refused(lab, "--ports", "eth1,eth2,eth1", code=2)
    assert "there is no interface br7" in refused(lab, "--ports", "eth1,eth2", "--bridge", "br7")
    assert "--bridge eth3: that interface is not a bridge" in refused(
        lab, "--ports", "eth1,eth2", "--bridge", "eth3"
    )
    said = refused(lab, "--ports", "eth1,br0", "--bridge", "br0", code=2)
    assert "--ports names br0, which is the bridge" in said
    ip(lab, "link", "set", "eth2", "nomaster")
    try:
        said = refused(lab, "--ports", "eth1,eth2", "--bridge", "br0")
        assert "ip link set eth2 master br0" in said
        ip(lab, "link", "add", "br1", "type", "bridge")
        ip(lab, "link", "set", "eth2", "master", "br1")
        assert "one bridge" in refused(lab, "--ports", "eth1,eth2")
        assert "port of br1, not of br0" in refused(lab, "--ports", "eth1,eth2", "--bridge", "br0")
    finally:
        ip(lab, "link", "set", "eth2", "master", "br0")
        ip(lab, "link", "del", "br1")
    ip(lab, "link", "set", "eth3", "mtu", "1400")
    try:
        assert "mtu 1500" in refused(lab, "--ports", "eth1,eth3")
    finally:
        ip(lab, "link", "set", "eth3", "mtu", "1500")
        ip(lab, "link", "set", "br0", "mtu", "1500")
    ip(lab, "link", "set", "br0", "down")
    try:
        assert "ip link set br0 up" in refused(lab, "--ports", "eth1,eth3")
    finally:
        ip(lab, "link", "set", "br0", "up")


def test_keys_and_sizes_that_cannot_serve(lab: Lab, tmp_path: Path) -> None:
    ports = ("--ports", "eth1,eth2,eth3")
    assert "nicps key new" in refused(lab, *ports, "--key", str(tmp_path / "none"))
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("no key\n")
    rubbish.chmod(0o600)
    assert "holds no key" in refused(lab, *ports, "--key", str(rubbish))
    assert "is not a size" in refused(lab, *ports, "--memory", "much", code=2)
    assert "1M at least" in refused(lab, *ports, "--memory", "10", code=2)


def test_another_program_on_a_port(lab: Lab) -> None:
    echo = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_PASS, 0x95, 0, 0, 0)
    program = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], echo, 0, "another")

    def attach(fd: int) -> None:
        def work(ipr: Any) -> None:
            links.attach(ipr, links.index_of(ipr, "eth2"), fd)

        links.with_netlink(lab.switch_netns, work)

    attach(program)
    try:
        err = refused(lab, "--ports", "eth1,eth2", attached=[None, "native", None])
        assert "another" in err and "xdp off" in err
    finally:
        attach(-1)


def test_a_switch_that_is_started_twice(lab: Lab, tmp_path: Path) -> None:
    """The second says that the first is there; what is on the ports is held by a link, which `ip` cannot take off."""
    adding.start(lab, log=tmp_path / "log")
    err = refused(lab, "--ports", "eth1,eth2", attached=["native"] * 3)
    assert "nicps switch xdp runs on interface eth1 already" in err
    assert "see: nicps switch xdp status" in err
    assert modes(lab) == ["native"] * 3


def test_without_root(tmp_path: Path) -> None:
    done = subprocess.run(
        [*NICPS, "switch", "xdp", "run", "--ports", "eth1,eth2"],
        user="nobody",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 3 and "needs root" in done.stderr


def test_words_that_it_cannot_take() -> None:
    for words in (["--ports", "eth1,,eth2"], []):
        done = nicps("switch", "xdp", "run", *words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, words


@pytest.mark.short("9")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(lab: Lab, how: signal.Signals, tmp_path: Path) -> None:
    process = adding.start(lab, "--json", log=tmp_path / "log")
    assert modes(lab) == ["native"] * 3
    process.send_signal(how)
    assert process.wait(20) == (-how if how == signal.SIGKILL else 0)
    until(lambda: modes(lab) == [None, None, None], "nothing is on the ports", 10.0)
    if how != signal.SIGKILL:
        counters = json.loads((tmp_path / "log").read_text().splitlines()[-1])
        assert counters and all(isinstance(count, int) for count in counters.values())


class Players:
    """Hosts that grant by hand."""

    def __init__(self, lab: Lab, key: SwitchKey | None = None) -> None:
        self.lab, self.key = lab, key
        self.socks = {host.number: raw_socket(host, wire.ETHERTYPE) for host in lab.hosts}
        self.macs = {h.number: bytes.fromhex(h.mac.replace(":", "")) for h in lab.hosts}
        self.boot = self.nonce = 0

    def close(self) -> None:
        for sock in self.socks.values():
            sock.close()

    def hears(self, number: int, step: SwitchStep, timeout_s: float = 5.0) -> wire.Switch:
        """The next such frame of the switch that comes to a host."""
        sock = self.socks[number]
        sock.settimeout(timeout_s)
        while True:
            data = sock.recv(2000)
            frame = data[wire.ETHERNET_BYTES :]
            if data[6:12] != wire.SWITCH or frame[1] != wire.FrameType.SWITCH:
                continue
            assert data[:6] == wire.BROADCAST
            if self.key is not None:
                assert self.key.control.verify(frame, wire.SWITCH)
            body = wire.unpack(frame).body
            assert isinstance(body, wire.Switch)
            if body.step == step:
                self.boot = body.boot
                return body

    def flush(self) -> None:
        for sock in self.socks.values():
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while sock.recv(2000):
                    pass

    def grant(
        self,
        view: int,
        *by: int,
        room: tuple[int, int] = (0, 0),
        to: bytes = wire.SWITCH,
        siphash: bytes = bytes(16),
    ) -> None:
        """These hosts grant the view with the nonce of the next HELLO; all three are live."""
        self.flush()
        nonce = self.hears(by[0], SwitchStep.HELLO).nonce
        for number in by:
            body = wire.Switch(self.boot, nonce, 0, view, *room, SwitchStep.GRANT)
            head = wire.Header(network=NETWORK, view=view, sender=number, sequence=1)
            told = wire.Grant(
                bytes([view] * 16), siphash, f"h{number}".encode().ljust(14, b"\0"), 1
            )
            members = [wire.GrantMember(mac, k) for k, mac in self.macs.items()]
            frame = wire.pack(head, body, tail=wire.pack_grant(told, members))
            if self.key is not None:
                frame = self.key.seal(frame, self.macs[number])
            self.socks[number].send(wire.ethernet(self.macs[number], frame, to))

    def install(self, view: int) -> None:
        """A list is put in force, as any member may see it."""
        body = wire.View(0, 0, view, 0, 0, 0, 0, 0, wire.ViewStep.INSTALL)
        frame = wire.pack(wire.Header(network=NETWORK), body)
        self.socks[1].send(wire.ethernet(self.macs[1], frame))


@contextlib.contextmanager
def playing(lab: Lab, *arguments: str, key: SwitchKey | None = None) -> Iterator[Players]:
    with adding.serving(lab, *arguments):
        players = Players(lab, key)
        try:
            yield players
        finally:
            players.close()


def said(lab: Lab) -> str:
    return state.switch_log(lab.name).read_text()


@pytest.mark.short("switch")
@pytest.mark.parametrize("to", [wire.SWITCH, wire.BROADCAST], ids=["switch", "broadcast"])
def test_members_grant_and_it_is_ready(lab: Lab, to: bytes) -> None:
    with playing(lab, "--memory", "64M") as players:
        players.grant(3, 1, 2, to=to)
        ready = players.hears(3, SwitchStep.READY)
        assert (ready.number, ready.members, ready.fragments) == (3, 0b011, 0)
        players.grant(3, 3, room=(1000, 8), to=to)
        until(lambda: players.hears(2, SwitchStep.READY).members == 0b111, "all have granted")
        players.grant(3, 1, room=(1000, 8), to=to)
        until(lambda: players.hears(2, SwitchStep.READY).fragments == 1000, "there is room")
        until(lambda: "view 3: adding for h1, h2, h3" in said(lab), "it says for whom", 5.0)
        boot = players.boot
        players.grant(3, 1, room=(10**7, 8), to=to)
        until(lambda: "--memory allows 67 MB" in said(lab), "it says that memory is missing", 5.0)
        assert players.hears(2, SwitchStep.READY).fragments == 1000
        players.grant(3, 1, room=(2000, 8), to=to)
        players.flush()
        assert players.hears(2, SwitchStep.HELLO).boot > boot
        players.grant(4, 1, 2, 3, room=(2000, 8), to=to)
        until(lambda: players.hears(2, SwitchStep.READY).members == 0b111, "all have granted again")
        ready = players.hears(2, SwitchStep.READY)
        assert (ready.number, ready.members, ready.fragments) == (4, 0b111, 2000)


def test_with_a_key(lab: Lab, tmp_path: Path) -> None:
    assert nicps("key", "new", str(tmp_path / "key")).returncode == 0
    key = SwitchKey.read(tmp_path / "key")
    with playing(lab, "--key", str(tmp_path / "key"), key=key) as players:
        players.grant(3, 1, 2, 3, siphash=b"s" * 16)
        assert players.hears(1, SwitchStep.READY).number == 3
        assert ", with a key" in said(lab)


def test_its_status(lab: Lab) -> None:
    """As another process sees it, in the switch's network namespace."""

    def status(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["ip", "netns", "exec", lab.switch_netns, *NICPS, "switch", "xdp", "status"]
        return subprocess.run(
            [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
        )

    nobody = status()
    assert nobody.returncode == 4 and "no switch that adds runs here" in nobody.stderr
    with playing(lab) as players:
        (fresh,) = json.loads(status("--json").stdout)
        assert fresh["ports"] == {f"eth{k}": "native" for k in (1, 2, 3)}
        assert (fresh["view"], fresh["members"], fresh["fragments"]) == (0, [], 0)
        players.grant(3, 1, 2, 3, room=(1000, 8))
        until(lambda: players.hears(2, SwitchStep.READY).fragments == 1000, "there is room")
        (ready,) = json.loads(status("--json").stdout)
        assert (ready["view"], ready["members"]) == (3, [1, 2, 3])
        assert (ready["fragments"], ready["width"], ready["keyed"]) == (1000, 8, False)
        assert "summed" in ready["counters"]
        shown = status().stdout
        assert "1,000 fragments of 8 bits" in shown and "native XDP" in shown


def test_another_view_passes_and_it_asks(lab: Lab) -> None:
    """HELLO comes at once, and not within the next second only."""
    with playing(lab) as players:
        first = players.hears(1, SwitchStep.HELLO).nonce
        socket_ = players.socks[1]
        players.install(7)
        second = players.hears(1, SwitchStep.HELLO, timeout_s=0.6).nonce
        assert second != first
        assert isinstance(socket_, socket.socket)


def test_a_port_goes_and_comes_back(lab: Lab) -> None:
    """Its cable is pulled; it leaves the bridge; another interface of its name takes its place."""
    with adding.serving(lab):
        lab.link("h2", "unplugged")
        until(lambda: "port eth2 has no carrier" in said(lab), "it says so", 10.0)
        lab.link("h2", "up")
        until(lambda: "port eth2 has its carrier back" in said(lab), "it says so", 10.0)
        ip(lab, "link", "set", "eth3", "nomaster")
        until(lambda: "port eth3 is not in the bridge any more" in said(lab), "it says so", 10.0)
        ip(lab, "link", "set", "eth3", "master", "br0")
        ip(lab, "link", "set", "eth2", "down")
        ip(lab, "link", "set", "eth2", "name", "other2")
        until(lambda: "port eth2 is gone" in said(lab), "it says so", 10.0)
        ip(lab, "link", "set", "other2", "name", "eth2")
        ip(lab, "link", "set", "eth2", "up")
        until(lambda: "port eth2 is there again (native XDP)" in said(lab), "it says so", 10.0)
        assert modes(lab) == ["native"] * 3
