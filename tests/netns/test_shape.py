# SPDX-License-Identifier: Apache-2.0
"""`nicps join --shape`: classes in the host's queue, set up only where asked, and taken away at the end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nicps import wire
from nicps.dataplane import htb
from nicps.dataplane.interface import read_interface
from nicps.lab import Lab, namespaces
from nicps.lab.agents import environment
from tests.netns.labs import until
from tests.netns.members import LIGHT, Network, tiny_job

ETH1 = "eth1"
HANDLE = "6e63:"
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    """Two hosts on an unshaped line; their agents are started by the tests."""
    with Network(2, program=LIGHT) as made:
        made.lab.up()
        yield made


def _raw(priority: int) -> socket.socket:
    """A packet socket on the interface of the namespace that we are in."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88B6))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
    for room in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        made.setsockopt(socket.SOL_SOCKET, room, 4 << 20)
    made.bind((ETH1, 0x88B6))
    return made


def inside(lab: Lab, host: str, call: Any) -> Any:
    return namespaces.inside(lab.host(host).netns, call)


def queue(network: Network, host: str) -> str:
    """The root disciplines of the host's interface, as `tc` shows them."""
    netns = network.lab.host(host).netns
    command = ["tc", "-n", netns, "qdisc", "show", "dev", ETH1, "root"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


def classes(network: Network, host: str) -> dict[str, int]:
    """Packets that each class has sent."""
    netns = network.lab.host(host).netns
    command = ["tc", "-n", netns, "-s", "class", "show", "dev", ETH1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    found, name = {}, ""
    for words in map(str.split, done.stdout.splitlines()):
        if words[:2] == ["class", "htb"]:
            name = words[2]
        elif words[:1] == ["Sent"]:
            found[name] = int(words[3])
    return found


def threaded(network: Network, host: str, value: int | None = None) -> int:
    """Whether the host's interface receives in threads; with a value, set that first."""
    work = f"echo {value} > /sys/class/net/{ETH1}/threaded" if value is not None else ":"
    process = network.lab.run(
        host, ["sh", "-ec", f"{work}; cat /sys/class/net/{ETH1}/threaded"], stdout=subprocess.PIPE
    )
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    return int(said)


@pytest.fixture
def plain(two: Network) -> Iterator[Network]:
    """No agent and no discipline of anybody."""
    for host in two.names:
        two.end(host, signal.SIGKILL)
        inside(two.lab, host, lambda: htb.clear(read_interface(ETH1)))
    yield two
    for host in two.names:
        two.end(host, signal.SIGTERM)


def test_classes_come_and_go_with_the_agent(plain: Network, open_path: Any) -> None:
    """A job trains through them: tokens and marks in the class of control, fragments in that of urgency 0."""
    assert HANDLE not in queue(plain, "h1")
    for host in plain.names:
        plain.join(host, "--shape", "2gbit")
    plain.all_stand_by()
    assert "htb 6e63:" in queue(plain, "h1") and threaded(plain, "h1")
    run = plain.train(tiny_job(open_path), rounds=5)
    assert run.result["weights_identical"]
    sent = classes(plain, "h1")
    assert sent["6e63:7"] > 20 and sent["6e63:10"] >= 5
    assert sent["6e63:1"] >= sent["6e63:7"] + sent["6e63:10"]
    for host in plain.names:
        plain.end(host, signal.SIGTERM)
        assert HANDLE not in queue(plain, host) and not threaded(plain, host)


def test_an_interface_that_receives_in_threads_anyway_goes_on_with_that(plain: Network) -> None:
    """A veth can be asked for it while it has an XDP program."""
    plain.join("h1")
    until(lambda: plain.status("h1"), "it answers")
    shaping = (
        "from nicps.dataplane import htb; from nicps.dataplane.interface import read_interface;"
        f"htb.shape(read_interface({ETH1!r}), 2_000_000_000)()"
    )
    for before in (1, 0):
        threaded(plain, "h1", before)
        shaped = plain.lab.run("h1", [sys.executable, "-c", shaping], env=environment())
        assert shaped.wait(20) == 0
        assert HANDLE not in queue(plain, "h1") and threaded(plain, "h1") == before


def test_without_the_option_nothing_changes(plain: Network) -> None:
    before = queue(plain, "h1")
    plain.join("h1")
    until(lambda: plain.status("h1"), "it answers")
    assert queue(plain, "h1") == before and not threaded(plain, "h1")


@pytest.mark.parametrize("by", ["join", "doctor"])
def test_what_a_killed_agent_leaves_is_taken_away(plain: Network, by: str) -> None:
    plain.join("h1", "--shape", "2gbit")
    until(lambda: plain.status("h1"), "it answers")
    plain.end("h1", signal.SIGKILL)
    assert HANDLE in queue(plain, "h1") and threaded(plain, "h1")
    if by == "join":
        plain.join("h1")
        until(lambda: plain.status("h1"), "it answers")
        assert "took away the classes that an older run left on eth1" in plain.log("h1")
    else:
        done = plain.command("h1", "doctor", "--iface", ETH1)
        assert "classes that an older run had left were taken away" in done.out
    assert HANDLE not in queue(plain, "h1") and not threaded(plain, "h1")


def test_doctor_knows_whose_classes_they_are(plain: Network) -> None:
    """Those of a running agent stay. The line of a veth has 10 Gbit/s."""
    for rate, said in (
        ("2gbit", "classes at 2gbit, of a running agent"),
        (
            "20gbit",
            "classes at 20gbit, and the line has 10gbit: frames wait in the NIC, in no order",
        ),
    ):
        plain.join("h1", "--shape", rate)
        until(lambda: plain.status("h1"), "it answers")
        assert said in plain.command("h1", "doctor", "--iface", ETH1).out
        assert HANDLE in queue(plain, "h1")
        plain.end("h1", signal.SIGTERM)


def test_somebodys_discipline_is_not_replaced(plain: Network) -> None:
    netns = plain.lab.host("h1").netns
    tc = ["tc", "-n", netns, "qdisc"]
    subprocess.run(
        [*tc, "add", "dev", ETH1, "root", "handle", "12:", "htb"], check=True, timeout=20
    )
    try:
        ended = plain.command("h1", "join", "--iface", ETH1, "--shape", "1gbit")
        assert "has a queueing discipline already (htb 12:)" in ended.error(3)
        assert "htb 12:" in queue(plain, "h1")
        assert plain.lab.host("h1").read_link().xdp_mode is None
    finally:
        subprocess.run([*tc, "del", "dev", ETH1, "root"], check=True, timeout=20)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("fast", "'fast' is not a rate: write 1gbit, 100mbit or bits per second"),
        ("10kbit", "--shape takes 1mbit to 34gbit, not 10kbit"),
        ("40gbit", "--shape takes 1mbit to 34gbit, not 40gbit"),
    ],
)
def test_no_rate(plain: Network, rate: str, said: str) -> None:
    assert said in plain.command("h1", "join", "--iface", ETH1, "--shape", rate).only_error(2)


def test_urgent_frames_overtake(plain: Network) -> None:
    """Of 400 bulk frames that wait in the queue at 10 Mbit/s (0.48 s) an urgent one and a control frame pass most."""
    hosts = [plain.lab.host(host) for host in plain.names]

    bulk_socket = inside(plain.lab, "h1", lambda: _raw(htb.of_urgency(0)))
    urgent_socket = inside(plain.lab, "h1", lambda: _raw(htb.of_urgency(3)))
    control_socket = inside(plain.lab, "h1", lambda: _raw(htb.CONTROL))
    listener = inside(plain.lab, "h2", lambda: _raw(0))
    undo = inside(plain.lab, "h1", lambda: htb.shape(read_interface(ETH1), 10_000_000))
    try:
        head = wire.BROADCAST + bytes.fromhex(hosts[0].mac.replace(":", "")) + b"\x88\xb6"
        for _ in range(400):
            bulk_socket.send(head + b"b" + bytes(1485))
        urgent_socket.send(head + b"u" + bytes(60))
        control_socket.send(head + b"c" + bytes(60))
        order, until_s = "", time.monotonic() + 10.0
        listener.settimeout(5.0)
        while len(order) < 402 and time.monotonic() < until_s:
            frame = listener.recv(2048)
            if frame[12:14] == b"\x88\xb6":
                order += chr(frame[14])
    finally:
        inside(plain.lab, "h1", undo)
        for each in (bulk_socket, urgent_socket, control_socket, listener):
            each.close()
    assert len(order) == 402
    assert max(order.index("u"), order.index("c")) < 100
