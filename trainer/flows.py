# SPDX-License-Identifier: Apache-2.0
"""A member's gradient by a plan: parts on several channels, which go out while backward makes those after them.

The front layers, which the next forward pass needs first, are on the most urgent channel (docs/channels.md).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nicps.client import Phase, Session
from nicps.collective.lanes import PER_FRAGMENT
from nicps.errors import JobFailed, NonFinite
from nicps.flows import ChannelPlan, Flows, Part, Times, plan_of
from nicps.need_first import MOST_ROUNDS, Line, Plan, Timing, cut, equal_shares
from nicps.steps import StepEnded
from trainer import weights
from trainer.errors import JobError
from trainer.exchanger import Exchanged

if TYPE_CHECKING:
    from trainer.flat import F32, FlatModel

_MB = 1 << 20
#: Numbers of all rounds that are open at a time, where `bucket_mb` is not set: this part of the vector, and so many at
#: least.
_OPEN_PART, _LEAST_OPEN = 1 / 4, 5 * _MB // 4


@dataclass(slots=True)
class Piece:
    """What one round brings. `missing`: parameters in it, or partly so; `here`, its place in the vector."""

    channel: int
    here: slice
    missing: int = 0


class Unit(NamedTuple):
    """What is updated at once: parameters, by their place in the layout, whose means come in the same pieces.

    Those of no parameter are the averaged buffers. `pieces`: their places in `Parts.pieces`.
    """

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(slots=True)
class _Line:
    """Pieces that go out one after the other. `passed`: so many have."""

    pieces: list[Piece]
    passed: int = 0


class Parts:
    """The plan of a step: the vector in rounds, on channels, the front-most parameters on the most urgent one.

    Attributes: `channels`, their pieces, by channel from the bulk one on, each from the rear layers to the front;
    averaged buffers are the last piece of the most urgent one. `pieces`, all of them in the order in which backward
    makes them. `pieces_of` each parameter that is trained, by their places in `pieces`, and their `names` and `sizes`.
    `residual`, float32 (lanes,), what rounding has left over at this member; `width` of the lanes, in bits. Any plan of
    this model has at `most`, and at `least`, so many rounds of parameters.

    Args:
        layout: of the vector, parameters first, in the order in which the forward pass needs them.
        channels: at most so many.
        lane: the job's setting.
        megabytes: of all rounds that are open at a time, in float32; None: a quarter of the vector.
        cuts: with how many parameters before it a less urgent channel begins, rising. Default: equal shares by bytes.
    """

    def __init__(
        self,
        layout: weights.Layout,
        channels: int,
        lane: str,
        megabytes: float | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        self.width = int(lane.removeprefix("i"))
        parameters = [entry for entry in layout if entry["kind"] == "parameter"]
        self.sizes = tuple(weights.size(entry) for entry in parameters)
        self.names = [entry["name"] for entry in parameters]
        lanes, end = weights.lanes(layout), sum(self.sizes)
        self.residual: F32 = np.zeros(lanes, np.float32)
        self.most = MOST_ROUNDS - (lanes > end)  # buffers have a round of their own
        self._room = int(
            max(end * _OPEN_PART, _LEAST_OPEN) if megabytes is None else megabytes * _MB / 4
        )
        self._grain = PER_FRAGMENT * 32 // self.width  # numbers of a fragment
        self.least = min(channels * -(-end // max(1, self._room)), self.most // channels * channels)
        self._lay(self._by_hand(cuts) if cuts else self._equal(channels))

    def _equal(self, channels: int) -> list[tuple[int, slice]]:
        """Rounds of about equal size, in equal numbers on each channel, front first."""
        plan = equal_shares(
            _plain(self.sizes), Line(0.0, 0.0, 0.0), channels, self.least, self._grain
        )
        cuts = zip(pairwise((0, *plan.ends)), plan.channels, strict=True)
        return [(channel, slice(*ends)) for ends, channel in cuts]

    def _by_hand(self, cuts: Sequence[int]) -> list[tuple[int, slice]]:
        """Rounds of about equal size within each channel.

        Raises:
            JobError: a channel would have no parameter.
        """
        edges = [0, *cuts, len(self.sizes)]
        if any(last <= first for first, last in pairwise(edges)):
            raise JobError(
                f"setting priority_cuts is {','.join(map(str, cuts))}; its numbers must rise between 0 and"
                f" {len(self.sizes)}, the number of the model's parameters"
            )
        each = [self.sizes[first:last] for first, last in pairwise(edges)]
        share = max(self._room // len(each), -(-sum(self.sizes) // (self.most - len(each) + 1)))
        found, at = [], 0
        for index, sizes in enumerate(each):
            parts = cut(_plain(sizes), -(-sum(sizes) // max(1, share)), self._grain)
            channel = len(each) - 1 - index
            found += [(channel, slice(at + part.first, at + part.last)) for part in parts]
            at += sum(sizes)
        return found

    def _lay(self, front_first: Sequence[tuple[int, slice]]) -> None:
        self.pieces = [Piece(channel, here) for channel, here in front_first][::-1]
        end, lanes = sum(self.sizes), len(self.residual)
        if lanes > end:
            self.pieces.append(Piece(self.pieces[-1].channel, slice(end, lanes)))
        last = max(piece.channel for piece in self.pieces)
        self.channels = [[p for p in self.pieces if p.channel == c] for c in range(last + 1)]
        self.pieces_of: list[list[Piece]] = []
        places = pairwise((0, *np.cumsum(self.sizes).tolist()))
        for first, stop in places:
            mine = [p for p in self.pieces if p.here.start < stop and first < p.here.stop]
            self.pieces_of.append(mine)
            for piece in mine:
                piece.missing += 1

    # ---- as fragments

    @property
    def fragment_bytes(self) -> int:
        """Of gradients in one of them."""
        return self._grain * self.width // 8

    @property
    def fragments(self) -> list[list[int]]:
        """Those of each round, by channel: what all members agree on."""
        return [[self._fragments(piece.here) for piece in channel] for channel in self.channels]

    def _fragments(self, here: slice) -> int:
        return -(-(here.stop - here.start) // self._grain)

    def rounds_of(self, plan: Plan) -> list[list[int]]:
        """The fragments of a plan's rounds, by channel. But for the last part, its parts are whole fragments."""
        numbers = [end * 8 // self.width for end in plan.ends]
        rounds: list[list[int]] = [[] for _ in range(max(plan.channels) + 1)]
        for ends, channel in zip(pairwise((0, *numbers)), plan.channels, strict=True):
            rounds[channel].insert(0, self._fragments(slice(*ends)))
        if len(self.residual) > numbers[-1]:
            rounds[-1].append(self._fragments(slice(numbers[-1], len(self.residual))))
        return rounds

    def replanned(self, rounds: Sequence[Sequence[int]]) -> Parts:
        """The parts of another plan, by the fragments of its rounds.

        Raises:
            JobFailed: the model has another number of fragments.
        """
        end, lanes = sum(self.sizes), len(self.residual)
        of_parameters = [[*channel] for channel in rounds]
        if lanes > end and of_parameters[-1:] != [[]]:
            of_parameters[-1].pop()  # buffers
        found, at = [], 0
        for channel, fragments in reversed([*enumerate(of_parameters)]):
            for count in reversed(fragments):
                found.append((channel, slice(at, min(at + count * self._grain, end))))
                at += count * self._grain
        other = copy.copy(self)
        if at - end in range(self._grain):
            other._lay(found)
        if at - end not in range(self._grain) or other.fragments != [list(each) for each in rounds]:
            raise JobFailed(
                f"the lead plans a step with rounds of {[list(each) for each in rounds]} fragments, and the model here"
                f" has {self._fragments(slice(0, end))}: the same job.py and the same versions are needed on every host"
            )
        return other

    def units(self) -> list[Unit]:
        """In the layout's order, averaged buffers last."""
        place = {id(piece): at for at, piece in enumerate(self.pieces)}
        of = [tuple(place[id(piece)] for piece in pieces) for pieces in self.pieces_of]
        found = []
        for pieces, same in groupby(range(len(of)), key=of.__getitem__):
            parameters = tuple(same)
            found.append(Unit(tuple(self.names[at] for at in parameters), parameters, pieces))
        rest = tuple(at for at, piece in enumerate(self.pieces) if not piece.missing)
        return [*found, Unit(("the averaged buffers",), (), rest)] if rest else found

    def in_vector(self, vector: F32) -> list[list[Part]]:
        """The parts of such a vector, by channel."""
        return [
            [Part(vector[piece.here], self.residual[piece.here]) for piece in channel]
            for channel in self.channels
        ]


def _plain(sizes: Sequence[int]) -> Timing:
    """Of which only the sizes are known."""
    none = (0.0,) * len(sizes)
    return Timing(tuple(sizes), none, none, 0.0, 0.0)


class InFlows:
    """Rounds of a plan on several channels. With a quorum below 1 a step may close without this member (R13).

    Args:
        finish: the member's vector of so many samples, float32 (lanes,).
        together: channels have rounds open at the same time; otherwise the plan's rounds come one after the other.

    Attributes: `alone`, whether they do so in the next step whatever `together` says; `noted`, called with each
    parameter whose gradient is whole.
    """

    def __init__(
        self,
        session: Session,
        model: FlatModel,
        parts: Parts,
        finish: Callable[[int], F32],
        *,
        together: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._model, self._parts = session, model, parts
        self._first = parts
        self._finish, self._together, self._clock = finish, together, clock
        self._flows: Flows | None = None
        self._phase = 0  # its number; 0: its open rounds are not known here yet
        self._rounds = [0]  # the open one of each channel
        self._lines: list[_Line] = []
        self._missing: dict[int, int] = {}  # gradients that a piece lacks, by its identity
        self._made: set[int] = set()
        self._samples = 0  # of the step, once the backward pass of its last micro-batch begins
        self._own = 0  # those of the step that is on its way
        #: Of the pieces that have gone out, by their identity.
        self._sums: dict[int, Future[None]] = {}
        self._problem: NonFinite | None = None
        self.alone = False
        self.noted: Callable[[int], None] = lambda parameter: None

    @property
    def parts(self) -> Parts:
        """Those of the phase."""
        return self._parts

    @property
    def times(self) -> list[tuple[Piece, Times]]:
        """Of all pieces of the step that was collected last."""
        assert self._flows is not None
        return [
            (piece, self._flows.times[number, place])
            for number, channel in enumerate(self._parts.channels)
            for place, piece in enumerate(channel)
        ]

    @property
    def busy(self) -> bool:
        """As `Exchanger`: parts are going out."""
        return self._samples > 0

    def ready(self, digest: str) -> None:
        """As `Exchanger`."""
        model, parts = self._model, self._parts
        model.on_gradient(self._note_gradient)
        mine = parts.in_vector(model.vector)
        room = max(len(part.vector) for part in mine[0])
        plan = plan_of(mine, parts.width)
        self._session.ready(room, digest, residual=parts.residual, plan=plan)
        self._begin_flows(mine)

    def _begin_flows(self, mine: Sequence[Sequence[Part]]) -> None:
        if self._flows is not None:
            self._flows.close()
        self._flows = Flows(self._session, mine, self._parts.width, together=self._together)

    def enter(self, phase: Phase) -> bool:
        """A phase of training begins. Whether it has another plan than before.

        Raises:
            JobFailed: the plan is that of another model.
        """
        self._phase = 0  # where hosts have gone on apart, another one may have its number
        rounds = [list(channel.rounds) for channel in phase.channels]
        if rounds == self._parts.fragments:
            return False
        first = self._first
        self._parts = first if rounds == first.fragments else first.replanned(rounds)
        self._begin_flows(self._parts.in_vector(self._model.vector))
        return True

    def plan(self, rounds: Sequence[Sequence[int]]) -> tuple[ChannelPlan, ...]:
        """As the agents agree on it."""
        return tuple(ChannelPlan(urgency, tuple(each)) for urgency, each in enumerate(rounds))

    def begin(self, phase: Phase, round_: int) -> None:
        """As `Exchanger`."""
        self._begin(phase)
        self._samples = phase.share_of(self._session.number)

    def _begin(self, phase: Phase) -> None:
        """A step begins."""
        assert self._flows is not None, "the agent has not been told of the model"
        if phase.number != self._phase:
            self._phase = phase.number
            self._rounds = [channel.open for channel in phase.channels]
        together = self._together and not self.alone
        self._flows.begin(phase, self._rounds, together=together)
        parts = self._parts
        lines = parts.channels if together else [parts.pieces]
        self._lines = [_Line(pieces) for pieces in lines]
        self._missing = {id(piece): piece.missing for piece in parts.pieces}
        self._made.clear()
        self._sums.clear()
        self._problem = None

    def _note_gradient(self, parameter: int) -> None:
        """The gradient of that parameter is whole. With the last one of a part it goes out, in its channel's turn.

        Raises:
            JobError: it was said to be whole before: some of it may be missing in what has gone out.
        """
        if not self._samples:
            return
        if parameter in self._made:
            raise JobError(
                f"parameter {self._parts.names[parameter]!r} gets its gradient in several parts, as in a layer that"
                " is checkpointed and used twice: such a model cannot have priorities"
            )
        self._made.add(parameter)
        self.noted(parameter)
        for piece in self._parts.pieces_of[parameter]:
            self._missing[id(piece)] -= 1
        for line in self._lines:
            self._pass_on(line)

    def _pass_on(self, line: _Line, *, rest: bool = False) -> None:
        """Let parts go out as long as they are whole; `rest`: they are."""
        assert self._flows is not None
        for piece in line.pieces[line.passed :]:
            if not rest and (self._missing[id(piece)] or not piece.missing):
                return  # buffers are whole only after backward
            if self._samples:
                self._check(piece.here)
            if self._problem is not None:
                return
            self._sums[id(piece)] = self._flows.offer(piece.channel, self._samples)
            line.passed += 1

    def _check(self, here: slice) -> None:
        """Hold a part back that is not finite."""
        vector = self._model.vector[here]
        finite = np.isfinite(vector)
        if not finite.all() and self._problem is None:
            index = int(np.argmin(finite))
            self._problem = NonFinite(here.start + index, float(vector[index]))

    def exchange(self, phase: Phase, round_: int, samples: int, out: F32) -> Exchanged | None:
        """As `Exchanger`."""
        self.offer(phase, round_, samples)
        try:
            exchanged = self.collect()
        except StepEnded:
            return None
        np.copyto(out, self._model.vector)
        return exchanged

    def attend(self, done: Callable[[], bool]) -> None:
        """The thread that computes waits, for what `offer` has given, until that is done."""
        assert self._session.channels is not None
        self._session.channels.attend(done)

    def offer(self, phase: Phase, round_: int, samples: int) -> list[Future[None]]:
        """Let all parts go out that have not. Returns the sums of `Parts.pieces`; a mean is in the model's vector then.

        Raises:
            NonFinite: this member's gradient is not finite there.
        """
        session = self._session
        if not self._samples:  # called away, or enough for the quorum, before the last micro-batch
            self._begin(phase)
            self._samples = 0 if session.closed(round_) else samples
        self._own = self._samples
        try:
            if self._own:
                self._finish(self._own)
            for line in self._lines:
                self._pass_on(line, rest=True)
            if self._problem is not None:
                raise self._problem
        finally:
            self._samples = 0
        return [self._sums[id(piece)] for piece in self._parts.pieces]

    @property
    def next_round(self) -> int:
        """Channel 0's first one of the step after the one that is on its way."""
        return self._rounds[0] + len(self._parts.channels[0])

    def collect(self) -> Exchanged:
        """Wait until all parts that were offered are means, or do not come.

        Raises:
            StepEnded: they do not come.
        """
        assert self._flows is not None
        commit = self._flows.finish()
        for channel, pieces in enumerate(self._parts.channels):
            self._rounds[channel] += len(pieces)
        return Exchanged(commit, self._own, 0.0, self._clock(), divided=True)

    def aside(self, work: Callable[[], None]) -> None:
        """As `Exchanger`."""
        work()

    def give_up(self) -> None:
        """As `Exchanger`."""
        if self._flows is not None:
            self._flows.give_up()
