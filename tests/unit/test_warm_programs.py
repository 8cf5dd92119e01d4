# SPDX-License-Identifier: Apache-2.0
"""Training programs of tests begin as copies of a stem, or as always where there is none."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from nicps.agent import process
from tests.netns import warm_programs
from tests.netns.labs import ROOT


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
    with open(os.devnull, "wb") as nowhere:
        streams = nowhere.fileno(), nowhere.fileno()
        pid, failed = warm_programs._start(
            process.start, ours, os.getpid(), argv, ROOT, dict(os.environ), streams, None, True
        )
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(failed, 1) == b"", "it has begun"
    os.close(failed)
    ours.close()
    theirs.close()
