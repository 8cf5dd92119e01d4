# SPDX-License-Identifier: Apache-2.0
"""Helpers that the tests of the lab share."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from nicps.lab import enter, links, namespaces, processes, state
from nicps.lab.lab import Host, Lab

ROOT = Path(__file__).resolve().parents[2]
NICPS = [sys.executable, "-m", "nicps"]
_OURS = re.compile(r"p\d+|br0|eth1")


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until the condition holds; its value.

    Every 10 ms at first. Four agents that are asked take 2 ms of processor time, so later it is every 30 ms.
    """
    begun = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - begun
        assert waited < timeout_s, f"in {timeout_s} s not: {what}"
        time.sleep(min(max(0.01, waited / 20), 0.03))
    return value


def leftovers(name: str) -> dict[str, Any]:
    """The parts that exist of a lab, empty if none."""
    there = {
        "namespaces": namespaces.find().get(name, []),
        "state": [path.name for path in state.LABS_DIR.glob(f"*{name}.json*")],
        "processes": [p.command for p in processes.find(name)],
        "mounts": [
            line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if f"/nicps-{name}-" in line
        ],
    }
    return {key: value for key, value in there.items() if value}


def own_links() -> set[str]:
    """Links of the kinds that a lab makes, in the namespace that we are in."""
    with IPRoute() as ipr:
        names = {link.get_attr("IFLA_IFNAME") for link in ipr.get_links()}
    return {name for name in names if _OURS.fullmatch(name)}


def nicps(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command, as a user does."""
    return subprocess.run(
        [*NICPS, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **{"timeout": 60, **options},
    )


def raw_socket(host: Host, ethertype: int) -> socket.socket:
    """A packet socket on the host's eth1."""
    return _packet_socket(host.netns, "eth1", ethertype)


def port_socket(lab: Lab, host: Host, ethertype: int) -> socket.socket:
    """A packet socket on the switch's port to that host."""
    return _packet_socket(namespaces.switch_name(lab.name), links.port_name(host.number), ethertype)


def _packet_socket(netns: str, iface: str, ethertype: int) -> socket.socket:
    """A socket stays in the namespace that it was made in."""

    def make() -> socket.socket:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ethertype))
        sock.bind((iface, ethertype))
        return sock

    return namespaces.inside(netns, make)


def in_lab_unmarked(netns: str, *argv: str) -> subprocess.Popen[bytes]:
    """A process in the lab's namespace that the lab did not start."""
    return subprocess.Popen([sys.executable, "-I", "-S", enter.__file__, netns, "--", *argv])
