# SPDX-License-Identifier: Apache-2.0
"""Training programs that exchange stripes, through a model of the kernel (`tests/striped_memory.py`), beside the
reference.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from nicps.exchange import Exchange
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.lanes import LaneFormat, Residual
from nicps.session.phases import Commit
from nicps.session.planned import MemberRounds
from nicps.session.reducers import Standing, StripedReducer
from tests import striped_reference as reference
from tests.striped_memory import Host, exchange, places_for

WIDTHS = (32, 16, 8)
F32 = reference.F32
VIEW = 5
PER = {32: 360, 16: 720, 8: 1440}


def never() -> bool:
    return False


class Program:
    """One member's reducer, with the reference's idea of it beside."""

    def __init__(self, number: int, lanes: int, width: int, host: Host) -> None:
        self.format = LaneFormat(lanes, width)
        self.host = host
        self.arena, self.doorbell = Arena.create(self.format.fragments), os.eventfd(0)
        self.residual = Residual(self.format)
        self.rounds = MemberRounds(number, self.arena, self.doorbell)
        self.reducer = StripedReducer(self.format, self.residual, self.rounds, number)
        self.map()
        self.reducer.enter(0, 0, Exchange.STRIPES)
        self.member = reference.Member(width, np.zeros(lanes, np.float32))
        self.pieces: list[reference.Piece] = []
        self.exponent = 0

    def map(self) -> None:
        phase = shared_form.Phase(
            "train", 1, 1, 0, (), Exchange.STRIPES, VIEW, (), 0, room=self.host.room
        )
        self.rounds.map(phase, iter((self.host.own.fd, self.host.sums.reading_fd)))

    def begin(self, round_: int, vector: F32) -> int:
        """The number of the conversion."""
        offer = self.reducer.offer(round_, vector, 4, finite=False)
        assert (
            offer.unit is not None and not offer.skip and (offer.samples, offer.channel) == (4, 0)
        )
        self.exponent = offer.unit
        self.host.offered[round_ & 1] = offer.conversion
        return offer.conversion

    def offer(self, round_: int, vector: F32) -> None:
        self.begin(round_, vector)
        self.reducer.convert(round_, vector)
        self.pieces = self.member.convert(vector)

    def expect(self, round_: int) -> None:
        """Its agent sends it; read what has come of the sums. Compiled loops compute the residual of that."""
        self.arena.set_sending_since(round_, 1)
        assert self.reducer.expect(round_, np.empty(self.format.lanes, np.float32))
        self.reducer.ahead(never)

    def read(self, commit: Commit) -> F32:
        out = np.full(self.format.lanes, 7, np.float32)
        self.reducer.sum(commit, out)
        return out

    def close(self) -> None:
        self.arena.close()
        os.close(self.doorbell)
        self.host.close()


class Members:
    """Members 1 to n; all are in the view at first, and none of `idle` has a share."""

    def __init__(self, stack: ExitStack, n: int, lanes: int, width: int, idle: int = 0) -> None:
        self.width, self.lanes = width, lanes
        self.fragments = LaneFormat(lanes, width).fragments
        self.shares = tuple(0 if number == idle else 4 for number in range(1, n + 1))
        self.programs = {}
        for number in range(1, n + 1):
            host = Host(self.fragments + 3, 1)
            self.programs[number] = Program(number, lanes, width, host)
            stack.callback(self.programs[number].close)
        self.hosts = {number: program.host for number, program in self.programs.items()}
        self.enter(VIEW, range(1, n + 1))

    def enter(self, view: int, live: Sequence[int]) -> None:
        """Another view, with new places for everybody."""
        self.view, self.live = view, frozenset(live)
        self.aggregators = Standing(0, view, self.live, self.shares).due
        places = places_for(self.fragments, len(self.aggregators), self.width)
        for number in live:
            program = self.programs[number]
            program.host.renew_places(places)
            message = shared_form.View(view, tuple(live), 0, 1, places)
            program.rounds.map(message, iter((program.host.blocks.reading_fd,)))
            program.reducer.change_view(Standing(number, view, self.live, self.shares))

    def unit(self, listed: Sequence[int]) -> int:
        return reference.unit_of([self.programs[k].exponent for k in listed] or [0], self.width)

    def gather(self, round_: int, listed: Sequence[int], only: Sequence[int] | None = None) -> None:
        """What the kernel's programs do."""
        hosts = {number: self.hosts[number] for number in self.live}
        about = (self.width, self.unit(listed), self.fragments, only)
        exchange(hosts, round_, self.view, self.aggregators, listed, *about)

    def commit(self, round_: int, listed: Sequence[int]) -> Commit:
        return Commit(
            round_,
            4 * len(listed),
            dict.fromkeys(listed, 4),
            self.unit(listed),
            exchange=Exchange.STRIPES,
            view=self.view,
            aggregators=self.aggregators,
        )

    def expected(self, listed: Sequence[int], unit: int) -> list[reference.Piece]:
        """The sum's fragments."""
        return [
            reference.add([self.programs[k].pieces[index] for k in listed], self.width, unit)
            for index in range(self.fragments)
        ]

    def settle(self, commit: Commit) -> F32:
        """All read it, and finish: bit for bit as the reference; the sum."""
        listed = sorted(commit.counted)
        if listed:
            pieces = self.expected(listed, commit.unit)
            values = np.concatenate([piece.values() for piece in pieces])
        else:
            pieces, values = [], np.zeros(self.lanes, np.float32)
        for number in self.live:
            program = self.programs[number]
            assert (program.read(commit).view(np.uint32) == values.view(np.uint32)).all(), number
            program.reducer.finish(commit)
            if number in listed:
                program.member.counted(pieces)
            if pieces and number in commit.aggregators:
                rank, n = commit.aggregators.index(number), len(commit.aggregators)
                for index in range(self.fragments * rank // n, self.fragments * (rank + 1) // n):
                    program.member.add_rest(index, pieces[index], commit.unit)
            self.same_residual(number)
        return values

    def same_residual(self, number: int) -> None:
        program = self.programs[number]
        kept = program.residual.kept
        assert not kept[self.lanes :].any()
        assert (kept[: self.lanes].view(np.uint32) == program.member.residual.view(np.uint32)).all()
        assert np.abs(kept).max() <= program.residual.largest()


def gradient(seed: int, lanes: int) -> F32:
    """Fragments of sizes that differ, some of them by far."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.uniform(-9, 0, -(-lanes // 360)).repeat(360)[:lanes]
    return (rng.standard_normal(lanes) * size).astype(np.float32)
