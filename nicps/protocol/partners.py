# SPDX-License-Identifier: Apache-2.0
"""B2, B3: workers in groups, which pull half of the parameters from the servers, and half from one another.

Nothing here has a state: what follows from a phase and a view is the same at all members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nicps.protocol.phase import Phase
from nicps.protocol.serving import pulled_fragments


def groups(workers: Iterable[int]) -> list[tuple[int, ...]]:
    """B2: workers in order of number, by twos; of an odd number the last three are a group. A single one is alone."""
    numbers = sorted(workers)
    odd = len(numbers) % 2
    starts = range(0, max(len(numbers) - odd, odd), 2)
    found = [tuple(numbers[at : at + 2]) for at in starts]
    if odd and len(numbers) > 1:
        found[-1] += (numbers[-1],)
    return found


def first_set(group: Sequence[int], worker: int) -> int:
    """B3: the set that a worker pulls from the servers: 1 for the first of its group, 2 for the others."""
    return 1 if worker == group[0] else 2


def own_set(phase: Phase, number: int) -> int:
    """The set that a member pulls from the servers, of all workers of the phase; 0 if it is none."""
    workers = (k for k, share in enumerate(phase.shares, 1) if share)
    found = (first_set(group, number) for group in groups(workers) if number in group)
    return next(found, 0)


@dataclass(frozen=True, slots=True)
class Pairing:
    """A worker pulls the fragments `own` from the servers, and those of `other` from the member `partner`."""

    partner: int
    own: range
    other: range

    @classmethod
    def of(cls, phase: Phase, live: Collection[int], number: int) -> Pairing | None:
        """That member's in a view with these live members; None if it has no partner.

        In a group of three the first takes set 2 from the second, and both others take set 1 from the first.
        """
        serving = phase.serving
        if serving is None or not serving.sets:
            return None
        group = next((g for g in groups(phase.sharing(live)) if number in g), ())
        if len(group) < 2:
            return None
        sets = (
            range(serving.sets),
            range(serving.sets, pulled_fragments(phase.fragments, phase.width)),
        )
        if number == group[0]:
            return cls(group[1], *sets)
        return cls(group[0], *reversed(sets))

    def limit(self, first: int, end: int, missing: int, ahead: int) -> int:
        """How far the partner is asked for fragments `first` to `end` of its set.

        It has come about as far with its set as this worker with its own.

        Args:
            missing: fragments of the own set that have not come.
            ahead: so many must have come of it before the partner is asked for the first one.
        """
        if not missing:
            return end
        come = max(0, len(self.own) - missing - ahead)
        return first + (end - first) * come // len(self.own)
