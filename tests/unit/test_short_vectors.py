# SPDX-License-Identifier: Apache-2.0
"""A short vector is converted before its offer is sent, and the agent hears of both at once; a long one after it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from nicps.collective.lanes import PER_FRAGMENT, Floats
from nicps.exchange import Exchange
from nicps.session import shared_form as says
from nicps.session.arena import Arena
from nicps.session.planned import MemberRounds

pytestmark = pytest.mark.unit
ROOM = 256
SHORT = 200
PHASE = says.Phase("train", 1, 1, 0, (1, 2), Exchange.STRIPES, 1, (1, 1), 1, room=ROOM)


class Memory:
    """That of member 1 of two, on one channel."""

    def __init__(self) -> None:
        self.arena, self._bell = Arena.create(ROOM), os.eventfd(0, os.EFD_NONBLOCK)
        self._rounds = MemberRounds(1, self.arena, self._bell)
        fds = [os.memfd_create(name) for name in ("own", "sums")]
        for fd in fds:
            os.ftruncate(fd, 1 << 20)
        self._rounds.map(PHASE, iter(fds))
        self.offers: list[tuple[int, int]] = []

    def offer(self, round_: int, numbers: int) -> None:
        vector = np.ones(numbers, np.float32)
        marred = np.zeros(ROOM, np.bool_)
        floats = Floats(vector, np.empty_like(vector), marred)

        def send(offer: says.Offer) -> None:
            """What the agent finds with the offer: fragments that are converted, and how often it was woken."""
            conversions = self._rounds._memory.own.records["conversion"][offer.round & 1]
            self.offers.append((int((conversions == offer.conversion).sum()), self.rung()))

        self._rounds.of(0).offer(round_, floats, 7, (1, 2), send)

    def rung(self) -> int:
        try:
            return os.eventfd_read(self._bell)
        except BlockingIOError:
            return 0


def test_the_agent_gets_a_short_vector_with_its_offer() -> None:
    memory = Memory()
    for round_, fragments in ((1, 1), (2, SHORT), (3, 2)):
        memory.offer(round_, fragments * PER_FRAGMENT)
        assert memory.offers.pop() == (fragments, 0)
        assert memory.rung() == 0
        assert memory.arena.converted(round_) == fragments


def test_a_long_vector_is_offered_before_it_is_converted() -> None:
    memory = Memory()
    memory.offer(1, SHORT * PER_FRAGMENT + 1)
    assert memory.offers == [(0, 0)]
    assert memory.rung() > 0
    assert memory.arena.converted(1) == SHORT + 1
