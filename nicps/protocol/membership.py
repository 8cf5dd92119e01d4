# SPDX-License-Identifier: Apache-2.0
"""The view in force: how it comes into force here, what ends it, and to whom it is sent (R3, R17 to R20)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from nicps import wire
from nicps.protocol.actions import Evicted, Installed, Joiner, Send
from nicps.protocol.carried import Carried
from nicps.protocol.deciding import Decisions
from nicps.protocol.departure import Departure
from nicps.protocol.formation import Formation
from nicps.protocol.installation import Installation
from nicps.protocol.lead import LeadWatch
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import AdaptiveTimeout, Phase, Timings
from nicps.protocol.readmission import Readmission
from nicps.protocol.ring import Ring
from nicps.protocol.rings import Rings
from nicps.protocol.signals import Chosen, Formed, Freeze, Steps
from nicps.protocol.standing import LEARNS, Place, Standing
from nicps.protocol.view import Successor, View
from nicps.protocol.view_change import ViewChange

#: So often a member may be suspected in one round, and stay as it answers.
_SUSPICIONS = 8
_MOST_VIEWS = 1 << 31  # a larger number is not one that a network can have come to


class Membership:
    """This host's part in views.

    Attributes:
        learners: members that came back and have not been counted since.
        ready: the lead knows that everybody has the view.
        view_change: the ballot for the next view; None while this host stands by.
        installation: the list in force, which is sent to a host that asks.
        announcing: this member sees to it that everybody gets that list.
        fresh: the nonce that a list for this host must name.
        busy: this host is about to start a network of its own.
    """

    def __init__(
        self,
        host: LocalHost,
        rings: Rings,
        decisions: Decisions,
        departure: Departure,
        readmission: Readmission,
        lead: LeadWatch,
        formation: Formation,
        timings: Timings,
        timeout: AdaptiveTimeout,
        nonce: Callable[[], int],
    ) -> None:
        self.learners: frozenset[int] = frozenset()
        self.ready = False
        self.view_change: ViewChange | None = None
        self.installation: Installation | None = None
        self.announcing = False
        self.fresh = nonce()
        self.busy = False
        self._host = host
        self._rings = rings
        self._decisions = decisions
        self._departure = departure
        self._readmission = readmission
        self._lead = lead
        self._formation = formation
        self._timings = timings
        self._timeout = timeout
        self._nonce = nonce
        self._last: Installation | None = None  # of the job before, which has ended
        self._leavers: dict[int, int] = {}  # number -> how often it has said so
        self._suspected: tuple[int, Counter[int]] = (
            0,
            Counter(),
        )  # in an open round: how often, by number

    @property
    def changing(self) -> bool:
        """The view is about to end: nothing may be completed or committed in it."""
        return self.view_change is not None and self.view_change.under_way

    def enter_phase(self) -> Ring:
        """The phase that this host is prepared for is in force; its ring."""
        ring = self._rings.enter_coming()
        self._count_learners(ring.phase)
        return ring

    def _count_learners(self, phase: Phase) -> None:
        """Who has a share in the phase is a full member."""
        if phase.kind is wire.PhaseKind.TRAIN:
            self.learners = frozenset(k for k in self.learners if not phase.shares[k - 1])

    def precedes(self, view: int, ballot: int, source: bytes) -> bool:
        """Whether our view is behind another's (the same number: only where one of two may go on alone)."""
        ours = self._host.view
        lead = ours.members[ours.lead - 1].mac
        return (ours.number, ours.ballot, lead) < (view, ballot, source)

    # ---- the next view

    def suspect(self, now: float, number: int) -> Steps:
        """R17: that member is silent. If it answers in time it stays.

        But where nothing comes of that, again and again, a path between two members is broken, and it must go.
        """
        if self.view_change is None or self.changing:
            return []
        round_, times = self._suspected
        if round_ != self._rings.open_round:
            times = Counter()
            self._suspected = self._rings.open_round, times
        times[number] += 1
        if times[number] > _SUSPICIONS:
            return self.evict(now, frozenset({number}))
        return self._follow(now, self.view_change.suspect(now, self._place(), number))

    def evict(self, now: float, numbers: frozenset[int]) -> Steps:
        """These must go: they leave by themselves, or differ from the others."""
        if self.view_change is None or not numbers:
            return []
        return self._follow(now, self.view_change.evict(now, self._place(), numbers))

    def rebuild(self, now: float, joiners: tuple[Joiner, ...]) -> Steps:
        """R20: take hosts back into the view, or new ones."""
        if self.view_change is None or not self._host.is_member:
            return []
        return self._follow(now, self.view_change.rebuild(now, self._place(), joiners))

    def renew(self, now: float) -> Steps:
        """A view of the same members, unless another one is coming anyway."""
        return [] if self.changing else self.rebuild(now, ())

    def on_view(self, now: float, source: bytes, sender: int, frame: wire.Frame) -> Steps:
        """Somebody proposes, or wants a value accepted."""
        assert self.view_change is not None
        steps = self.view_change.on_view(now, self._place(), source, sender, frame)
        return self._follow(now, steps)

    def on_vote(self, now: float, sender: int, frame: wire.Frame) -> Steps:
        """A member promises, has accepted, or refuses."""
        assert self.view_change is not None
        return self._follow(now, self.view_change.on_vote(now, self._place(), sender, frame))

    def on_leave(self, now: float, number: int) -> Steps:
        """A member departs. The lowest of those who stay acts at once, the others if it does not."""
        view = self._host.view
        times = self._leavers[number] = self._leavers.get(number, 0) + 1
        staying = [k for k in view.order if k != number]
        if number not in view.live or times <= staying.index(self._host.number):
            return []
        return self.evict(now, frozenset({number}))

    def tick(self, now: float) -> Steps:
        """Propose, repeat, send the list in force."""
        steps: Steps = []
        if self.changing and self._host.is_member:
            assert self.view_change is not None
            steps += self._follow(now, self.view_change.tick(now, self._place()))
        installation = self.installation
        if installation is None or not self.announcing or not self._host.is_member:
            return steps
        steps += installation.tick(now)
        silent = installation.silent(now, max(4 * self._timings.silence_s, self._timeout.seconds))
        return steps + self.suspect(now, silent) if silent else steps

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        due = self.view_change.deadline() if self.view_change is not None else math.inf
        if self.announcing and self.installation is not None:
            due = min(due, self.installation.deadline())
        return due

    def _follow(self, now: float, steps: Steps) -> Steps:
        """What the ballot asks for, at its place in the order."""
        out: Steps = []
        for step in steps:
            if isinstance(step, Freeze):
                self._rings.freeze()
                self._decisions.withdraw()
            elif isinstance(step, Chosen):
                assert self.view_change is not None
                number, nonces = self._host.view.number, dict(self.view_change.nonces)
                out += self._put_in_force(
                    now, number + 1, number, step.successor, step.ballot, nonces
                )
            else:
                out.append(step)
        return out

    def _place(self) -> Place:
        """Where this member stands, for its promise."""
        ring, prepared = self._rings.current, self._decisions.prepared_for
        decided = max(self._decisions.highest, prepared)
        learns = self._host.number in self.learners
        if ring is None:
            standing = Standing(0, self._rings.open_round, False, decided, learns)
        else:
            # The lead has dropped a round in which another phase is prepared, and so may training programs have.
            there = prepared <= ring.phase.number
            first, *others = [
                (round_, complete and there)
                for round_, complete in zip(ring.rounds, ring.completes, strict=True)
            ]
            rounds = (*first, decided, learns, tuple(others))
            saves = ring.saves_open and first[1]
            standing = Standing(ring.phase.number, *rounds, saves, ring.saved_before)
        unit = self.installation.unit if self.installation is not None else 0
        return Place(standing, self._rings.by_phase(), unit)

    def _seed(self) -> bytes:
        return b"".join(self._nonce().to_bytes(8, "big") for _ in range(2))

    # ---- a view comes into force

    def form(self, now: float, formed: Formed) -> Steps:
        """The list of the network that this host has started is closed (R3)."""
        live = frozenset(m.number for m in formed.members)
        seed = self._seed()
        successor = Successor(
            formed.members, live, 1, follows=0, phase=0, round=0, unit=0, seed=seed
        )
        return self._put_in_force(now, formed.view, 0, successor, 0, dict(formed.fresh))

    def _put_in_force(
        self,
        now: float,
        number: int,
        base: int,
        successor: Successor,
        ballot: int,
        nonces: dict[int, int],
    ) -> Steps:
        """What this member has proposed is agreed on, or formed: it tells all others."""
        me = next(m.number for m in successor.members if m.mac == self._host.mac)
        view = successor.view(number, ballot)
        installation = Installation(view, base, successor, {me}, nonces, self._timings)
        if me in successor.live:
            steps = self._install(now, me, successor, installation)
            if self._host.is_member:
                self.announcing = True
                return steps
        else:
            steps = self.leave_view("the others have gone on without it")
        self.installation = installation  # perhaps nobody else who is left knows of it
        return [
            *installation.tick(now),
            *steps,
        ]  # the others can do without us: they have the list now

    def on_install(self, now: float, source: bytes, frame: wire.Frame) -> Steps:
        """R3, R18: a list is in force; R19: or this host has been evicted."""
        body, host = frame.body, self._host
        assert isinstance(body, wire.View)
        number, entries = body.addressee, cast("tuple[wire.ViewMember, ...]", frame.items[1])
        if not 0 < number <= len(entries) or entries[number - 1].mac != host.mac:
            return []  # it is another host's
        successor = Successor.of(frame)
        if successor is None or body.number >= _MOST_VIEWS:
            return []
        view = successor.view(body.number, body.ballot)
        lead = view.members[view.lead - 1].mac
        same = (host.view.number, host.view.seed) == (view.number, view.seed)
        behind = self.precedes(view.number, view.ballot, lead) if host.view.number else True
        # The list may be another network's, whose starter this host has answered, too. Then it has no say in this one.
        ours = not host.is_member or host.view.grows_into(view, host.number)
        if body.ended:
            known = host.view.number and ours and not (host.ended or self.busy)
            if known and body.nonce == self.fresh and (same or behind):
                return self.stand_by_after_end(wire.Ending(body.ended), view)
            return []
        if host.is_member and same:
            return [self._installed()]
        if body.nonce != self.fresh or not behind:
            return []
        if number not in view.live:
            return self._learn_of_eviction(view, body.base, successor) if ours else []
        steps: Steps = []
        # Where hosts go on alone another view may have the number of this one: its lead is not in this one.
        follows = body.base == host.view.number and view.lead in host.view.live
        if host.is_member and not follows:
            steps += self.leave_view("the others have gone on without it")
        if not host.is_member and self.busy and not self._formation.yields:
            return steps
        steps += self._formation.lose(source, view.name_of(source))
        nonces = dict.fromkeys(view.live, 0)  # those who have it too answer without a nonce
        installation = Installation(view, body.base, successor, {number}, nonces, self._timings)
        declined = self._departure.declined if body.base else ""  # it had answered before
        steps += self._install(now, number, successor, installation)
        steps.append(self._installed())
        if declined:  # the others count on it
            self._departure.declined = declined
            self._departure.leave_for_good(now, declined)
        return steps

    def _learn_of_eviction(self, view: View, base: int, successor: Successor) -> Steps:
        """R19: the others have agreed on a view without this host."""
        if not self._host.is_member:
            return []
        unheard = "it was not heard, and the others have gone on without it"
        steps = self.leave_view(self._departure.reason or unheard)
        # The sender may die before it has sent it to all.
        self.installation = Installation(view, base, successor, set(), {}, self._timings)
        return steps

    def _install(
        self, now: float, number: int, successor: Successor, installation: Installation
    ) -> Steps:
        """From here on the view is in force at this host; the phase that goes on, goes on."""
        host, view, before = self._host, installation.view, self._host.view
        member = host.is_member
        ring = self._rings.by_phase().get(successor.follows) if member else None
        old = ring or self._rings.current
        steps: Steps = []
        if member and old is not None:
            if successor.saves:
                old.hear_saves(successor.round)
            steps += old.settle(successor.rounds)
        carried, again = Carried(0, 0, 0), False
        if member and successor.follows:
            if ring is None or ring.rounds != successor.rounds:
                return steps + self.leave_view("it has missed what the others have decided")
            carried, again = self._carry(ring, number, successor)
        joined = view.live - before.live if member else frozenset[int]()
        lost = before.live - view.live if member else frozenset[int]()
        if member:
            self.learners = (self.learners | joined) & view.live
            macs = [m.mac for m in view.members]
            self._readmission.note_view(
                now, (macs[k - 1] for k in joined), (macs[k - 1] for k in lost)
            )
            if self.view_change is not None and not lost and not joined:
                self._timeout.back_off()
        else:  # with a round open there is a state, which this host has not got: of itself it knows
            self.learners = frozenset({number} if successor.round else ())
            self._readmission.reset(now)
            self._departure.close()
        if host.ended:
            self._last = self.installation
        host.state, host.view, host.number = NodeState.MEMBER, view, number
        host.ending, self._departure.declined = wire.Ending.NONE, ""
        self.fresh = self._nonce()
        self.installation, self.announcing, self.ready = installation, False, False
        self._leavers = {}
        self._lead.enter_view(now)
        self.view_change = ViewChange(
            view, number, self.fresh, self._timings, self._timeout, self._seed
        )
        phase = None
        if ring is not None:
            phase = ring.phase.among(view.live, successor.phase, successor.unit)
        self._rings.enter_view(now, successor.rounds, phase, carried)
        self._decisions.enter_view(phase, successor.phase)
        if phase is not None:
            self._count_learners(phase)
        steps.append(Installed(view, number, phase, again, successor.rounds))
        if self._rings.current is not None:
            steps += self._rings.current.enter()
        if view.lead == number:
            self.announcing = True
            steps += self._departure.lead_fails()
        return steps

    def _carry(self, ring: Ring, number: int, successor: Successor) -> tuple[Carried, bool]:
        """What goes along into the next view; whether this host must come back to the phase that goes on."""
        carried = ring.carry()
        again = self._decisions.prepared_for > ring.phase.number
        if again:  # its training program has left the round, and will offer again
            carried = carried.without_offers()
        # R14: the lead says again that training goes on, but in a phase's first round, which needs no word.
        leads = successor.lead == number and ring.phase.kind is wire.PhaseKind.TRAIN
        undecided = leads and ring.awaits_decision(successor.rounds)
        saves = leads and carried.saves
        return replace(carried, unit=successor.unit, undecided=undecided, saves=saves), again

    def _installed(self) -> Send:
        """To who puts the view in force: it is, here."""
        host, round_ = self._host, self._rings.open_round
        body = wire.Vote(
            nonce=self.fresh,
            ballot=host.view.ballot,
            phase=0,
            round=round_,
            decided=self._decisions.highest,
            mac=bytes(6),
            step=wire.ViewStep.INSTALL,
            complete=LEARNS * (host.number in self.learners),
        )
        return Send(wire.Frame(host.header(round_), body, ((), ())))

    def on_installed(self, number: int, vote: wire.Vote) -> None:
        """A member has the list. It says if it has no state: who was taken in knows that of itself only."""
        if self.installation is not None:
            self.installation.installed.add(number)
        if self._host.leads and not self.ready:
            learns = {number} if vote.complete & LEARNS else set()
            self.learners = self.learners - {number} | learns

    # ---- announcing others

    def send_view(self, number: int, nonce: int) -> Steps:
        """A host is still in an older view: it gets ours."""
        current = self._host.is_member or self._host.ended
        if not number or self.installation is None or not current:
            return []
        return [self.installation.send_to(number, nonce)]

    def send_last_view(self, source: bytes, answer: wire.Answer) -> Steps:
        """Who was in the last job's list only has perhaps not heard its end."""
        last = self._last
        number = last.view.number_of(source) if last is not None else 0
        if last is None or not number or answer.view > last.view.number:
            return []
        return [last.send_to(number, answer.fresh)]

    def on_ask(self, now: float, nonce: int) -> Steps:
        """R4: a switch records whom its members themselves say to be in, to a nonce of its controller's."""
        if not self._host.is_member or self.installation is None:
            return []
        return self.installation.answer(now, nonce)

    # ---- standing by

    def stand_by(self, ending: wire.Ending = wire.Ending.NONE) -> None:
        """This host is in the view no more, or the job has ended."""
        self._host.state = NodeState.STANDBY
        self._host.ending = ending
        self._rings.close()
        self._decisions.close()
        self._departure.close()
        if self.installation is not None:
            self.installation.ending = ending
        self.announcing = self.ready = False
        self.view_change = None

    def stand_by_after_end(self, ending: wire.Ending, view: View) -> Steps:
        """The job has ended in that view, while this host was not heard."""
        self.stand_by(ending)
        lead = view.members[view.lead - 1].name
        return [Evicted("the job has ended", ending, lead)]

    def leave_view(self, reason: str) -> Steps:
        """R19: stand by; number, model and data stay."""
        declines = self._departure.close()
        self.stand_by()
        steps: Steps = [Evicted(reason)]
        return steps + self._departure.decline(declines) if declines else steps
