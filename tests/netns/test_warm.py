# SPDX-License-Identifier: Apache-2.0
"""The processes from which labs start commands (`tests/netns/warm.py`): the workers of a test run share them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nicps.lab import Lab, LabSettings, processes
from tests.netns.warm import NICPS, Command, Server
from tests.reaper import fresh_name


@pytest.fixture
def netns() -> Iterator[str]:
    """That of a host."""
    with Lab(LabSettings(fresh_name(), 2)) as lab:
        yield lab.host("h1").netns


def says(server: Server, netns: str) -> str:
    """The output of a command that the server has started."""
    options: dict[str, Any] = {"env": {**os.environ, processes.MARK: "none"}, "stdout": -1}
    argv = [sys.executable, "-m", "tests.netns.says_program"]
    out, _ = Command(server, netns, argv, None, options).communicate(timeout=60)
    return str(out.decode())


def test_one_server_serves_all_until_the_last_has_gone(netns: str) -> None:
    """Also those that come at the same time. What comes after its end starts another."""
    run, servers = fresh_name(), list[Server]()
    makers = [threading.Thread(target=lambda: servers.append(Server(NICPS, run))) for _ in range(4)]
    for each in makers:
        each.start()
    for each in makers:
        each.join()
    (first,) = (server for server in servers if server.started)
    said = [says(server, netns) for server in servers]
    assert len(set(said)) == 1 and said[0] == f"{first.started} says\n"
    first.close()
    for server in servers:
        if server is not first:
            assert says(server, netns) == said[0]
            server.close()
    first.wait()
    another = Server(NICPS, run)
    assert says(another, netns) != said[0]
    another.close()
    another.wait()
