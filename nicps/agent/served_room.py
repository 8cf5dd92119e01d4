# SPDX-License-Identifier: Apache-2.0
"""What the job that is here has of parameter servers, in the kernel and in files shared with its training program.

A server's program gives the weights of the own part in a memory file, and gets that part back in another one. All else
goes through the maps (docs/servers.md).
"""

from __future__ import annotations

from collections import deque

from nicps import wire
from nicps.agent.served import ServedPart, WeightsFile
from nicps.agent.served_frames import check_exponents, own_frame
from nicps.dataplane import DataPlane
from nicps.dataplane.servers import Servers, ServersPart, ServersStore
from nicps.errors import BpfLoadError
from nicps.job import actions as act
from nicps.job import slow_work
from nicps.protocol import Phase, SendServed
from nicps.session.fields import Message
from nicps.session.served_form import NearLimit, Pulled, Serves

#: Counters of the frames with parameters that leave this host: as a server, and as a partner.
_GIVEN = ("pulled", "passed_on")
#: Fragments of the own part in one system call, which takes about a millisecond then.
_OWN_RUNS = 1024


class ServedRoom:
    """Of one job after the other. What takes long is done in a thread: `reserve`, `fill`, `read` and `release`.

    Attributes: `versions`, of the first server's part, if this host has that: pushes and synchronisations (S2).
    """

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._reserved: dict[int, ServersPart | ServersStore] = {}
        self._given: WeightsFile | None = None  # that the program writes its weights to
        self._told: WeightsFile | None = None  # with the own part
        self._former: list[WeightsFile] = []  # files that are not needed any more
        self._part: ServedPart | None = None
        self._full = False  # a parameter of the part that is in use was found near the limits
        self._begins: act.BeginServing | None = None  # a phase that is prepared
        self._own: deque[tuple[SendServed, Phase, wire.Header]] = deque()
        self.versions = 0
        self._before = self._given_out()

    def _given_out(self) -> tuple[int, ...]:
        counters = self._dataplane.maps.counters()
        return tuple(counters.get(name, 0) for name in _GIVEN)

    def facts(self) -> dict[str, int]:
        """For the run's result: `versions`, and how many frames with parameters have left this host in the job."""
        since = (now - then for now, then in zip(self._given_out(), self._before, strict=True))
        return {"versions": self.versions, **dict(zip(_GIVEN, since, strict=True))}

    @property
    def _servers(self) -> Servers:
        servers = self._dataplane.maps.servers
        assert servers is not None, "the program of servers is loaded first"
        return servers

    # ---- in a thread

    def reserve(self, ticket: int, task: slow_work.ReserveServed) -> int | slow_work.StripesRefused:
        """Load the program, and make a store."""
        try:
            self._dataplane.open_servers()
            if task.own:
                self._dataplane.open_own()
        except BpfLoadError as error:
            return slow_work.StripesRefused(str(error))
        if task.room:
            self._reserved[ticket] = self._servers.reserve_store(task.room, task.pushes)
        return ticket

    def fill(self, ticket: int, task: slow_work.FillPart) -> int:
        """Make the own part of what the program has given.

        Raises:
            TooLarge: a weight is not finite, or too large.
        """
        assert self._given is not None, "the program was asked for its weights"
        about = task.part
        self._part = part = ServedPart(self._servers, about.room, about.width, about.vector)
        self._reserved[ticket] = part.fill(self._given)
        return ticket

    def read(self, _: slow_work.ReadPart) -> None:
        """Write the own part into a file."""
        assert self._part is not None, "this host serves"
        former, self._told = self._told, self._part.read()
        if former is not None:
            self._former.append(former)

    # ---- at once

    def use(self, action: act.UseServed) -> None:
        """What was reserved comes into use."""
        reserved = self._reserved.pop(action.served)
        if isinstance(reserved, ServersStore):
            self._servers.use_store(reserved)
        else:
            self._servers.use_part(reserved)
            self._full = False

    def drop(self, action: act.DropServed) -> None:
        """What was reserved is not needed."""
        self._reserved.pop(action.served).close()

    def begin(self, action: act.BeginServing) -> None:
        """A phase with servers is prepared. It begins here once its first round is open."""
        self._begins = action

    def open_round(self, round_: int) -> None:
        """That round of a phase with servers is going to be open, before the kernel is told."""
        servers, begins, config = (
            self._dataplane.maps.servers,
            self._begins,
            self._dataplane.maps.config,
        )
        if servers is None:
            return
        if begins is not None and round_ >= begins.first_round:
            self._begins = None
            config["round_low"], config["round_high"] = (
                1,
                0,
            )  # none, until the new words are written
            servers.begin_phase(begins.forget, begins.room, staleness=begins.staleness)
            self._dataplane.maps.stripes.areas.rank_channels()
            if not begins.serves:
                self._part = None  # of an earlier phase
        if round_ != config["round"]:
            servers.begin_round(round_)

    def settle(self, action: act.Settled) -> None:
        """A round is committed with a list."""
        self._servers.settle(action.round)

    def note_commit(self, round_: int, view: int, listed: int) -> int:
        """A round with a list of so many contributions is committed: as many fragments of these are in the own part."""
        servers, part = self._dataplane.maps.servers, self._part
        if servers is None or part is None:
            return 0
        opened, pushes = servers.version
        if part.is_first and opened == round_:
            self.versions += pushes + bool(listed)
        return servers.made(round_, view) * listed

    def find_full(self) -> NearLimit | None:
        """The parameter of the own part that is near the limits, if there is one: once for each part."""
        if self._part is None or self._full or self._servers.full is None:
            return None
        self._full = True
        return self._part.find_full()

    def descriptors(self, message: Message) -> tuple[int, ...]:
        """Of the memory that a message tells of, in the order that it promises."""
        while self._former:  # not in the thread: their descriptors may be on their way
            self._former.pop().close()
        if isinstance(message, Pulled) and message.lanes:
            assert self._told is not None, "the part is read first"
            return (self._told.fd,)
        if not isinstance(message, Serves):
            return ()
        fds, store = list[int](), self._servers.store
        if message.room and store is not None:
            fds += [store.own_fd, store.sums_fd]
        if message.lanes:
            former, self._given = self._given, WeightsFile(message.lanes)
            if former is not None:
                former.close()
            fds.append(self._given.fd)
        return tuple(fds)

    # ---- a server that trains

    def queue_own(self, action: SendServed, phase: Phase, header: wire.Header) -> None:
        """Fragments of this host's step, or its questions, that are for the own part."""
        self._own.append((action, phase, header))

    def serve_own(self) -> None:
        """Let them have their effect, once the kernel has the settings with which frames would be sent now.

        Raises:
            JobFailed: a step cannot be added.
        """
        while self._own:
            action, phase, header = self._own.popleft()
            for first, count in action.ranges:
                for at in range(first, first + count, _OWN_RUNS):
                    runs = min(_OWN_RUNS, first + count - at)
                    if action.type is not wire.FrameType.PULL:
                        exponents = self._servers.own[at : at + runs]["exponent"]
                        check_exponents(at, exponents, phase.width)
                    self._dataplane.serve_own(own_frame(header, action, phase, at), runs)

    def drop_own(self) -> None:
        """They are not needed any more."""
        self._own.clear()

    # ---- the end

    def retire(self) -> None:
        """The job is over."""
        reserved, self._reserved = self._reserved, {}
        for made in reserved.values():
            made.close()
        for file in (self._given, self._told, *self._former):
            if file is not None:
                file.close()
        self._given = self._told = self._part = self._begins = None
        self._former = []
        self._own.clear()
        self.versions = 0
        self._before = self._given_out()
        if self._dataplane.maps.servers is not None:
            self._servers.retire()

    def release(self) -> None:
        """Give the kernel's memory back, once the programs are gone."""
        if self._dataplane.maps.servers is not None:
            self._servers.release()
