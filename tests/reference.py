# SPDX-License-Identifier: Apache-2.0
"""What a round's sum must be, bit for bit, from the gradients that the members saved.

Imports nothing of the product: it is written from docs/protocol.md ("Numbers on the wire") alone. A gradient and what
rounding left over of those before it are cut into fragments; each fragment gets the smallest power-of-two step, a
multiple of the accumulators' unit, under which its largest number fits a lane. Lanes are added as integers. Where a
switch adds, the unit itself is the step of all ("Where a switch adds"). What
rounding leaves over is kept only where the gradient was counted.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

PAYLOAD_BITS = 1440 * 8
# The largest magnitude that a lane takes and a float32 can name, and the largest shift, by the lanes' bits.
LARGEST = {32: 2.0**31 - 2.0**7, 16: 2.0**15 - 1, 8: 2.0**7 - 1}
MOST_SHIFT = {32: 26, 16: 42, 8: 50}
#: Those whose numbers these are, where several members were counted.
EXCHANGES = ("broadcast", "switch")

F32 = npt.NDArray[np.float32]
#: What `numpy.load` gives of a member's ROUND.npz.
Saved = Mapping[str, Any]


@dataclass
class Member:
    """One member's rounding error."""

    width: int
    residual: F32 = field(default_factory=lambda: np.zeros(0, np.float32))

    def quantise(
        self, vector: F32, unit: int, members: int = 0
    ) -> tuple[npt.NDArray[np.int64], F32]:
        """The gradient in multiples of 2**unit, int64, and what that leaves over, float32.

        Where a switch adds the lanes of so many members, all have that one step, and what is too large for a part of a
        lane is cut off.
        """
        if not len(self.residual):
            self.residual = np.zeros_like(vector)
        values = vector + self.residual
        assert values.dtype == np.float32
        exact = values.astype(np.float64)
        whole, left = np.empty(len(exact), np.int64), np.empty_like(values)
        per = PAYLOAD_BITS // self.width
        for first in range(0, len(exact), per):
            part = slice(first, first + per)
            shift = 0
            if members:
                limit = int(LARGEST[self.width]) >> (members - 1).bit_length()
                whole[part] = np.clip(np.rint(exact[part] / 2.0**unit), -limit, limit)
                left[part] = exact[part] - whole[part] * 2.0**unit
                continue
            while np.abs(exact[part]).max() > LARGEST[self.width] * 2.0 ** (unit + shift):
                shift += 1
            assert shift <= MOST_SHIFT[self.width]
            lanes = np.rint(exact[part] / 2.0 ** (unit + shift))
            whole[part] = lanes.astype(np.int64) << shift
            left[part] = exact[part] - lanes * 2.0 ** (unit + shift)
        return whole, left


def check(
    width: int,
    rounds: Mapping[int, Mapping[int, Saved]],
    lives: MutableMapping[tuple[int, str], Any] | None = None,
) -> int:
    """Compare every member's saved totals with the sum of what was counted; how many gradients were.

    Args:
        width: of a lane, in bits.
        rounds: what the members saved, by round and member number, all of one run and all its rounds. Of who died
            in a round, and of a round that was not committed, there may be the contributions only. A member's "life"
            ends where it forgets its rounding error.
        lives: of members whose rounding errors go on from rounds of other exchanges; they are changed.

    Raises:
        AssertionError: a total differs in any bit, members disagree on what was counted, or a round is of another
            exchange.
    """
    members = {} if lives is None else lives
    gradients = 0
    for round_, saved in sorted(rounds.items()):
        sums = {number: own for number, own in saved.items() if "total" in own}
        if not sums:
            continue  # begun, and not committed
        first = next(iter(sums.values()))
        counted, unit = first["counted"].tolist(), int(first["unit"])
        switched = int(first["members"])
        for number, own in sums.items():
            assert own["counted"].tolist() == counted, (round_, number)
            assert (int(own["unit"]), int(own["members"])) == (unit, switched), (round_, number)
            assert int(own["n"]) == sum(samples for _, samples in counted)
            if "exchange" in own and len(counted) > 1:
                assert str(own["exchange"]) in EXCHANGES, (round_, str(own["exchange"]), counted)
        total = np.zeros(len(first["total"]), np.int64)
        for number, samples in counted:
            own = saved[number]
            assert int(own["samples"]) == samples, (round_, number)
            member = members.setdefault((number, str(own.get("life", ""))), Member(width))
            whole, left = member.quantise(own["vector"], unit, switched)
            total += whole
            member.residual = left
            gradients += 1
        expected = (total.astype(np.float64) * 2.0**unit).astype(np.float32)
        for number, own in sums.items():
            differs = own["total"].view(np.uint32) != expected.view(np.uint32)
            at = np.flatnonzero(differs)
            sizes = own["total"][at[:4]].tolist(), expected[at[:4]].tolist()
            assert not len(at), (round_, number, counted, unit, len(at), at[:8].tolist(), sizes)
    return gradients
