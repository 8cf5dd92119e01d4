# SPDX-License-Identifier: Apache-2.0
"""One member's part in the ring: the token (R9, R10, R16) and the round that closes in two turns (R11 to R13).

A round is open while gradients may still join. The holder who sees the quorum closes the list; in that turn each
member marks itself complete or asks for what it lacks, and senders repair. Who finds all marked commits: the token
goes on with the next round's number and carries the last list, so that the next turn tells everybody, also who
missed the frame. See docs/protocol.md, "A round".
"""

from __future__ import annotations

from nicps import wire
from nicps.protocol.actions import (
    Send,
)
from nicps.protocol.holder import Holder
from nicps.protocol.round import Carried, KernelState, Offer
from nicps.protocol.token import TokenState

_BACKOFF = 10.0  # a repeat's interval grows to this many times its first value


class Ring(Holder):
    """One member's part in the ring of one phase: taking the token, waiting for it, repeating it (`Round`)."""

    # ---- what the agent and the node tell it

    def offer(
        self, now: float, round_: int, samples: int, unit: int | None = None, skip: bool = False
    ) -> None:
        """A gradient of `round_` is ready (`Offer`)."""
        if round_ != self.round or self._line().settled or not self.phase.shares[self.number - 1]:
            return
        self._offer = self._held = Offer(samples, unit, skip)
        self._passes = False
        self._ready = samples
        self._act_or_want(now)

    def progress(self, now: float, round_: int, samples: int) -> None:
        """Micro-batches of `round_` worth `samples` are done; others hear of it once somebody has contributed."""
        if round_ != self.round or self._line().settled:
            return
        self._ready = samples
        if self.token is not None and self.token.counted:
            self._emit_want(0)

    def read(self, now: float, round_: int, digest: int) -> None:
        """The sum of `round_` has been read out and applied; its bank is free. `digest`: of the state after it."""
        if round_ < self._read:
            return
        self._read, self._digest = round_, digest
        if self.token is not None and self.round - self._line().read >= 2:
            self._act_or_want(now)

    def sent(self, now: float) -> None:
        """The kernel has taken the fragments of one `SendFragments`."""
        self.exchange.on_sent()
        self._last_sent_at = self._handed_at = now

    def go_on(self, now: float) -> None:
        """The lead has decided that training goes on: only now it may mark itself complete in the next round (R14)."""
        self._undecided = False
        self._act_or_want(now)

    def bounced(self, now: float, frame: wire.Frame) -> None:
        """The kernel handed this token on for us (R10)."""
        token = TokenState.of(frame)
        if token.key > self._key and token.generation == self.phase.generation:
            self._key = token.key
            self.parked = False
            self._sent_token(now, token)

    def kernel_saw(self, seen: tuple[int, int], heard: float) -> None:
        """The kernel's newest (generation, hop), and when it last accepted a frame of the ring (clock of `now`).

        To be told before the frames that the kernel passed up: it hands tokens on by itself, and keeps from us those
        that bring no news.
        """
        self._seen = max(self._seen, seen)
        if heard > self._heard:
            since = max(self._heard, self._handed_at)
            if since and not self.holding and heard > since:
                self._patience.heard(heard - since)
            self._heard = heard

    # ---- frames

    def on_token(self, now: float, frame: wire.Frame) -> None:
        """A token frame from a member."""
        token = TokenState.of(frame)
        if (
            token.generation != self.phase.generation
            or len(token.lines) != len(self._view.members)
            or not self.round <= token.round <= self.round + 1
            or token.owner not in self._view.live
            or any(sender not in self._view.live for sender, _, _ in token.ranges)
        ):
            return
        if token.key <= self._key or token.key < self._seen:
            if token.key == self._key and frame.header.sender == token.owner:
                self._beacon_at = now
            if frame.header.flags & wire.Flag.REPEAT and self._is_last_broadcaster():
                self._answer(now)
            return
        self._key = token.key
        self._last_sent = None
        self._heard = now
        self.holding = False
        self.parked = bool(frame.header.flags & wire.Flag.PARKED)
        self._want_s = self._timings.want_s
        self._learn(token)
        if token.owner == self.number and not self.parked:
            self.turns += 1
            self._hold(now)
        else:
            self._act_or_want(now)

    def on_completion(self, now: float) -> None:
        """The kernel has taken the last fragment of a member's contribution."""
        self._act_or_want(now)

    def on_want(self, now: float, frame: wire.Frame) -> None:
        """A member tells its ready samples, or wants the token (a parked one is handed over)."""
        want, sender = frame.body, frame.header.sender
        assert isinstance(want, wire.Want)
        if self.token is None or frame.header.round > self.round or sender == self.number:
            return
        if sender == self.token.owner and not frame.header.flags & wire.Flag.TOKEN_WANTED:
            # The holder lives, though it has nothing to hand on yet. Who wants the token has not got it.
            self._beacon_at = now
        if frame.header.round == self.round and want.ready > self._ready_of.get(sender, 0):
            self._ready_of[sender] = want.ready
            self._publish_need()
        if not (self.holding and self.parked):
            return
        line = self.token.lines[sender - 1]
        if want.read > line.read:
            line.read, line.digest = want.read, want.digest
            self._compare()
        if frame.header.flags & wire.Flag.TOKEN_WANTED:
            self.token.idle = 0
            self._hand_to(now, sender)
        else:
            self._act_or_want(now)

    # ---- time

    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        times = []
        if self._last_sent is not None and not self.exchange.delays_token:
            times.append(self._repeat_at())
        if self.exchange.delays_token and self._others:
            times.append(self._life_at())
        if self._want_at is not None:
            times.append(self._want_at)
        if self._listens():
            times.append(self._silent_at())
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Repeat what nobody seems to have heard (R16), want what does not come, send round what is parked."""
        if self._last_sent is not None and not self.exchange.delays_token:
            if not self._is_last_broadcaster():
                self._last_sent = None  # somebody went on from it
            elif now >= self._repeat_at():
                if self.holding:
                    self._send_round(now)
                else:
                    self._repeat(now)
                    self._repeat_s = min(self._repeat_s * 2, self._timings.repeat_s * _BACKOFF)
        if self.exchange.delays_token and self._others and now >= self._life_at():
            self._beacon_at = now
            self._emit_want(0)  # we wait for our own training program: a sign of life
        if self._listens() and now >= self._silent_at():
            self._tell_silent(now)
        if self._want_at is not None and now >= self._want_at:
            if self.holding or not self._wants():
                self._want_at = None
            elif not self.parked and now < self._heard + self._timings.want_s:
                self._want_at = self._heard + self._timings.want_s  # the ring is busy: it will come
            else:
                self._want(now)

    def _repeat_at(self) -> float:
        """A parked token goes round at intervals; any other is repeated once the ring has fallen silent.

        Fragments put it off, but prove nothing: they may be late ones of the holder before.
        """
        if self.holding:
            return self._last_sent_at + self._timings.beacon_s
        return max(self._last_sent_at, self._heard) + self._repeat_s

    def _life_at(self) -> float:
        """When the holder, busy with its own gradient, must be heard again; its fragments are heard anyway."""
        return max(self._handed_at, self._beacon_at) + self._timings.beacon_s

    def _listens(self) -> bool:
        """Whether somebody else has the token and should be heard of."""
        return (
            not self.holding
            and not self.exchange.delays_token
            and self._silent is not None
            and self._owner != self.number
        )

    def _silent_at(self) -> float:
        """R17: when the holder has been silent for too long, for the k-th member after it.

        It broadcasts, hands on, or announces that it parks.
        """
        rank = self._view.rank_after(self._owner, self.number)
        last = max(self._heard, self._beacon_at, self._handed_at)
        return last + rank * self._patience.seconds

    def _tell_silent(self, now: float) -> None:
        tell, self._silent = self._silent, None
        if tell is not None:
            tell(now, self._owner)

    # ---- repeating and wanting

    def _send_round(self, now: float) -> None:
        """A parked token goes round once: who does not hand it on has left, though nobody waits for it."""
        assert self.token is not None
        self.token.idle = 0
        self._hand_to(now, self._view.next_after(self.number))

    def _is_last_broadcaster(self) -> bool:
        return self._last_sent is not None and self._last_sent.key >= self._seen

    def _answer(self, now: float) -> None:
        """Somebody has not heard our token. If it has just gone out it is on its way: answers to answers, and to
        every copy of a frame, would only grow.
        """
        if now >= self._last_sent_at + self._timings.repeat_s / 4:
            self._repeat(now)

    def _repeat(self, now: float) -> None:
        """R16: the last broadcaster broadcasts again, marked as a repeat."""
        token = self._last_sent
        assert token is not None
        self._last_sent_at = now
        flags = wire.Flag.REPEAT | (wire.Flag.PARKED if self.holding else wire.Flag(0))
        self._emit(Send(token.pack(self._header(flags, token.round))))

    def _wants(self) -> bool:
        """Whether this member would do something with the token."""
        token = self.token
        if token is None:
            return self._offer is not None
        line = self._line()
        if self.round - line.read >= 2 and self._read > line.read:
            return True
        if token.state == wire.TokenState.OPEN:
            if line.settled or self._frozen:
                return False
            return self._passes or (self._offer is not None and self._bank_free(token))
        return not line.complete and not self._held_back()

    def _act_or_want(self, now: float) -> None:
        """Use the parked token if it is here, otherwise see to it that it comes."""
        if self.holding and self.parked:
            token = self.token
            assert token is not None
            if self._wants():
                token.idle = 0
                self._hold(now)
        elif not self.holding and self._wants():
            if self.parked:
                self._want(now)
            elif self._want_at is None:
                self._want_at = now + self._timings.want_s
        else:
            self._want_at = None

    def _emit_want(self, flags: int) -> None:
        body = wire.Want(self._ready, self._read, self._digest)
        self._emit(Send(wire.pack(self._header(flags, self.round), body)))

    def _want(self, now: float) -> None:
        self._emit_want(wire.Flag.TOKEN_WANTED)
        self._want_at = now + self._want_s
        self._want_s = min(self._want_s * 2, self._timings.want_s * _BACKOFF)


__all__ = ["Carried", "KernelState", "Offer", "Ring"]
