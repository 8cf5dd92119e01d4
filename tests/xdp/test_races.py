# SPDX-License-Identifier: Apache-2.0
"""Kernel against kernel, and kernel against agent, over many rounds: sums and counts are exact.

A processor stalls in the middle of a fragment, at a random place. Meanwhile another processor takes other fragments,
also of later rounds, and the agent goes on: it opens and drops rounds, enters a view, takes other accumulators, reads
sums early and in the end. The expected contents of the maps are computed here, from the seen-bits of every slot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from nicps.agent.frames import write_settings
from nicps.dataplane import bpf
from nicps.exchange import Exchange
from nicps.protocol import KernelState
from nicps.session.lanes import LaneFormat
from nicps.session.sums import Sums
from tests.xdp import stall
from tests.xdp.kernel import MACS, VIEW, fragment, payload_of
from tests.xdp.stall import LIMIT_S, Stalling, stalling

FRAGMENTS, BLOCKS = 6, 2
STEPS, ENOUGH_S = 500, 15.0  # whichever comes first


@cache
def gradient(view: int, round_: int, sender: int) -> NDArray[np.int64]:
    """The lanes of each of a sender's fragments: others in every round, and small enough to be exact in float32."""
    return np.random.default_rng((view, round_, sender)).integers(-(2**18), 2**18, 360)


@cache
def piece(view: int, round_: int, sender: int, index: int) -> bytes:
    """One fragment of it."""
    payload = payload_of(gradient(view, round_, sender), 32)
    return fragment(
        payload,
        width=32,
        sender=sender,
        index=index,
        fragments=FRAGMENTS,
        view=view,
        round_=round_,
    )


@dataclass
class Race:
    """The agent, and the frames that come in.

    Args:
        senders: the senders of fragments; 0: a switch, with its sums.

    Attributes: `overtaken`, fragments whose processor stalled until a newer tag was in its bank.
    """

    program: Stalling
    senders: tuple[int, ...]
    view: int = VIEW
    round: int = 0
    stalled: Future[bpf.Run] | None = None
    at: tuple[int, int] = (0, 0)  # view and round of the fragment that stalls
    overtaken: int = 0
    kept: tuple[int, int] | None = None  # view and round of the sum before, which may still be read

    def __post_init__(self) -> None:
        self.maps, self.rng = self.program.maps, np.random.default_rng(1)
        self.sums = Sums(LaneFormat(FRAGMENTS * 360, 32), 1)
        if 0 in self.senders:
            self.sums.exchange = Exchange.SWITCH
        self.members = frozenset({1, 2, 3})
        self.out = np.empty(FRAGMENTS * 360, np.float32)
        self.map()

    def map(self) -> None:
        """The accumulators, as a training program has them."""
        self.sums.map(os.dup(self.maps.accumulators_fd), os.dup(self.maps.slots_fd), BLOCKS)

    # ---- frames

    def any(self) -> bytes:
        """A fragment of the open round."""
        sender, index = int(self.rng.choice(self.senders)), int(self.rng.integers(FRAGMENTS))
        return piece(self.view, self.round, sender, index)

    def take(self, frame: bytes) -> None:
        """One processor takes a frame."""
        self.program.kernel.run(frame)

    def begin_to_stall(self) -> None:
        """Another one takes a frame, and stalls somewhere in it."""
        self.end_of_stall()
        place = int(self.rng.choice([stall.CHECKED, stall.CLAIMED, stall.ADDED]))
        self.at = self.view, self.round
        self.stalled = self.program.stall(place, self.any())

    def end_of_stall(self) -> None:
        """It goes on, and comes to its end."""
        if self.stalled is not None:
            newer = (self.view, self.round) > self.at and (self.round - self.at[1]) % 2 == 0
            self.overtaken += newer and not self.stalled.done()
            self.program.go()
            self.stalled.result(LIMIT_S)
            self.stalled = None

    # ---- the agent

    def open(self, *, complete: bool = False) -> None:
        """The round is open; the next one too, once this one is complete."""
        sums, high = 0 in self.senders, self.round + complete
        settings = {"bounce": False, "sums": sums, "sums_next": sums}
        state = KernelState(self.round, self.round, high, 0, 0, **settings)
        write_settings(self.maps.config, self.maps.stripes.areas.words[0], state)

    def missing(self) -> list[tuple[int, int]]:
        """The fragments that are not here: sender and index of each."""
        return [
            (sender, index)
            for sender in self.senders
            for first, count in self.maps.missing(
                self.round, self.view, sender, FRAGMENTS, FRAGMENTS
            )
            for index in range(first, first + count)
        ]

    def counts(self) -> list[int]:
        """Of each sender."""
        return [self.maps.count(self.round, self.view, sender) for sender in self.senders]

    def complete(self) -> None:
        """All fragments come in, lost ones are sent again, and the sum is read, as far as possible early."""
        lanes = np.frombuffer(payload_of(gradient(self.view, self.round, 1), 32), np.uint8)
        own = np.tile(lanes, (FRAGMENTS, 1)), np.zeros(FRAGMENTS, np.uint8)
        self.out[:] = np.nan
        self.sums.begin(self.round, self.members, self.out)
        turn = 0
        while min(self.counts()) < FRAGMENTS:
            for sender, index in self.missing():
                self.take(piece(self.view, self.round, sender, index))
                self.sums.ahead(self.view, 0, own, lambda: False)
            turn += 1
            if turn > 1:  # it may have claimed what is missing
                self.end_of_stall()
            assert turn < 4, f"round {self.round}: {self.counts()}, missing {self.missing()}"
        self.open(complete=True)
        self.sums.total(self.round, self.members, 0, own, self.out)
        expected = self.expected(self.view, self.round, self.senders)
        if not self.sums.exchange.includes_own:
            expected = expected + gradient(self.view, self.round, 1)
        assert (self.out.reshape(FRAGMENTS, 360) == expected).all(), f"sum of round {self.round}"
        for view, round_ in filter(None, (self.kept, (self.view, self.round))):
            bank = self.maps.accumulators[round_ & 1].reshape(-1, 360)[:FRAGMENTS]
            whole = self.expected(view, round_, self.senders)
            assert (bank == whole).all(), f"round {round_} while it is read"
        self.kept = self.view, self.round

    def expected(self, view: int, round_: int, senders: tuple[int, ...]) -> NDArray[np.int64]:
        """In the accumulators of a fragment."""
        return np.sum([gradient(view, round_, sender) for sender in senders], axis=0)

    def drop(self) -> None:
        """A decision drops the round, and the next one too."""
        self.kept = None
        for _ in range(2):
            self.round += 1
            self.open()

    def enter_view(self) -> None:
        """The round is run again in another view. This waits until the processor which stalls goes on."""
        self.kept = None
        threading.Timer(0.002, self.program.go).start()
        self.maps.enter_view(self.view + 1, 1, MACS, 2)
        self.view += 1
        self.open()

    def allocate(self) -> None:
        """The next phase has accumulators of its own."""
        self.kept = None
        threading.Timer(0.002, self.program.go).start()
        self.maps.allocate(BLOCKS)
        self.map()
        self.round += 1
        self.open()

    def check(self) -> None:
        """No processor is in the program: each slot of the open round equals its seen-bits, and counts are those of
        slots.
        """
        missing = self.missing()
        bank = self.maps.accumulators[self.round & 1].reshape(-1, 360)
        for index in range(FRAGMENTS):
            here = tuple(sender for sender in self.senders if (sender, index) not in missing)
            if here:
                expected = self.expected(self.view, self.round, here)
                assert (bank[index] == expected).all(), f"round {self.round}, fragment {index}"
        for sender, count in zip(self.senders, self.counts(), strict=True):
            there = FRAGMENTS - sum(lacking == sender for lacking, _ in missing)
            assert count == there, f"round {self.round}: {count} of sender {sender}, not {there}"

    def step(self) -> None:
        """A fragment stalls; others come in, and the agent goes on; then the fragment does."""
        self.begin_to_stall()
        for _ in range(int(self.rng.integers(3))):
            self.take(self.any())
        fates = [self.drop, self.complete, self.enter_view, self.allocate, lambda: None]
        self.rng.choice(fates, p=[0.5, 0.3, 0.03, 0.02, 0.15])()
        for _ in range(int(self.rng.integers(4))):
            self.take(self.any())
        self.end_of_stall()
        self.check()
        if self.rng.random() < 0.5:
            self.complete()
            self.round += 1
            self.open()


@pytest.fixture(scope="module")
def program() -> Iterator[Stalling]:
    with stalling() as loaded:
        yield loaded


@pytest.mark.short("members")
@pytest.mark.parametrize("senders", [(2, 3), (0,)], ids=["members", "switch"])
def test_sums_and_counts_are_exact(program: Stalling, senders: tuple[int, ...]) -> None:
    program.reset(BLOCKS)
    race, began = Race(program, senders), time.monotonic()
    race.round = 1
    race.open()
    for _ in range(STEPS):
        race.step()
        if time.monotonic() > began + ENOUGH_S and race.overtaken > 10:
            break
    assert race.overtaken > 10
