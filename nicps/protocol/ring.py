# SPDX-License-Identifier: Apache-2.0
"""One member's part in the ring: the token (R9, R10, R16) and the round that closes in two turns (R11 to R13).

A round is open while gradients may still join. The holder that sees the quorum closes the list. In that turn each
member marks itself complete or asks for what it lacks, and senders repair. The holder that finds all members marked
commits the round: the token goes on with the next round's number, and carries the last list. So the next turn tells
all members, those too that missed a frame. See docs/protocol.md, "A round".
"""

from __future__ import annotations

import math

from nicps import wire
from nicps.protocol.actions import Send
from nicps.protocol.carried import Offer
from nicps.protocol.progress import lacks_in
from nicps.protocol.ring_parts import RingParts
from nicps.protocol.signals import Lacking, Silent, Steps
from nicps.protocol.token import TokenState


class Ring(RingParts):
    """One member's part in the ring of a phase: taking the token, forwarding it, waiting for it, retransmitting it."""

    # ---- reports of the agent and the node

    def create(self, now: float) -> Steps:
        """R9: the lead makes the token, once everybody has acknowledged the phase or the view."""
        token = self._control.create()
        if not self._others:
            return self._hold(now)
        token.hop += 1  # whose it is, before anything is sent under it: switches follow the token
        self._key = token.key
        return [self._send(token, 0), *self._hold(now)]

    def offer(self, now: float, offer: Offer) -> Steps:
        """A contribution is ready."""
        if not self._control.offer(offer):
            return []
        return self._settle(now) + self._act_or_want(now)

    def progress(self, now: float, round_: int, samples: int) -> Steps:
        """Micro-batches of `round_` worth `samples` are done; others hear of it once somebody has contributed."""
        return [self._want_frame(0)] if self._control.progress(round_, samples) else []

    def read(self, now: float, round_: int, digest: int, channel: int = 0) -> Steps:
        """The sum of `round_` has been read out and applied; its bank is free. `digest`: of the state after it."""
        return self._act_or_want(now) if self._control.read(round_, digest) else []

    def sent(self, now: float, channel: int = 0) -> None:
        """The kernel has taken the fragments of one `SendFragments`."""
        self._exchange.on_sent()
        # Elsewhere the token is long gone: what this member sends says nothing of the token's owner.
        if self._exchange.kind.token_waits:
            self._retransmission.left(now)
            self._detector.note_forwarded(now)

    def go_on(self, now: float, *, saves: bool, channel: int = 0) -> Steps:
        """The lead has decided that training goes on (`OpenRound.go_on`)."""
        self._control.go_on(saves=saves)
        return self._settle(now) + self._act_or_want(now)

    def bounced(self, now: float, frame: wire.Frame) -> None:
        """The kernel forwarded this token for us (R10).

        This member may have closed the list since, or committed the round, without the token. A retransmission is what
        the kernel has sent all the same: nobody may know two tokens of one hop.
        """
        token = TokenState.of(frame)
        if token.key > self._key and token.generation == self.phase.generation:
            self._key = token.key
            self.parked = False
            self._note_forwarded(now, token)
            self._control.take_bounced(now, TokenState.of(frame))

    def kernel_saw(self, seen: tuple[int, int], token_at: float, frame_at: float) -> bool:
        """The kernel's newest (generation, hop), and when it last accepted a token, and any frame (clock of `now`).

        To be told before the frames that the kernel passed up: it forwards tokens by itself, and keeps from us those
        that bring no news. Returns whether one of the times is news, on which `deadline` may depend.
        """
        self._seen = max(self._seen, seen)
        return self._detector.measure(token_at, frame_at, self.holding)

    # ---- frames

    def on_token(self, now: float, frame: wire.Frame) -> Steps:
        """A token frame from a member."""
        token, view, round_ = TokenState.of(frame), self._view, self.round
        if (
            token.generation != self.phase.generation
            or len(token.lines) != len(view.members)
            or not (round_ <= token.round <= round_ + 1 or self._control.bring_forward(token))
            or token.owner not in view.live
            or (token.ranges and not {sender for sender, _, _ in token.ranges} <= view.live)
        ):
            return []
        key = token.key
        if key <= self._key or key < self._seen:
            return self._on_old_token(now, frame.header, token)
        self._key = key
        self._retransmission.token = None
        self._detector.hear_token(now)
        self.holding = False
        self.parked = bool(frame.header.flags & wire.Flag.PARKED)
        self._want.reset_interval()
        steps: Steps = [*self._control.learn(now, token), *self._settle(now)]
        if token.owner == self.number and not self.parked:
            self.turns += 1
            return steps + self._hold(now) + self._settle(now)
        return steps + self._act_or_want(now)

    def _on_old_token(self, now: float, header: wire.Header, token: TokenState) -> Steps:
        """A repeat: its sender lives, and lacks perhaps what this member has sent since."""
        if token.key == self._key and header.sender == token.owner:
            self._detector.hear_beacon(now)
        last = self._retransmission
        if not header.flags & wire.Flag.REPEAT or self._exchange.delays_token:
            return []  # nobody lacks this, or the fragments before it are still on their way
        if last.is_newest(self._seen) and last.may_answer(now):
            return [self._retransmit(now)]
        return []

    def on_completion(self, now: float) -> Steps:
        """The kernel has taken the last fragment of a member's contribution."""
        return self._act_or_want(now)

    def on_list(self, now: float, members: int, unit: int, channel: int = 0) -> Steps:
        """The first contribution to the open round came to this host's kernel: what it says of the round."""
        return [*self._exchange.on_list(now, members, unit)]

    def on_lacking(self, now: float, frame: wire.Frame) -> Steps:
        """An aggregator answers what this member has asked: some have not contributed yet."""
        assert isinstance(frame.body, wire.Lacking)
        if frame.header.round != self.round or wire.channel_of(frame.header.flags):
            return []
        return [*self._exchange.on_lacking(now, frame.body)]

    def advance(self, now: float) -> Steps:
        """Sums came to this host's kernel, or lanes of its contribution were converted."""
        steps: Steps = [*self._advance(now), *self._settle(now)]
        if self._exchange.kind.broadcasts_marks and self._control.token is not None:
            steps += self._report_lacks(now, self._control.token)
        # This comes often. A member that has asked for the token asks again in time.
        return steps + (self._act_or_want(now) if self._want.at == math.inf else [])

    def _advance(self, now: float) -> Steps:
        """Send what there is room for, and ask for what has not come."""
        return [*self._exchange.advance(now)]

    def on_want(self, now: float, frame: wire.Frame) -> Steps:
        """A member tells its ready samples, or wants the token (a parked one is handed over)."""
        want, sender = frame.body, frame.header.sender
        assert isinstance(want, wire.Want)
        token, round_ = self._control.token, frame.header.round
        if wire.channel_of(frame.header.flags):
            return []  # there is no such channel
        early = frame.header.flags & wire.Flag.OFFERED and round_ == self.round + 1
        if token is None or sender == self.number or (round_ > self.round and not early):
            return []
        wanted = frame.header.flags & wire.Flag.TOKEN_WANTED
        if sender == token.owner and self._is_beacon(frame):
            self._detector.hear_beacon(now)
        if frame.header.flags & (wire.Flag.COMPLETE | wire.Flag.OFFERED):
            heard = self._announcer.hear(now, frame)
            return heard if round_ < self.round else heard + self._settle(now)
        steps: Steps = []
        if round_ == self.round:
            steps += self._control.hear_ready(sender, want)
            others = self._view.live - {sender} | ({0} if self.asks_switch else set())
            lacks = lacks_in(frame, others)
            steps += [Lacking(round_, sender, lacks)] if lacks else []
        if not (self.holding and self.parked):
            return steps
        steps += self._control.hear_read(sender, want)
        if wanted:
            token.idle = 0
            return steps + self._forward_to(now, sender)
        return steps + self._act_or_want(now)

    def _is_beacon(self, frame: wire.Frame) -> bool:
        """Whether the token's owner says that it has the token, and nothing to forward yet.

        A WANT with a flag or an entry shows that its sender lives, and not that it has the token. An owner that has
        not received the token repeats offers and reports without end.
        """
        return not frame.header.flags and not any(frame.items)

    def _settle(self, now: float) -> Steps:
        """Offer, mark, close and commit without the token. Who has it in hand commits by it."""
        if not self._exchange.kind.broadcasts_marks:
            return []
        return self._announcer.settle(now, commits=not self.holding or self.parked)

    # ---- time

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        due = min(self._want.at, self._exchange.deadline(), self._announcer.due)
        if self._exchange.delays_token:
            return min(due, self._detector.beacon_due()) if self._others else due
        if self._retransmission.token is not None:
            due = min(due, self._retransmit_at())
        return min(due, self._silent_at())

    def tick(self, now: float) -> Steps:
        """Repeat what nobody seems to have heard (R16), want what does not come, send round what is parked."""
        steps: Steps = []
        if now >= self._exchange.deadline():
            steps += self.advance(now)
        steps += self._repeat(now)
        last, delayed = self._retransmission, self._exchange.delays_token
        if last.token is not None and not delayed:
            if not last.is_newest(self._seen):
                last.token = None  # somebody went on from it
            elif now >= self._retransmit_at():
                if self.holding:
                    steps += self._send_round(now)
                else:
                    steps.append(self._retransmit(now))
                    last.back_off()
        if self._exchange.delays_token and self._others and now >= self._detector.beacon_due():
            self._detector.hear_beacon(now)
            steps.append(self._want_frame(0))  # it waits for its own training program
        if now >= self._silent_at():
            self._detector.reported = True
            self.freeze()  # the next view is proposed
            steps.append(Silent(self._control.owner))
        return steps + self._want_it(now)

    def _repeat(self, now: float) -> Steps:
        """Retransmit what this member has announced, if it is time to."""
        if now < self._announcer.due:
            return []
        return [*self._announcer.repeat(now), *self._act_or_want(now)]

    def _want_it(self, now: float) -> Steps:
        """Ask for the token, if it is time to."""
        want = self._want
        if now < want.at:
            return []
        if self.holding or not self._control.wants_token():
            want.cancel()
        elif self.parked or not want.wait_for(self._detector.heard, now):
            return [self._ask_for_it(now)]
        return []

    def _retransmit_at(self) -> float:
        """A parked token goes round at intervals; any other is sent again once the ring has fallen silent.

        Fragments put it off, but prove nothing: they may be late ones of the holder before.
        """
        if self.holding:
            return self._retransmission.due_parked(self._timings.beacon_s)
        return self._retransmission.due(self._detector.heard)

    def _silent_at(self) -> float:
        """R17: when the holder has been silent for too long, for the k-th member after it; never for the holder.

        It broadcasts, forwards the token, or announces that it parks.
        """
        detector, owner, number = self._detector, self._control.owner, self.number
        if self.holding or owner == number or detector.reported or self._exchange.delays_token:
            return math.inf
        return detector.silent_at(self._view.rank_after(owner, number))

    # ---- holding the token, and forwarding it

    def _hold(self, now: float) -> Steps:
        """Everything that the holder does, until there is nothing left; then forward or park."""
        token = self._control.token
        assert token is not None
        self.holding, self.parked = True, False
        self._want.cancel()
        steps: Steps = []
        while True:
            changed, actions = self._control.take_turn(now)
            steps += [*actions, *self._report_lacks(now, token)]
            if not changed:
                break
            token.idle = 0
            if self._others:
                return steps + self._forward_to(now, self._view.next_after(self.number))
        token.idle = min(token.idle + 1, len(self._view.live))
        parks = token.idle >= len(self._view.live)
        to = self.number if parks else self._view.next_after(self.number)
        return steps + self._forward_to(now, to)

    def _report_lacks(self, now: float, token: TokenState) -> Steps:
        """Tell all what this member does not get, however often it is sent again (R16)."""
        lacks = self._exchange.take_report(now, token)
        if not lacks:
            return []
        items = tuple(wire.Lack(count, member) for member, count in lacks.items())
        return [self._want_frame(0, items), Lacking(self.round, self.number, lacks)]

    def _forward_to(self, now: float, owner: int) -> Steps:
        """Broadcast the token for its next owner; for ourselves, that is parking it."""
        token = self._control.token
        assert token is not None
        token.owner = owner
        token.hop += 1
        self._key = token.key
        self.holding = self.parked = owner == self.number
        self._retransmission.reset_interval()
        self._note_forwarded(now, token)
        if not self._others:
            return []
        return [
            self._send(token, wire.Flag.PARKED * self.parked),
            *self._exchange.on_forwarded(now),
        ]

    def _note_forwarded(self, now: float, token: TokenState) -> None:
        self._retransmission.restart(now, token if self._others else None)
        self._detector.note_forwarded(now)

    def _send_round(self, now: float) -> Steps:
        """A parked token goes round once: a member that does not forward it has left, though nobody waits for it."""
        token = self._control.token
        assert token is not None
        token.idle = 0
        return self._forward_to(now, self._view.next_after(self.number))

    def _retransmit(self, now: float) -> Send:
        """R16: the last broadcaster broadcasts again, marked as a repeat."""
        token = self._retransmission.token
        assert token is not None
        self._retransmission.left(now)
        return self._send(token, wire.Flag.REPEAT | wire.Flag.PARKED * self.holding)

    # ---- wanting it

    def _act_or_want(self, now: float) -> Steps:
        """Use the parked token if it is here, otherwise see to it that it comes."""
        if self.holding and self.parked:
            token = self._control.token
            assert token is not None
            if self._control.wants_token():
                token.idle = 0
                return self._hold(now)
        elif not self.holding and self._control.wants_token():
            if self.parked:
                return [self._ask_for_it(now)]
            self._want.begin(now)
        else:
            self._want.cancel()
        return []

    def _ask_for_it(self, now: float) -> Send:
        self._want.asked(now)
        return self._want_frame(wire.Flag.TOKEN_WANTED)

    # ---- frames of this member

    def _want_frame(self, flags: int, lacks: tuple[wire.Lack, ...] = ()) -> Send:
        header = self._view.header(self.number, self.round, flags)
        return Send(wire.Frame(header, self._control.want(len(lacks)), (lacks,)))

    def _send(self, token: TokenState, flags: int) -> Send:
        return Send(token.frame(self._view.header(self.number, token.round, flags)))


__all__ = ["Offer", "Ring"]
