# SPDX-License-Identifier: Apache-2.0
"""How one view follows another: a ballot among its members (R17, R18).

Whoever finds a member silent proposes to go on without it. Members promise to follow the proposal, each telling where
it stands; with promises from a majority the proposer knows what the old view can have committed, and puts the next
list, and the round to go on with, to the vote; accepted by a majority it is in force. This is Paxos with one instance
a view, so the successor of a view is one, whoever proposes, dies, or is cut off: promises only go upward, and what a
majority may have accepted is proposed again as it is.

Who has promised neither completes nor commits in the old view any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from nicps import wire
from nicps.protocol.actions import Cut, Joiner, Send
from nicps.protocol.phase import AdaptiveTimeout, Member, Timings
from nicps.protocol.signals import AskForLaterView, Chosen, Freeze, Steps
from nicps.protocol.standing import Place, Standing
from nicps.protocol.view import (
    NO_BALLOT,
    Successor,
    SuccessorItems,
    View,
    mask,
    with_joiners,
)

Order = tuple[int, bytes]  # a ballot: number, proposer's MAC
NO_VALUE: SuccessorItems = ((), (), ())


@dataclass(frozen=True, slots=True)
class _Promise:
    standing: Standing
    accepted: Order = NO_BALLOT
    successor: Successor | None = None


@dataclass(slots=True)
class _Proposal:
    """What this member has proposed."""

    ballot: int
    suspects: frozenset[int]
    joiners: tuple[Joiner, ...]
    started: float
    grace_at: float
    vote_at: float
    next_send: float
    interval: float
    looked_at: float = 0.0  # when the promises were counted last
    promises: dict[int, _Promise] = field(default_factory=dict)
    successor: Successor | None = None
    accepted: set[int] = field(default_factory=set)


class ViewChange:
    """One member's part in the ballot for the view that follows `view`.

    Whoever calls it says at which place this member is. With the first proposal it returns `Freeze`: from then on that
    place does not change.

    Args:
        seed: 16 random bytes, for the next view's keys.
    """

    def __init__(
        self,
        view: View,
        number: int,
        fresh: int,
        timings: Timings,
        timeout: AdaptiveTimeout,
        seed: Callable[[], bytes],
    ) -> None:
        self.view = view
        self.number = number
        self.nonces: dict[int, int] = {number: fresh}  # of those who have told theirs
        self.promised: Order = NO_BALLOT
        self.under_way = False  # a proposal is known here: the view is about to end
        self.out: set[int] = set()  # evicted, whether they answer or not
        self._mac = view.members[number - 1].mac
        self._fresh = fresh
        self._timings = timings
        self._timeout = timeout
        self._seed = seed
        self._accepted: Order = NO_BALLOT
        self._successor: Successor | None = None
        self._proposal: _Proposal | None = None
        self._take_over_at = math.inf
        self._progress_at = 0.0  # when the proposal that is followed here was news
        self._frozen_at: float | None = None
        self._met: dict[int, float] = {}  # since then: when a member was heard last
        self._cut_reported = False
        self._attempts = 0
        self.done = False

    # ---- proposing

    def suspect(self, now: float, place: Place, number: int) -> Steps:
        """R17: that member is silent. If it answers in time it stays."""
        if self.under_way:
            return []
        return self._propose(now, place, frozenset({number}), ())

    def evict(self, now: float, place: Place, numbers: frozenset[int]) -> Steps:
        """These must go, even if they answer: they leave by themselves, or their weights differ.

        A member that leaves may propose so itself: it promises and accepts, and is not in the next view, unless
        nobody else answers.
        """
        new = numbers - self.out
        self.out |= numbers
        if not new or self.under_way:
            return []
        return self._propose(now, place, frozenset(), ())

    def rebuild(self, now: float, place: Place, joiners: tuple[Joiner, ...]) -> Steps:
        """R20: hosts come back, or are new."""
        if self.under_way:
            return []
        return self._propose(now, place, frozenset(), joiners)

    def _propose(
        self, now: float, place: Place, suspects: frozenset[int], joiners: tuple[Joiner, ...]
    ) -> Steps:
        ballot = self.promised[0] + 1
        self.promised = (ballot, self._mac)
        self._take_over_at = math.inf
        frozen = self._begin(now)
        self._proposal = _Proposal(
            ballot,
            suspects,
            joiners,
            started=now,
            grace_at=now + self._timeout.grace_s,
            vote_at=now + self._timeout.vote_s,
            next_send=now,
            interval=self._timings.decision_s,
        )
        self._proposal.promises[self.number] = _Promise(
            place.standing, self._accepted, self._successor
        )
        return frozen + self.tick(now, place)

    # ---- frames

    def on_view(
        self, now: float, place: Place, source: bytes, sender: int, frame: wire.Frame
    ) -> Steps:
        """Somebody proposes, or wants a value accepted.

        Raises:
            WireError: the value cannot be meant; nothing has changed.
        """
        body = frame.body
        assert isinstance(body, wire.View)
        order = (body.ballot, source)
        successor = Successor.of(frame)
        accept = body.step == wire.ViewStep.ACCEPT
        if self.done or (accept and successor is None):
            return []
        if order < self.promised:
            return [self._vote(place, 0, self.promised[0], source)]
        steps: Steps = []
        if body.nonce:
            self.nonces[sender] = body.nonce
        if order != self.promised or (accept and order != self._accepted):
            self._progress_at = now
        if order != self.promised:
            self.promised = order
            self._proposal = None
            steps += self._begin(now)
        self._met[sender] = now
        if accept:
            self._accepted, self._successor = order, successor
        # A proposer that repeats itself may hear nobody. It waits longest where nobody who promises has the state.
        timings = self._timings
        longest_s = timings.state_s if place.standing.learns else timings.cut_s
        if now <= self._progress_at + longest_s:
            rank = self.view.rank_after(sender, self.number)
            self._take_over_at = now + (rank + 1) * self._takeover_s
        return [*steps, self._vote(place, body.step, body.ballot, source)]

    def on_vote(self, now: float, place: Place, sender: int, frame: wire.Frame) -> Steps:
        """A member promises, has accepted, or refuses.

        Raises:
            WireError: what it has accepted cannot be meant; nothing has changed.
        """
        vote = frame.body
        assert isinstance(vote, wire.Vote)
        successor, standing = Successor.of(frame), Standing.of(frame)
        if sender in self.view.live:
            self.nonces[sender] = vote.nonce
            self._met[sender] = now
        proposal = self._proposal
        if proposal is None or vote.mac != self._mac or self.done:
            return []
        if vote.step == 0:
            if vote.ballot > proposal.ballot:  # somebody else's is ahead of ours
                self._proposal = None
                self.promised = (vote.ballot, b"")
                rank = sorted(self.view.live).index(self.number) + 1
                self._take_over_at = now + rank * self._takeover_s
        elif vote.ballot == proposal.ballot:
            if vote.step == wire.ViewStep.PROPOSE:
                accepted = (vote.accepted_ballot, vote.accepted_mac)
                proposal.promises[sender] = _Promise(standing, accepted, successor)
            elif vote.step == wire.ViewStep.ACCEPT:
                proposal.accepted.add(sender)
            return self._advance(now, place)
        return []

    # ---- time

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        if self.done or not self.under_way:
            return math.inf
        proposal = self._proposal
        if proposal is None:
            return min(self._take_over_at, self._cut_at())
        times = [proposal.next_send, self._cut_at()]
        if proposal.successor is None:
            waits = (proposal.grace_at, proposal.vote_at)
            times += [time for time in waits if time > proposal.looked_at]
        return min(times)

    def tick(self, now: float, place: Place) -> Steps:
        """Repeat the proposal; take over from a proposer that has fallen silent."""
        if self.done:
            return []
        steps: Steps = []
        if now >= self._cut_at():
            steps += self._report_cut(now)
        proposal = self._proposal
        if proposal is None:
            if now >= self._take_over_at:
                self._attempts += 1
                steps += self._propose(now, place, frozenset(), ())
            return steps
        steps += self._advance(now, place)
        if self.done or now < proposal.next_send:
            return steps
        proposal.next_send = now + proposal.interval
        proposal.interval = min(proposal.interval * 1.5, self._timings.decision_s * 10)
        steps.append(self._send(proposal, place))
        if now >= proposal.started + self._timings.cut_s:
            steps.append(AskForLaterView())
        return steps

    def _begin(self, now: float) -> Steps:
        """A proposal is known: nothing is completed or committed from here on."""
        self.under_way = True
        if self._frozen_at is None:
            self._frozen_at = now
        return [Freeze()]

    def _cut_at(self) -> float:
        """When to look whether there is a majority, for the user."""
        if self._cut_reported or self._frozen_at is None:
            return math.inf
        return self._frozen_at + self._timings.cut_s

    def _report_cut(self, now: float) -> Steps:
        """Every member that has no majority with those it hears tells its user, whoever proposes."""
        since = now - self._timings.cut_s / 2
        heard = {k for k, at in self._met.items() if at >= since} | {self.number}
        if self.view.agreed(heard, alone=self._timings.alone):
            self._frozen_at = now  # look again
            return []
        self._cut_reported = True
        return [Cut(frozenset(self.view.live - heard))]

    @property
    def _takeover_s(self) -> float:
        """Until one takes over: longer each time, so that two do not get into each other's way for ever."""
        return 2 * self._timeout.vote_s * (1 << min(self._attempts, 4))

    # ---- the proposer's two steps

    def _advance(self, now: float, place: Place) -> Steps:
        proposal = self._proposal
        if proposal is None or self.done:
            return []
        view, timings = self.view, self._timings
        proposal.looked_at = now
        if proposal.successor is None:
            promised = proposal.promises.keys()
            ballot, agreed = self._agreed(proposal)
            if agreed is not None:
                self.done = True
                return [Chosen(agreed, ballot)]
            if not view.agreed(promised, alone=timings.alone):
                return []
            everybody = view.live - self.out <= promised
            others = view.live - self.out - proposal.suspects <= promised
            late = now >= proposal.vote_at or (others and now >= proposal.grace_at)
            if all(promise.standing.learns for promise in proposal.promises.values()):
                late = now >= proposal.started + timings.state_s  # the job cannot go on with these
            if not everybody and not late:
                return []
            proposal.successor = self._choose(proposal, place)
            self._accepted = (proposal.ballot, self._mac)
            self._successor = proposal.successor
            proposal.accepted.add(self.number)
            proposal.next_send, proposal.interval = now, timings.decision_s
        if not view.agreed(proposal.accepted, alone=timings.alone):
            return []
        self.done = True
        return [Chosen(proposal.successor, proposal.ballot)]

    def _agreed(self, proposal: _Proposal) -> tuple[int, Successor | None]:
        """What has been agreed on already, if the promises show it, though they may be no majority any more.

        Whoever put it to the vote had accepted it before all others.
        """
        order = max(promise.accepted for promise in proposal.promises.values())
        same = {k: p for k, p in proposal.promises.items() if p.accepted == order}
        if order == NO_BALLOT or not self.view.agreed({*same, self.view.number_of(order[1])}):
            return 0, None
        return order[0], next(iter(same.values())).successor

    def _choose(self, proposal: _Proposal, place: Place) -> Successor:
        """The value: what may have been agreed on already, or what the promises say."""
        promises = proposal.promises
        accepted = max(promises.values(), key=lambda promise: promise.accepted)
        if accepted.successor is not None:
            return accepted.successor
        standings = {number: promise.standing for number, promise in promises.items()}
        follows = max(standing.phase for standing in standings.values())
        ring = place.rings.get(follows)
        first = ring.phase.first_round if ring is not None else 0
        channels = 1 + max(len(s.others) for s in standings.values() if s.phase == follows)
        places = {
            number: standing.places(follows, (first,) * channels)
            for number, standing in standings.items()
        }
        survivors = frozenset(places) - self.out or frozenset(places)
        rounds = []
        for channel in range(channels):
            here = {number: of[channel] for number, of in places.items()}
            round_ = max(open_round for open_round, _ in here.values())
            # All survivors have it whole: it counts.
            whole = follows and all(here[number] == (round_, True) for number in survivors)
            rounds.append(round_ + bool(whole))
        learners = {number for number, standing in standings.items() if standing.learns}
        fit = survivors - learners or survivors
        lead = self.view.lead if self.view.lead in fit else min(fit)
        joiners = [Member(0, joiner.mac, joiner.name) for joiner in proposal.joiners]
        members, numbers = with_joiners(self.view.members, joiners)
        for joiner in proposal.joiners:
            number = next((m.number for m in members if m.mac == joiner.mac), 0)
            if number in numbers:
                self.nonces[number] = joiner.fresh
        return Successor(
            members=members,
            live=survivors | numbers,
            lead=lead,
            follows=0 if joiners else follows,
            phase=max(max(s.decided, s.phase) for s in standings.values()) + 1,
            round=rounds[0],
            # Without a ring this member has come late to the view. It has marked nothing: no round was committed in it.
            unit=ring.unit_of(rounds[0]) if ring is not None else place.unit,
            seed=self._seed(),
            others=tuple(rounds[1:]),
            saves=any(standing.saves_before(follows, rounds[0]) for standing in standings.values()),
        )

    # ---- frames of ours

    def _send(self, proposal: _Proposal, place: Place) -> Send:
        step = wire.ViewStep.PROPOSE
        items = NO_VALUE
        if proposal.successor is not None:
            step, items = wire.ViewStep.ACCEPT, proposal.successor.items()
        body = wire.View(
            live=mask(self.view.live - proposal.suspects - self.out),
            nonce=self._fresh,
            number=self.view.number + 1,
            base=self.view.number,
            ballot=proposal.ballot,
            addressee=0,
            members=len(items[1]),
            values=len(items[0]),
            step=step,
            channels=len(items[2]),
        )
        return Send(wire.Frame(self._header(place), body, items))

    def _vote(self, place: Place, step: int, ballot: int, proposer: bytes) -> Send:
        standing = place.standing
        items = self._successor.items() if self._successor is not None else NO_VALUE
        standings = tuple(
            wire.Standing.at(channel, round_, complete=complete)
            for channel, (round_, complete) in enumerate(standing.others, 1)
        )
        body = wire.Vote(
            nonce=self._fresh,
            ballot=ballot,
            phase=standing.phase,
            round=standing.round,
            decided=standing.decided,
            mac=proposer,
            step=step,
            complete=standing.flags,
            accepted_ballot=self._accepted[0],
            accepted_mac=self._accepted[1],
            members=len(items[1]),
            values=len(items[0]),
            channels=len(items[2]),
            standings=len(standings),
        )
        return Send(wire.Frame(self._header(place), body, (*items, standings)))

    def _header(self, place: Place) -> wire.Header:
        return self.view.header(self.number, place.standing.round)
