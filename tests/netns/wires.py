# SPDX-License-Identifier: Apache-2.0
"""A veth pair in a network namespace of its own, which ends with the process or thread that holds it.

+------- namespace -------+
|  left ---------- right  |
+-------------------------+
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pyroute2 import IPRoute

from nicps.lab import enter, links


def run(command: str) -> str:
    """Run a command; its output."""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextmanager
def veth_pair(rate: str = "", mtu: int = 1500) -> Iterator[tuple[str, str]]:
    """Both interfaces up in a new namespace, which this thread is in until the end.

    The namespace has no name: the kernel removes it, with all in it, when no process is in it any more.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    enter.unshare(enter.CLONE_NEWNET)
    try:
        run(f"ip link add left mtu {mtu} type veth peer name right mtu {mtu}")
        for name in ("left", "right"):
            # No address: the kernel's own chatter would be in the way.
            run(f"ip link set {name} addrgenmode none")
            run(f"ip link set {name} up")
            if rate:
                run(f"tc qdisc add dev {name} root tbf rate {rate} burst 128kb limit 4mb")
        with IPRoute() as ipr:
            links.await_queues(ipr)
        yield "left", "right"
    finally:
        enter.setns(before)
        os.close(before)
