# SPDX-License-Identifier: Apache-2.0
"""One member's part in the ring: the token (R9, R10, R16) and the round that closes in two turns (R11 to R13).

A round is open while gradients may still join. The holder who sees the quorum closes the list; in that turn each
member marks itself complete or asks for what it lacks, and senders repair. Who finds all marked commits: the token
goes on with the next round's number and carries the last list, so that the next turn tells everybody, also who
missed the frame. See docs/protocol.md, "A round".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.actions import (
    Action,
    Closed,
    Committed,
    Differs,
    Need,
    Receiver,
    Send,
    SendFragments,
)
from nicps.protocol.phase import Patience, Phase, Timings
from nicps.protocol.token import Line, TokenState
from nicps.protocol.view import View

_BACKOFF = 10.0  # a repeat's interval grows to this many times its first value


@dataclass(frozen=True, slots=True)
class Offer:
    """A gradient that waits for the token. `unit` is not None if it does not fit and asks for a larger one."""

    samples: int
    unit: int | None = None


@dataclass(frozen=True, slots=True)
class Carried:
    """What a member takes along from its ring in one view to that in the next.

    `offer` is its gradient of the open round, counted or not, that it still holds; `passes`: it has dropped it, as the
    round closed without it. `read` and `digest` are of the last round that its training program has applied.
    """

    round: int
    unit: int
    read: int
    digest: int = 0
    offer: Offer | None = None
    ready: int = 0
    passes: bool = False
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class KernelState:
    """What the XDP program must know to act for this member (`struct nicps_config`)."""

    round: int
    round_low: int
    round_high: int
    fragments: int
    sent_seen: int
    own_sent: int
    bounce: bool


class Ring:
    """The state machine of one phase at one member.

    Args:
        header: makes this node's next frame header from (flags, round).
        emit: takes an action.
        silent: told, once, the number of a member that should be heard and is not (R17).
        carried: from the view before, where the phase goes on.
    """

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        receiver: Receiver,
        timings: Timings,
        patience: Patience,
        header: Callable[[int, int], wire.Header],
        emit: Callable[[Action], None],
        silent: Callable[[float, int], None],
        carried: Carried | None = None,
        now: float = 0.0,
    ) -> None:
        carried = carried or Carried(phase.first_round, phase.unit, phase.first_round - 1)
        self.phase = phase
        self.number = number
        self.round = carried.round
        self.unit = carried.unit  # of the open round
        self.token: TokenState | None = None  # the latest that was seen
        self.holding = False
        self.parked = False
        self.turns = 0  # times that this member had the token
        self._view = view
        self._others = len(view.live) > 1
        self._receiver = receiver
        self._timings = timings
        self._patience = patience
        self._header = header
        self._emit = emit
        self._silent: Callable[[float, int], None] | None = silent
        self._key = (phase.generation, 0)  # newest token that this machine has handled or sent
        self._seen = self._key  # newest that the kernel has seen
        self._offer = carried.offer
        self._held = carried.offer  # what this member has to give to the open round, or has given
        self._passes = carried.passes
        self._own_sent = 0
        self._ready = carried.ready
        self._ready_of: dict[int, int] = {}  # from WANT frames
        self._read = carried.read
        self._digest = carried.digest
        self._compared = 0  # round whose digests have been found to differ
        self._closed = 0  # round whose closing without us has been told
        self._complete = False
        self._frozen = False
        self._undecided = carried.undecided
        self._last_sent: TokenState | None = None
        self._last_sent_at = 0.0
        self._handed_at = 0.0  # when this member gave the token away
        self._beacon_at = 0.0  # when the parked token was announced last
        self._repeat_s = timings.repeat_s
        self._sending = 0  # SendFragments that the kernel has not taken yet
        self._heard = now
        self._want_at: float | None = None
        self._want_s = timings.want_s
        self._need = 0

    # ---- what the agent and the node tell it

    def create(self, now: float) -> None:
        """R9: the lead makes the token, once everybody has acknowledged the phase or the view.

        Each member tells in its first turn what it has read out; until then all that is known is what the round's
        being open says.
        """
        known = self.round - 3 if self.round > self.phase.first_round else self.round - 1
        lines = [Line(read=known) for _ in self._view.members]
        self.token = TokenState.create(
            self.phase.generation, self.number, self.round, self.unit, lines
        )
        self._hold(now)

    @property
    def complete(self) -> bool:
        """This member has every fragment of the open round's closed list, and has said so."""
        return self._complete

    def carry(self) -> Carried:
        """What goes along into the next view. Nothing is counted that the next one does not count again."""
        passes = self._closed == self.round and self._held is None
        return Carried(
            self.round,
            self.unit,
            self._read,
            self._digest,
            self._held,
            self._ready,
            passes or self._passes,
            self._undecided,
        )

    def unit_of(self, round_: int) -> int:
        """log2 of the unit of the open round, or of the next one, which follows from the closed list."""
        if round_ <= self.round or self.token is None:
            return self.unit
        return max(self.unit, *(line.unit for line in self.token.lines))

    def settle(self) -> None:
        """The survivors of a view all have the open round: it is committed (R18)."""
        assert self.token is not None and self._complete
        self.token.commit()
        self._committed(self.token)

    def offer(self, now: float, round_: int, samples: int, unit: int | None = None) -> None:
        """A gradient of `round_` is ready; `unit` asks for a larger one instead of sending it."""
        if round_ != self.round or self._line().settled:
            return
        self._offer = self._held = Offer(samples, unit)
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
        self._sending -= 1
        self._last_sent_at = self._handed_at = now

    def freeze(self) -> None:
        """A new phase or view is coming: contribute and close nothing more, but keep passing the token."""
        self._frozen = True

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
                self._repeat(now)
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
        if sender == self.token.owner:
            self._beacon_at = now  # the holder lives, though it has nothing to hand on yet
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
        if self._last_sent is not None and not self._sending:
            times.append(self._repeat_at())
        if self._sending and self._others:
            times.append(self._life_at())
        if self._want_at is not None:
            times.append(self._want_at)
        if self._listens():
            times.append(self._silent_at())
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Repeat what nobody seems to have heard (R16), want what does not come, send round what is parked."""
        if self._last_sent is not None and not self._sending:
            if not self._is_last_broadcaster():
                self._last_sent = None  # somebody went on from it
            elif now >= self._repeat_at():
                if self.holding:
                    self._send_round(now)
                else:
                    self._repeat(now)
                    self._repeat_s = min(self._repeat_s * 2, self._timings.repeat_s * _BACKOFF)
        if self._sending and self._others and now >= self._life_at():
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

    # ---- the machine itself

    @property
    def kernel(self) -> KernelState:
        """What the XDP program must know now."""
        token = self.token
        quiet = (
            token is not None
            and not self.holding
            and token.state == wire.TokenState.OPEN
            and self._offer is None
            and not self._passes
            and self._line().read == self._read
            and (not token.counted or self._line().ready == self._ready or self._line().settled)
        )
        return KernelState(
            round=self.round,
            round_low=self.round,
            round_high=self.round + (1 if self._complete else 0),
            fragments=self.phase.fragments_in(self.round),
            sent_seen=token.sent if token is not None else 0,
            own_sent=self._own_sent,
            bounce=quiet and not self._frozen,
        )

    def _line(self) -> Line:
        return self.token.lines[self.number - 1] if self.token is not None else _NO_LINE

    def _learn(self, token: TokenState) -> None:
        """Take over what a newer token says."""
        if token.round == self.round + 1:
            self._committed(token)
        self.token = token
        self._compare()
        line = self._line()
        if token.state == wire.TokenState.CLOSING and not line.settled:
            self._close_without_us()
        self._publish_need()

    def _compare(self) -> None:
        """Whether all members hold the same weights after the round committed last, once all have told."""
        token, round_ = self.token, self.round - 1
        assert token is not None
        told = {
            k: token.lines[k - 1].digest
            for k in self._view.order
            if token.lines[k - 1].read == round_ and token.lines[k - 1].digest
        }
        counted = {k for k in self._view.order if self.phase.shares[k - 1]}
        if self._compared == round_ or len(set(told.values())) < 2 or not counted <= told.keys():
            return
        self._compared = round_
        digests = sorted(told.values())
        most = max(digests, key=digests.count)
        tie = 2 * digests.count(most) <= len(digests)
        different = frozenset() if tie else frozenset(k for k in told if told[k] != most)
        self._emit(Differs(round_, different))

    def _close_without_us(self) -> None:
        self._offer = self._held = None
        if self._closed != self.round:
            self._closed = self.round
            self._emit(Closed(self.round))

    def _committed(self, token: TokenState) -> None:
        counted = {k: e.samples_before for k, e in enumerate(token.lines, 1) if e.samples_before}
        self._emit(Committed(self.round, counted, token.unit_before, token.unit))
        self.round = token.round
        self.unit = token.unit
        self._offer = self._held = None
        self._passes = False
        self._own_sent = 0
        self._ready = 0
        self._ready_of = {}
        self._complete = False
        self._need = 0
        # R14: before the lead has decided on a round, the next one must not be committed, whatever comes in first.
        lead = self.number == self._view.lead
        self._undecided = lead and self.phase.kind is wire.PhaseKind.TRAIN

    def _hold(self, now: float) -> None:
        """Everything that the holder does, until there is nothing left; then hand on or park."""
        token = self.token
        assert token is not None
        self.holding, self.parked = True, False
        self._want_at = None
        while self._duties(token):
            token.idle = 0
            if self._others:
                self._hand_to(now, self._view.next_after(self.number))
                return
        token.idle = min(token.idle + 1, len(self._view.live))
        if token.idle >= len(self._view.live):
            self._hand_to(now, self.number)
        else:
            self._hand_to(now, self._view.next_after(self.number))

    def _duties(self, token: TokenState) -> bool:
        """One pass over what this member can do with the token; whether anything changed."""
        line = token.lines[self.number - 1]
        changed = self._repair(token)
        if token.state == wire.TokenState.OPEN and not self._frozen:
            changed |= self._contribute(token, line)
            if token.quorum_reached(self.phase):
                token.state = wire.TokenState.CLOSING
                changed = True
                if not line.settled:
                    self._close_without_us()
        if not line.settled:
            line.ready = self._ready
        if line.read != self._read:
            line.read, line.digest = self._read, self._digest
            changed = True
            self._compare()
        for number, ready in self._ready_of.items():
            other = token.lines[number - 1]
            if not other.settled:
                other.ready = max(other.ready, ready)
        asked = len(token.ranges)
        lacking = self._frozen or self._ask(token)  # the open round of a frozen ring is dropped
        changed |= len(token.ranges) > asked
        if token.state == wire.TokenState.CLOSING and not lacking and not self._held_back():
            if not line.complete:
                line.marks |= wire.Mark.COMPLETE
                self._complete = True
                changed = True
            if all(token.lines[k - 1].complete for k in self._view.order):
                token.commit()
                self._committed(token)
                changed = True
        self._publish_need()
        return changed

    def _held_back(self) -> bool:
        return self._undecided or self._frozen

    def _repair(self, token: TokenState) -> bool:
        """Send again what others lack, before anything new; only the sender repairs."""
        end = self.phase.fragments_in(self.round)
        mine = tuple(
            (f, min(c, end - f)) for s, f, c in token.ranges if s == self.number and f < end
        )
        if not mine:
            return False
        token.ranges = [r for r in token.ranges if r[0] != self.number]
        self._send_fragments(self._line().samples, mine, repair=True)
        return True

    def _contribute(self, token: TokenState, line: Line) -> bool:
        """Broadcast the gradient (R10), unless somebody has yet to read the bank that it goes to."""
        offer = self._offer
        if self._passes and not line.settled:
            line.marks |= wire.Mark.SKIPPED
            line.ready = 0
            return True
        if offer is None or line.settled or not self._bank_free(token):
            return False
        self._offer = None
        line.ready = 0
        if offer.unit is not None:
            line.marks |= wire.Mark.SKIPPED
            line.unit = offer.unit
            return True
        fragments = self.phase.fragments_in(self.round)
        line.samples = offer.samples
        line.marks |= wire.Mark.CONTRIBUTED
        token.sent += fragments
        self._own_sent = fragments
        self._send_fragments(offer.samples, ((0, fragments),), repair=False)
        return True

    def _bank_free(self, token: TokenState) -> bool:
        return all(token.lines[k - 1].read >= self.round - 2 for k in self._view.order)

    def _send_fragments(
        self, samples: int, ranges: tuple[tuple[int, int], ...], *, repair: bool
    ) -> None:
        if self._others:
            self._sending += 1
            view, generation = self._view.number, self.phase.generation
            self._emit(SendFragments(view, generation, self.round, samples, ranges, repair))

    def _ask(self, token: TokenState) -> bool:
        """Write what this member lacks into the token; whether it lacks anything."""
        room = wire.max_ranges(len(token.lines)) - len(token.ranges)
        fragments = self.phase.fragments_in(self.round)
        asked = set(token.ranges)
        lacking = False
        for number, line in enumerate(token.lines, 1):
            if number == self.number or not line.contributed:
                continue
            if self._receiver.count(self.round, self._view.number, number) >= fragments:
                continue
            lacking = True
            for first, count in self._receiver.missing(
                self.round, self._view.number, number, fragments, max(room, 0)
            ):
                wanted = (number, first, min(count, 0xFFFF))
                if room > 0 and wanted not in asked:
                    token.ranges.append(wanted)
                    room -= 1
        return lacking

    # ---- handing on, wanting, repeating

    def _hand_to(self, now: float, owner: int) -> None:
        """Broadcast the token for its next owner; for ourselves, that is parking it."""
        token = self.token
        assert token is not None
        token.owner = owner
        token.hop += 1
        self._key = token.key
        self.holding = self.parked = owner == self.number
        self._repeat_s = self._timings.repeat_s
        self._sent_token(now, token)
        if self._others:
            flags = wire.Flag.PARKED if self.parked else wire.Flag(0)
            self._emit(Send(token.pack(self._header(flags, token.round))))

    def _sent_token(self, now: float, token: TokenState) -> None:
        self.token = token
        self._last_sent = token if self._others else None
        self._last_sent_at = self._handed_at = now

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

    @property
    def _owner(self) -> int:
        """Who has the token, or will make it."""
        return self.token.owner if self.token is not None else self._view.lead

    def _listens(self) -> bool:
        """Whether somebody else has the token and should be heard of."""
        return (
            not self.holding
            and not self._sending
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

    def _send_round(self, now: float) -> None:
        """A parked token goes round once: who does not hand it on has left, though nobody waits for it."""
        assert self.token is not None
        self.token.idle = 0
        self._hand_to(now, self._view.next_after(self.number))

    def _is_last_broadcaster(self) -> bool:
        return self._last_sent is not None and self._last_sent.key >= self._seen

    def _repeat(self, now: float) -> None:
        """R16: the last broadcaster broadcasts again, marked as a repeat."""
        token = self._last_sent
        assert token is not None
        self._last_sent_at = now
        flags = wire.Flag.REPEAT | (wire.Flag.PARKED if self.holding else wire.Flag(0))
        self._emit(Send(token.pack(self._header(flags, token.round))))

    @property
    def frozen(self) -> bool:
        """A decision has been heard, and the phase is about to end."""
        return self._frozen

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

    def _publish_need(self) -> None:
        """Tell the trainer how many samples are still enough (R13)."""
        token = self.token
        if token is None or self._line().settled:
            return
        others = sum(
            max(line.ready, self._ready_of.get(number, 0))
            for number, line in enumerate(token.lines, 1)
            if number != self.number and not line.settled
        )
        need = self.phase.quorum - token.counted - others
        if token.counted and need != self._need:
            self._need = need
            self._emit(Need(self.round, need))


_NO_LINE = Line()
