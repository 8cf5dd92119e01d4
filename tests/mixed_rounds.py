# SPDX-License-Identifier: Apache-2.0
"""What the rounds of a job must have come to whose exchange has changed: each as its exchange has it, bit for bit.

What rounding leaves over goes on from one exchange to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tests import reference, striped_rounds
from tests.reference import Saved

#: What hosts have saved of a round, by member number: offers, and sums.
Both = tuple[Mapping[int, Saved], Mapping[int, Saved]]


@dataclass
class Member(reference.Member, striped_rounds.Member):
    """One life of one member, in any exchange."""


def check(
    width: int, rounds: Mapping[int, Both], boots: Mapping[int, int] | None = None
) -> Counter[str]:
    """Compare all sums, as `reference.check` and `striped_rounds.check` do.

    Returns:
        How many gradients were counted, by whose numbers the sums were: of "broadcast" or of "stripes".
    """
    done = {round_: both for round_, both in sorted(rounds.items()) if both[1]}
    lives: dict[tuple[int, str], Member] = {}
    for saved in (saved for both in done.values() for saved in both):
        for number, own in saved.items():
            lanes = len(own["vector"] if "vector" in own else own["total"])
            fresh = Member(width, np.zeros(lanes, np.float32))
            lives.setdefault((number, str(own["life"])), fresh)
    gradients: Counter[str] = Counter()
    switch = striped_rounds.Switch()
    for numbers, group in groupby(done, lambda round_: _numbers(done[round_])):
        here = {round_: done[round_] for round_ in group}
        if numbers == "broadcast":
            merged = {round_: _merged(*both) for round_, both in here.items()}
            gradients[numbers] += reference.check(width, merged, lives)
        else:
            gradients[numbers] += striped_rounds.check(width, here, boots, lives, switch)
    return gradients


def _numbers(both: Both) -> str:
    """Whose numbers the round's sums are."""
    exchange = str(next(iter(both[1].values()))["exchange"])
    return "broadcast" if exchange in reference.EXCHANGES else "stripes"


def _merged(offers: Mapping[int, Saved], sums: Mapping[int, Saved]) -> dict[int, Saved]:
    """The sum's rounding errors belong to the life under which the gradient was offered."""
    return {k: {**sums.get(k, {}), **offers.get(k, {})} for k in {*offers, *sums}}
