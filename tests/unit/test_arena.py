# SPDX-License-Identifier: Apache-2.0
"""The order of accesses to the memory that an agent and its training program share.

Some processors may exchange two stores, or two loads. So a barrier must stand between what a word says and what it
stands for, at both ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nicps.agent.sources import ArenaSource
from nicps.session import arena as module
from nicps.session.arena import Arena
from nicps.session.lanes import LaneFormat, Residual
from nicps.session.offers import Offers

ROUND = 7
WIDTH = 16
BATCHES = 3
FORMAT = LaneFormat(BATCHES * 92_160, WIDTH)
NEW = 9


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(FORMAT.fragments)
    yield arena
    arena.close()


@pytest.fixture
def at_barrier(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Let something happen at each barrier."""

    def set_(event: Callable[[], object]) -> None:
        monkeypatch.setattr(module, "barrier", event)

    return set_


def test_lanes_are_written_before_their_number(
    arena: Arena, at_barrier: Callable[[Callable[[], object]], None]
) -> None:
    told, written = list[int](), list[int]()

    def note() -> None:
        there = arena.lanes[ROUND & 1].view(">i2").all(axis=1) & (arena.shifts[ROUND & 1] < 99)
        written.append(int(there.sum()))
        told.append(int(arena._words[8 + (ROUND & 1)]))

    bell = os.eventfd(0)
    offers = Offers(FORMAT, Residual(FORMAT), arena, bell)
    offers.unit = -30
    arena.shifts[:] = 99
    offers.begin(ROUND)
    at_barrier(note)
    offers.convert(ROUND, np.ones(FORMAT.lanes, np.float32))
    os.close(bell)
    batch = FORMAT.batch
    assert written == [batch, 2 * batch, 3 * batch]
    assert told == [0, batch, 2 * batch]
    at_barrier(lambda: None)
    assert arena.converted(ROUND) == 3 * batch


def test_their_number_is_read_before_the_lanes(
    arena: Arena, at_barrier: Callable[[Callable[[], object]], None]
) -> None:
    """What the program adds at the barrier is not in the number that was read before it."""
    source = ArenaSource(arena, lambda yes: None)
    arena.set_converted(ROUND, 4)

    def go_on() -> None:
        arena.lanes[ROUND & 1, :4] = NEW
        arena.set_converted(ROUND, 8)

    at_barrier(go_on)
    assert source.available(ROUND) == 4
    assert (source.payload(ROUND, 0, 4)[0] == NEW).all(), "no barrier"


def test_samples_are_of_their_round(
    arena: Arena, at_barrier: Callable[[Callable[[], object]], None]
) -> None:
    """Those of a round are written before its number, and read behind it."""
    arena.need = (ROUND, 5)
    seen = list[tuple[int, int]]()
    at_barrier(lambda: seen.append((int(arena._words[0]), int(arena._words[1]))))
    arena.need = (ROUND + 1, 30)
    assert seen == [(ROUND, 30)]

    def go_on() -> None:
        at_barrier(lambda: None)
        arena.need = (ROUND + 2, 60)

    at_barrier(go_on)
    assert arena.need == (ROUND + 1, 60)
