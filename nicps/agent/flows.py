# SPDX-License-Identifier: Apache-2.0
"""Monitoring of the rounds of each channel: when each round was offered and complete, and which member it waited for
(docs/channels.md).

Every member broadcasts its offers and marks in WANT frames. So this host knows of each round whose offer, and whose
mark, came last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nicps import wire
from nicps.agent.records import TimeLine
from nicps.job.contribution import Contribution
from nicps.protocol import Committed, Node
from nicps.protocol.channels import ChannelledRing
from nicps.protocol.signals import Late
from nicps.session.activity import ChannelActivity

_MS = 1000.0
_DIGITS = 3  # of milliseconds


@dataclass(slots=True)
class _Heard:
    """Of one round, by member: when it was heard to offer, and to have all of the round. `whole`: when its sums were
    here."""

    offers: dict[int, float] = field(default_factory=dict)
    marks: dict[int, float] = field(default_factory=dict)
    whole: float | None = None


@dataclass(slots=True)
class _Row:
    """A channel's rounds of one step, for the time line. `committed`: when the last one was."""

    first: int
    begun: float
    committed: float = 0.0
    rounds: list[list[float | int | None]] = field(default_factory=list)


class FlowWatch:
    """Of the phase that is in force.

    Args:
        timeline: gets a row for each channel and step.

    Attributes: `rounds` and `bytes`, by channel, of training rounds that were committed since the agent began.
    """

    def __init__(self, node: Node, timeline: TimeLine) -> None:
        self._node, self._timeline = node, timeline
        self._heard: dict[tuple[int, int], _Heard] = {}  # by channel and round
        self._rows: dict[int, _Row] = {}  # by channel
        self.rounds = [0] * wire.MAX_CHANNELS
        self.bytes = [0] * wire.MAX_CHANNELS

    # ---- what happens

    def hear(self, now: float, source: bytes, frame: bytes) -> None:
        """A frame came, before the node takes it.

        Raises:
            WireError: it is malformed.
        """
        if not isinstance(self._node.ring, ChannelledRing):
            return
        if len(frame) < 2 or frame[1] != wire.FrameType.WANT:
            return
        header, view = wire.unpack_header(frame), self._node.view
        if header.view != view.number or header.sender not in view.live:
            return
        if view.members[header.sender - 1].mac == source:
            self._note(now, header)

    def note_sent(self, now: float, frame: wire.Frame) -> None:
        """This host sends a frame."""
        if isinstance(frame.body, wire.Want) and isinstance(self._node.ring, ChannelledRing):
            self._note(now, frame.header)

    def _note(self, now: float, header: wire.Header) -> None:
        channel, open_rounds = wire.channel_of(header.flags), self._node.rounds
        if channel >= len(open_rounds):
            return
        open_round = open_rounds[channel]
        # A member may have committed a round that is open here, and this host one whose mark it is about to send.
        if abs(header.round - open_round) > 1:
            return
        heard = self._heard.get((channel, header.round))
        if heard is None:
            self._forget(channel, open_round - 2)  # rounds in which this host had no part
            heard = self._heard[channel, header.round] = _Heard()
        if header.flags & wire.Flag.OFFERED:
            heard.offers.setdefault(header.sender, now)
        if header.flags & wire.Flag.COMPLETE:
            heard.marks.setdefault(header.sender, now)

    def note_sums(self, now: float, channel: int, round_: int) -> None:
        """The kernel has all sums of that round."""
        if (heard := self._heard.get((channel, round_))) is not None and heard.whole is None:
            heard.whole = now

    def enter_view(self) -> None:
        """Another view is in force: its members offer again."""
        self._heard.clear()

    def close(self) -> None:
        """The job is over."""
        self._heard.clear()
        self._rows.clear()

    def note_commit(self, now: float, commit: Committed, own: Contribution) -> None:
        """A round is committed.

        Args:
            own: this host's, to that channel.
        """
        channel, phase = commit.channel, commit.phase
        self.rounds[channel] += 1
        self.bytes[channel] += commit.fragments * wire.PAYLOAD_BYTES
        heard = self._heard.get((channel, commit.round), _Heard())
        self._forget(channel, commit.round)
        if not phase.planned:
            return  # a group has no steps, and no report
        place = phase.place_of(commit.round, channel)
        row = self._rows.get(channel)
        if not place:
            row = self._rows[channel] = _Row(commit.round, now)
        if row is None or commit.round != row.first + place:
            return  # the step's beginning was not seen
        row.rounds.append(self._moments(now, commit, own, heard, row.committed))
        row.committed = now
        if place == phase.rounds_per_step(channel) - 1:
            self._write(now, channel, phase.channels[channel].urgency, self._rows.pop(channel))

    def _moments(
        self, now: float, commit: Committed, own: Contribution, heard: _Heard, before: float
    ) -> list[float | int | None]:
        """When this host had offered, all had, its sums were there, and it was committed; whose offer and mark were
        last. None: not known, as the token brought it, or nobody else is there.

        Args:
            before: when the round before it was committed. What was offered earlier counts as offered then.
        """
        number, round_ = self._node.number, commit.round
        offered = max(own.offered_at(round_), before) if number in commit.counted else None
        offers = {k: at for k, at in heard.offers.items() if k in commit.counted}
        last_offer = max(offers, key=offers.__getitem__, default=None)
        listed: float | None = None
        if last_offer is not None and len(offers) == len(commit.counted):
            listed = offers[last_offer]
        else:
            last_offer = None
            if offered is not None:
                known = own.offered_at(round_) + own.seconds_listed(now, round_)
                listed = min(now, max(offered, known))
        # An offer to the next round is a mark of this one, and may take its place.
        whole = heard.marks.get(number, now) if heard.whole is None else heard.whole
        return [offered, listed, whole, now, last_offer, self._last_mark(heard)]

    def _last_mark(self, heard: _Heard) -> int | None:
        """Whose mark this host has waited for. The lead's is always the last one: it waits for all others."""
        lead, number = self._node.view.lead, self._node.number
        marks = {k: at for k, at in heard.marks.items() if k != lead}
        last = max(marks, key=marks.__getitem__, default=None)
        if last is None:
            return None
        return last if marks[last] > marks.get(number, 0.0) else lead

    def _write(self, now: float, channel: int, urgency: int, row: _Row) -> None:
        """A line for all rounds of the step: moments in milliseconds from its `t0` on."""
        known = [at for moments in row.rounds for at in moments[:4] if at is not None]
        begun = min(known)

        def since(at: float | int | None) -> float | None:
            return None if at is None else round((at - begun) * _MS, _DIGITS)

        rounds = [[*map(since, moments[:4]), *moments[4:]] for moments in row.rounds]
        more: dict[str, Any] = {"channel": channel} if channel else {}
        self._timeline.note("rounds", begun, now, row.first, **more, urgency=urgency, rounds=rounds)

    def _forget(self, channel: int, last: int) -> None:
        """What was heard of that channel's rounds up to that one is of no more use."""
        for of, round_ in [*self._heard]:
            if of == channel and round_ <= last:
                del self._heard[of, round_]

    # ---- what is asked

    def activity(self) -> tuple[ChannelActivity, ...]:
        """Each channel of the phase that is in force; none without such a phase."""
        ring = self._node.ring
        if not isinstance(ring, ChannelledRing):
            return ()
        plans, step = ring.phase.channels, ring.step
        return tuple(
            ChannelActivity(
                number=channel,
                urgency=plan.urgency,
                step=step.current if step is not None else 0,
                round=round_,
                place=ring.phase.place_of(round_, channel),
                places=plan.rounds_per_step,
                state=self._state(ring, channel, round_),
                rounds=self.rounds[channel],
                bytes=self.bytes[channel],
                awaits=tuple(sorted(self.awaited(channel))),
            )
            for channel, (plan, round_) in enumerate(zip(plans, ring.rounds, strict=True))
        )

    def _state(self, ring: ChannelledRing, channel: int, round_: int) -> str:
        """What this host does in the open round."""
        step = ring.step
        if step is not None and not step.has_begun(channel, round_):
            return "done"
        (offers, marks), number = self._known(ring, channel, round_), self._node.number
        if number in marks:
            return "marked"
        if number not in offers:
            return "open"
        return "offered" if self._due(ring) - offers else "sums"

    def _known(self, ring: ChannelledRing, channel: int, round_: int) -> tuple[set[int], set[int]]:
        """The members that have offered, and those that have all of the round. On channel 0 the token tells, too."""
        heard = self._heard.get((channel, round_), _Heard())
        offers, marks = set(heard.offers), set(heard.marks)
        if not channel and ring.token is not None and ring.token.round == round_:
            lines = enumerate(ring.token.lines, 1)
            for number, line in lines:
                offers |= {number} if line.settled else set()
                marks |= {number} if line.complete else set()
        return offers, marks

    def _due(self, ring: ChannelledRing) -> frozenset[int]:
        """The members whose offers a round needs, as far as is known."""
        if ring.step is not None and ring.step.listed is not None:
            return frozenset(ring.step.listed)
        return frozenset(ring.phase.sharing(self._node.view.live))

    def awaited(self, channel: int) -> frozenset[int]:
        """The members that the channel's open round waits for while others are done."""
        return frozenset(self.find_late(channel))

    def find_late(self, channel: int) -> Mapping[int, Late]:
        """The same, and what the round waits for."""
        ring = self._node.ring
        if not isinstance(ring, ChannelledRing) or channel >= len(ring.rounds):
            return {}
        offers, marks = self._known(ring, channel, ring.rounds[channel])
        among = self._due(ring)
        what, found = Late.GRADIENT, among - offers
        if not found:
            among = self._node.view.live
            what, found = Late.MARK, among - marks
            others = found - {self._node.view.lead}  # it marks itself last
            found = others or found
        return dict.fromkeys(found, what) if found < among else {}
