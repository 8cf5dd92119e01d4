# SPDX-License-Identifier: Apache-2.0
"""Which members serve, who takes a server's place, and what a host needs for its part (docs/servers.md).

Nothing here has a state: the lead asks as it decides on a training phase, and each host as it prepares for one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nicps import wire
from nicps.errors import JobFailed
from nicps.job.text import one_line
from nicps.protocol.phase import Phase
from nicps.protocol.serving import pulled_fragments
from nicps.protocol.view import View
from nicps.session.served_form import Serves

SYNC_EVERY = 64  # T of S4, where a job says nothing of it


def is_served(settings: Mapping[str, Any]) -> bool:
    """Whether a job with these settings has parameter servers."""
    return str(settings.get("system", "R")) != "R"


# ---- the lead: who serves


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings `servers` and `servers_train`: how many, or which hosts; whether they have a share of the batch."""

    count: int
    names: tuple[str, ...] = ()
    train: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Asked:
        """Out of a job's settings.

        Raises:
            JobFailed: they are no such thing.
        """
        text, train = str(settings.get("servers", 1)), bool(settings.get("servers_train", False))
        names = tuple(name.strip() for name in text.split(","))
        if len(names) == 1 and _is_number(text):
            if not 1 <= int(text) <= wire.MAX_MEMBERS:
                raise JobFailed(f"servers={text}: a job has 1 to {wire.MAX_MEMBERS} servers")
            return cls(int(text), (), train)
        shown = one_line(text)
        if not all(names):
            raise JobFailed(
                f"servers={shown}: name how many servers there are, or hosts separated by commas"
            )
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise JobFailed(f"servers={shown}: {twice} is named twice")
        return cls(len(names), names, train)

    def choose(self, view: View) -> tuple[int, ...]:
        """The first servers of a job, by rank.

        Raises:
            JobFailed: a name is no live member's, or there are too few members.
        """
        live = view.order
        if self.names:
            numbers = {view.members[k - 1].name: k for k in live}
            for name in self.names:
                if name not in numbers:
                    there = view.names(live)
                    raise JobFailed(f"servers: {one_line(name)} is no member of this job: {there}")
            servers = tuple(numbers[name] for name in self.names)
        else:
            servers = live[: self.count]
        need = self.count + (not self.train)
        if len(live) < need:
            shown = ",".join(self.names) or self.count
            needs = (
                f"that and one worker are {need} hosts" if not self.train else f"that needs {need}"
            )
            raise JobFailed(
                f"servers={shown}: {needs}, and there are {len(live)}: name fewer servers, add hosts, or use system=R"
            )
        return servers


def _is_number(text: str) -> bool:
    return text.strip().lstrip("-").isdecimal()


@dataclass(frozen=True, slots=True)
class Roles:
    """Who serves in the next phase, by rank; the worker `source` that new parts are filled from, 0: from no worker."""

    servers: tuple[int, ...]
    source: int = 0


def choose_source(workers: Collection[int], read: Mapping[int, int], first_round: int) -> int:
    """The worker that a new server is filled from: it has read most, and of these it has the lowest number.

    Args:
        workers: that are live, have trained, and go on.
        read: the last round that each has read.
        first_round: of the first training phase with servers. Before it was read nothing is trained, and a new server
            has the weights from its own program: 0.
    """
    able = [number for number in workers if read.get(number, 0) >= first_round]
    return min(able, key=lambda number: (-read[number], number), default=0)


def follow(
    before: tuple[int, ...], live: Collection[int], workers: Collection[int], source: int
) -> Roles | None:
    """Who serves after hosts have gone, or come; None: the job cannot go on, and is saved and stopped (R22).

    A member that does not serve takes the rank of a server that has gone: of those that are no workers the one with
    the lowest number, or else of the workers, but for the last one. If there is none, the servers that are left deal
    the parameters out anew, and all of them are filled from `source`.

    Args:
        before: the servers of the phase before, by rank.
        workers: that have trained, and go on.
        source: as `choose_source` says, for the case that somebody must be filled; it goes on as a worker.
    """
    gone = [server for server in before if server not in live]
    if not gone:
        return Roles(before)
    idle = sorted(set(live) - set(before) - set(workers))
    busy = sorted(set(workers) & set(live) - set(before) - {source})
    if not source and busy:
        busy.pop()  # one of them stays a worker
    new = iter((*idle, *busy))
    taken = {server: next(new, 0) for server in gone}
    servers = tuple(taken.get(server, server) for server in before)
    if 0 in servers:
        servers = tuple(server for server in before if server in live)
    left = set(workers) & set(live) - set(servers)
    return Roles(servers, source) if servers and left else None


# ---- every host: what it needs


@dataclass(frozen=True, slots=True)
class Room:
    """What of a vector is at one host in a phase.

    `rank` of its part, -1 for none; `first` and `homes`, the part in push fragments. `room` and `pushes`: fragments of
    parameters in its store, and push fragments in its own records; 0: it has none. `averages`: there are
    synchronisations.
    """

    rank: int = -1
    first: int = 0
    homes: int = 0
    room: int = 0
    pushes: int = 0
    averages: bool = False

    @classmethod
    def of(cls, phase: Phase, number: int) -> Room:
        """What that member needs. A server that is alone and does not train pulls nothing, but to be filled."""
        serving, share = phase.serving, phase.shares[number - 1]
        assert serving is not None
        rank = serving.servers.index(number) if number in serving.servers else -1
        part = serving.part(rank, phase.fragments) if rank >= 0 else range(0)
        pulls = bool(share) or len(serving.servers) > 1 or bool(serving.source and rank >= 0)
        room = pulled_fragments(phase.fragments, phase.width) if pulls else 0
        pushes = phase.fragments if pulls else 0
        return cls(rank, part.start, len(part), room, pushes, serving.every > 0)

    def lanes(self, width: int, vector: int) -> range:
        """The parameters of the part, of a vector of so many."""
        per = wire.lanes_per_fragment(width)
        return range(min(self.first * per, vector), min((self.first + self.homes) * per, vector))


@dataclass(frozen=True, slots=True)
class PartOf:
    """The part of a vector of `vector` parameters that `room` is at a host, whose steps have lanes of `width` bits."""

    room: Room
    width: int
    vector: int

    @property
    def lanes(self) -> range:
        """Its parameters."""
        return self.room.lanes(self.width, self.vector)


def keeps_part(before: Phase | None, phase: Phase, number: int, learners: Collection[int]) -> bool:
    """Whether that member's kernel has the part already that it serves in a phase.

    Args:
        before: the last phase with servers that it was in.
        learners: who has missed rounds.
    """
    if before is None or before.serving is None or number in learners:
        return False
    if (before.fragments, before.width) != (phase.fragments, phase.width):
        return False
    now, then = Room.of(phase, number), Room.of(before, number)
    same = (now.rank, now.first, now.homes) == (then.rank, then.first, then.homes)
    return now.rank >= 0 and same and now.averages <= then.averages


def announce(phase: Phase, number: int, vector: int, *, new: bool, fills: bool) -> Serves:
    """What a training program is told before it enters a phase.

    Args:
        vector: parameters in it.
        new: own records and a store that it has not mapped.
        fills: it writes the weights of its part.
    """
    serving, room = phase.serving, Room.of(phase, number)
    assert serving is not None
    part = room.lanes(phase.width, vector) if fills else range(0)
    maps = (room.room, room.pushes) if new else (0, 0)
    return Serves(serving.servers, serving.every, serving.sets, *maps, part.start, len(part))
