# SPDX-License-Identifier: Apache-2.0
"""Who is in: answering calls, changing the view, coming back, departing (R2, R3, R17 to R20)."""

from __future__ import annotations

from dataclasses import replace

from nicps import wire
from nicps.protocol.actions import (
    Answered,
    Declined,
    Failed,
    Installed,
    Joiner,
    Send,
    Struck,
)
from nicps.protocol.deciding import Deciding
from nicps.protocol.host import Farewell, NodeState
from nicps.protocol.installation import Installation
from nicps.protocol.phase import Phase
from nicps.protocol.returns import Returns
from nicps.protocol.succession import LEARNS, Standing, Succession
from nicps.protocol.view import Successor, View, safe_name

_UNCALLED = 6  # calls that a host on standby misses before it asks
_MOST_VIEWS = 1 << 31  # a larger number is not one that a network can have come to


class Membership(Deciding):
    """The view in force, and what is told and heard about the next."""

    # ---- forming, and coming back

    def _on_call(self, now: float, source: bytes, frame: wire.Frame) -> None:
        call = frame.body
        assert isinstance(call, wire.Call)
        if not call.view:
            if self.state is NodeState.MEMBER or (self.busy and self._formation.starting is None):
                return
            if not self._formation.on_call(now, source):
                return
            stage: wire.Stage | None = wire.Stage.NOTHING
        elif (self.state is NodeState.STANDBY and not self.busy) or (
            call.view == self.view.number and self.number in self.learners and not self.leaving
        ):
            stage = self._stage(frame.tail.decode(errors="replace"))
            if stage in (wire.Stage.FILES, wire.Stage.WAITING):
                self._asked = now  # it is the job that this host has a part of
            if stage is not None:
                self._declined = ""  # it is another job
        elif self.state is NodeState.MEMBER and self._precedes(call.view, call.ballot, source):
            stage = self._until_told  # it will tell us that we have been struck off (R19)
        else:
            return
        if stage is not None:
            self._formation.answer(call.nonce, self._fresh, self.view.number, stage)

    def _on_answer(self, now: float, source: bytes, frame: wire.Frame) -> None:
        answer = frame.body
        assert isinstance(answer, wire.Answer)
        self._formation.on_answer(now, source, frame)
        number = self.view.number_of(source)
        here = answer.view == self.view.number and number in self.view.live
        tells = self.leads or self.ended or self.changing  # perhaps no lead is left to tell it
        if 0 < answer.view <= self.view.number and not here and tells:
            self._tell(number, answer.fresh)  # perhaps it does not know yet
            if not number:
                self._tell_of_the_last(source, answer)
        if not (self.leads and self._ready and self.calls) or answer.stage >= wire.Stage.ASKS:
            return
        if number in self.view.live and number not in self.learners:
            return
        if answer.nonce not in self._called:
            return  # not to a call of ours, or to an old one
        if number not in self.view.live and self._returns.must_wait(now, source):
            return
        name = safe_name(frame.tail.decode(errors="replace"), source)
        joiner = Joiner(source, name, answer.fresh)
        self._actions.append(Answered(joiner, number, wire.Stage(answer.stage)))

    @property
    def _until_told(self) -> wire.Stage:
        """What a member answers that may have been struck off: who has departed does not want to come in again."""
        return wire.Stage.ASKS if self.leaving else wire.Stage.NOTHING

    def _precedes(self, view: int, ballot: int, source: bytes) -> bool:
        """Whether our view is behind another's (the same number: only where one of two may go on alone)."""
        lead = self.view.members[self.view.lead - 1].mac
        return (self.view.number, self.view.ballot, lead) < (view, ballot, source)

    @property
    def _calls_back(self) -> bool:
        return bool(self.calls) and self.leads and self._ready and not self.changing

    # ---- where this member stands

    def _standing(self) -> Standing:
        """Where this member stands, for its promise."""
        ring = self.ring
        prepared = self.phase.number if self.phase is not None else 0
        decided = max(self._decided, prepared)
        learns = self.number in self.learners
        if ring is None:
            return Standing(0, self._round, False, decided, learns)
        # The lead has dropped a round in which another phase is prepared, and so may training programs have.
        complete = ring.complete and prepared <= ring.phase.number
        return Standing(ring.phase.number, ring.round, complete, decided, learns)

    def _freeze(self) -> None:
        for ring in (self.ring, self._next_ring):
            if ring is not None:
                ring.freeze()
        self._ballot = None

    def _phase_of(self, number: int) -> Phase | None:
        ring = self._ring_of_phase(number)
        return ring.phase if ring is not None else None

    def _unit_of(self, phase: int, round_: int) -> int:
        ring = self._ring_of_phase(phase)
        return ring.unit_of(round_) if ring is not None else 0

    # ---- a view comes into force

    def _chosen(self, now: float, successor: Successor, ballot: int) -> None:
        """This member's proposal has been agreed on: put it in force."""
        assert self._succession is not None
        nonces = dict(self._succession.nonces)
        number, base = self.view.number + 1, self.view.number
        self._put_in_force(now, number, base, successor, ballot, nonces)

    def _put_in_force(
        self,
        now: float,
        number: int,
        base: int,
        successor: Successor,
        ballot: int,
        nonces: dict[int, int],
    ) -> None:
        me = next(m.number for m in successor.members if m.mac == self.mac)
        view = successor.view(number, ballot)
        installation = self._installation_of(view, base, successor, {me}, nonces)
        if me in successor.live:
            self._install(now, me, successor, installation)
            self._telling = True
        else:
            installation.tick(now)  # the others can do without us: they have the list now
            self._struck("the others have gone on without it")
            self._installation = installation  # perhaps nobody else who is left knows of it

    def _on_install(self, now: float, source: bytes, frame: wire.Frame) -> None:
        """R3, R18: a list is in force; R19: or this host has been struck off."""
        body = frame.body
        assert isinstance(body, wire.View)
        successor = Successor.of(frame)
        number = body.addressee
        if (
            successor is None
            or not 0 < number <= len(successor.members)
            or successor.members[number - 1].mac != self.mac
            or body.number >= _MOST_VIEWS
        ):
            return
        view = successor.view(body.number, body.ballot)
        lead = view.members[view.lead - 1].mac
        same = (self.view.number, self.view.seed) == (view.number, view.seed)
        behind = self._precedes(view.number, view.ballot, lead) if self.view.number else True
        if body.ended:
            known = self.view.number and not (self.ended or self.busy)
            if known and body.nonce == self._fresh and (same or behind):
                self._learn_of_the_end(wire.Ending(body.ended), view)
            return
        if self.state is NodeState.MEMBER and same:
            self._say_installed()
            return
        if body.nonce != self._fresh or not behind:
            return
        if number not in view.live:
            if self.state is NodeState.MEMBER:
                self._struck("it was not heard, and the others have gone on without it")
                # Whoever told this host may die before it has told all.
                self._installation = self._installation_of(view, body.base, successor, set(), {})
            return
        if self.state is NodeState.MEMBER and body.base != self.view.number:
            self._struck("the others have gone on without it")
        if self.state is not NodeState.MEMBER and self.busy and not self._formation.yields:
            return
        self._formation.lose(source)
        nonces = dict.fromkeys(view.live, 0)  # those who have it too answer without a nonce
        installation = self._installation_of(view, body.base, successor, {number}, nonces)
        declined = self._declined if body.base else ""  # it had answered before, and is counted on
        self._install(now, number, successor, installation)
        self._say_installed()
        if declined:
            self._declined = declined
            self._farewell = Farewell(wire.Leave(), declined, now, declines=True)

    def _on_ask(self, now: float, nonce: int) -> None:
        """R4: a switch records whom its members themselves say to be in, to a nonce of its controller's."""
        if self.state is NodeState.MEMBER and self._installation is not None:
            self._installation.answer(now, nonce)

    def _install(
        self, now: float, number: int, successor: Successor, installation: Installation
    ) -> None:
        """From here on the view is in force at this host; the phase that goes on, goes on."""
        view, before = installation.view, self.view
        member = self.state is NodeState.MEMBER and installation.view.number != 0
        ring = self._ring_of_phase(successor.follows) if member else None
        old = ring or self.ring
        if member and old is not None and old.round == successor.round - 1 and old.complete:
            old.settle()
        carried = again = None
        if member and successor.follows:
            if ring is None or ring.round != successor.round:
                self._struck("it has missed what the others have decided")
                return
            carried = ring.carry()
            again = self.phase is not None and self.phase.number > ring.phase.number
            if again:  # its training program has left the round, and will offer again
                carried = replace(carried, offer=None, passes=False, ready=0)
            # R14: the lead says again that training goes on, but in a phase's first round, which needs no word.
            leads = view.lead == number and ring.phase.kind is wire.PhaseKind.TRAIN
            undecided = leads and successor.round > ring.phase.first_round
            carried = replace(carried, unit=successor.unit, undecided=undecided)
        joined = view.live - before.live if member else frozenset[int]()
        lost = before.live - view.live if member else frozenset[int]()
        self.learners = (self.learners | joined) & view.live if member else frozenset()
        if not member:
            self._returns = Returns(self.timings.call_back_s)
        for k in joined:
            self._returns.taken(view.members[k - 1].mac)
        for k in lost:
            self._returns.lost(now, view.members[k - 1].mac)
        if not member and successor.round:
            self.learners = frozenset({number})  # of itself it knows
        if member and self._succession is not None and not lost and not joined:
            self.patience.was_wrong()
        if self.ended:
            self._last = self._installation
        self.state, self.view, self.number = NodeState.MEMBER, view, number
        self._fresh = self._nonce()
        self._installation, self._telling, self._ready = installation, False, False
        self._next_ring = self._waiting = self._ballot = self._balloted = None
        self._decided, self._generation = successor.phase, 1
        self._acked = (successor.phase, True, b"")
        self._round = successor.round
        self._leavers = {}
        self._called = ()
        self._ending, self._declined = wire.Ending.NONE, ""
        self._heard = self._beacon_at = self._call_at = now
        self._succession = Succession(
            view,
            number,
            self._fresh,
            self.timings,
            self.patience,
            self.header,
            self._actions.append,
            self._freeze,
            self._standing,
            self._phase_of,
            self._unit_of,
            self._seed,
            self._chosen,
            self._ask,
        )
        if not member:
            self._farewell = None
        self.ring = None
        phase = None
        if ring is not None and carried is not None and successor.follows:
            phase = ring.phase.among(view.live, successor.phase, successor.unit)
            self.ring = self._new_ring(phase, now, carried)
            self._count_learners(phase)
        self.phase = phase
        self._actions.append(Installed(view, number, phase, bool(again)))
        if view.lead == number:
            self._telling = True
            if self._farewell is not None and isinstance(self._farewell.body, wire.Fail):
                self._actions.append(Failed(self._farewell.reason))  # whom it was told has left
                self._farewell = None

    def _say_installed(self) -> None:
        body = wire.Vote(
            nonce=self._fresh,
            ballot=self.view.ballot,
            phase=0,
            round=self.open_round,
            decided=self._decided,
            mac=bytes(6),
            step=wire.ViewStep.INSTALL,
            complete=LEARNS * (self.number in self.learners),
        )
        self._actions.append(Send(wire.pack(self.header(0, self.open_round), body)))

    def _on_installed(self, number: int, vote: wire.Vote) -> None:
        """A member has the list. It says if it has no state: who was taken in knows that of itself only."""
        if self._installation is not None:
            self._installation.told.add(number)
        if self.leads and not self._ready:
            learns = {number} if vote.complete & LEARNS else set()
            self.learners = self.learners - {number} | learns

    def _seed(self) -> bytes:
        return b"".join(self._nonce().to_bytes(8, "big") for _ in range(2))

    # ---- telling, asking, leaving

    def _tell(self, number: int, nonce: int) -> None:
        """Somebody is still in an older view: tell it of ours."""
        current = self.state is NodeState.MEMBER or self.ended
        if number and self._installation is not None and current:
            self._installation.tell(number, nonce)

    def _tell_of_the_last(self, source: bytes, answer: wire.Answer) -> None:
        """Who was in the last job's list only has perhaps not heard its end."""
        last = self._last
        number = last.view.number_of(source) if last is not None else 0
        if last is not None and number and answer.view <= last.view.number:
            last.tell(number, answer.fresh)

    @property
    def _asks(self) -> bool:
        """Struck off, and not called: perhaps the job has ended meanwhile."""
        return (
            self.state is NodeState.STANDBY
            and bool(self.view.number)
            and not (self.ended or self.busy)
        )

    def _ask_at(self) -> float:
        return max(self._asked, self._heard) + _UNCALLED * self.timings.call_back_s

    def _ask(self) -> None:
        """Whoever knows of a later view, or of the end, answers with it (R19)."""
        self._formation.answer(0, self._fresh, self.view.number, self._until_told)

    def _tick_view(self, now: float) -> None:
        if self._succession is not None and (self.state is NodeState.MEMBER):
            self._succession.tick(now)
        installation = self._installation
        if installation is None or not self._telling or self.state is not NodeState.MEMBER:
            return
        installation.tick(now)
        silent = installation.silent(now, max(4 * self.timings.silence_s, self.patience.seconds))
        if silent and self._succession is not None:
            self._succession.suspect(now, silent)

    def _struck(self, reason: str) -> None:
        """R19: stand by; number, model and data stay."""
        farewell = self._farewell
        self._stand_by()
        self._actions.append(Struck(reason))
        if farewell is not None and farewell.declines:
            self._decline(farewell.reason)

    def _decline(self, reason: str) -> None:
        """Nothing more of this job for this host; if it is taken in, as it has answered before, it leaves again."""
        self._declined = reason
        self._actions.append(Declined(reason))

    def _learn_of_the_end(self, ending: wire.Ending, view: View) -> None:
        """The job has ended in that view, while this host was not heard."""
        self._stand_by(ending)
        lead = view.members[view.lead - 1].name
        self._actions.append(Struck("the job has ended", ending, lead))

    def _on_leave(self, now: float, number: int) -> None:
        """The lowest of those who stay acts at once, the others if it does not."""
        assert self._succession is not None
        told = self._leavers[number] = self._leavers.get(number, 0) + 1
        staying = [k for k in self.view.order if k != number]
        if number in self.view.live and told > staying.index(self.number):
            self._succession.strike(now, frozenset({number}))
