# SPDX-License-Identifier: Apache-2.0
"""The calls of a group, as a program makes them: each is checked, and carried out on its channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

import numpy as np

from nicps.collective.calls import Average, Barrier, Broadcast, Call, Gather, Reduce
from nicps.collective.feedback import Compressed, Form
from nicps.collective.kinds import Array, Kind
from nicps.errors import UsageProblem
from nicps.session.lanes import F32

#: Widths in bits, by name.
LANES = {"i8": 8, "i16": 16, "i32": 32}
_FLOAT32 = Kind("float32", np.dtype(np.float32))


class Operations(ABC):
    """Attributes: `rank` of this member; `size`, the ranks that there are."""

    rank: int
    size: int

    @abstractmethod
    def _call(self, call: Call, channel: int) -> Future[Any]:
        """Carry it out after all that was called before on that channel."""

    def all_reduce(
        self, vector: Array, operation: str = "sum", *, dtype: str | None = None, channel: int = 0
    ) -> Future[Array]:
        """The operation over all members' vectors, (n,).

        Args:
            vector: (n,), not changed by the call, and by nobody else until it is done.
            dtype: "bfloat16", for a vector of uint16 that holds such numbers.
            channel: on which it travels. Calls on different channels do not wait for one another.
        """
        return self._reduce(vector, operation, dtype, channel)

    def average(
        self, vector: F32, residual: F32, *, lane: str = "i8", channel: int = 0
    ) -> Future[F32]:
        """The mean of all members' vectors, in place, in narrow lanes with error feedback.

        A mean is over the members that were counted. Where the vector takes several rounds and a member is lost in
        between, each part of it is the mean over those counted in its round, the same at all members. Fragments in
        which a number of some member or a sum is not finite are NaN at all of them.

        Args:
            vector: float32 (n,), contiguous. The result takes its place.
            residual: float32 (n,), contiguous: what rounding has left over so far, zeros at first. It is added to the
                vector, and what is left over now takes its place. Nobody else may read or write it meanwhile.
            lane: "i8", "i16" or "i32".
            channel: as for `all_reduce`.
        """
        for name, each in (("vector", vector), ("residual", residual)):
            flags, fits = each.flags, each.shape == (len(vector),) and each.dtype == np.float32
            if not (fits and flags.c_contiguous and flags.writeable):
                raise UsageProblem(
                    f"average: the {name} must be writable float32 ({len(vector):,},) in one piece, not {each.dtype}"
                    f" {each.shape}"
                )
        return self.average_as(Compressed, vector, residual, lane=lane, channel=channel)

    def average_as(
        self, form: Form, vector: Any, residual: Any, *, lane: str = "i8", channel: int = 0
    ) -> Future[Any]:
        """As `average`, of numbers of another library. Other members may call `average`.

        Args:
            form: makes what a round exchanges of parts of vector and residual, in the thread that carries out calls.
        """
        if lane not in LANES:
            raise UsageProblem(f"lane must be one of {', '.join(LANES)}, not {lane!r}")
        return self._call(Average(_FLOAT32, vector, residual, LANES[lane], form), channel)

    def reduce(
        self,
        vector: Array,
        root: int,
        operation: str = "sum",
        *,
        dtype: str | None = None,
        channel: int = 0,
    ) -> Future[Array | None]:
        """As `all_reduce`, of which only the root gets the result."""
        self._check_rank(root)
        return self._reduce(vector, operation, dtype, channel, root=root)

    def reduce_scatter(
        self, vector: Array, operation: str = "sum", *, dtype: str | None = None, channel: int = 0
    ) -> Future[Array]:
        """The same, of which each member gets the part of its rank; `vector` is (size * n,), and the result (n,)."""
        if vector.size % self.size:
            raise UsageProblem(
                f"reduce_scatter: {vector.size:,} numbers cannot be dealt out to {self.size} members"
            )
        return self._reduce(vector, operation, dtype, channel, scatter=True)

    def _reduce(
        self,
        vector: Array,
        operation: str,
        dtype: str | None,
        channel: int,
        root: int | None = None,
        *,
        scatter: bool = False,
    ) -> Future[Any]:
        kind, flat = _operand(vector, dtype)
        kind.check(operation)
        call = Reduce(kind, flat, operation, self.size, self.rank, root, scatter)
        return self._call(call, channel)

    def broadcast(
        self, vector: Array, root: int, *, dtype: str | None = None, channel: int = 0
    ) -> Future[Array]:
        """The root's vector, (n,); those of the others only say how long it is.

        The future raises MemberLost if the root has left.
        """
        self._check_rank(root)
        kind, flat = _operand(vector, dtype)
        return self._call(Broadcast(kind, flat, root, self.rank), channel)

    def all_gather(
        self, vector: Array, *, dtype: str | None = None, channel: int = 0
    ) -> Future[Array]:
        """All members' vectors, (size, n), by rank. The future raises MemberLost if one has left."""
        kind, flat = _operand(vector, dtype)
        return self._call(Gather(kind, flat, self.size), channel)

    def barrier(self, *, channel: int = 0) -> Future[None]:
        """All members that are left have called it, after what they have called before on that channel."""
        empty = np.zeros(0, np.uint8)
        return self._call(Barrier(Kind.of(empty), empty), channel)

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageProblem(f"there is no rank {root}: the group has {self.size} members")


def _operand(vector: Array, dtype: str | None) -> tuple[Kind, Array]:
    kind = Kind.of(vector, dtype)
    return kind, np.ascontiguousarray(vector).reshape(-1)
