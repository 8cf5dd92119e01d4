# SPDX-License-Identifier: Apache-2.0
"""What a member broadcasts of the open round of a channel: offers and marks (`Exchange.broadcasts_marks`)."""

from __future__ import annotations

import math

from nicps import wire
from nicps.protocol.actions import Send
from nicps.protocol.open_round import OpenRound
from nicps.protocol.signals import Steps
from nicps.protocol.timers import MarkTimer
from nicps.protocol.view import View


class Announcer:
    """Broadcasts this member's offers and marks, and hears the others'.

    Args:
        marks: when this member broadcasts them again.
    """

    def __init__(self, open_round: OpenRound, view: View, marks: MarkTimer) -> None:
        self._of = open_round
        self._view = view
        self._others = len(view.live) > 1
        self._marks = marks

    def settle(self, now: float, *, commits: bool = True) -> Steps:
        """Broadcast this member's offer, and its mark once it has all of the round.

        Close the list with the offers of all, and commit the round with the marks of all.

        Args:
            commits: the round may be committed now.
        """
        of = self._of
        steps: Steps = []
        if of.broadcast_offer() and self._others:
            steps += self._begin(now)
        steps += of.close_offered(now)
        if of.mark() and self._others:
            steps += self._begin(now)
        if of.all_marked and commits:
            steps += of.commit_marked()
        return steps

    def _begin(self, now: float) -> Steps:
        self._marks.reset_interval()
        return self.announce(now, self._of.round)

    def announce(self, now: float, round_: int) -> Steps:
        """This member's offer and mark in the open round; in the round before only the mark, which is an answer."""
        of = self._of
        self._marks.said(now, of.channel)
        flags, want = int(wire.Flag.COMPLETE | wire.Flag.REPEAT), of.want(0)
        if round_ == of.round:
            flags, want = of.announcement()
        if flags & wire.Flag.COMPLETE:
            flags |= wire.Flag.SAVES * of.saves(round_)
        flags |= wire.channel_flags(of.channel)
        frame = wire.Frame(self._view.header(of.number, round_, flags), want, ((),))
        return [Send(frame), *of.hear_read(of.number, want)]

    def hear(self, now: float, frame: wire.Frame) -> Steps:
        """A member offers to the open round or the next one, or has all of a round that it cannot commit yet."""
        of, want, sender = self._of, frame.body, frame.header.sender
        round_, flags = frame.header.round, frame.header.flags
        assert isinstance(want, wire.Want)
        steps: Steps = [*of.hear_read(sender, want)]
        if round_ < of.round:  # the phase before may have dropped the round that was open in it
            lacks = of.phase.first_round <= round_ == of.round - 1
            # A mark with REPEAT is an answer, whose sender lacks nothing. Members that answered it would not stop.
            lacks = lacks and not flags & wire.Flag.REPEAT
            answers = lacks and self._marks.may_answer(now, of.channel)
            return steps + (self.announce(now, round_) if answers else [])
        if flags & wire.Flag.OFFERED:
            of.offers.hear(round_, sender, want.ready, want.unit, want.window)
        if flags & wire.Flag.COMPLETE and round_ == of.round:
            saves = bool(flags & wire.Flag.SAVES)
            of.hear_mark(sender, wire.Mark.COMPLETE | wire.Mark.SAVES * saves)
        return steps

    @property
    def due(self) -> float:
        """When this member repeats its offer or its mark of a round that it cannot commit yet."""
        of = self._of
        due = self._marks.due(of.channel)
        if due == math.inf or not self._others or of.frozen:
            return math.inf
        return due if of.complete or of.has_offered else math.inf

    def repeat(self, now: float) -> Steps:
        """Say it again: a member has perhaps not heard it."""
        self._marks.back_off(now)
        self._of.offers.unheard = True
        return self.announce(now, self._of.round)
