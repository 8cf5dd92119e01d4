# SPDX-License-Identifier: Apache-2.0
"""The watch over fragments that are sent again and never arrive (R16): whom it concerns, and who has to go."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Committed, NoProgress
from nicps.protocol.local_host import LocalHost
from nicps.protocol.phase import Phase, Timings
from nicps.protocol.signals import Lacking, Lacks

#: Fragments that are sent again in vain, before a member reports what it lacks.
IN_VAIN = 30
#: Between two asks counts no more than this part of `Timings.silence_most_s`, and the others have as long to report.
_PART = 1 / 3
#: How much the time of a round counts that waits for a more urgent one.
BEHIND = 0.1
#: Between two reports of a member every other one reports as well; a few of them may be lost.
_LOST = 5
#: Verdicts of a member that may wait for the lead to replace the exchange.
_LEADS_VERDICTS = 2
#: Verdicts after which the lead gives up an exchange that nothing can replace: the job ends then.
_LAST_VERDICTS = 8


class Progress:
    """Whether a member still gets what it lacks of the open round.

    It does not if fragments were sent again in vain for `Timings.silence_most_s`, and so many of them that loss is no
    explanation. A pause of this host, or of the ring, counts in part, as no retransmission falls into it.

    Attributes: `behind`, what is more urgent is on its way here, so this waits: its time counts a tenth.
    """

    def __init__(self, timings: Timings) -> None:
        self.behind = False
        self._limit_s = timings.silence_most_s
        self.open()

    def open(self) -> None:
        """Another round is open."""
        self._have = -1
        self._restart(0.0)

    def _restart(self, now: float) -> None:
        self._waited_s, self._in_vain, self._asked, self._asked_at = 0.0, 0, 0, now
        self._report_at: float | None = None
        self._is_due = False

    def note(self, now: float, have: int, asks: int) -> None:
        """The member has so many fragments, and asks for so many again."""
        if have > self._have:
            self._have = have
            self._restart(now)
        waited_s = min(now - self._asked_at, self._limit_s * _PART)
        self._waited_s += waited_s * BEHIND if self.behind else waited_s
        self._in_vain += self._asked
        self._asked, self._asked_at = asks, now
        if self._waited_s >= self._limit_s and self._in_vain >= IN_VAIN:
            self._is_due = self._report_at is None or now >= self._report_at

    def take_report(self, now: float) -> bool:
        """Whether to report that nothing comes, however often it is sent again; and again after a while."""
        is_due, self._is_due = self._is_due, False
        if is_due:
            self._report_at = now + self._limit_s / IN_VAIN
        return is_due


def lacks_in(frame: wire.Frame, others: Collection[int]) -> Lacks:
    """What a WANT reports of these: what its sender does not get, however often it is sent again."""
    return {
        lack.member: lack.count
        for items in frame.items
        for lack in items
        if isinstance(lack, wire.Lack) and lack.member in others
    }


@dataclass(frozen=True, slots=True)
class _Report:
    lacks: Lacks
    at: float


class Standstill:
    """What members report of the open rounds that they lack, and do not get."""

    def __init__(self, host: LocalHost, timings: Timings) -> None:
        self._host = host
        self._settles_s = timings.silence_most_s * _PART
        self._view = 0
        self._rounds: dict[int, int] = {}  # by channel: the newest that a report is of
        self._excused = 0, 0  # a view, and a round's number
        self._reports: dict[tuple[int, int], _Report] = {}  # by channel and member
        self._since = 0.0  # the first of them
        self._judged_at = -math.inf
        self._judged = 0  # how often, since there are reports
        self._proven: set[tuple[Exchange, frozenset[bytes]]] = (
            set()
        )  # hosts among which that exchange has made a sum; none is part of another

    def note_counted(self, commit: Committed) -> None:
        """A round was committed: its exchange works among these members, if there was anything to exchange."""
        if commit.view == self._view and self._rounds.get(commit.channel, 0) <= commit.round:
            self._rounds[commit.channel] = commit.round + 1
            self._forget(commit.channel)
        exchange = commit.exchange
        if exchange.fallback is None or not commit.has_sum:
            return
        if exchange.absolute and len(commit.counted) < 2:
            return  # a contributor that is alone in the list broadcasts its lanes
        hosts = self._hosts((*commit.counted, *commit.aggregators))
        if exchange.central:  # each of them with the switch: nothing goes from one to another
            hosts = hosts.union(*(h for e, h in self._proven if e == exchange))
        if not self._have_worked(exchange, hosts):
            smaller = {(e, h) for e, h in self._proven if e == exchange and h <= hosts}
            self._proven = self._proven - smaller | {(exchange, hosts)}

    def _forget(self, channel: int) -> None:
        """What was reported of that channel is of a round that is not open any more."""
        self._reports = {k: report for k, report in self._reports.items() if k[0] != channel}
        if not self._reports:
            self._judged_at, self._judged = -math.inf, 0

    def blames_network(self, phase: Phase, *, has_sums: bool = False) -> bool:
        """Whether the network is at fault rather than a member: the exchange has never worked among all of these.

        It may need what the network does not do, as frames to one host only. An exchange that needs less takes its
        place, and shows which member is at fault, if one is. If the phase cannot have another exchange, blaming the
        network ends the job. So there the network is blamed only if the exchange has never worked between two hosts.

        A host knows what has worked since its agent began, so members can differ. The lead replaces the exchange. Where
        it has not done so two verdicts after it should have, the others blame a member.

        Args:
            has_sums: sums of several contributions have come in an open round.
        """
        exchange, live = phase.exchange, self._host.view.live
        members = phase.sharing(live) if phase.aggregators(live) else ()
        if not members or exchange.fallback is None:
            return False
        if self._judged >= self._verdicts_of_lead(phase) + _LEADS_VERDICTS and not self._host.leads:
            return False
        if phase.keeps_exchange:
            return not has_sums and all(e != exchange for e, _ in self._proven)
        return not self._have_worked(exchange, self._hosts(members))

    def gives_up(self, phase: Phase) -> bool:
        """The lead has judged often enough to give up the exchange for the network's sake.

        If another one takes its place, once is enough. Otherwise frames may have been lost for a while: the end of a
        job cannot be taken back.
        """
        return self._judged >= self._verdicts_of_lead(phase)

    @staticmethod
    def _verdicts_of_lead(phase: Phase) -> int:
        return _LAST_VERDICTS if phase.keeps_exchange else 1

    def _hosts(self, numbers: Iterable[int]) -> frozenset[bytes]:
        """By their addresses: in the next job's network the numbers are others'. A switch is none of them."""
        members = self._host.view.members
        return frozenset(members[k - 1].mac for k in numbers if k)

    def _have_worked(self, exchange: Exchange, hosts: frozenset[bytes]) -> bool:
        return any(e == exchange and hosts <= proven for e, proven in self._proven)

    @property
    def verdicts(self) -> int:
        """How often this member has judged since there are reports."""
        return self._judged

    def excuse(self, round_: int) -> None:
        """A member lacks sums of that round because a switch does not answer: that is not for a member to go for."""
        self._excused = self._host.view.number, round_

    def hear(
        self,
        now: float,
        lacking: Lacking,
        learners: Collection[int],
        phase: Phase | None = None,
    ) -> list[NoProgress]:
        """A member reports, perhaps this one. The first report is for the user; who has missed it hears a later one.

        Args:
            phase: in force. Of one with servers only workers can lack something: the most of them count.
        """
        view, member, round_ = self._host.view, lacking.member, lacking.round
        channel = lacking.channel
        if view.number != self._view:
            self._view, self._rounds, self._reports = view.number, {}, {}
        if round_ < self._rounds.get(channel, 0):
            return []  # it is committed here
        if round_ != self._rounds.get(channel):
            self._rounds[channel] = round_
            self._forget(channel)
        before = self._reports.get((channel, member))
        turn_s = now - before.at if before is not None else 0.0
        old = now - max(self._settles_s, _LOST * turn_s)
        self._reports = {k: report for k, report in self._reports.items() if report.at >= old}
        if not self._reports:
            self._since = now
        first = NoProgress(round_, {member: lacking.lacks}, channel=channel)
        found = [] if before is not None else [first]
        self._reports[channel, member] = _Report(lacking.lacks, now)
        # Members that heard different reports can each name another member to propose. So every member judges again.
        settled_at = max(self._since, self._judged_at) + self._settles_s
        # A learner knows of itself only that it is one.
        judges = before is not None and (view.number, round_) != self._excused
        if judges and now >= settled_at and self._host.number not in learners:
            self._judged_at = now
            self._judged += 1
            all_lack = self._of_all_channels()
            served = phase is not None and phase.serving is not None
            voters = phase.sharing(view.live) if phase is not None and served else view.live
            at_fault = find_fault(all_lack, voters, learners)
            found.append(NoProgress(round_, all_lack, at_fault, channel))
        return found

    def _of_all_channels(self) -> dict[int, Lacks]:
        """What each member lacks, over all channels: so two of them never accuse two members at once."""
        lacks: dict[int, Counter[int]] = {}
        for _, member in sorted(self._reports, key=lambda of: of[1]):
            lacks.setdefault(member, Counter())
        for (_, member), report in self._reports.items():
            lacks[member].update(report.lacks)
        return {member: dict(of) for member, of in lacks.items()}


def find_fault(
    lacks: Mapping[int, Lacks], live: Collection[int], learners: Collection[int] = ()
) -> int:
    """The member whose link or host must be at fault.

    It is the one that cannot take what others send, unless most of the others lack the same member's fragments: then
    it is that one. Learners have nothing that the job could go on with: they accuse nobody, and go first. Only one
    member at a time: without it the rest may do well, and a lone host lacks nothing.

    Args:
        lacks: by the member that reports; none is empty.
        live: who can report.
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
