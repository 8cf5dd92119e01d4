# SPDX-License-Identifier: Apache-2.0
"""One member's part in a phase with several channels, or several rounds a step (docs/channels.md).

Channel 0 is the ring, with the token. Every other channel is a series of rounds without one. In a planned phase a step
binds them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nicps import wire
from nicps.protocol.actions import Action, Closed, Send
from nicps.protocol.announcer import Announcer
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.exchange import Exchanger, exchanger_of
from nicps.protocol.exchange.giving_way import LineFigures
from nicps.protocol.kernel import ChannelledReceiver, ChannelState, KernelState, Receiver
from nicps.protocol.open_round import OpenRound
from nicps.protocol.phase import AdaptiveTimeout, Phase, Timings
from nicps.protocol.progress import lacks_in
from nicps.protocol.restraint import Restraint
from nicps.protocol.ring import Ring
from nicps.protocol.signals import Lacking, Steps
from nicps.protocol.step import Step
from nicps.protocol.token import Line, TokenState
from nicps.protocol.view import View


class Channel:
    """A channel above 0: its open round, its exchange, and what this member broadcasts of it."""

    def __init__(self, of: OpenRound, announcer: Announcer) -> None:
        self.of = of
        self.exchange = of.exchange
        self.announcer = announcer

    def begin(self, phase: Phase, view: View) -> None:
        """The phase is in force: list and marks of the open round have a place."""
        of, lines = self.of, [Line() for _ in view.members]
        of.token = TokenState.create(phase.generation, 0, of.round, of.unit, lines)

    def kernel(self, phase: Phase) -> ChannelState:
        """What the XDP program must know of it now."""
        of, exchange = self.of, self.exchange
        width, conversion = exchange.width or phase.width, exchange.conversion
        return ChannelState(
            round=of.round,
            round_low=of.round,
            round_high=of.round + of.complete,
            width=width,
            width_next=width,
            offered=(0, conversion) if of.round & 1 else (conversion, 0),
            clock=exchange.clock,
            urgency=phase.channels[of.channel].urgency,
        )


class ChannelledRing(Ring):
    """The ring of channel 0, with the other channels and the step that they are in.

    Attributes: `step`, None where no step binds the channels together.
    """

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        receiver: Receiver,
        timings: Timings,
        timeout: AdaptiveTimeout,
        carried: Carried | None = None,
        now: float = 0.0,
    ) -> None:
        carried = carried or Carried.at_the_start(phase)
        rounds = (carried.round, *(other.round for other in carried.others))
        self.step = None
        if phase.planned:
            self.step = Step(phase, view, number, rounds, carried.listed)
            self.step.undecided, self.step.saves = carried.undecided, carried.saves
        super().__init__(phase, view, number, receiver, timings, timeout, carried, now, self.step)
        self._channels: list[Channel] = []
        for channel, of in enumerate(carried.others, 1):
            assert isinstance(receiver, ChannelledReceiver)
            there = receiver.of_channel(channel)
            exchange = exchanger_of(phase, view, number, there, timings, now, channel)
            # R14: without steps the lead says again of each channel that its rounds go on.
            trains = view.lead == number and phase.kind is wire.PhaseKind.TRAIN
            of = replace(of, undecided=trains and of.round > phase.first_round)
            open_round = OpenRound(phase, view, number, exchange, of, channel, self.step)
            announcer = Announcer(open_round, view, self._marks)
            self._channels.append(Channel(open_round, announcer))
        self._all = (self._control, *(channel.of for channel in self._channels))
        self._turn = 0  # the channel that was announced last
        plans = [phase.channels[of.channel] for of in self._all]
        #: By channel, the rounds of higher urgency than its own.
        self._ahead = [
            [of for of, other in zip(self._all, plans, strict=True) if other.urgency > own.urgency]
            for own in plans
        ]
        line, below = LineFigures(), [list[Exchanger]() for _ in plans]
        for open_, ahead in zip(self._all, self._ahead, strict=True):
            open_.exchange.give_way_to([each.exchange for each in ahead], line)
            for each in ahead:
                below[each.channel].append(open_.exchange)
        #: The most urgent channel first.
        self._in_order = sorted(self._all, key=lambda of: -plans[of.channel].urgency)
        self._begun = frozenset[int]()  # the channels whose lists are known here
        exchanges = [of.exchange for of in self._all]
        share = 1.0 if phase.planned else timings.urgent_share
        self._restraint = Restraint(share, exchanges, below)

    def _of(self, channel: int) -> OpenRound | None:
        """That channel's open round; None: the phase has no such channel."""
        return self._all[channel] if channel < len(self._all) else None

    # ---- what others ask

    @property
    def rounds(self) -> tuple[int, ...]:
        """The open round of each channel."""
        return tuple([of.round for of in self._all])

    @property
    def completes(self) -> tuple[bool, ...]:
        """Of each channel, whether this member has all of its open round, and has said so."""
        return tuple(of.complete for of in self._all)

    @property
    def between_steps(self) -> bool:
        """No round of the step that is open is committed, and this member has marked none complete."""
        return self.step is None or not (self.step.under_way or any(self.completes))

    def awaits_decision(self, rounds: Sequence[int]) -> bool:
        """Whether the lead's program has to say that training goes on, where these rounds are open."""
        if self.step is None:
            return super().awaits_decision(rounds)
        step = Step(self.phase, self._view, self.number, rounds, None)
        return step.current > 0 and not step.under_way

    def batch(self, channel: int) -> int:
        """As many frames of that channel may wait in this host's queues; 0: any number."""
        of = self._of(channel)
        return of.exchange.batch if of is not None else 0

    @property
    def awaits_lanes(self) -> bool:
        """Others wait for lanes that this host's training program has not converted yet."""
        return super().awaits_lanes or any(
            channel.exchange.awaits_lanes or channel.of.waits_to_enter for channel in self._channels
        )

    @property
    def has_sums(self) -> bool:
        """Sums of several contributions have come in an open round."""
        return any(of.exchange.has_sums for of in self._all)

    @property
    def kernel(self) -> KernelState:
        """What the XDP program must know now."""
        state, phase = super().kernel, self.phase
        state.urgency = phase.channels[0].urgency
        state.channels = tuple([channel.kernel(phase) for channel in self._channels])
        return state

    # ---- from view to view

    def freeze(self) -> None:
        """Another phase or view is coming, for all channels."""
        self._end_restraint()
        for of in self._all:
            of.freeze()

    def _end_restraint(self) -> None:
        """Offers that wait go along."""
        for offer in self._restraint.release(math.inf):
            self._all[offer.channel].offer(offer)

    def carry(self) -> Carried:
        """What goes along into the next view."""
        self._end_restraint()
        others = tuple(channel.of.carry() for channel in self._channels)
        carried = replace(super().carry(), others=others)
        if self.step is None or not self.step.under_way:
            return carried
        return replace(carried, listed=self.step.listed, saves=self.step.saves)

    def settle(self, rounds: Sequence[int]) -> list[Action]:
        """These rounds are open in the next view: one that is whole here, and before them, is committed (R18)."""
        actions: list[Action] = []
        for of, round_ in zip(self._all, rounds, strict=False):
            if of.round == round_ - 1 and of.complete:
                actions += of.settle()
        return actions

    def catch_up(self, rounds: Sequence[int]) -> list[Action]:
        """The lead has decided, with these rounds open in channels 1 and up: all before them are committed there."""
        actions: list[Action] = []
        for channel, round_ in zip(self._channels, rounds, strict=False):
            if channel.of.round == round_ - 1 and channel.of.complete:
                actions += channel.of.commit_marked()
        return actions

    # ---- reports of the agent and the node

    def create(self, now: float) -> Steps:
        """R9: the lead makes the token. From then on the other channels take offers."""
        return super().create(now) + self._go_on(now)

    def enter(self) -> list[Action]:
        """This view is in force here. If the step's list stands, a member outside it is told so."""
        return self._close_excluded()

    def _close_excluded(self) -> list[Action]:
        step = self.step
        shares = self.phase.shares[self.number - 1]
        if step is None or not shares or not step.excludes(self.number):
            return []
        return [Closed(self.phase.first_of(step.current))]

    def offer(self, now: float, offer: Offer) -> Steps:
        """A contribution to a round of its channel is ready."""
        of = self._of(offer.channel)
        if of is not None and self._restraint.holds(now, offer):
            return []
        if of is None or not of.offer(offer):
            return [*self._close_excluded()]
        return self._go_on(now)

    def read(self, now: float, round_: int, digest: int, channel: int = 0) -> Steps:
        """The sum of that channel's round has been read."""
        of = self._of(channel)
        if of is not None:
            of.read(round_, digest)
        return self._go_on(now)

    def sent(self, now: float, channel: int = 0) -> None:
        """The kernel has taken the fragments of one `SendFragments`."""
        if not channel:
            super().sent(now)
        elif channel <= len(self._channels):
            self._channels[channel - 1].exchange.on_sent()

    def go_on(self, now: float, *, saves: bool, channel: int = 0) -> Steps:
        """The lead has decided that training goes on, after the last step; without steps, after a channel's round."""
        of = self._of(channel)
        if of is not None:
            of.go_on(saves=saves)
        return self._go_on(now)

    # ---- frames

    def on_list(self, now: float, members: int, unit: int, channel: int = 0) -> Steps:
        """The first contribution to the open round of that channel came to this host's kernel."""
        of = self._of(channel)
        if of is None:
            return []
        return [*of.exchange.on_list(now, members, unit), *self._make_way(now)]

    def on_lacking(self, now: float, frame: wire.Frame) -> Steps:
        """An aggregator answers what this member has asked."""
        of, body = self._of(wire.channel_of(frame.header.flags)), frame.body
        assert isinstance(body, wire.Lacking)
        if of is None or frame.header.round != of.round:
            return []
        return [*of.exchange.on_lacking(now, body)]

    def advance(self, now: float) -> Steps:
        """Sums came to this host's kernel, or lanes of its contributions were converted."""
        steps = super().advance(now)
        return steps + self._report(now)

    def _advance(self, now: float) -> Steps:
        """The most urgent channel first: the windows of the others follow from it."""
        steps: Steps = []
        for of in self._in_order:
            of.exchange.note_urgent(now, self._is_behind(of.channel))
            steps += of.exchange.advance(now)
        return steps

    def _make_way(self, now: float) -> Steps:
        """Once the list of a round is known, the windows of less urgent ones get smaller at once."""
        if not self._channels:
            return []
        before = self._begun
        self._begun = frozenset(of.channel for of in self._all if of.exchange.knows_list)
        return self._advance(now) if self._begun - before else []

    def _is_behind(self, channel: int) -> bool:
        """A round of a higher urgency is on its way here: what is less urgent waits for it."""
        closing = wire.TokenState.CLOSING
        return any(
            of.token is not None and of.token.state == closing and not of.complete
            for of in self._ahead[channel]
        )

    def on_want(self, now: float, frame: wire.Frame) -> Steps:
        """A member says something of a channel; what it offers to tells what is committed at it."""
        number = wire.channel_of(frame.header.flags)
        steps = self._hear_of_step(number, frame)
        if not number:
            return steps + super().on_want(now, frame) + self._settle(now)
        of, sender, round_ = self._of(number), frame.header.sender, frame.header.round
        if of is None or self._control.token is None or sender == self.number:
            return steps
        announces = frame.header.flags & (wire.Flag.COMPLETE | wire.Flag.OFFERED)
        early = frame.header.flags & wire.Flag.OFFERED and round_ == of.round + 1
        if round_ > of.round and not early:
            return steps + self._go_on(now)
        if announces:
            heard = self._channels[number - 1].announcer.hear(now, frame)
            return steps + heard + self._go_on(now)
        if round_ == of.round:
            lacks = lacks_in(frame, self._view.live - {sender})
            steps += [Lacking(round_, sender, lacks, number)] if lacks else []
        return steps + self._go_on(now)

    def _hear_of_step(self, number: int, frame: wire.Frame) -> Steps:
        """An offer is a mark for what was before: the sender has committed the rounds before it.

        So has this member, if it has marked them: also those of other channels, where the offer is of a later step.
        Channel 0 has the token for that, and the lead's mark that says whether it saves.
        """
        flags, round_ = frame.header.flags, frame.header.round
        of = self._of(number)
        if not flags & wire.Flag.OFFERED or of is None or frame.header.sender == self.number:
            return []
        steps: Steps = []
        for channel in self._channels:
            other, before = channel.of, False
            if not other.complete or other.frozen:
                continue
            if other.channel == number:
                before = other.round < round_
            elif self.step is not None:
                theirs = self.phase.step_of(round_, number)
                before = self.phase.step_of(other.round, other.channel) < theirs
            if before:
                steps += other.commit_marked()
        return steps

    # ---- what follows

    def _settle(self, now: float) -> Steps:
        """On all channels; what is committed on one may begin the next step on all."""
        if self._control.token is None:
            return []
        steps: Steps = []
        while True:
            before = self.rounds
            steps += super()._settle(now)
            self._note_list()
            for channel in self._channels:
                if channel.of.token is None:
                    channel.begin(self.phase, self._view)
                steps += channel.announcer.settle(now)
            if self.rounds == before:
                return steps + self._make_way(now)

    def _note_list(self) -> None:
        """The step's list may have become known, by a token or by offers; a member outside it has nothing to give."""
        step, token = self.step, self._control.token
        if step is None or token is None:
            return
        step.note_list(0, token)
        if step.excludes(self.number):
            for of in self._all:
                if of.has_begun:
                    of.drop_offer()

    def _go_on(self, now: float) -> Steps:
        return self._settle(now) + self._act_or_want(now)

    def _hold(self, now: float) -> Steps:
        """With the token in hand channel 0 goes on, and what that begins on the others."""
        return super()._hold(now) + self._settle(now)

    def _report(self, now: float) -> Steps:
        """Tell all what this member does not get in a channel above 0 (R16)."""
        steps: Steps = []
        for channel in self._channels:
            of = channel.of
            lacks = channel.exchange.take_report(now, of.token) if of.token is not None else {}
            if lacks:
                items = tuple(wire.Lack(count, member) for member, count in lacks.items())
                flags = wire.channel_flags(of.channel)
                header = self._view.header(self.number, of.round, flags)
                report = wire.Frame(header, of.want(len(items)), (items,))
                steps += [Send(report), Lacking(of.round, self.number, lacks, of.channel)]
        return steps

    # ---- time

    @property
    def waits_for_kernel(self) -> bool:
        """An offer waits for rounds that the kernel may end at any time."""
        return self._restraint.waits

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        due = min(super().deadline(), self._restraint.due())
        for channel in self._channels:
            due = min(due, channel.announcer.due, channel.exchange.deadline())
        return due

    def tick(self, now: float) -> Steps:
        """Time has passed."""
        steps: Steps = []
        if any(now >= channel.exchange.deadline() for channel in self._channels):
            steps += self.advance(now)
        return steps + self._release(now) + super().tick(now)

    def _release(self, now: float) -> Steps:
        """Offers that have waited long enough."""
        return [step for offer in self._restraint.release(now) for step in self.offer(now, offer)]

    def _repeat(self, now: float) -> Steps:
        """One timer serves all channels: one of those that are due is announced, in turn."""
        announcers = [self._announcer, *(channel.announcer for channel in self._channels)]
        count = len(announcers)
        turns = [(self._turn + 1 + at) % count for at in range(count)]
        found = next((at for at in turns if now >= announcers[at].due), None)
        if found is None:
            return []
        self._turn = found
        return [*announcers[found].repeat(now), *self._act_or_want(now)]
