# SPDX-License-Identifier: Apache-2.0
"""What the rounds of a job must have come to whose exchange has changed: each as its exchange has it, bit for bit.

What rounding leaves over goes on from one exchange to the next.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from tests import reference, striped_rounds
from tests.reference import Saved

#: What hosts have saved of a round, by member number: offers, and sums.
Both = tuple[Mapping[int, Saved], Mapping[int, Saved]]


@dataclass
class Member(reference.Member, striped_rounds.Member):
    """One life of one member, in any exchange."""


@dataclass
class Checked:
    """What the rounds of a job that `check` has looked at, all but the last ones, have left behind for the next.

    With the same rounds and more it goes on from there; a job of many scenes is checked after each.
    """

    rounds: dict[int, Both] = field(default_factory=dict)
    boots: Mapping[int, int] | None = None
    lives: dict[tuple[int, str], Member] = field(default_factory=dict)
    switch: striped_rounds.Switch = field(default_factory=striped_rounds.Switch)
    gradients: Counter[str] = field(default_factory=Counter)

    def begins(self, done: Mapping[int, Both], boots: Mapping[int, int] | None) -> bool:
        """Whether these are the same objects, and nothing was added before the end."""
        first = list(done)[: len(self.rounds)]
        if first != [*self.rounds] or (boots is None) != (self.boots is None):
            return False
        if boots is not None and self.boots is not None and not self.boots.items() <= boots.items():
            return False
        return all(
            now.keys() == then.keys() and all(now[number] is then[number] for number in now)
            for round_ in first
            for now, then in zip(done[round_], self.rounds[round_], strict=True)
        )

    def become(self, other: Checked) -> None:
        """Be of those rounds from now on."""
        vars(self).update(vars(other))


#: Of those that a check has looked at, the next one looks at these again: some hosts may have more to say of them.
_LAST = 8


def check(
    width: int,
    rounds: Mapping[int, Both],
    boots: Mapping[int, int] | None = None,
    checked: Checked | None = None,
) -> Counter[str]:
    """Compare all sums, as `reference.check` and `striped_rounds.check` do.

    Args:
        checked: what an earlier call has left there; it is changed. It counts only if the rounds that it is of are the
            same objects now. Otherwise all are compared anew.

    Returns:
        How many gradients were counted, by whose numbers the sums were: of "broadcast" or of "stripes".
    """
    done = {round_: both for round_, both in sorted(rounds.items()) if both[1]}
    state = Checked() if checked is None or not checked.begins(done, boots) else _copy(checked)
    left = list(done)[len(state.rounds) :]
    settled, last = left[:-_LAST], left[-_LAST:]
    _go_on(state, width, {round_: done[round_] for round_ in settled}, boots)
    if checked is not None:
        checked.become(_copy(state))
    _go_on(state, width, {round_: done[round_] for round_ in last}, boots)
    return state.gradients


def _copy(state: Checked) -> Checked:
    """Arrays are replaced in a check, never changed."""
    lives = {key: copy.copy(member) for key, member in state.lives.items()}
    switch, gradients = copy.copy(state.switch), state.gradients.copy()
    return Checked(dict(state.rounds), state.boots, lives, switch, gradients)


def _go_on(
    state: Checked, width: int, done: Mapping[int, Both], boots: Mapping[int, int] | None
) -> None:
    lives = state.lives
    for saved in (saved for both in done.values() for saved in both):
        for number, own in saved.items():
            lanes = len(own["vector"] if "vector" in own else own["total"])
            fresh = Member(width, np.zeros(lanes, np.float32))
            lives.setdefault((number, str(own["life"])), fresh)
    for numbers, group in groupby(done, lambda round_: _numbers(done[round_])):
        here = {round_: done[round_] for round_ in group}
        if numbers == "broadcast":
            merged = {round_: _merged(*both) for round_, both in here.items()}
            state.gradients[numbers] += reference.check(width, merged, lives)
        else:
            state.gradients[numbers] += striped_rounds.check(
                width, here, boots, lives, state.switch
            )
    state.rounds.update(done)
    state.boots = None if boots is None else dict(boots)


def _numbers(both: Both) -> str:
    """Whose numbers the round's sums are."""
    exchange = str(next(iter(both[1].values()))["exchange"])
    return "broadcast" if exchange in reference.EXCHANGES else "stripes"


def _merged(offers: Mapping[int, Saved], sums: Mapping[int, Saved]) -> dict[int, Saved]:
    """The sum's rounding errors belong to the life under which the gradient was offered."""
    return {k: {**sums.get(k, {}), **offers.get(k, {})} for k in {*offers, *sums}}
