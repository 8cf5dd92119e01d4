# SPDX-License-Identifier: Apache-2.0
"""One training program (R8): what it owes, what it is told, and how long it may send nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.accumulators import Memory
from nicps.job.actions import EndProgram, EnterPhase, Post, Welcome
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Orders
from nicps.job.owed import Owed, PlannedStep
from nicps.protocol import Committed, Phase
from nicps.protocol.plan import ChannelPlan
from nicps.session import shared_form
from nicps.session.served_form import Serves

STALL_S = 60.0  # the job's `stall_s`: the time without a message of a program that others wait for
_KINDS = {wire.PhaseKind.TRAIN: "train", wire.PhaseKind.TEST: "test", wire.PhaseKind.FINISH: "end"}
_LONGER = {"start": 5, "end": 5}  # for duties in which it sends nothing until it is done
_SHORTER = 1 / 20  # while all wait for the rest of its gradient
_OWN_PHASES = 1 << 30  # saving and loading: none of the network's phases has such a number


class Program:
    """One training program, from its start to its end.

    Args:
        number: the program's serial number at this host's agent.
        stall_s: the job's setting.
        patient: no message is expected of it at any time, except the rest of a gradient that it has begun to convert.

    Attributes: `attached`, it has connected; `gateway`, a process connects for it. `ready`, it has built the model,
    whose gradient has `fragments`; `channels`, its
    first plan of a step, where steps have one. `ended`, its process is gone. `digest`, of its state (hexadecimal).
    `holds_state`: that was the others' state, too, so it is no new program. `trained`, the last round that it was told
    of; `saved`, the number of rounds of the state that it saved last. `duty`, what it has to do ("start", "work",
    "save", "load", "judge" or "end"); empty while it waits for this host.
    """

    def __init__(self, number: int, stall_s: float, now: float, *, patient: bool = False) -> None:
        self.number = number
        self.stall_s = stall_s
        self._patient = patient
        self.duty = "start"
        self.attached = self.gateway = self.ready = self.ended = self.holds_state = False
        self.digest = ""
        self.fragments = 0
        self.channels: tuple[ChannelPlan, ...] = ()
        self.trained = self.saved = 0
        self._moved = now  # when it sent a message, or was told what to do
        self._unanswered = 0  # phases that it was told of and is not in yet
        self._owed = Owed()
        self._shown = (0, 0, 0)  # the memory of the kernel's that it has mapped
        self._saving = 0  # number of the phase in which it saves or loads
        self._own_phase = _OWN_PHASES
        self._first_round = 0  # of the phase that it was told of last
        self._leads = False  # as it was told last
        self._released = False

    # ---- time

    def describe_moment(self, open_round: int) -> str:
        """The round that it is in, for an error message."""
        if self.duty == "end":
            return " after the last round"
        return f" in round {open_round}" if self.holds_state else " before its first round"

    def give_duty(self, now: float, duty: str) -> None:
        """It was told to do something."""
        self.duty, self._moved = duty, now

    def excuse(self) -> None:
        """It has nothing more to do in the open round until that is committed, except to judge the one before."""
        if self.duty == "work":
            self.duty = "judge" if self._owed.unjudged else ""

    def close_round(self, round_: int) -> None:
        """The open round closes without it. It may still have to read the sum of the round before, and to judge that
        round.

        A round of the phase before, whose ring learns of it late, excuses nothing.
        """
        if round_ < self._first_round:
            return
        if self._owed.step is not None:
            self._owed.step.close(round_)
            self._go_on_with_step()
            return
        self._owed.closed = True
        if not self._owed.unread:
            self.excuse()

    def note_movement(self, now: float) -> None:
        """It has sent a message, or could not."""
        self._moved = now

    def silent_at(self, awaited: bool) -> float:
        """The time at which it will have been silent for too long; infinity while it may be silent.

        Args:
            awaited: all members wait for the rest of a gradient of this host's. One that was in no phase has none: it
                is that of the program before.
        """
        owes = self.duty and not (self._patient and self.attached)
        if not owes and not (awaited and self.holds_state):
            return math.inf
        return self._moved + self.silence_limit_s(awaited)

    def silence_limit_s(self, awaited: bool) -> float:
        """How long it may be silent."""
        shorter = awaited and self.holds_state
        return self.stall_s * (_SHORTER if shorter else _LONGER.get(self.duty, 1))

    # ---- messages to it

    def welcome(self, node: NodeInfo, settings: Mapping[str, Any]) -> Orders:
        """It has connected."""
        view, self._leads = node.view, node.leads
        members = tuple(shared_form.Member(m.number, m.name) for m in view.members)
        number, name = node.number, node.name
        message = shared_form.Welcome(number, members, name, view.lead, settings, "", view.number)
        return [Welcome(self.number, message)]

    def enter(
        self,
        now: float,
        phase: Phase,
        first_round: int,
        memory: Memory,
        node: NodeInfo,
        serves: Serves | None = None,
        rounds: Sequence[int] = (),
    ) -> Orders:
        """Leave whatever it does, and go into this phase, with that memory of the kernel's.

        Args:
            serves: who serves parameters in it.
            rounds: the open round of each channel, where it has several and goes on.
        """
        works = phase.kind is wire.PhaseKind.FINISH or bool(phase.shares[node.number - 1])
        self._owed.trains = works and phase.kind is wire.PhaseKind.TRAIN
        self.holds_state |= phase.kind is not wire.PhaseKind.FINISH
        self._first_round = first_round
        self._owed.closed = self._owed.unread = False
        # R14: a lead that comes back to a phase repeats its decision after the round before.
        self._owed.unjudged = node.leads and first_round > phase.first_round
        self._owed.step = None
        opened = tuple(rounds) or (first_round,) * phase.channel_count
        if phase.planned:
            self._owed.step = step = PlannedStep(phase, opened)
            self._owed.unjudged = node.leads and step.judges
        self.give_duty(now, "end" if phase.kind is wire.PhaseKind.FINISH else "work")
        if not works:
            self.excuse()  # it only serves
        new = self._show(memory)
        self._unanswered += 1
        view, self._leads = node.view, node.leads
        message = shared_form.Phase(
            _KINDS[phase.kind],
            first_round,
            phase.number,
            phase.unit,
            phase.shares,
            phase.exchange,
            view.number,
            view.order,
            view.lead,
            new.blocks,
            new.room,
            new.places,
            tuple(
                shared_form.PhaseChannel(plan.urgency, plan.rounds or (plan.room,), open_)
                for plan, open_ in zip(phase.channels, opened, strict=bool(phase.channels))
            ),
            new.stripes if phase.channels else (),
        )
        told: Orders = [Post(self.number, serves)] if serves is not None else []
        return [*told, EnterPhase(self.number, message)]

    def change_state(self, now: float, what: str, node: NodeInfo) -> Orders:
        """Let it "save" its state into the working folder, or "load" the one that is there."""
        self._own_phase += 1
        self._saving = number = self._own_phase
        self.give_duty(now, what)
        self._unanswered += 1
        view, self._leads = node.view, node.leads
        own = what, 0, number, 0, (), Exchange.BROADCAST
        message = shared_form.Phase(*own, view.number, view.order, view.lead)
        return [Post(self.number, message)]

    def show_view(self, now: float, node: NodeInfo, phase: Phase | None, memory: Memory) -> Orders:
        """Hosts have come or gone; the phase goes on, or none does. The program's stripe may be another one."""
        leads_now = node.leads and not self._leads
        step = self._owed.step
        between = phase is None or node.open_round <= phase.first_round
        if phase is not None and step is not None:
            between = not step.judges
        if leads_now and not between:
            self._owed.unjudged = True  # R14: it repeats its decision
            if not self.duty:
                self.give_duty(now, "judge")
        view, self._leads = node.view, node.leads
        places = 0
        # A program that has been in no phase of stripes, or has not connected, gets all of it with its first one.
        if self._shown[1]:
            places = memory.since(self._shown).places
            self._shown = (*self._shown[:2], memory.made[2])
        several = phase is not None and bool(phase.channels)
        stripes = memory.stripes if several and places else ()
        of = view.number, view.order, view.lead, node.open_round
        message = shared_form.View(*of, places, stripes)
        return [Post(self.number, message)]

    def show_commit(
        self, now: float, commit: Committed, seconds_waited: float, seconds_listed: float = 0.0
    ) -> Orders:
        """A round counts: its sum can be read."""
        owed, step = self._owed, self._owed.step
        if step is None and not commit.channel:
            self.trained = commit.round
            owed.closed, owed.unread, owed.unjudged = False, True, self._leads
        elif step is not None and step.note_committed(commit.channel, commit.round):
            self.trained, owed.unjudged = step.trained, self._leads
        self.give_duty(now, "work")
        self._go_on_with_step()
        message = shared_form.Committed(
            commit.round,
            commit.counted,
            commit.unit,
            commit.next_unit,
            commit.exchange,
            seconds_waited,
            commit.view,
            commit.aggregators,
            commit.saved,
            commit.channel,
            seconds_listed,
        )
        return [Post(self.number, message)]

    def _show(self, memory: Memory) -> Memory:
        """The memory of the kernel's that it has not mapped yet."""
        if memory.made == (0, 0, 0):
            return memory
        new, self._shown = memory.since(self._shown), memory.made
        return new

    def end(self, reason: str, *, saved: bool = False) -> Orders:
        """End it, in any state, and free the memory that was shared with it; `saved`: the job's state is saved."""
        if self._released:
            return []
        self.ended = self._released = True
        return [EndProgram(self.number, reason, saved and self.holds_state)]

    # ---- its messages

    @property
    def lags(self) -> bool:
        """Whether it was told of a phase that it is not in yet: its messages are about an earlier one."""
        return self._unanswered > 0

    def note_prepared(self) -> None:
        """It is in a phase that it was told of."""
        self._unanswered -= 1

    def note_offered(self, channel: int, round_: int) -> None:
        """It has offered to that round: until it is committed the program has nothing more to do for it."""
        if self._owed.step is None:
            self.excuse()
            return
        self._owed.step.note_offered(channel, round_)
        self._go_on_with_step()

    def _go_on_with_step(self) -> None:
        """In a step of a plan: whether it owes something after what has just happened."""
        owed, step = self._owed, self._owed.step
        if step is None or self.duty not in ("", "work", "judge") or self.lags:
            return
        if step.owes(closed=step.closed or not owed.trains):
            self.duty = "work"
        else:
            self.duty = "judge" if owed.unjudged else ""

    def note_read(self, round_: int, digest: str, channel: int = 0) -> None:
        """It has read a round's sum, and holds the state after it. The next round's sum may wait for it already."""
        self.digest = digest or self.digest
        if self._owed.step is not None:
            self._owed.step.note_read(channel, round_)
            self._go_on_with_step()
            return
        if channel:
            return
        self._owed.unread = round_ < self.trained
        if not self.lags:
            self.duty = "work"
            if not self._owed.unread and (self._owed.closed or not self._owed.trains):
                self.excuse()

    def note_judged(self, round_: int, what: str) -> None:
        """It has judged a round."""
        if round_ < self.trained:
            return  # the next round has been committed meanwhile: it owes that judgement
        self._owed.unjudged = False
        if self.duty == "judge":
            self.duty = ""
        # Repeated as a phase begins, after a view may have swallowed it, it excuses nothing in that phase. Nor does it
        # once a round of the next step is committed: all go on with that step.
        step = self._owed.step
        under_way = step is not None and step.under_way
        if what not in ("continue", "more") and round_ >= self._first_round and not under_way:
            self.excuse()  # the lead goes on once all do something else

    def note_ready(
        self, fragments: int, digest: str, channels: tuple[ChannelPlan, ...] = ()
    ) -> None:
        """It has built the model."""
        self.channels = channels
        self.ready, self.fragments, self.digest, self.duty = True, fragments, digest, ""

    def note_state(self, number: int, digest: str) -> bool:
        """It has saved its state, or loaded another's; return whether that was its last order."""
        if number != self._saving:
            return False
        self._saving = 0
        if self.duty in ("save", "load"):  # otherwise it has been sent into a phase meanwhile
            self.duty = ""
        self.digest = digest or self.digest
        return True
