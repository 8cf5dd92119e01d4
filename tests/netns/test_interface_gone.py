# SPDX-License-Identifier: Apache-2.0
"""An interface that is deleted while an agent reads its properties."""

from __future__ import annotations

import fcntl
import socket
import subprocess
from typing import Any

import pytest

from nicps.dataplane import interface
from nicps.errors import InterfaceMissing
from tests.netns.wires import veth_pair


@pytest.mark.parametrize("question", ["find_port", "fcntl.ioctl", "socket.if_nametoindex"])
def test_an_interface_that_goes_while_it_is_looked_at(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent is told that its interface is down, and reads its properties, while the interface is deleted."""
    ask: Any = {
        "find_port": interface.find_port,
        "fcntl.ioctl": fcntl.ioctl,
        "socket.if_nametoindex": socket.if_nametoindex,
    }[question]
    with veth_pair() as (left, _):

        def ask_late(*arguments: Any) -> Any:
            subprocess.run(["ip", "link", "delete", left], stderr=subprocess.DEVNULL, timeout=30)
            return ask(*arguments)

        monkeypatch.setattr(f"nicps.dataplane.interface.{question}", ask_late)
        with pytest.raises(InterfaceMissing, match=r"^interface left has gone$"):
            interface.still_usable(left)
