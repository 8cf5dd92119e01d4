# SPDX-License-Identifier: Apache-2.0
"""Which members serve, which member replaces a lost server, and what a host needs for its part (docs/servers.md).

Nothing here has a state: the lead asks as it decides on a training phase, and each host as it prepares for one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nicps import wire
from nicps.errors import JobFailed
from nicps.job.text import one_line
from nicps.protocol.partners import own_set
from nicps.protocol.phase import Phase
from nicps.protocol.serving import pulled_fragments
from nicps.protocol.view import View
from nicps.session import served_form
from nicps.session.served_form import Serves

SYNC_EVERY = 64  # pushes from one synchronisation to the next (T of S4): the default of the setting `sync_every`


def second_begins(settings: Mapping[str, Any], sets: Sequence[int]) -> int:
    """The first fragment of set 2 of a job whose workers have partners; otherwise 0.

    Args:
        sets: numbers of each set, as the prepared job has them; none: it has no sets.
    """
    if not sets or not bool(settings.get("partners", True)):
        return 0
    return served_form.second_begins(sets)


# ---- the lead: which members serve


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
                    raise JobFailed(
                        f"servers: {one_line(name)} is no member of this job: --set servers=N, or names out of {there}"
                    )
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


def replace_servers(
    before: tuple[int, ...],
    counted: Collection[int],
    view: View,
    reads: Mapping[int, int] = MappingProxyType({}),
    *,
    train: bool = False,
) -> tuple[int, ...]:
    """The servers of the next phase, after some were lost: workers that have read the newest round take their ranks.

    Each of them has the parameters of the commit that it has read last. Among several that have read the same, those
    with the highest numbers serve. The lead has the lowest number: if it can it goes on as a worker, so that hosts that
    come back get its optimizer's state.

    Args:
        before: the servers of the phase before, by rank.
        counted: the live members that have the job's state.
        reads: the last round that each worker has read, as far as that is known.
        train: servers have a share, too. Then there may be fewer of them: those that are left have all parts. What is
            filled must be of the newest round, as members that have read it train on: others are given no part.

    Raises:
        JobFailed: no worker would be left.
    """
    gone = [number for number in before if number not in counted]
    workers = sorted(set(counted) - set(before), key=lambda k: (reads.get(k, 0), k))
    newest = max((reads.get(k, 0) for k in counted), default=0)
    if train:
        workers = [k for k in workers if reads.get(k, 0) == newest]
    if not train and len(workers) <= len(gone):
        raise JobFailed(
            f"{view.names(gone)} served parameters, and left: too few hosts are left to serve and to train"
        )
    taken = dict(zip(gone, reversed(workers), strict=False))
    found = tuple(taken.get(number, number) for number in before if number in {*counted, *taken})
    if len(found) == len(before):
        return found
    return tuple(number for number in found if reads.get(number, 0) == newest)


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
        """What that member needs. A server that is alone and does not train pulls nothing."""
        serving, share = phase.serving, phase.shares[number - 1]
        assert serving is not None
        rank = serving.servers.index(number) if number in serving.servers else -1
        part = serving.part(rank, phase.fragments) if rank >= 0 else range(0)
        pulls = bool(share) or len(serving.servers) > 1
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
        learners: members that have missed rounds.
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
    sets, own = serving.sets, own_set(phase, number)
    return Serves(serving.servers, serving.every, sets, *maps, part.start, len(part), own)
