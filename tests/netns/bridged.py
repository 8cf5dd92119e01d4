# SPDX-License-Identifier: Apache-2.0
"""Hosts at the ports of a bridge, each in a network namespace of its own; all end with the context.

+------- this thread's namespace --------+
|              bridge br0                |
|   eth1          eth2          eth3     |
+----+-------------+-------------+-------+
     |             |             |
+--- eth0 ---+ +- eth0 ---+ +- eth0 ---+
| 10.9.0.1   | | 10.9.0.2 | | 10.9.0.3 |
+------------+ +----------+ +----------+
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from nicps import wire
from nicps.dataplane import bpf
from nicps.lab import enter
from tests.netns.planes import until
from tests.netns.wires import run

#: r0 = XDP_PASS; exit. A veth takes redirected frames only if its other end has a program.
_PASS = bytes.fromhex("b70000000200000095000000" + "00000000")


@dataclass
class Host:
    """One of the hosts; it receives all frames, and sends those that it is given."""

    number: int
    pid: int
    mac: bytes
    packets: socket.socket
    heard: list[bytes] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.9.0.{self.number}"

    @property
    def there(self) -> str:
        """The beginning of a command line that is to run in its namespace."""
        return f"nsenter --target {self.pid} --net"

    def send(self, frame: bytes) -> None:
        """From its Ethernet header on."""
        assert self.packets.send(frame) == len(frame)

    def ours(self) -> list[bytes]:
        """All frames of nicps that have come so far."""
        while select.select([self.packets], [], [], 0)[0]:
            self.heard.append(self.packets.recv(2048))
        return self.heard


def join(number: int, pid: int, programs: ExitStack) -> Host:
    """Plug a host in: a cable between port `eth<number>` and its namespace."""
    mac = bytes((2, 0, 0, 0, 1, number))
    text = mac.hex(":")
    run(f"ip link add eth{number} type veth peer name p{number} address {text}")
    run(f"ip link set eth{number} addrgenmode none")
    run(f"ip link set eth{number} master br0 up")
    run(f"ip link set p{number} netns {pid} name eth0")
    there = f"nsenter --target {pid} --net"
    run(f"{there} ip link set eth0 addrgenmode none up")
    run(f"{there} ip address add 10.9.0.{number}/24 dev eth0")
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter.setns(other)
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        packets.bind(("eth0", wire.ETHERTYPE))
        program = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], _PASS, 0, "pass")
        link = bpf.xdp_link(program, socket.if_nametoindex("eth0"), bpf.XDP_FLAGS_DRV_MODE)
        os.close(program)
        programs.callback(os.close, link)
        programs.callback(packets.close)
    finally:
        enter.setns(here)
        os.close(here)
        os.close(other)
    return Host(number, pid, mac, packets)


@contextmanager
def bridged(count: int) -> Iterator[list[Host]]:
    """The hosts; this thread is in the bridge's namespace until the end."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    unshare = os.path.realpath(shutil.which("unshare") or "")
    with ExitStack() as stack:
        stack.callback(os.close, before)
        enter.unshare(enter.CLONE_NEWNET)
        stack.callback(enter.setns, before)
        run("ip link add br0 type bridge")
        run("ip link set br0 addrgenmode none up")
        hosts = []
        for number in range(1, count + 1):
            inside = subprocess.Popen(["unshare", "--net", "sleep", "300"])
            stack.callback(inside.wait)
            stack.callback(inside.kill)
            until(
                lambda inside=inside: os.readlink(f"/proc/{inside.pid}/exe") != unshare,
                "its namespace is there",
            )
            hosts.append(join(number, inside.pid, stack))
        for number in range(1, count + 1):
            until(
                lambda number=number: (
                    "state forwarding" in run(f"bridge link show dev eth{number}")
                ),
                "the port forwards",
            )
        yield hosts
