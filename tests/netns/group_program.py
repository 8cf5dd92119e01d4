# SPDX-License-Identifier: Apache-2.0
"""A member of a group, started by a test and by no agent: `python -m tests.netns.group_program SETTINGS`.

It prints a JSON object a line: `formed`, then the result of each drawn call, then `closed`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import orjson

from nicps.collective import CallMismatch, Group, MemberLost
from nicps.errors import NicpsError
from tests.collectives import draw


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def run(settings: dict[str, Any]) -> None:
    """Form, call what was drawn, and check it against NumPy."""
    time.sleep(float(settings.get("late_s", 0)))
    group = Group.form(
        settings.get("size", 0),
        name=settings.get("name", "default"),
        rank=settings.get("rank"),
        forming_s=settings.get("forming_s", 30),
        timeout_s=settings.get("timeout_s", 60),
    )
    say(formed=group.rank, names=group.names)
    dies = settings.get("dies", {}).get(str(group.rank))
    for number in range(settings.get("calls", 0)):
        call = draw(settings.get("seed", 1), number, group.size, settings.get("most", 4000))
        if dies == number:
            call.call(group)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            result = call.call(group).result()
        except MemberLost as error:
            assert call.needs() & set(group.lost), (call, group.lost)
            say(call=number, lost=str(error))
            continue
        counted = [rank for rank in range(group.size) if rank not in group.lost]
        call.check(result, group.rank, counted)
        shared = call.what in ("all_reduce", "broadcast", "all_gather")
        digest = hashlib.sha256(result.tobytes()).hexdigest() if shared else ""
        say(call=number, counted=counted, digest=digest)
    if settings.get("differs"):
        try:
            if group.rank == 1:
                group.barrier().result()
            else:
                group.all_reduce(np.zeros(1000, np.float32)).result()
        except CallMismatch as error:
            say(differs=str(error))
    if settings.get("sleeps"):
        time.sleep(60)
    if settings.get("waits"):
        group.all_reduce(np.zeros(5)).result()
        say(waited=True)
        time.sleep(60)
    group.close()
    say(closed=True, lost=group.lost)


if __name__ == "__main__":
    try:
        run(orjson.loads(sys.argv[1]))
    except NicpsError as error:
        say(error=str(error), kind=type(error).__name__)
        sys.exit(error.exit_code)
