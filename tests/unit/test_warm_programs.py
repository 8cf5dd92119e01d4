# SPDX-License-Identifier: Apache-2.0
"""Training programs of tests begin as copies of a stem, or as always where there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial

import pytest

from tests.netns import warm_programs
from tests.netns.labs import ROOT


def nothing(*_: object) -> None:
    """In place of what the agent does in a child before its program."""


@pytest.mark.parametrize("asked", [False, True])
def test_a_stem_that_is_killed_in_this_moment(asked: bool) -> None:
    """Before it is asked, or before it has answered: the program starts as always."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10.0)
    if asked:
        theirs.shutdown(socket.SHUT_WR)
    else:
        theirs.close()
    argv = [sys.executable, "-P", str(ROOT / "tests" / "netns" / "__init__.py")]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    more = {"preexec_fn": partial(nothing, None, True), "cwd": ROOT, "env": dict(os.environ)}
    child = warm_programs._start(ours, os.getpid(), argv, **streams, **more)
    assert child.wait(30.0) == 0
    ours.close()
    theirs.close()
