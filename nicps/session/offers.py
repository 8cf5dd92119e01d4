# SPDX-License-Identifier: Apache-2.0
"""The gradients that a training program offers: converted, batch by batch, into memory that its agent sends from.

The other direction is `nicps.session.sums`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from nicps.exchange import Exchange
from nicps.session.arena import Arena, Handover
from nicps.session.lanes import F32, U8, LaneFormat, Quantiser, Residual, check_finite

_ROOM = 1  # bits: the next gradient may be larger still
_SATURATED = 4  # bits too large is a matter of the residual; more than that, of the step
_LEAST_UNIT = -100


class Offers:
    """Writes the arena for vectors in one format.

    Args:
        residual: what rounding has left over.
        doorbell: rung for the agent after every batch.

    Attributes: `unit`, log2 of what the open round's numbers are multiples of; `exchange` makes the sums.
    """

    def __init__(self, format: LaneFormat, residual: Residual, arena: Arena, doorbell: int) -> None:
        self.arena = arena
        self.unit = 0
        self.exchange = Exchange.BROADCAST
        self._handover = Handover(arena, doorbell)
        self._quantiser, self._residual = Quantiser(format, residual), residual

    @property
    def members(self) -> int:
        """Of so many a switch adds the lanes; 0 if the kernel adds."""
        return self._quantiser.format.members

    @property
    def saturated(self) -> int:
        """Lanes so far that were too large for the step that a switch needs of all; the rest is in the residual."""
        return self._quantiser.saturated

    @property
    def coarser(self) -> int:
        """By so many bits the next unit may be the larger one without anybody having been left out."""
        return _SATURATED + _ROOM if self.exchange.shared_step else 0

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """A phase begins; `members` are in it."""
        self.unit, self.exchange = unit, exchange
        format = self._quantiser.format
        self._quantiser.format = replace(format, members=members if exchange.shared_step else 0)

    def wanted(self, vector: F32) -> tuple[int | None, bool]:
        """The unit that is asked for in the next round, if it should be another; whether this one's is too fine.

        Raises:
            NonFinite: the vector holds NaN or infinity.
        """
        format, largest = self._quantiser.format, self._largest(vector)
        unit = max(format.unit_for(largest) + _ROOM, _LEAST_UNIT) if largest else None
        if self.exchange.shared_step:
            # What is a little too large for the step that a switch needs of all goes into the residual.
            return unit, unit is not None and unit > self.unit + self.coarser
        skip = largest > format.largest(self.unit)
        return (unit, True) if skip else (None, False)

    def begin(self, round_: int) -> None:
        """Nothing of the round's vector is there yet; before the agent is told of it."""
        self._handover.begin(round_)

    def convert(self, round_: int, vector: F32) -> None:
        """Convert the whole vector, float32 (lanes,)."""
        quantiser, done = self._quantiser, 0
        lanes, shifts = self.own(round_)
        while done < quantiser.format.fragments:
            done += quantiser.batch(vector, done, self.unit, lanes, shifts)
            self._handover.show(round_, done)

    def put(self, round_: int, *numbers: int) -> None:
        """Offer a few whole numbers, of 32 bits, in one fragment."""
        lanes, shifts = self.own(round_)
        lanes[0] = 0
        lanes[0].view(">i4")[: len(numbers)] = numbers
        shifts[0] = 0
        self._handover.show(round_, 1)

    def own(self, round_: int) -> tuple[U8, U8]:
        """This member's lanes, uint8 (fragments, 1440), and shifts, uint8 (fragments,), of a round."""
        parity, fragments = round_ & 1, self._quantiser.format.fragments
        return self.arena.lanes[parity, :fragments], self.arena.shifts[parity, :fragments]

    def counted(self) -> None:
        """The vector converted last is in a sum: what rounding left over goes into the next one."""
        self._quantiser.keep()

    def _largest(self, vector: F32) -> float:
        """An upper bound of the magnitude that is to be sent; exact when it comes near the limit."""
        format, residual = self._quantiser.format, self._residual
        # Where a switch adds, the next round's step hangs on the exact one.
        if not self.exchange.shared_step:
            # Another exchange may have left over more than the gradient itself.
            left = residual.limit if math.isfinite(residual.limit) else _norm(residual.kept)
            bound = _norm(vector) + left
            if bound < format.largest(self.unit) / 4:
                return bound
        check_finite(vector)
        return float(np.abs(vector + residual.kept[: format.lanes]).max())


def _norm(vector: F32) -> float:
    """No magnitude in it is larger."""
    return math.sqrt(float(np.dot(vector, vector)))
