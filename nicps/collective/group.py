# SPDX-License-Identifier: Apache-2.0
"""A group of programs on the hosts of a network, and its calls, which a thread carries out in their order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import numpy as np

from nicps.collective.calls import Average, Barrier, Broadcast, Call, Gather, Reduce
from nicps.collective.errors import CallMismatch, CollectiveFailed, GroupClosed, MemberLost
from nicps.collective.kinds import Array, Kind
from nicps.collective.link import Link
from nicps.collective.rounds import Attempt, Changed, Differs, Ranks
from nicps.errors import NicpsError, UsageProblem
from nicps.session.lanes import F32

R = TypeVar("R")
_TEXT_BYTES = 200  # of what a member says that it has called
DEFAULT_TIMEOUT_S = 1800.0
#: Widths in bits, by name.
LANES = {"i8": 8, "i16": 16, "i32": 32}


class Group:
    """Programs on several hosts, one on each. Calls can come from any thread; their order must be the same everywhere.

    Attributes: `rank` of this member, `size`, the members that the group has begun with, and the `names` of their hosts
    by rank. `lost`, the ranks that have left since. `on_loss` is called with these when they have changed, in the
    thread that carries out calls.
    """

    def __init__(self, link: Link, rank: int | None, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[tuple[Call | None, Future[Any]]] = queue.SimpleQueue()
        self.on_loss: Callable[[tuple[int, ...]], None] | None = None
        self.lost: tuple[int, ...] = ()
        self._ranks = self._agree_on_ranks(rank)
        self.rank = self._ranks.numbers.index(link.number)
        self.size, self.names = self._ranks.size, self._ranks.names
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="nicps-collective", daemon=True)
        self._thread.start()

    @classmethod
    def form(
        cls,
        size: int = 0,
        *,
        name: str = "default",
        rank: int | None = None,
        socket: str | None = None,
        forming_s: float = 300.0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """Wait until the programs of all members are there.

        Args:
            size: members; 0: one on each host of the network whose agent stands by.
            name: of the group, the same at all members.
            rank: of this member, if all say one; otherwise the group deals them out.
            socket: the agent's; default: NICPS_SOCKET, or `@nicps`.
            forming_s: how long to wait for the others.
            timeout_s: how long a call waits for the others.

        Raises:
            NetworkProblem: no agent is there, or the others have not come.
            UsageProblem: the ranks or the size cannot be meant.
        """
        if not 0 <= size <= 64:
            raise UsageProblem(f"a group has 1 to 64 members, not {size}")
        link = Link.form(name, size, socket, forming_s)
        try:
            return cls(link, rank, timeout_s)
        except BaseException:
            link.close("it could not begin")
            raise

    def _agree_on_ranks(self, rank: int | None) -> Ranks:
        """Every member says which it wants."""
        numbers = tuple(sorted(self._link.names))
        names = tuple(self._link.names[k] for k in numbers)
        ranks = Ranks(numbers, names)
        wanted = np.array([-1 if rank is None else rank], np.int64)
        found = self._attempt(
            Gather(Kind.of(wanted), wanted, len(numbers)).carry_out, "ranks", ranks
        )
        asked = [int(row[0]) for row in found]
        if all(each == -1 for each in asked):
            return ranks
        if sorted(asked) != list(range(len(numbers))):
            said = ", ".join(
                f"{name} none" if each == -1 else f"{name} {each}"
                for name, each in zip(names, asked, strict=True)
            )
            raise UsageProblem(
                f"the members' ranks must be 0 to {len(numbers) - 1}, each once: {said}"
            )
        order = [asked.index(k) for k in range(len(numbers))]
        return Ranks(tuple(numbers[k] for k in order), tuple(names[k] for k in order))

    # ---- calls

    def all_reduce(
        self, vector: Array, operation: str = "sum", *, dtype: str | None = None
    ) -> Future[Array]:
        """The operation over all members' vectors, (n,).

        Args:
            vector: (n,), not changed by the call, and by nobody else until it is done.
            dtype: "bfloat16", for a vector of uint16 that holds such numbers.
        """
        return self._reduce(vector, operation, dtype)

    def average(self, vector: F32, residual: F32, *, lane: str = "i8") -> Future[F32]:
        """The mean of all members' vectors, in place, in narrow lanes with error feedback.

        A mean is over the members that were counted. Where the vector takes several rounds and a member is lost in
        between, each part of it is the mean over those counted in its round, the same at all members. Fragments in
        which a number of some member or a sum is not finite are NaN at all of them.

        Args:
            vector: float32 (n,), contiguous. The result takes its place.
            residual: float32 (n,), contiguous: what rounding has left over so far, zeros at first. It is added to the
                vector, and what is left over now takes its place. Nobody else may read or write it meanwhile.
            lane: "i8", "i16" or "i32".
        """
        if lane not in LANES:
            raise UsageProblem(f"lane must be one of {', '.join(LANES)}, not {lane!r}")
        for name, each in (("vector", vector), ("residual", residual)):
            flags, fits = each.flags, each.shape == (len(vector),) and each.dtype == np.float32
            if not (fits and flags.c_contiguous and flags.writeable):
                raise UsageProblem(
                    f"average: the {name} must be writable float32 ({len(vector):,},) in one piece, not {each.dtype}"
                    f" {each.shape}"
                )
        return self._call(Average(Kind.of(vector), vector, residual, LANES[lane]))

    def reduce(
        self, vector: Array, root: int, operation: str = "sum", *, dtype: str | None = None
    ) -> Future[Array | None]:
        """The same, of which only the root gets the result."""
        self._check_rank(root)
        return self._reduce(vector, operation, dtype, root=root)

    def reduce_scatter(
        self, vector: Array, operation: str = "sum", *, dtype: str | None = None
    ) -> Future[Array]:
        """The same, of which each member gets the part of its rank; `vector` is (size * n,), and the result (n,)."""
        if vector.size % self.size:
            raise UsageProblem(
                f"reduce_scatter: {vector.size:,} numbers cannot be dealt out to {self.size} members"
            )
        return self._reduce(vector, operation, dtype, scatter=True)

    def _reduce(
        self,
        vector: Array,
        operation: str,
        dtype: str | None,
        root: int | None = None,
        *,
        scatter: bool = False,
    ) -> Future[Any]:
        kind, flat = _operand(vector, dtype)
        kind.check(operation)
        return self._call(Reduce(kind, flat, operation, self.size, self.rank, root, scatter))

    def broadcast(self, vector: Array, root: int, *, dtype: str | None = None) -> Future[Array]:
        """The root's vector, (n,); those of the others only say how long it is.

        The future raises MemberLost if the root has left.
        """
        self._check_rank(root)
        kind, flat = _operand(vector, dtype)
        return self._call(Broadcast(kind, flat, root, self.rank))

    def all_gather(self, vector: Array, *, dtype: str | None = None) -> Future[Array]:
        """All members' vectors, (size, n), by rank. The future raises MemberLost if one has left."""
        kind, flat = _operand(vector, dtype)
        return self._call(Gather(kind, flat, self.size))

    def barrier(self) -> Future[None]:
        """All members that are left have called it."""
        empty = np.zeros(0, np.uint8)
        return self._call(Barrier(Kind.of(empty), empty))

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageProblem(f"there is no rank {root}: the group has {self.size} members")

    def _call(self, call: Call) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise GroupClosed("the group is closed")
            self._queue.put((call, future))
        return future

    # ---- the end

    def close(self) -> None:
        """Leave after all that was called, once all members that are left have called `close` too.

        A program that ends without it counts as lost, and the others go on.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put((None, Future()))
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the group; where an error ends the program, the others go on without it."""
        if kind is None:
            self.close()
            return
        with self._lock:
            self._closed = True
        self._link.close("the program has failed")

    # ---- the thread

    def _work(self) -> None:
        while True:
            call, future = self._queue.get()
            if call is None:
                self._leave()
                return
            if not future.set_running_or_notify_cancel():
                # The others wait for it.
                future = Future()
            try:
                future.set_result(self._attempt(call.carry_out, call.text, self._ranks))
            except NicpsError as error:
                future.set_exception(error)
            except Exception as error:
                self._link.close(f"a call has failed: {error!r}")
                future.set_exception(error)

    def _attempt(self, carry_out: Callable[[Attempt], R], text: str, ranks: Ranks) -> R:
        """Begin again for as long as members leave in the middle."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            attempt = Attempt(self._link, text, ranks, deadline)
            try:
                result = carry_out(attempt)
            except Changed:
                continue
            except Differs:
                raise self._explain(text, ranks, deadline) from None
            except MemberLost:
                self._note_lost(attempt, ranks)
                raise
            self._note_lost(attempt, ranks)
            return result

    def _explain(self, text: str, ranks: Ranks, deadline: float) -> CallMismatch:
        """All members know that they have called different things: each says what."""
        said = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8)
        attempt = Attempt(self._link, "what was called", ranks, deadline)
        rows = attempt.gather(said)
        by_text: dict[str, list[str]] = {}
        for rank in attempt.counted:
            told = rows[rank].tobytes().rstrip(b"\0").decode(errors="replace")
            by_text.setdefault(told, []).append(f"{ranks.names[rank]} (rank {rank})")
        calls = "; ".join(f"{', '.join(who)}: {told}" for told, who in by_text.items())
        return CallMismatch(f"the members have called different things: {calls}")

    def _note_lost(self, attempt: Attempt, ranks: Ranks) -> None:
        lost = tuple(rank for rank in range(ranks.size) if rank not in attempt.counted)
        if lost != self.lost:
            self.lost = lost
            if self.on_loss is not None:
                self.on_loss(lost)

    def _leave(self) -> None:
        empty = np.zeros(0, np.uint8)
        goodbye = Barrier(Kind.of(empty), empty, "close")
        try:
            self._attempt(goodbye.carry_out, goodbye.text, self._ranks)
            self._link.leave()
        except CollectiveFailed as error:
            self._link.close(str(error))


def _operand(vector: Array, dtype: str | None) -> tuple[Kind, Array]:
    kind = Kind.of(vector, dtype)
    return kind, np.ascontiguousarray(vector).reshape(-1)
