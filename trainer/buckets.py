# SPDX-License-Identifier: Apache-2.0
"""A member's gradient in buckets, which go out while backward makes those after them (docs/jobs.md, "Buckets")."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nicps.errors import NonFinite
from nicps.steps import Step, room_of
from trainer import weights
from trainer.errors import JobError

F32 = npt.NDArray[np.float32]
_MB = 1 << 20
_END_S = 1.0  # for a bucket that is on its way as the program fails


class Buckets:
    """The pieces of the vector, from its end to its beginning: about the order in which backward makes them.

    Attributes: `residual`, float32 (lanes,), what rounding has left over at this member; `pieces`, averaged buffers the
    last one; `width` of the lanes, in bits; `room`, numbers of a round at most. `piece_of` each parameter that is
    trained, and their `names`.

    Args:
        layout: of the vector.
        megabytes: of a piece, in float32: it is closed once it has so much.
    """

    def __init__(self, layout: weights.Layout, megabytes: float, lane: str) -> None:
        parameters = [entry for entry in layout if entry["kind"] == "parameter"]
        sizes = [weights.size(entry) for entry in parameters]
        self.names = [entry["name"] for entry in parameters]
        lanes, end = weights.lanes(layout), sum(sizes)
        self.residual: F32 = np.zeros(lanes, np.float32)
        self.width = int(lane.removeprefix("i"))
        self.pieces: list[slice] = []
        self.piece_of = [0] * len(sizes)
        first = last = end
        for index in reversed(range(len(sizes))):
            first -= sizes[index]
            self.piece_of[index] = len(self.pieces)
            if (last - first) * 4 >= megabytes * _MB or not index:
                self.pieces.append(slice(first, last))
                last = first
        if end < lanes:
            self.pieces.append(slice(end, lanes))
        self.room = room_of(*(p.stop - p.start for p in self.pieces), width=self.width)


class Overlap:
    """A step's buckets, exchanged in a thread of its own, one after the other in their order.

    From its beginning to the end of `finish` the session belongs to that thread.

    Args:
        vector: float32 (lanes,), the member's contribution. The mean takes its place, bucket by bucket.
    """

    def __init__(self, buckets: Buckets, vector: F32, step: Step) -> None:
        self.step = step
        self._buckets, self._vector = buckets, vector
        self._made = [False] * len(buckets.piece_of)
        of_parameters = range(max(buckets.piece_of) + 1)  # buffers are whole only after backward
        self._missing = [buckets.piece_of.count(piece) for piece in of_parameters]
        self._passed = 0  # buckets that the thread may exchange
        self._whole: queue.SimpleQueue[slice | None] = queue.SimpleQueue()
        self._asides: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="buckets", daemon=True)
        self._thread.start()

    # ---- the thread that computes

    def note_gradient(self, parameter: int) -> None:
        """The gradient of that parameter is whole. With the last one of a bucket it goes out, in its turn.

        Raises:
            JobError: it was said to be whole before: some of it may be missing in what has gone out.
        """
        if self._made[parameter]:
            raise JobError(
                f"parameter {self._buckets.names[parameter]!r} gets its gradient in several parts, as in a layer that"
                " is checkpointed and used twice: such a model cannot have bucket_mb"
            )
        self._made[parameter] = True
        self._missing[self._buckets.piece_of[parameter]] -= 1
        while self._passed < len(self._missing) and not self._missing[self._passed]:
            self._pass_on()

    def _pass_on(self) -> None:
        self._whole.put(self._buckets.pieces[self._passed])
        self._passed += 1

    def finish(self) -> None:
        """The vector is whole: wait until all buckets are exchanged. What the thread wants done is done meanwhile.

        Raises:
            nicps.steps.StepEnded: the phase has ended.
            NonFinite: at that place of the vector.
            NicpsError: as the session raises it.
        """
        while self._passed < len(self._buckets.pieces):
            self._pass_on()
        self._whole.put(None)
        while (work := self._asides.get()) is not None:
            work()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """This program fails: no further bucket goes out."""
        self._given_up = True
        self._whole.put(None)
        self._thread.join(_END_S)

    # ---- the thread that exchanges

    def aside(self, work: Callable[[], None]) -> None:
        """Let the thread that computes do something, once it waits for this one; this one waits until it is done."""
        done = threading.Event()

        def carry_out() -> None:
            try:
                work()
            finally:
                done.set()

        self._asides.put(carry_out)
        done.wait()

    def _run(self) -> None:
        try:
            while (piece := self._whole.get()) is not None and not self._given_up:
                self._exchange(piece)
        except BaseException as error:
            self._error = error
        self._asides.put(None)

    def _exchange(self, piece: slice) -> None:
        here = self._vector[piece]
        finite = np.isfinite(here)
        if not finite.all():
            index = int(np.argmin(finite))
            raise NonFinite(piece.start + index, float(here[index]))
        self.step.average(here, self._buckets.residual[piece])
