# SPDX-License-Identifier: Apache-2.0
"""A job's vector as rounds in stripes exchange it: float32 with error feedback, in one format.

The sum has memory of its own, so it is read while the rest of it is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable

from nicps.session.absolute import I8, AbsoluteQuantiser, AbsoluteSummer, Lanes
from nicps.session.lanes import F32, LaneFormat, Residual
from nicps.session.loops import loops_for
from nicps.session.sized import Bank, Outcome
from nicps.wire import NOT_FINITE

#: So many batches of the own stripe are converted at once by compiled loops: nobody waits for one of them.
_OWN_BATCHES = 16


class Whole:
    """One vector after the other, as `nicps.session.sized.Vector`.

    Args:
        residual: what rounding has left over.

    Attributes: `feedback`, False: `settle` only reads the sum, as the round was settled before.
    """

    def __init__(self, format: LaneFormat, residual: Residual) -> None:
        self.format, self.feedback = format, True
        self.width, self.numbers = format.width, format.lanes
        self._quantiser = AbsoluteQuantiser(format, residual)
        self._summer = AbsoluteSummer(format)
        self._vector: F32 | None = None  # that was taken last, until it is counted
        self._bound = 0
        self._out: F32 | None = None
        self._unread: Iterable[range] = ()

    def compile(self) -> None:
        """From now on compiled loops do the work, where there are some for the format."""
        self._quantiser.loops = self._summer.loops = loops_for(self.format)

    @property
    def own_batch(self) -> int:
        """Fragments of the own stripe that are converted at once: a call of a loop has its cost in Python."""
        return self.format.batch * (_OWN_BATCHES if self._quantiser.loops is not None else 1)

    # ---- a member's own

    def take(self, vector: F32, *, finite: bool) -> None:
        """The next one, float32 (lanes,).

        Raises:
            NonFinite: it must be `finite`, and is not.
        """
        self._bound = self._quantiser.bound(vector, finite=finite)
        self._quantiser.begin()
        self._vector = vector

    def bound(self) -> int:
        """As `Vector`."""
        return self._bound

    def write(self, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """As `Vector`; any number of fragments."""
        assert self._vector is not None, "there is no vector"
        self._quantiser.batch(self._vector, first, count, lanes, exponents)

    @property
    def is_open(self) -> bool:
        """Whether a vector was taken that has not been counted yet."""
        return self._vector is not None

    def drop(self, own: Bank) -> None:
        """The vector taken last is not counted, or not yet. It must not have changed."""
        if self._vector is not None:
            self._quantiser.drop(self._vector, own.lanes, own.exponents)

    # ---- sums

    def read(self, sums: Bank, part: range, out: F32) -> None:
        """Read the sums of at most a batch of fragments."""
        self._summer.batch(sums.lanes, sums.exponents, part.start, len(part), out)

    def keep_early(self, sums: Bank, part: range, own: Bank) -> None:
        """Sums of these fragments are here. They may have the vector taken last in them, and be committed.

        If the vector is large, their residual is computed now, while the program waits for the other sums: after the
        last one it would take as long as converting.
        """
        if self._vector is None or self._quantiser.loops is None:
            return
        lost = sums.exponents[part.start : part.stop] == NOT_FINITE
        self._quantiser.keep_early(self._vector, part.start, own.lanes, own.exponents, lost)

    def expect(self, out: F32 | None, unread: Iterable[range]) -> None:
        """`settle` reads these fragments into `out`, float32 (lanes,)."""
        self._out, self._unread = out, unread

    def settle(self, outcome: Outcome) -> None:
        """As `Vector`: read the sum; the rounding error of this member's contribution becomes the residual."""
        sums, batch = Bank(outcome.lanes, outcome.exponents), self.format.batch
        if self._out is not None:
            for part in self._unread:
                for first in part[::batch]:
                    self.read(sums, range(first, min(first + batch, part.stop)), self._out)
        self.expect(None, ())
        if not self.feedback:
            return
        own = Bank(outcome.own_lanes, outcome.own_exponents)
        if outcome.counted:
            assert self._vector is not None, "nothing was converted"
            lost = sums.exponents == NOT_FINITE
            self._quantiser.keep(self._vector, own.lanes, own.exponents, lost)
            self._vector = None
        else:
            self.drop(own)
        if (rest := outcome.rest) is not None:
            exponents = sums.exponents[rest.first : rest.first + len(rest.used)]
            self._quantiser.add(rest.first, rest.lanes, exponents, rest.used, outcome.unit)
