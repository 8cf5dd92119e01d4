# SPDX-License-Identifier: Apache-2.0
"""What a call of the backend gives back: how long a script waits for it, and what ends the wait."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from nicps.collective import CollectiveFailed, Group  # noqa: E402
from nicps.torch import ProcessGroupNicps  # noqa: E402
from nicps.torch.tcp import Tcp  # noqa: E402
from tests.collectives import Meeting, together  # noqa: E402


def test_a_wait_ends_at_its_time_out() -> None:
    """Gloo raises then, too. The call goes on, and its result comes once the other rank has made it."""
    waited = threading.Event()

    def program(group: Group) -> float:
        pg, tensor = ProcessGroupNicps(group, Tcp("threads")), torch.ones(3)
        if group.rank == 1:
            assert waited.wait(30)
        options = dist.BarrierOptions()
        assert options.timeout < timedelta()
        works = [pg.allreduce([tensor]), pg.barrier(options)]
        if group.rank == 0:
            with pytest.raises(CollectiveFailed, match=r"not done within 0\.05 s: .* It goes on"):
                works[0].wait(timedelta(seconds=0.05))
            options.timeout = timedelta(seconds=0.05)
            works.append(pg.barrier(options))
            with pytest.raises(CollectiveFailed, match=r"not done within 0\.05 s"):
                works[2].wait()
            waited.set()
        else:
            works.append(pg.barrier())
        for work in works:
            work.limit = None
            assert work.wait(timedelta()) and work.wait(timedelta(seconds=30))
        return float(tensor[0])

    assert together(Meeting(2), program) == [2.0, 2.0]


_ENDS = """
import threading, time
from nicps.collective import Group
from nicps.torch.works import work_of
from tests.collectives import Meeting, ThreadLink

def write(_):
    begun.set()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        time.sleep(0.001)

begun = threading.Event()
group = Group(ThreadLink(Meeting(1), 1), None, 30.0)
work = work_of(None, group.barrier(), write, [])
assert begun.wait(30)
"""


def test_a_script_can_end_while_a_result_is_written() -> None:
    """An interpreter at its end stops threads where they are: in PyTorch that aborts the process."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


_WAITS = """
import os, signal, threading
from nicps.collective import Group
from nicps.collective.rounds import Ranks
from nicps.torch.works import work_of
from tests.collectives import Meeting, ThreadLink

Group._agree_on_ranks = lambda *_: Ranks((1, 2), ("h1", "h2"))
group = Group(ThreadLink(Meeting(2), 1), None, 30.0)
work = work_of(None, group.barrier(), lambda _: None, [])
threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    work.wait()
except KeyboardInterrupt:
    os._exit(3)
"""


def test_a_script_that_waits_for_another_rank_ends_with_ctrl_c() -> None:
    argv = [sys.executable, "-c", _WAITS]
    assert subprocess.run(argv, capture_output=True, timeout=15).returncode == 3
