# SPDX-License-Identifier: Apache-2.0
"""What the kernels of members of a phase with parameter servers have, as a test says it; and such a phase."""

from __future__ import annotations

from collections.abc import Container, Iterable
from random import Random

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Phase, View
from nicps.protocol.actions import SendServed
from nicps.protocol.exchange.steps import Steps
from nicps.protocol.serving import Serving
from tests.listed import ROUND, members_of
from tests.simulator.kernel import in_ranges

VIEW_NUMBER, FRAGMENTS = 3, 300
MEMBERS = members_of(4)
#: Member 1 leads, and serves.
VIEW = View(VIEW_NUMBER, MEMBERS, frozenset({1, 2, 3, 4}), 1)


def phase_of(every: int = 4, fragments: int = FRAGMENTS, first_round: int = ROUND) -> Phase:
    """Members 4 and 1 serve, 2 and 3 train; of lanes of 16 bits."""
    return Phase(
        1,
        1,
        wire.PhaseKind.TRAIN,
        first_round=first_round,
        fragments=fragments,
        last_fragments=fragments,
        width=16,
        shares=(0, 4, 4, 0),
        quorum=8,
        exchange=Exchange.SERVERS,
        serving=Serving((4, 1), every),
    )


class ServedKernel:
    """What has come of steps and pulls, by the newest number of each; nothing else comes."""

    def __init__(self) -> None:
        self.number = 0
        self.here: set[int] = set()
        self.versions: dict[int, tuple[int, int]] = {}
        self.answers: dict[int, tuple[int, int, int, int]] = {}
        self.homes = 0  # that are made

    def take(self, number: int, indices: Iterable[int]) -> None:
        """These fragments of that step or pull have come."""
        if number > self.number:
            self.number, self.here = number, set()
        if number == self.number:
            self.here.update(indices)

    def take_all(self, actions: Iterable[object]) -> None:
        """All that was sent comes."""
        for action in actions:
            if isinstance(action, SendServed):
                self.take(action.number, indices(action))

    def _reached(self, number: int, first: int, end: int) -> tuple[int, int]:
        have = self.here if number == self.number else set()
        lacking = next((index for index in range(first, end) if index not in have), end)
        return lacking, max((i + 1 for i in have if first <= i < end), default=first)

    def _missing(self, number: int, first: int, end: int, limit: int) -> list[tuple[int, int]]:
        have = self.here if number == self.number else set()
        return in_ranges((index for index in range(first, end) if index not in have), limit)

    acknowledged_to = pulled_to = _reached
    missing_acknowledgements = missing_parameters = _missing

    def least_version(self, first: int, end: int) -> tuple[int, int]:
        return min(self.versions.get(index, (ROUND, 0)) for index in range(first, end))

    def answered(self, server: int) -> tuple[int, int, int, int]:
        return self.answers.get(server, (0, 0, 0, 0))

    def made(self, round_: int, view: int) -> int:
        return self.homes

    # ---- what other exchanges ask

    def count(self, round_: int, view: int, sender: int) -> int:
        return 0

    def missing(self, *_: int) -> list[tuple[int, int]]:
        return []

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        return first, first

    def missing_sums(self, *_: int) -> list[tuple[int, int]]:
        return []

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        return 0

    def next_to_send(self, round_: int, aggregator: int) -> int:
        return 0

    def absent(self, *_: int) -> dict[int, int]:
        return {}


def indices(action: SendServed) -> set[int]:
    """The fragments that are sent."""
    return {index for first, count in action.ranges for index in range(first, first + count)}


def finish_with_losses(
    steps: Steps,
    kernel: ServedKernel,
    actions: list[SendServed],
    now: float,
    random: Random,
    silent: Container[int] = (),
) -> float:
    """Four of ten frames and answers are lost, others are overtaken; the silent members never answer.

    Returns:
        when all of it has come.
    """
    late: list[tuple[int, set[int]]] = []
    ends = now + 60.0
    while not steps.whole:
        assert now < ends, "it is stuck"
        for action in actions:
            if action.to not in silent:
                come = {index for index in indices(action) if random.random() < 0.6}
                late.append((action.number, come))
        random.shuffle(late)
        for of, come in late[: len(late) // 2 + 1]:
            kernel.take(of, come)
        del late[: len(late) // 2 + 1]
        now = min(steps.deadline(), now + 0.002) if random.random() < 0.8 else steps.deadline()
        actions = steps.advance(now)
        assert len({action.number for action in actions}) <= 1
    return now
