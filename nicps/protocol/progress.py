# SPDX-License-Identifier: Apache-2.0
"""The watch over fragments that are sent again and never arrive (R16): whom it concerns, and who has to go."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nicps.protocol.actions import NoProgress
from nicps.protocol.local_host import LocalHost
from nicps.protocol.phase import Timings
from nicps.protocol.signals import Lacking, Lacks

#: Retransmissions in vain until a member reports what it lacks. They are spread over `Timings.silence_most_s`.
IN_VAIN = 30
#: In this part of that time the others report, too. A report that is older counts no more.
_SETTLES = 1 / 3


class Progress:
    """Whether a member still gets what it lacks of the open round.

    A pause of this host, or of the ring, counts once however long it lasts: no retransmission falls into it.
    """

    def __init__(self, timings: Timings) -> None:
        self._every_s = timings.silence_most_s / IN_VAIN
        self.open()

    def open(self) -> None:
        """Another round is open."""
        self._have, self._vain, self._counted_at = -1, 0, 0.0
        self._is_due = False

    def note(self, now: float, have: int) -> None:
        """The member has so many fragments, and asks for the others."""
        if have > self._have:
            self._have, self._vain, self._counted_at, self._is_due = have, 0, now, False
        elif now >= self._counted_at + self._every_s:
            self._vain, self._counted_at = self._vain + 1, now
            self._is_due = self._vain >= IN_VAIN

    def take_report(self) -> bool:
        """Whether to report that nothing comes, however often it is sent again: once for each time in vain."""
        is_due, self._is_due = self._is_due, False
        return is_due


@dataclass(frozen=True, slots=True)
class _Report:
    lacks: Lacks
    at: float


class Standstill:
    """What members report of the open round that they lack, and do not get."""

    def __init__(self, host: LocalHost, timings: Timings) -> None:
        self._host = host
        self._settles_s = timings.silence_most_s * _SETTLES
        self._round = 0, 0  # its view, and its number
        self._reports: dict[int, _Report] = {}
        self._since = 0.0  # the first of them
        self._judged = False

    def hear(self, now: float, lacking: Lacking, learners: Collection[int]) -> list[NoProgress]:
        """A member reports, perhaps this one. The first report is for the user; who has missed it hears a later one."""
        view, member, round_ = self._host.view, lacking.member, lacking.round
        if (view.number, round_) != self._round:
            self._round, self._reports, self._judged = (view.number, round_), {}, False
        old = now - self._settles_s
        self._reports = {k: report for k, report in self._reports.items() if report.at > old}
        if not self._reports:
            self._since = now
        known = member in self._reports
        found = [] if known else [NoProgress(round_, {member: lacking.lacks})]
        self._reports[member] = _Report(lacking.lacks, now)
        knows = (
            self._host.number not in learners
        )  # who else learns: a learner knows that of itself only
        if knows and not self._judged and now >= self._since + self._settles_s:
            self._judged = True
            all_lack = {k: self._reports[k].lacks for k in sorted(self._reports)}
            at_fault = find_fault(all_lack, view.live, learners)
            found.append(NoProgress(round_, all_lack, at_fault))
        return found


def find_fault(
    lacks: Mapping[int, Lacks], live: Collection[int], learners: Collection[int] = ()
) -> int:
    """The member whose link or host must be at fault.

    It is the one that cannot take what others send, unless most of the others lack the same member's fragments: then
    it is that one. Learners have nothing that the job could go on with: they accuse nobody, and go first. Only one
    member at a time: without it the rest may do well, and a lone host lacks nothing.

    Args:
        lacks: by the member that reports; none is empty.
    """
    full = set(live) - set(learners)
    lacked_by: dict[int, set[int]] = {}
    for member in full & lacks.keys():
        for owner in lacks[member]:
            lacked_by.setdefault(owner, set()).add(member)
    taker = max(lacks, key=lambda k: (k in learners, len(lacks[k]), k))
    owner = max(lacked_by, key=lambda k: (len(lacked_by[k]), k), default=0)
    several = len(lacked_by.get(owner, ()))
    most = 2 * several > len(full - {owner})
    return owner if several >= max(2, len(lacks[taker])) and most else taker
