# SPDX-License-Identifier: Apache-2.0
"""A veth pair in a network namespace of its own, which ends with the process or thread that holds it.

+------- namespace -------+
|  left ---------- right  |
+-------------------------+
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nicps.lab import enter


def run(command: str) -> str:
    """Run a command; its output."""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def await_queues(*names: str) -> None:
    """Wait until the kernel has attached the queues of interfaces that were set up: before that it drops all frames.

    A worker of the kernel does so when the carrier is there, which takes a while on a busy machine.
    """
    deadline = time.monotonic() + 30
    while not all(" state UP " in run(f"ip -o link show {name}") for name in names):
        assert time.monotonic() < deadline, f"{names} are not up"
    run("ip link set lo up")  # waits for the lock under which the worker does both


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
        await_queues("left", "right")
        yield "left", "right"
    finally:
        enter.setns(before)
        os.close(before)
