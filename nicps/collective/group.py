# SPDX-License-Identifier: Apache-2.0
"""A group of programs on the hosts of a network, and its calls. On each channel a thread carries them out in order."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from nicps.collective import endings
from nicps.collective.admission import Admission, Place, admit
from nicps.collective.attempts import carried_out
from nicps.collective.calls import Barrier, Call, Gather
from nicps.collective.channels import Workers, plan_of
from nicps.collective.errors import CollectiveFailed, GroupClosed, UnderWay
from nicps.collective.kinds import Kind
from nicps.collective.lanes import PER_FRAGMENT
from nicps.collective.link import Link
from nicps.collective.operations import Operations
from nicps.collective.rounds import Attempt, Ranks
from nicps.collective.store import Store
from nicps.errors import UsageProblem
from nicps.session.shared_form import ChannelPlan
from nicps.wire import MOST_SIZED

R = TypeVar("R")
_CLOSED = "the group is closed"
_FORKED = "the group is that of the process that this one was forked from: make calls there"
_FAILED = "the program has failed"
_END_LIMIT_S = 5.0  # for the threads to end after that
DEFAULT_TIMEOUT_S = 1800.0


class Spent(NamedTuple):
    """Of one call: when it began, on the monotonic clock, and how long then not all others had called."""

    began: float
    seconds_listed: float


class Group(Operations):
    """Programs on several hosts, one on each. Calls can come from any thread; on each channel their order must be the
    same everywhere.

    Args:
        link: None at a program that comes late.
        come_in: makes the link of a program that comes late, or back.
        members: at such a program, how many there are.

    Attributes: `rank` of this member, `size`, the ranks that there are, and the `names` of their hosts by rank;
    `world`, the size that the group has begun with. `late`: it is under way, and this program is not in it before
    its first `admit`; rank and size may be others then. `lost`, the ranks that have left since. `changes`, how often
    members have left or have come in. `on_loss` is called with `lost` when more have left, in the thread that carries
    out calls, and so cannot make any. `before_all`, what is called in front of each call on all channels (`plan`,
    `admit`, `close`): what it puts on channels comes before that one. `channels`, how many there are; only `plan`
    changes that. `farewell`, by what name the others are told of `close`, the same at all members. `parted`: all that
    were left have closed it together, and `lost` is the same at all of them.
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
        self.channels, self.farewell, self.parted = 1, "close", False
        self._spent: dict[int, Spent] = {}
        self.on_loss: Callable[[tuple[int, ...]], None] | None = None
        self.before_all: list[Callable[[], None]] = []
        self.lost: tuple[int, ...] = ()
        self.changes = 0
        self._closed, self._failed = "", False  # why no call is taken
        self._comes_in = False  # a thread waits for a link
        self._telling: set[int] = set()  # threads that are in `on_loss`
        self._lock = threading.Lock()  # of what the threads of several channels and callers change
        if link is not None:
            self._ranks = self._agree_on_ranks(link, rank)
            self.rank = self._ranks.numbers.index(link.number)
        else:
            self.rank = members - 1 if rank is None else rank
            size = max(members, self.rank + 1)
            self._ranks = Ranks((0,) * size, ("",) * size)
        self.size, self.names = self._ranks.size, self._ranks.names
        self.world = self.size
        self._workers = Workers(self._note_failure)
        endings.note(self)

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
        urgencies: Sequence[int] | None = None,
        rooms: Sequence[int] | None = None,
    ) -> Self:
        """Wait until the programs of all members are there.

        Args:
            size: members; 0: one on each host of the network whose agent stands by.
            name: of the group, the same at all members.
            rank: of this member, if all say one; otherwise the group deals them out.
            socket: the agent's; default: NICPS_SOCKET, or `@nicps`.
            forming_s: how long to wait for the others.
            timeout_s: how long a call waits for the others.
            late: where the group is under way already, come in at the first `admit`; then its channels are those of
                the group.
            urgencies, rooms: of several channels, as for `plan`, the same at all members.

        Raises:
            UnderWay: the group is under way already.
            NetworkProblem: no agent is there, or the others have not come.
            UsageProblem: the ranks, the size or the channels cannot be meant.
            CallMismatch: the members have given different channels.
        """
        if not 0 <= size <= 64:
            raise UsageProblem(f"a group has 1 to 64 members, not {size}")
        if rooms is not None and urgencies is None:
            raise UsageProblem("a group with rooms= needs urgencies=, one for each channel")
        if urgencies is not None:
            plan_of(urgencies, rooms, PER_FRAGMENT, MOST_SIZED)  # refused before others wait for it
        come_in = partial(Link.form, name, size, socket, timeout_s, late=True)
        try:
            link = Link.form(name, size, socket, forming_s)
        except UnderWay as found:
            if not late:
                raise
            return cls(None, rank, timeout_s, come_in, found.members)
        group: Self | None = None
        try:
            group = cls(link, rank, timeout_s, come_in)
            if urgencies is not None:
                group.plan(urgencies, rooms).result()
            return group
        except BaseException as error:
            link.close("it could not begin")
            if group is not None:
                group.__exit__(type(error))
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

    # ---- calls of all members on all channels

    def plan(self, urgencies: Sequence[int], rooms: Sequence[int] | None = None) -> Future[None]:
        """Let the group have these channels from now on: a call of all members, after all their calls on any channel.

        Calls on them can be made at once; they wait for it.

        Args:
            urgencies: of each channel, 0 to 7: what has a larger one goes first.
            rooms: numbers of 32 bits in a round of each channel, at most; longer vectors take several. Default: equal
                parts of what the group has room for.

        Raises:
            UsageProblem: there cannot be such channels.
        """
        link = self._link
        limit = link.room if link is not None else MOST_SIZED
        plan = plan_of(urgencies, rooms, PER_FRAGMENT, limit)
        self._settle()
        with self._lock:
            self._check_open()
            self.channels = len(plan)
            return self._workers.put_together(partial(self._plan, plan))

    def admit(self) -> Future[Admission]:
        """Take in the programs that wait for it, at a point that all members choose; a late one comes in here.

        It comes after all calls on any channel that were made before, and before all that are made later.
        Ranks, size and names may be others once it is done: make no other call before. The future raises MemberLost at
        a late one, if all others are lost; NetworkProblem, if the group is over.
        """
        self._settle()
        with self._lock:
            self._check_open()
            return self._workers.put_together(self._admit)

    def _settle(self) -> None:
        self._check_open()
        for each in tuple(self.before_all):
            each()

    def _call(self, call: Call, channel: int) -> Future[Any]:
        with self._lock:
            self._check_open()
            if type(channel) is not int or not 0 <= channel < self.channels:
                have = "one channel, 0" if self.channels == 1 else f"{self.channels} channels"
                raise UsageProblem(f"there is no channel {channel!r}: the group has {have}")
            return self._workers.put(channel, partial(self._carry_out, call, channel))

    def _check_open(self) -> None:
        self.check_thread()
        if self._closed:
            raise GroupClosed(self._closed)

    def check_thread(self) -> None:
        """Raises UsageProblem in `on_loss`, where nothing may wait for the group's calls."""
        if threading.get_ident() in self._telling:
            raise UsageProblem(
                "on_loss is called in the thread that carries out the group's calls, and cannot make any, nor wait for"
                " one: let it set what the script looks at"
            )

    # ---- the end

    def close(self) -> None:
        """Leave after all that was called, once all members that are left have called `close` too.

        A program that ends without it counts as lost, and the others go on.
        """
        self.check_thread()
        with contextlib.suppress(GroupClosed):
            self._settle()
        with self._lock:
            if self._closed:
                return
            self._closed = _CLOSED
            self._workers.put_together(self._end)
            self._workers.end()
        self._workers.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the group; where an error ends the program, the others go on without it."""
        if kind is None:
            self.close()
        else:
            self.give_up()

    def give_up(self) -> None:
        """Let the others go on without this member, and wait a moment for the threads."""
        with self._lock:
            if not self._closed:
                self._closed, self._failed = _CLOSED, True
                self._workers.put_together(self._end)
                self._workers.end()
        if self._link is not None and self._closed != _FORKED:
            self._link.abandon(_FAILED)
            if not self._comes_in:
                self._workers.join(_END_LIMIT_S)

    def disown(self) -> None:
        """As `nicps.collective.endings.Owned`."""
        self._lock = threading.Lock()
        self._closed = _FORKED
        if self._link is not None:
            self._link.disown(_FORKED)

    # ---- in the threads

    def _note_failure(self, error: BaseException) -> None:
        if self._link is not None:
            self._link.close(f"a call has failed: {error!r}")

    def _carry_out(self, call: Call, channel: int) -> Any:
        if self._link is None:
            self._spent[channel] = Spent(time.monotonic(), 0.0)
            return call.alone()
        return self._attempt(call.carry_out, call.text, self._ranks, channel=channel, direct=True)

    def _plan(self, plan: tuple[ChannelPlan, ...]) -> None:
        """As `plan`, in the thread."""
        link, deadline = self._link, time.monotonic() + self._timeout_s
        if link is None:
            return
        said = ", ".join(f"{each.urgency} ({each.rounds[0]:,} fragments)" for each in plan)
        try:
            link.plans = plan if link.agreed != plan else ()
            self._attempt(
                lambda each: each.add_words(np.zeros(1, np.int32)),
                f"plan of channels of urgency {said}",
                self._ranks,
            )
            link.await_plan(plan, deadline)
        except BaseException:
            self.channels = len(link.agreed)
            raise
        finally:
            link.plans = ()

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
        self.channels = len(link.plan)
        self.changes += bool(admission.ranks)
        self._note_lost(table.ranks.of(here), anew=True)
        return admission

    def _make_link(self) -> Link:
        """Come into the group that is under way; a member that it has gone on without comes back."""
        if self._come_in is None:
            raise GroupClosed("the group is over here")
        if self._link is not None:
            self._wanted = self.rank
        self._comes_in = True
        try:
            return self._come_in()
        finally:
            self._comes_in = False

    def _attempt(
        self,
        carry_out: Callable[[Attempt], R],
        text: str,
        ranks: Ranks,
        coming: Link | None = None,
        *,
        channel: int = 0,
        direct: bool = False,
    ) -> R:
        """Carry a call out.

        Args:
            coming: the link of an `admit`: that says itself who is lost.
        """
        link = coming or self._link
        assert link is not None
        if channel >= len(link.agreed):
            raise UsageProblem(f"there is no channel {channel}: the plan has not come into force")
        deadline = time.monotonic() + self._timeout_s

        def note(done: Attempt) -> None:
            self._spent[channel] = Spent(done.began, done.seconds_listed)
            if coming is None:
                self._note_lost(done.counted)

        of = link.of(channel)
        gather = of.gather if direct else None
        return carried_out(of, carry_out, text, ranks, deadline, note, gather)

    def spent(self, channel: int) -> Spent:
        """Of the last call on that channel; for a callback of its future."""
        return self._spent[channel]

    def _note_lost(self, here: tuple[int, ...], *, anew: bool = False) -> None:
        """Only these are left; or, `anew`, are there."""
        with self._lock:
            before = set(self.lost)
            lost = set(range(self._ranks.size)).difference(here)
            more = lost - before
            self.lost = tuple(sorted(lost if anew else lost | before))
            self.changes += bool(more)
        if more and self.on_loss is not None:
            thread = threading.get_ident()
            self._telling.add(thread)
            try:
                self.on_loss(self.lost)
            except BaseException:  # the script's own mistake must cost no member
                traceback.print_exc()
            finally:
                self._telling.discard(thread)

    def _end(self) -> None:
        link = self._link
        if link is None:
            return
        if self._failed:
            link.close(_FAILED)
            return
        empty = np.zeros(0, np.uint8)
        goodbye = Barrier(Kind.of(empty), empty, self.farewell)
        try:
            self._attempt(goodbye.carry_out, goodbye.text, self._ranks)
            self.parted = True
            link.leave()
        except CollectiveFailed as error:
            link.close(str(error))
