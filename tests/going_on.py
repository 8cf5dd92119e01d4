# SPDX-License-Identifier: Apache-2.0
"""Members of a job with servers in the open round, before and after GO (`tests/unit/test_goes_on.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from nicps import wire
from nicps.protocol import Send, SendServed, Timings, View
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.served_ring import ServedRing
from nicps.protocol.signals import Steps
from nicps.protocol.token import Line, TokenState
from tests.served_kernel import ROUND, VIEW, ServedKernel, phase_of

TIMINGS = Timings()
START = 100.0
OFFERED, COMPLETE, GOES_ON = wire.Flag.OFFERED, wire.Flag.COMPLETE, wire.Flag.GOES_ON
PUSH, PULL, CONTRIBUTION = wire.FrameType.PUSH, wire.FrameType.PULL, wire.FrameType.CONTRIBUTION
NEXT = ROUND + 1  # the open round; the one before is committed


def token(
    hop: int, round_: int = NEXT, marks: int = 0, read: int = ROUND - 1, of: int = 1
) -> wire.Frame:
    """The lead has parked it; `marks` are in the entry of the member `of`, and nobody has told more than `read`."""
    lines = [Line(read=read) for _ in VIEW.members]
    lines[of - 1].marks = marks
    header = VIEW.header(1, round_, wire.Flag.PARKED)
    return TokenState(1, hop, 1, round_, -40, -40, lines).frame(header)


def said(sender: int, flags: int = 0, round_: int = NEXT, read: int = ROUND) -> wire.Frame:
    """What that member broadcasts."""
    return wire.Frame(VIEW.header(sender, round_, flags), wire.Want(4, read), ((),))


def worker(
    number: int = 2, every: int = 4, carried: Carried | None = None, read: int = ROUND
) -> tuple[ServedRing, ServedKernel]:
    """In the open round; it has read the one before."""
    kernel, phase = ServedKernel(), phase_of(every)
    carried = carried or Carried(NEXT, -40, read)
    timeout = AdaptiveTimeout(TIMINGS)
    ring = ServedRing(phase, VIEW, number, kernel, TIMINGS, timeout, carried, START)
    ring.on_token(START, token(5))
    return ring, kernel


def lead(*, decided: bool = True, view: View = VIEW, every: int = 4) -> ServedRing:
    """Member 1, which only serves."""
    kernel, phase = ServedKernel(), phase_of(every)
    carried = Carried(NEXT, -40, ROUND, undecided=not decided)
    timeout = AdaptiveTimeout(TIMINGS)
    ring = ServedRing(phase, view, 1, kernel, TIMINGS, timeout, carried, START)
    ring.create(START)
    return ring


def step(round_: int = NEXT, *, skip: bool = False) -> Offer:
    return Offer(round_, 4, None, skip)


def wants(steps: Steps) -> list[tuple[int, int, int]]:
    """Rounds, flags and last rounds read of what this member broadcasts."""
    found = []
    for one in steps:
        if isinstance(one, Send) and isinstance(one.frame.body, wire.Want):
            header = one.frame.header
            found.append((header.round, int(header.flags), one.frame.body.read))
    return found


def types(steps: Iterable[object]) -> set[wire.FrameType]:
    return {one.type for one in steps if isinstance(one, SendServed)}
