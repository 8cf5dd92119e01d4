# SPDX-License-Identifier: Apache-2.0
"""What must hold of sums of stripes: every member has the same, no part of a gradient is lost, none counts twice.

What a committed list comes to is made here again, from what its members have offered.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING

from nicps import wire
from nicps.protocol import Committed
from nicps.session import shared_form as says
from tests.simulator.gradients import LEAST, Contribution, Lane, Reference, reference
from tests.simulator.places import Own, Records, bounds

if TYPE_CHECKING:
    from tests.simulator.checks import Checks
    from tests.simulator.host import Host
    from tests.simulator.program import Program

Round = tuple[int, int]  # the host where each has its own, and the number
Name = tuple[int, int, int]  # of a program: its host, that one's life, and the how manieth there


class SumChecks:
    """What was offered, what it came to, and whose remainders were used."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._offers: dict[tuple[int, int], tuple[Contribution, int]] = {}  # round, member
        self._conversions: dict[tuple[int, int], int] = {}
        self.made: dict[Round, Reference] = {}
        self.used: dict[Round, set[int]] = defaultdict(set)  # fragments whose remainder was
        self._entered: defaultdict[int, int] = defaultdict(int)  # fragment -> of all gradients
        self._due: set[tuple[Round, int]] = set()  # rounds that a member has yet to apply
        self._holders: set[Name] = set()  # programs that have a residual
        self._left: dict[Name, list[int]] = {}  # the same: their residuals at their end
        self.central: set[Round] = set()  # that a switch has summed
        self._summed: dict[int, tuple[int, int]] = {}  # the last of these, and its view

    def _key(self, host: Host, round_: int) -> Round:
        """Where hosts may go on alone, each may come to another sum, and run a round again."""
        return (host.index if self._checks.lan.timings.alone else -1), round_

    def offered(
        self, host: Host, round_: int, offer: Contribution, largest: int, conversion: int
    ) -> None:
        """A gradient of a training phase is about to be converted; `largest`: as it is told."""
        whose = round_, host.node.number
        self._offers[whose] = offer, largest
        self._conversions[whose] = conversion

    def sent(self, host: Host, round_: int, index: int, own: Own) -> None:
        """Only what was offered goes out."""
        offered = self._conversions.get((round_, host.node.number))
        if own.conversion != offered:
            self._checks.fail(
                f"{host.node.name} sends fragment {index} of round {round_} as conversion "
                f"{own.conversion} has left it, not {offered}"
            )

    def committed(self, host: Host, commit: Committed, fragments: int) -> None:
        """A round counts at a host, whose kernel has all its sums."""
        checks, round_ = self._checks, commit.round
        listed = sorted(commit.counted)
        if not listed:
            return
        key = self._key(host, round_)
        made = self.made.get(key)
        if made is None or checks.lan.timings.alone:
            offers = [self._offers[round_, k] for k in listed]
            width, members = _width_of(commit), max(host.node.view.live)
            whose = [one for one, _ in offers], [most for _, most in offers]
            made = reference(*whose, width, self._before(key, commit), members)
            self.made[key], self.used[key] = made, set()
            self._due |= {(key, k) for k in listed}
        if commit.unit != made.unit and len(listed) > 1:
            checks.fail(f"round {round_} has the unit {commit.unit}, not {made.unit}")
        records, whose = host.kernel.stripes.records, (host.node.number, commit.view, round_)
        for index in range(fragments):
            found = sum_in(records, *whose, commit.counted, index)
            if found is None or not _same(found, made.sums[index]):
                checks.fail(
                    f"{host.node.name}: fragment {index} of round {round_} is {found}, not "
                    f"{made.sums[index]}: {listed} counted"
                )

    def _before(self, key: Round, commit: Committed) -> Reference | None:
        """The round whose remainders a switch has added: the last one that it has summed, if it has not lost them."""
        if not commit.exchange.central or len(commit.counted) < 2:
            return None
        branch, round_ = key
        boots = self._checks.lan.linux.boots
        before, self._summed[branch] = self._summed.get(branch), (commit.round, commit.view)
        self.central.add(key)
        if before is None or boots.get(before[1]) != boots.get(commit.view):
            return None
        return self.made[branch, before[0]] if round_ - before[0] < 256 else None

    def total(self, program: Program, commit: says.Committed) -> int:
        """The whole sum as that program reads it, as far as it goes into the weights."""
        if not commit.counted:
            return 0
        found, whose = [], (program.host.node.number, commit.view, commit.round)
        for index in range(len(program.residual)):
            lane = sum_in(program.records, *whose, commit.counted, index)
            if lane is None:
                self._checks.fail(
                    f"{program.host.node.name} reads round {commit.round}: there is no sum {index}"
                )
            found.append(lane if lane is not None and lane.finite else None)
        text = repr((commit.round, sorted(commit.counted.items()), found))
        return int(hashlib.sha1(text.encode()).hexdigest()[:8], 16)

    # ---- residuals

    def take_rests(self, program: Program, commit: says.Committed) -> None:
        """An aggregator's program uses the remainders of its stripe, each once, and each that of this round."""
        checks, host, key = self._checks, program.host, self._key(program.host, commit.round)
        tag, bank = commit.view << 32 | commit.round, commit.round & 1
        first, end = _own_stripe(program, commit)
        for index in range(first, end):
            made, rest = self.made[key], program.places.totals[bank][index - first]
            there = program.records.sums[bank][index].rest == tag
            if not there or rest != made.rests[index] or index in self.used[key]:
                checks.fail(
                    f"{host.node.name} uses the remainder {rest} of fragment {index} of round "
                    f"{commit.round}: it should be {made.rests[index]}; tagged: {there}, "
                    f"used before: {index in self.used[key]}"
                )
            self.used[key].add(index)
            self._holders.add(program.name)
            program.residual[index] += rest << made.unit - LEAST

    def applied(self, program: Program, commit: says.Committed) -> None:
        """A program has applied a round, and used what is left over of its stripe."""
        lost = {*range(*_own_stripe(program, commit))} - self.used[
            self._key(program.host, commit.round)
        ]
        if lost:
            self._checks.fail(
                f"{program.host.node.name} has not used the remainders {sorted(lost)} of round "
                f"{commit.round}"
            )

    def counted(self, program: Program, commit: says.Committed, offer: Contribution) -> None:
        """The program's own contribution is in the sum: what its lanes do not have stays."""
        key = self._key(program.host, commit.round)
        made = self.made[key]
        self._holders.add(program.name)
        self._due.discard((key, program.host.node.number))
        for index, lane in enumerate(made.sums):
            if lane.finite:
                program.residual[index] = offer.left[index]
                self._entered[index] += offer.gradient[index]

    def ended(self, program: Program) -> None:
        """A program ends well: with that residual."""
        self._left[program.name] = program.residual

    def balance(self) -> bool:
        """Of a job in which no program was lost: all that was counted is in the weights, or is left over.

        A member that was evicted keeps what it has, and the remainders that it has not used are lost. Whoever applies
        a round has used them (`applied`).

        Returns:
            Whether all residuals and remainders are known, so that this could be looked at.
        """
        rests = (
            index in self.used[key] or not rest or key in self.central
            for key, made in self.made.items()
            for index, rest in enumerate(made.rests)
        )
        unknown = self._due or self._holders - self._left.keys() or not all(rests)
        if self._checks.lan.timings.alone or unknown:
            return False
        for index in sorted(self._entered):
            summed = sum(made.sums[index].whole for made in self.made.values())
            below = sum(made.below[index] for made in self.made.values())
            left = sum(residual[index] for residual in self._left.values())
            kept = sum(self._at_switch(key, index) for key in self.central)
            if self._entered[index] != summed + below + left + kept:
                gone = self._entered[index] - summed - below - left - kept
                self._checks.fail(f"of fragment {index} {gone} was lost")
        return bool(self.made)

    def _at_switch(self, key: Round, index: int) -> int:
        """What is left over of a switch's sum, less what was added to it of the one before."""
        made = self.made[key]
        added = made.added[index] if made.sums[index].finite else 0
        return made.rests[index] - added << made.unit - LEAST


def _width_of(commit: Committed) -> int:
    """Bits of its lanes."""
    if not commit.phase.sized:
        return commit.phase.width
    return wire.width_of(next(iter(commit.counted.values())))


def _own_stripe(program: Program, commit: says.Committed) -> tuple[int, int]:
    """The fragments whose remainders that program has."""
    number = program.host.node.number
    if len(commit.counted) < 2 or number not in commit.aggregators:
        return 0, 0
    rank, count = commit.aggregators.index(number), len(commit.aggregators)
    return bounds(len(program.residual), rank, count)


def sum_in(
    records: Records, number: int, view: int, round_: int, counted: Collection[int], index: int
) -> Lane | None:
    """The sum as a member finds it; None if it is not there. Its own, where nobody else has contributed."""
    if set(counted) == {number}:
        return records.own[round_ & 1][index].lane
    stored = records.sums[round_ & 1][index]
    return stored.lane if stored.tag == view << 32 | round_ else None


def _same(found: Lane, made: Lane) -> bool:
    """What is not finite has no value."""
    if not found.finite or not made.finite:
        return found.exponent == made.exponent == wire.NOT_FINITE
    return found == made
