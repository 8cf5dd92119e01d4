# SPDX-License-Identifier: Apache-2.0
"""One host's copy of a group's store: docs/collective.md, "A store that all members share".

`now`, frames and calls come in; frames and answers go out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from nicps.errors import NetworkProblem, UsageProblem, WireError
from nicps.session.fields import Message, encode
from nicps.session.store_form import (
    LINES,
    READING,
    WAITING,
    WRITING,
    Answer,
    Ask,
    Base,
    Begin,
    Do,
    Last,
    Line,
    Value,
    Whole,
)
from nicps.store.streams import RETRANSMIT_S, Incoming, Outgoing
from nicps.store.values import Values
from nicps.wire import ScriptStep

MOST_CALLS = 256  # of a host, that wait for their turn or for a key
_PACE_S = 0.002  # between two bursts of a host, for each member of the view


class Piece(NamedTuple):
    """A frame of the view: OUTPUT of this host's stream, or SEEN of that member's."""

    step: ScriptStep
    member: int
    at: int
    tail: bytes = b""


@dataclass(eq=False, slots=True)
class Call:
    """A call of this host. `of`: whatever the caller knows it by. `forgotten`: nobody waits for its answer."""

    of: Any
    ask: Ask
    forgotten: bool = False


@dataclass(slots=True)
class _Turn:
    """The store in one view.

    `bases` of the members whose first line is here. `sequencer`: 0 before it has begun. `whole`: this host's copy is.
    `settled`: bytes of the sequencer's stream that all members have, as far as is known. `under_way`: this host's call
    is with the sequencer. `answers` to calls of this host: where in the sequencer's stream they were given. `owed`:
    members whose streams are to be acknowledged.
    """

    number: int
    own: int
    out: Outgoing
    ins: dict[int, Incoming]
    bases: dict[int, int]
    pace_s: float
    sequencer: int = 0
    whole: bool = False
    settled: int = 0
    under_way: bool = False
    coming: Values = field(default_factory=Values)
    coming_last: dict[int, Answer] = field(default_factory=dict)
    answers: deque[tuple[int, Call, Answer]] = field(default_factory=deque)
    owed: set[int] = field(default_factory=set)
    told: bool = True  # the others, what is settled
    quiet_until: float = 0.0
    asked_at: float = 0.0  # what is settled

    @property
    def orders(self) -> bool:
        """This host is the sequencer."""
        return self.sequencer == self.own

    @property
    def unsettled(self) -> bool:
        """This host has more of the sequencer's stream than it knows to be at all members."""
        return self.sequencer in self.ins and self.ins[self.sequencer].at > self.settled


class Replica:
    """This host's copy, from the group's begin to its end here.

    Args:
        first: random; calls of this host have the numbers after it.
    """

    def __init__(self, first: int) -> None:
        self._number = first
        self._values = Values()
        self._last: dict[int, Answer] = {}  # by member: to its last call that has written something
        self._base = 0
        self._turn: _Turn | None = None
        self._queue: deque[Call] = deque()  # that were not carried out: the first is the next
        self._waiting: list[Call] = []  # that were, and lack a key

    # ---- this host's calls

    def call(self, of: Any, ask: Ask) -> None:
        """A program of this host calls.

        Raises:
            UsageProblem: it cannot be meant.
            NetworkProblem: too many calls wait.
        """
        ask.check()
        if len(self._queue) + len(self._waiting) >= MOST_CALLS:
            raise NetworkProblem(
                f"{MOST_CALLS} calls of this host wait for the store already: wait for fewer keys at once"
            )
        self._number += 1
        self._queue.append(Call(of, replace(ask, number=self._number)))
        self._go_on()

    def forget(self, of: Any) -> None:
        """Nobody waits for that call any more. It may be carried out all the same."""
        self.forget_all(lambda each: bool(each == of))

    def forget_all(self, which: Callable[[Any], bool]) -> None:
        """The same of all calls that the caller knows by such."""
        for call in (*self._queue, *self._waiting):
            call.forgotten |= which(call.of)
        self._waiting = [call for call in self._waiting if not call.forgotten]

    def take_answers(self) -> list[tuple[Any, Answer]]:
        """What can be answered now."""
        turn, found = self._turn, list[tuple[Any, Answer]]()
        if turn is None:
            return found
        while True:
            if turn.orders and turn.out.everywhere > turn.settled:
                turn.settled, turn.told = turn.out.everywhere, not turn.ins
            if not turn.answers or turn.answers[0][0] > turn.settled:
                return found
            _, call, answer = turn.answers.popleft()
            if self._queue and self._queue[0] is call:
                self._queue.popleft()
                turn.under_way = False
                self._go_on()
            elif call in self._waiting:
                self._waiting.remove(call)
            if not call.forgotten:
                found.append((call.of, answer))

    def _go_on(self) -> None:
        """Give the next call of this host to the sequencer."""
        turn = self._turn
        while turn is not None and turn.whole and not turn.under_way and self._queue:
            turn.under_way = True
            ask = self._queue[0].ask
            if turn.orders:
                self._order(turn, turn.own, ask)
            else:
                turn.out.put(_line(ask))

    # ---- views

    def enter(self, now: float, number: int, own: int, live: Collection[int]) -> None:
        """A view is in force: `own` is this member's number."""
        others = [k for k in live if k != own]
        self._turn = turn = _Turn(
            number,
            own,
            Outgoing(now, others),
            {k: Incoming() for k in others},
            {own: self._base},
            _PACE_S * len(live),
        )
        turn.out.put(_line(Base(self._base)))
        self._begin(turn)  # alone

    def _begin(self, turn: _Turn) -> None:
        """Once the bases of all are known here: the store goes on with this host's copy if that is the one."""
        highest = max(turn.bases.values())
        first = min(k for k, base in turn.bases.items() if base == highest)
        if len(turn.bases) <= len(turn.ins) or first != turn.own:
            return
        turn.sequencer = turn.own
        turn.out.put(_line(Begin()))
        for each in self._values.lines():
            turn.out.put(_line(each))
        for member, answer in self._last.items():
            if member == turn.own or member in turn.ins:
                turn.out.put(_line(Last(member, answer)))
        turn.out.put(_line(Whole()))
        self._have_whole(turn, turn.out.end)

    def _have_whole(self, turn: _Turn, at: int) -> None:
        """This host's copy is complete; what it waits for may be in it."""
        self._base, turn.whole = turn.number, True
        last = self._last.get(turn.own)
        if self._queue and last is not None and last.number == self._queue[0].ask.number:
            turn.under_way = True
            turn.answers.append((at, self._queue[0], last))
        self._answer_waiting(turn, at)
        self._go_on()

    # ---- frames

    def take(self, now: float, sender: int, piece: Piece) -> None:
        """A frame of the view, of that member.

        Raises:
            WireError: it cannot be meant.
        """
        turn = self._turn
        if turn is None or sender not in turn.ins:
            return
        if piece.step == ScriptStep.SEEN:
            self._note_seen(turn, now, sender, piece)
        elif piece.step == ScriptStep.OUTPUT and piece.member == sender:
            turn.owed.add(sender)
            turn.ins[sender].take(piece.at, piece.tail)
            self._read(turn, sender)

    def _note_seen(self, turn: _Turn, now: float, sender: int, piece: Piece) -> None:
        if piece.member == turn.own:
            news = turn.out.acknowledge(now, sender, piece.at)
            if turn.orders and not news and piece.at <= turn.settled:
                turn.told = False  # it asks what is settled
        elif sender == piece.member:  # only the sequencer says that
            turn.settled = max(turn.settled, min(piece.at, turn.ins[sender].at))

    def _read(self, turn: _Turn, member: int) -> None:
        """Take the lines that are whole. Where one cannot be meant this host has no copy before the next view."""
        source = turn.ins[member]
        try:
            while (data := source.next_line()) is not None:
                line = LINES.decode(orjson.loads(data))
                if isinstance(line, Do | Ask):
                    (line.ask if isinstance(line, Do) else line).check()
                self._take_line(turn, member, line, source.read_to)
        except (orjson.JSONDecodeError, UsageProblem, WireError, AttributeError) as error:
            self._turn = None
            raise WireError(f"a line of a group's store: {error}") from None

    def _take_line(self, turn: _Turn, member: int, line: Line, at: int) -> None:
        orders = member == turn.sequencer
        match line:
            case Base() if member not in turn.bases:
                turn.bases[member] = line.base
                if not turn.sequencer:
                    self._begin(turn)
            case Begin() if not turn.sequencer:
                turn.sequencer = member
                turn.out.hear_only(member)
            case Value() if orders and not turn.whole:
                turn.coming.put(line.key, line.value)
            case Last() if orders and not turn.whole:
                turn.coming_last[line.member] = line.answer
            case Whole() if orders and not turn.whole:
                self._values, self._last = turn.coming, turn.coming_last
                self._have_whole(turn, at)
            case Do() if orders and turn.whole:
                self._carry_out(turn, line.member, line.ask, at)
                self._go_on()
            case Ask() if turn.orders:
                self._order(turn, member, line)
            case Ask():
                pass  # it is the sequencer's to take
            case _:
                raise WireError(f"{line.op!r} in the wrong place")

    # ---- calls in order

    def _order(self, turn: _Turn, member: int, ask: Ask) -> None:
        """The sequencer's: this call is the next one."""
        turn.out.put(_line(Do(member, ask)))
        self._carry_out(turn, member, ask, turn.out.end)

    def _carry_out(self, turn: _Turn, member: int, ask: Ask, at: int) -> None:
        answer = self._values.carry_out(ask)
        if ask.what in WRITING and answer is not None:
            self._last[member] = answer
        if member == turn.own and self._queue and self._queue[0].ask.number == ask.number:
            if answer is not None:
                turn.answers.append((at, self._queue[0], answer))
            else:
                call = self._queue.popleft()
                turn.under_way = False
                if not call.forgotten:
                    self._waiting.append(call)
        if ask.what not in READING:
            self._answer_waiting(turn, at)

    def _answer_waiting(self, turn: _Turn, at: int) -> None:
        """Answer the calls of this host that wait for keys, where those are there now."""
        answered = {id(call) for _, call, _ in turn.answers}
        for call in self._waiting:
            assert call.ask.what in WAITING
            if id(call) not in answered and (answer := self._values.carry_out(call.ask)):
                turn.answers.append((at, call, answer))

    # ---- time

    def due(self, now: float) -> list[Piece]:
        """Frames that are sent now, once `take_answers` has seen what is settled."""
        turn, pieces = self._turn, list[Piece]()
        if turn is None:
            return pieces
        if now >= turn.quiet_until and (output := turn.out.due(now)):
            pieces += [Piece(ScriptStep.OUTPUT, turn.own, at, tail) for at, tail in output]
            turn.quiet_until = now + turn.pace_s
        if turn.unsettled and now >= turn.asked_at + RETRANSMIT_S:
            turn.owed.add(turn.sequencer)
        for member in sorted(turn.owed):
            pieces.append(Piece(ScriptStep.SEEN, member, turn.ins[member].at))
            if member == turn.sequencer:
                turn.asked_at = now
        turn.owed.clear()
        if not turn.told:
            turn.told = True
            pieces.append(Piece(ScriptStep.SEEN, turn.own, turn.settled))
        return pieces

    def due_at(self, now: float) -> float | None:
        """When `due` has something, if no frame comes before; None: never."""
        turn = self._turn
        if turn is None:
            return None
        if turn.owed or not turn.told:
            return now
        times = [turn.asked_at + RETRANSMIT_S] if turn.unsettled else []
        if (at := turn.out.due_at(now)) is not None:
            times.append(max(turn.quiet_until, at))
        return min(times, default=None)


def _line(message: Message) -> bytes:
    return orjson.dumps(encode(message))
