# SPDX-License-Identifier: Apache-2.0
"""A group of programs on the hosts of a network, and its calls, which a thread carries out in their order."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from nicps.collective.admission import Admission, Place, admit
from nicps.collective.calls import Average, Barrier, Broadcast, Call, Gather, Reduce
from nicps.collective.errors import (
    CallMismatch,
    CollectiveFailed,
    GroupClosed,
    MemberLost,
    UnderWay,
)
from nicps.collective.kinds import Array, Kind
from nicps.collective.link import Link
from nicps.collective.rounds import Attempt, Changed, Differs, Ranks
from nicps.collective.store import Store
from nicps.errors import NicpsError, UsageProblem
from nicps.session.lanes import F32

R = TypeVar("R")
_TEXT_BYTES = 200  # of what a member says that it has called
_FAILED = "the program has failed"
_END_LIMIT_S = 5.0  # for the thread to end after that
DEFAULT_TIMEOUT_S = 1800.0
#: Widths in bits, by name.
LANES = {"i8": 8, "i16": 16, "i32": 32}


class Group:
    """Programs on several hosts, one on each. Calls can come from any thread; their order must be the same everywhere.

    Args:
        link: None at a program that comes late.
        come_in: makes the link of a program that comes late, or back.
        members: at such a program, how many there are.

    Attributes: `rank` of this member, `size`, the ranks that there are, and the `names` of their hosts by rank;
    `world`, the size that the group has begun with. `late`: it is under way, and this program is not in it before
    its first `admit`; rank and size may be others then. `lost`, the ranks that have left since. `changes`, how often
    members have left or have come in. `on_loss` is called with `lost` when more have left, in the thread that carries
    out calls.
    """

    def __init__(
        self,
        link: Link | None,
        rank: int | None,
        timeout_s: float,
        come_in: Callable[[], Link] | None = None,
        members: int = 1,
    ) -> None:
        self._link = link
        self._wanted, self._come_in = rank, come_in
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any] | None, Future[Any]]] = (
            queue.SimpleQueue()
        )
        self.on_loss: Callable[[tuple[int, ...]], None] | None = None
        self.lost: tuple[int, ...] = ()
        self.changes = 0
        if link is not None:
            self._ranks = self._agree_on_ranks(link, rank)
            self.rank = self._ranks.numbers.index(link.number)
        else:
            self.rank = members - 1 if rank is None else rank
            size = max(members, self.rank + 1)
            self._ranks = Ranks((0,) * size, ("",) * size)
        self.size, self.names = self._ranks.size, self._ranks.names
        self.world = self.size
        self._closed = self._failed = False
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
        late: bool = False,
    ) -> Self:
        """Wait until the programs of all members are there.

        Args:
            size: members; 0: one on each host of the network whose agent stands by.
            name: of the group, the same at all members.
            rank: of this member, if all say one; otherwise the group deals them out.
            socket: the agent's; default: NICPS_SOCKET, or `@nicps`.
            forming_s: how long to wait for the others.
            timeout_s: how long a call waits for the others.
            late: where the group is under way already, come in at the first `admit`.

        Raises:
            UnderWay: the group is under way already.
            NetworkProblem: no agent is there, or the others have not come.
            UsageProblem: the ranks or the size cannot be meant.
        """
        if not 0 <= size <= 64:
            raise UsageProblem(f"a group has 1 to 64 members, not {size}")
        come_in = partial(Link.form, name, size, socket, timeout_s, late=True)
        try:
            link = Link.form(name, size, socket, forming_s)
        except UnderWay as found:
            if not late:
                raise
            return cls(None, rank, timeout_s, come_in, found.members)
        try:
            return cls(link, rank, timeout_s, come_in)
        except BaseException:
            link.close("it could not begin")
            raise

    @property
    def store(self) -> Store:
        """Keys and values that the members share, for any thread.

        Raises:
            GroupClosed: this program has come late, and is not in the group yet.
        """
        link = self._link
        if link is None or link.store is None:
            raise GroupClosed(
                "this process has come late to a group that is under way, and shares its store once it is in it: after"
                " its first admit() or State.sync()"
            )
        return link.store

    @property
    def late(self) -> bool:
        """This program is not in the group yet; its calls are answered here."""
        return self._link is None

    @property
    def out(self) -> bool:
        """The group is over for this program: closed, or gone on without it. `admit` brings it back."""
        return self._link is not None and self._link.is_over

    def _agree_on_ranks(self, link: Link, rank: int | None) -> Ranks:
        """Every member says which it wants."""
        numbers = tuple(sorted(link.names))
        names = tuple(link.names[k] for k in numbers)
        self._ranks = ranks = Ranks(numbers, names)
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

    def admit(self) -> Future[Admission]:
        """Take in the programs that wait for it, at a point that all members choose; a late one comes in here.

        Ranks, size and names may be others once it is done: make no other call before. The future raises MemberLost at
        a late one, if all others are lost; NetworkProblem, if the group is over.
        """
        return self._put(self._admit)

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageProblem(f"there is no rank {root}: the group has {self.size} members")

    def _call(self, call: Call) -> Future[Any]:
        return self._put(partial(self._carry_out, call))

    def _put(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise GroupClosed("the group is closed")
            self._queue.put((work, future))
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
            failed, self._closed = not self._closed, True
            if failed:
                self._failed = True
                self._queue.put((None, Future()))
        link = self._link
        if link is not None and failed:
            link.abandon(_FAILED)
            self._thread.join(_END_LIMIT_S)

    # ---- the thread

    def _work(self) -> None:
        while True:
            work, future = self._queue.get()
            if work is None:
                self._end()
                return
            if not future.set_running_or_notify_cancel():
                # The others wait for it.
                future = Future()
            try:
                future.set_result(work())
            except NicpsError as error:
                future.set_exception(error)
            except Exception as error:
                if self._link is not None:
                    self._link.close(f"a call has failed: {error!r}")
                future.set_exception(error)

    def _carry_out(self, call: Call) -> Any:
        if self._link is None:
            return call.alone()
        return self._attempt(call.carry_out, call.text, self._ranks)

    def _admit(self) -> Admission:
        """As `admit`, in the thread."""
        if self._link is None or self._link.is_over:
            link, late = self._make_link(), True
            wanted = -1 if self._wanted is None else self._wanted
            place = Place(late, wanted, link.names[link.number])
        else:
            link, late = self._link, False
            place = Place(late, self.rank, self.names[self.rank])

        def attempt(carry_out: Callable[[Attempt], R], text: str) -> R:
            return self._attempt(carry_out, text, self._ranks, link)

        try:
            admission, table, here = admit(link, attempt, place, self._ranks, self.world)
        except BaseException:
            if late:
                link.close("it could not come in")
            raise
        self._link, self._ranks, self.world = link, table.ranks, table.world
        self.rank = table.ranks.numbers.index(link.number)
        self.size, self.names = table.ranks.size, table.ranks.names
        self.changes += bool(admission.ranks)
        self._note_lost(table.ranks.of(here))
        return admission

    def _make_link(self) -> Link:
        """Come into the group that is under way; a member that it has gone on without comes back."""
        if self._come_in is None:
            raise GroupClosed("the group is over here")
        if self._link is not None:
            self._link, self._wanted = None, self.rank
        return self._come_in()

    def _attempt(
        self,
        carry_out: Callable[[Attempt], R],
        text: str,
        ranks: Ranks,
        coming: Link | None = None,
    ) -> R:
        """Begin again for as long as members leave in the middle.

        Args:
            coming: the link of an `admit`: that says itself who is lost.
        """
        deadline = time.monotonic() + self._timeout_s
        link = coming or self._link
        assert link is not None
        while True:
            attempt = Attempt(link, text, ranks, deadline)
            try:
                result = carry_out(attempt)
            except Changed:
                continue
            except Differs:
                raise self._explain(link, text, ranks, deadline) from None
            except MemberLost:
                self._note_lost(attempt.counted)
                raise
            if coming is None:
                self._note_lost(attempt.counted)
            return result

    def _explain(self, link: Link, text: str, ranks: Ranks, deadline: float) -> CallMismatch:
        """All members know that they have called different things: each says what."""
        said = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8)
        attempt = Attempt(link, "what was called", ranks, deadline)
        rows = attempt.gather(said)
        by_text: dict[str, list[str]] = {}
        for rank in attempt.counted:
            told = rows[rank].tobytes().rstrip(b"\0").decode(errors="replace")
            by_text.setdefault(told, []).append(f"{ranks.names[rank]} (rank {rank})")
        calls = "; ".join(f"{', '.join(who)}: {told}" for told, who in by_text.items())
        return CallMismatch(f"the members have called different things: {calls}")

    def _note_lost(self, here: tuple[int, ...]) -> None:
        lost = tuple(rank for rank in range(self._ranks.size) if rank not in here)
        more = set(lost) - set(self.lost)
        self.lost = lost
        if more:
            self.changes += 1
            if self.on_loss is not None:
                try:
                    self.on_loss(lost)
                except Exception:  # the script's own mistake must cost no member
                    traceback.print_exc()

    def _end(self) -> None:
        link = self._link
        if link is None:
            return
        if self._failed:
            link.close(_FAILED)
            return
        empty = np.zeros(0, np.uint8)
        goodbye = Barrier(Kind.of(empty), empty, "close")
        try:
            self._attempt(goodbye.carry_out, goodbye.text, self._ranks)
            link.leave()
        except CollectiveFailed as error:
            link.close(str(error))


def _operand(vector: Array, dtype: str | None) -> tuple[Kind, Array]:
    kind = Kind.of(vector, dtype)
    return kind, np.ascontiguousarray(vector).reshape(-1)
