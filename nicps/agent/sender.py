# SPDX-License-Identifier: Apache-2.0
"""The frames that leave this host, in order: small frames, and contributions in batches of fragments."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from nicps import wire
from nicps.agent.priorities import Line, Priorities
from nicps.agent.served_frames import ServedFrames
from nicps.agent.striped import StripeFrames, header_dtype
from nicps.dataplane import DataPlane
from nicps.dataplane.txring import TxRing
from nicps.errors import InterfaceDown, InterfaceUnfit, JobFailed
from nicps.protocol import Member, SendFragments, SendServed
from nicps.protocol.phase import Phase
from nicps.session.lanes import U8

BATCH = 256  # frames for one system call
_TURN = 2048  # frames before the loop turns to other work (25 ms at 1 Gbit/s)


class Source(Protocol):
    """The payload of a contribution: the trainer's memory, or a file."""

    def available(self, round_: int) -> int:
        """Fragments that are ready to be sent, from the first on."""

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """uint8 (count, 1440) and the shifts, or in stripes the exponents: uint8 (count,) or one for all."""

    def sending(self, round_: int) -> None:
        """The first fragments are with the kernel."""

    def awaited(self, yes: bool) -> None:
        """This host has the token and waits for more fragments; or it has all that it needs."""


@dataclass(frozen=True, slots=True)
class _Small:
    data: bytes
    sent: Callable[[], None] | None


@dataclass(slots=True)
class _Bulk:
    action: SendFragments | SendServed
    phase: Phase
    source: Source
    template: U8
    ranges: deque[tuple[int, int]] = field(default_factory=deque)
    started: float = 0.0

    @property
    def down(self) -> bool:
        """Of each range the last fragment goes first."""
        return isinstance(self.action, SendServed) and self.action.down

    @property
    def asks(self) -> bool:
        """They are questions, which hold nothing of this host's."""
        action = self.action
        if isinstance(action, SendServed):
            return action.type is wire.FrameType.PULL
        return action.asks


def _delays_token(item: _Small | _Bulk) -> bool:
    """Whether a token that is queued now leaves after this."""
    if isinstance(item, _Small):
        return True
    return isinstance(item.action, SendFragments) and item.action.exchange.token_waits


def _check_shifts(shifts: U8, bulk: _Bulk, first: int) -> None:
    """Refuse a shift that is too large. No kernel takes such a fragment, and it would be sent again for ever.

    Args:
        shifts: copies of those that are sent, since the training program can still write to its own.

    Raises:
        JobFailed: one of them is too large.
    """
    assert isinstance(bulk.action, SendFragments)
    most = 0 if bulk.action.exchange.shared_step else wire.MAX_SHIFT[bulk.phase.width]
    if shifts.max() > most:
        at = int(shifts.argmax())
        raise JobFailed(
            f"fragment {first + at} of round {bulk.action.round} has a shift of {shifts[at]}, and at most {most} can"
            " be added: the training program has written over its contribution"
        )


class Sender:
    """The queues in front of the data plane: tokens and fragments of a channel in order, other frames before them.

    Args:
        header: makes the next frame header from (flags, round); `take_sequence` reserves further sequence numbers.
        sent: called when a `SendFragments` is with the kernel, with its start time; None: it is not needed any more.
        members: the list of the view in force.
        batch: as many frames of a channel may wait in this host's queues while something more urgent is open; 0: any
            number.
        is_over: nobody waits for these any more. In stripes they are not sent then: other lanes may be in their place.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        header: Callable[[int, int], wire.Header],
        take_sequence: Callable[[int], int],
        sent: Callable[[SendFragments, float | None], None],
        members: Callable[[], Sequence[Member]] = tuple,
        batch: Callable[[int], int] = lambda channel: 0,
        is_over: Callable[[SendFragments], bool] = lambda action: False,
    ) -> None:
        self._dataplane = dataplane
        self._header = header
        self._take_sequence = take_sequence
        self._sent = sent
        self._batch, self._is_over = batch, is_over
        self.lines: Priorities[_Small | _Bulk] = Priorities(dataplane)
        self._control: deque[_Small] = deque()
        self._dtype = header_dtype(wire.Fragment)
        self._rows = np.zeros((BATCH, self._dtype.itemsize), np.uint8)
        self._records = self._rows.view(self._dtype).reshape(BATCH)
        self._stripes = StripeFrames(BATCH, members)
        self._served = ServedFrames(BATCH, members)
        self.fragments = 0  # sent, repairs included
        self.again = 0  # repairs
        self.small = 0  # other frames sent
        #: The interface's queue is full, or has its share of bulk: try again soon.
        self.refused = False
        self.more = False  # there was a pause only for the loop's sake: go on at once
        self.down = False  # the interface refused a frame, which is lost
        self.queued = False  # frames, since the last `pump`
        self.muted = False  # the interface cannot be used: nothing is sent, all is lost
        self.waits = False  # for more of a contribution, which all members wait for

    def frame(self, data: bytes, sent: Callable[[], None] | None = None) -> None:
        """Queue one small frame; `sent` is called when it has gone.

        A token stays behind the tokens that are queued before it, and behind fragments whose exchange has it so. All
        other frames are sent first.
        """
        self.queued = True
        queue = self.lines.first.queue
        waits = data[1] == wire.FrameType.TOKEN and any(map(_delays_token, queue))
        if waits:
            queue.append(_Small(data, sent))
        else:
            self._control.append(_Small(data, sent))

    def fragments_of(self, action: SendFragments, phase: Phase, source: Source) -> None:
        """Queue (part of) a contribution.

        Raises:
            OSError: it is the first of its channel, and there is no room for a ring.
        """
        header = self._header(action.flags, action.round)
        total, width = phase.fragments_in(action.round, action.channel), phase.width
        if action.striped is not None:
            total = action.striped.fragments or total
            width = action.striped.width or width
            template = self._stripes.template(header, action.striped, total, width)
        else:
            lanes = wire.lanes_per_fragment(width)
            body = wire.Fragment(0, total, lanes, width, 0, action.samples)
            frame = wire.pack(header, body, tail=bytes(wire.PAYLOAD_BYTES))
            template = np.frombuffer(frame[: self._dtype.itemsize], np.uint8)
        urgency = phase.channels[action.channel].urgency if phase.channels else 0
        line, self.queued = self.lines.of(action.channel, urgency), True
        line.queue.append(_Bulk(action, phase, source, template, deque(action.ranges)))

    def served_of(self, action: SendServed, phase: Phase, source: Source) -> None:
        """Queue (part of) a step, or questions for parameters. A channel's number is its urgency.

        Raises:
            OSError: it is the first of its channel, and there is no room for a ring.
        """
        header = self._header(wire.channel_flags(action.channel), action.round)
        template = self._served.template(header, action, phase)
        line, self.queued = self.lines.of(action.channel, urgency=action.channel), True
        line.queue.append(_Bulk(action, phase, source, template, deque(action.ranges)))

    def takes_answer(self, frame: bytes) -> bool:
        """Whether a LACKING frame answers an open question, for the first time."""
        return self._stripes.takes_answer(frame)

    def drop_fragments(self) -> list[SendFragments]:
        """Remove contributions from the queue, or the parts that have not been sent; return them."""
        dropped: list[_Bulk] = []
        for line in self.lines.order:
            dropped += [item for item in line.queue if isinstance(item, _Bulk)]
            line.queue = deque(item for item in line.queue if isinstance(item, _Small))
        self.waits = False
        for item in dropped:
            item.source.awaited(False)
        return [item.action for item in dropped if isinstance(item.action, SendFragments)]

    def pump(self, now: float) -> None:
        """Send as much as the kernel takes and the sources have: what is more urgent first."""
        for line in self.lines.order:
            line.begin()
        self.refused = self.more = self.waits = self.down = self.queued = False
        while True:
            if self._control:
                if not self._send_small(self._control[0]) and not self._is_lost(
                    self.lines.first, now
                ):
                    return
                self._control.popleft()
                continue
            line_ = self.lines.next()
            if line_ is None:
                return
            self._pump_next(line_, now)
            if self.more:
                return

    def _pump_next(self, line: Line[_Small | _Bulk], now: float) -> None:
        """Send the next of that line, or as much of it as can be sent."""
        item = line.queue[0]
        if isinstance(item, _Small):
            line.stopped = not self._send_small(item) and not self._is_lost(line, now)
        else:
            item.started, over = item.started or now, self._is_useless(item)
            try:
                taken = self.muted or over or self._pump_bulk(item, line)
                line.stopped = not taken and not self._is_lost(line, now)
            except (InterfaceDown, InterfaceUnfit):
                self.down = True  # others ask for what they lack, if they know of it
            if not line.stopped:
                item.source.awaited(False)
                if isinstance(item.action, SendFragments):
                    self._sent(item.action, None if over else item.started)
        if not line.stopped:
            line.queue.popleft()

    def _is_useless(self, bulk: _Bulk) -> bool:
        action = bulk.action
        if isinstance(action, SendServed) or action.striped is None:
            return False
        return self._is_over(action)

    def _is_lost(self, line: Line[_Small | _Bulk], now: float) -> bool:
        """`Line.is_lost`; if not, the frame is tried again soon."""
        lost = line.is_lost(now)
        self.refused |= line.refused
        return lost

    def _send_small(self, item: _Small) -> bool:
        try:
            if not self.muted and not self._dataplane.send(item.data):
                self.lines.first.refused = True
                return False
        except (InterfaceDown, InterfaceUnfit):
            self.down = True
        self.small += 1
        if item.sent is not None:
            item.sent()
        return True

    def _pump_bulk(self, bulk: _Bulk, line: Line[_Small | _Bulk]) -> bool:
        """Whether all of it is with the kernel."""
        tx, round_ = line.ring, bulk.action.round
        available, flushed = bulk.source.available(round_), False
        before = line.fragments
        most = self._most(bulk, line)
        while bulk.ranges:
            if line.fragments >= before + _TURN:
                self.more = True
                return False
            first, left = bulk.ranges[0]
            count = min(left, available - first, BATCH)
            if count <= 0:
                tx.flush()
                self.waits = True
                bulk.source.awaited(True)
                return False  # the source rings when it has more
            if most:
                count = min(count, most - tx.pending())
                if count <= 0:
                    tx.flush()
                    self.refused = True
                    return False
            count = min(count, tx.free())
            if count <= 0:
                tx.flush()
                if tx.free() <= 0:
                    line.blocked = True
                    line.refused = tx.unsent() > 0
                    return False
                continue
            taken = self._push(bulk, tx, first + left - count if bulk.down else first, count)
            tx.flush()
            flushed = True
            absolute = isinstance(bulk.action, SendServed) or bulk.action.striped is not None
            if not bulk.action.repair and (first == 0 or absolute):
                bulk.source.sending(round_)
            line.fragments += taken
            self.fragments += taken
            self.again += taken if bulk.action.repair and not bulk.asks else 0
            if taken < left:
                bulk.ranges[0] = (first if bulk.down else first + taken, left - taken)
            else:
                bulk.ranges.popleft()
        if not flushed:  # all is in the ring, and the interface has refused some of it before
            tx.flush()
        line.refused = tx.unsent() > 0
        return not line.refused

    def _most(self, bulk: _Bulk, line: Line[_Small | _Bulk]) -> int:
        """As many frames may wait in its ring, where they could not be overtaken any more; 0: any number."""
        action = bulk.action
        if isinstance(action, SendServed) or not bulk.phase.channels:
            return 0
        return self._batch(action.channel)

    def _push(self, bulk: _Bulk, tx: TxRing, first: int, count: int) -> int:
        """Put at most so many fragments into the ring; return the number that it took."""
        payload, scale = bulk.source.payload(bulk.action.round, first, count)
        sequence = self._take_sequence(count)
        if isinstance(bulk.action, SendServed):
            if bulk.down:  # a step's fragments: each has an exponent of its own
                payload, scale = payload[::-1], np.asarray(scale)[::-1]
            addressed = self._served.fill(bulk.action, bulk.template, first, count, scale, sequence)
            return tx.push(addressed[0], payload, addressed[1])
        if bulk.action.striped is not None:
            striped = bulk.action.striped
            whose = striped, striped.width or bulk.phase.width, bulk.template
            rows, to = self._stripes.fill(*whose, first, count, scale, sequence)
            return tx.push(rows, payload, to)
        rows, records = self._rows[:count], self._records[:count]
        rows[:] = bulk.template
        records["index"] = np.arange(first, first + count, dtype=np.uint32)
        records["shift"] = scale
        _check_shifts(records["shift"], bulk, first)
        records["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint32)
        return tx.push(rows, payload)
