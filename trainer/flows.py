# SPDX-License-Identifier: Apache-2.0
"""A member's gradient by a plan: parts on several channels, which go out while backward makes those after them.

The front layers, which the next forward pass needs first, are on the most urgent channel (docs/channels.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nicps.client import Phase, Session
from nicps.collective.lanes import PER_FRAGMENT
from nicps.errors import NonFinite
from nicps.flows import Flows, Part, plan_of
from nicps.need_first import MOST_ROUNDS, Line, Timing, equal_shares
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
    """The plan of equal shares: the vector in rounds of about equal size, in equal numbers on each channel.

    Attributes: `channels`, their pieces, by channel from the bulk one on, each from the rear layers to the front;
    averaged buffers are the last piece of the most urgent one. `pieces`, all of them in the order in which backward
    makes them. `pieces_of` each parameter that is trained, by their places in `pieces`, and their `names`. `residual`,
    float32 (lanes,), what rounding has left over at this member; `width` of the lanes, in bits.

    Args:
        layout: of the vector, parameters first.
        channels: at most so many.
        lane: the job's setting.
        megabytes: of all rounds that are open at a time, in float32; None: a quarter of the vector.
    """

    def __init__(
        self, layout: weights.Layout, channels: int, lane: str, megabytes: float | None = None
    ) -> None:
        self.width = int(lane.removeprefix("i"))
        parameters = [entry for entry in layout if entry["kind"] == "parameter"]
        sizes = tuple(weights.size(entry) for entry in parameters)
        self.names = [entry["name"] for entry in parameters]
        lanes, end = weights.lanes(layout), sum(sizes)
        self.residual: F32 = np.zeros(lanes, np.float32)
        most = MOST_ROUNDS - (lanes > end)  # buffers have a round of their own
        room = max(end * _OPEN_PART, _LEAST_OPEN) if megabytes is None else megabytes * _MB / 4
        rounds = min(channels * -(-end // max(1, int(room))), most // channels * channels)
        none = (0.0,) * len(sizes)
        grain = PER_FRAGMENT * 32 // self.width
        timing = Timing(tuple(sizes), none, none, 0.0, 0.0)
        plan = equal_shares(timing, Line(0.0, 0.0, 0.0), channels, rounds, grain)
        cuts = zip(pairwise((0, *plan.ends)), plan.channels, strict=True)
        self.pieces = [Piece(channel, slice(*ends)) for ends, channel in cuts][::-1]
        if lanes > end:
            self.pieces.append(Piece(self.pieces[-1].channel, slice(end, lanes)))
        last = max(piece.channel for piece in self.pieces)
        self.channels = [[p for p in self.pieces if p.channel == c] for c in range(last + 1)]
        self.pieces_of: list[list[Piece]] = []
        places = pairwise((0, *np.cumsum(sizes).tolist()))
        for first, stop in places:
            mine = [p for p in self.pieces if p.here.start < stop and first < p.here.stop]
            self.pieces_of.append(mine)
            for piece in mine:
                piece.missing += 1

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


class InFlows:
    """Rounds of a plan on several channels. With a quorum below 1 a step may close without this member (R13).

    Args:
        finish: the member's vector of so many samples, float32 (lanes,).
        together: channels have rounds open at the same time; otherwise the plan's rounds come one after the other.
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
        self._finish, self._together, self._clock = finish, together, clock
        self._flows: Flows | None = None
        self._phase = 0  # its number
        self._rounds = [0]  # the open one of each channel
        self._lines: list[_Line] = []
        self._missing: dict[int, int] = {}  # gradients that a piece lacks, by its identity
        self._made: set[int] = set()
        self._samples = 0  # of the step, once the backward pass of its last micro-batch begins
        self._own = 0  # those of the step that is on its way
        self._sums: dict[
            int, Future[None]
        ] = {}  # of the pieces that have gone out, by their identity
        self._problem: NonFinite | None = None

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
        self._flows = Flows(self._session, mine, parts.width, together=self._together)

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
        self._flows.begin(phase, self._rounds)
        parts = self._parts
        lines = parts.channels if self._together else [parts.pieces]
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

    @property
    def units(self) -> list[Unit]:
        """What is updated at once."""
        return self._parts.units()

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
