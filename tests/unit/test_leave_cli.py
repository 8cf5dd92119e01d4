# SPDX-License-Identifier: Apache-2.0
"""`nicps leave`: one line says what was left."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nicps import cli
from nicps.session.channel import Channel
from nicps.session.fields import encode
from nicps.session.messages import Ok
from tests.unit.test_status_cli import status

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (encode(status(job=None)), "h2 has left network nicps on eth1"),
        (encode(status(job="run-1")), "h2 has left network nicps on eth1, in the middle of run-1"),
        ({"op": "status", "name": "an agent of long ago"}, "this host has left the network"),
    ],
)
def test_one_line_says_what_was_left(
    answer: Mapping[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the agent is of another version, whose status cannot be read."""
    code, asked = leave(tmp_path / "agent", answer)
    out, err = capsys.readouterr()
    assert (code, out, err, asked) == (0, f"{said}\n", "", ["status", "leave"])


def test_a_refusal_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent refuses a user's first command, and closes the connection."""
    refusal = {"op": "error", "message": "user 7 may not give commands", "exit_code": 2}
    assert leave(tmp_path / "agent", refusal) == (2, ["status"])
    assert capsys.readouterr() == ("", "nicps: error: user 7 may not give commands\n")


def leave(address: Path, answer: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The command's exit code, and what it asked an agent that answers so about its status."""
    asked: list[str] = []
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(address))
    listening.listen()

    def agent() -> None:
        channel = Channel(listening.accept()[0])
        while "leave" not in asked:
            asked.append(channel.recv(20.0)[0]["op"])
            channel.send(encode(Ok()) if asked[-1] == "leave" else dict(answer))
            if answer["op"] == "error":
                break
        channel.close()

    thread = threading.Thread(target=agent)
    thread.start()
    code = cli.main(["leave", "--socket", str(address)])
    thread.join(20)
    listening.close()
    return code, asked
