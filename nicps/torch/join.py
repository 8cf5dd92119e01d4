# SPDX-License-Identifier: Apache-2.0
"""How a process joins: the group that it forms beside its agent, or the rendezvous that its environment names.

Where the environment names none, the store is the one that all members of the group share.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch._C._distributed_c10d import PrefixStore, Store

from nicps.collective import CollectiveFailed, Group
from nicps.errors import UsageProblem
from nicps.torch.store import GroupStore
from nicps.torch.tcp import Tcp
from nicps.torch.waiting import print_if_slow

#: No device has this name: a group of Gloo's own is refused with it at once.
NO_TCP = "no-tcp-between-the-hosts"
_LEAST_S = 1.0
_QUIET_S = 10.0  # until a script says that it waits for the others: imports take seconds
_FORMING_S = 30.0  # at least, also where a call may take less
#: The group that the rendezvous has formed, for the process group that is created after it.
_formed: list[tuple[Group, Tcp]] = []
#: The group that the rendezvous has formed last.
_met: list[_Met] = []
#: The ranks that agents have given this process, in one group after the other: they stay in RANK.
_given: set[str] = set()
#: C++ has only a part of a store that is made in Python: the rest must stay.
_stores: list[Store] = []


@dataclass(slots=True)
class _Met:
    """A group that a rendezvous has formed.

    Attributes: `said`, RANK and WORLD_SIZE in the environment since then; `times`, how often its store was handed out.
    """

    group: Group
    said: tuple[str | None, str | None]
    times: int = 0

    @property
    def under_way(self) -> bool:
        """This process is in it, and so cannot form another one."""
        return not (self.group.out or self.group.late)

    def store(self, timeout: timedelta) -> Store:
        """Its store, each time with keys of its own."""
        self.times += 1
        store = GroupStore(self.group)
        store.set_timeout(timeout)
        _stores.append(store)
        return store if self.times == 1 else PrefixStore(f"rendezvous {self.times}", store)

    def renumber(self) -> None:
        """All ranks that were left have left together: the next group is theirs, in the same order.

        A script that has changed RANK or WORLD_SIZE since says itself whom it waits for.
        """
        group = self.group
        if not group.parted or self.said != _said():
            return
        left = [rank for rank in range(group.size) if rank not in group.lost]
        rank = str(left.index(group.rank))
        if self.said[0] in _given:
            _given.add(rank)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = rank, str(len(left))


def _said() -> tuple[str | None, str | None]:
    return os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


def register() -> None:
    """`nicps://`; `env://` (the default) where the environment has no rank or address; under `nicps run` all addresses.

    An address without a rank, and any under `nicps run`, is the script's own, of a tutorial that has all ranks on one
    host: no rank would find the others.
    """
    # `torch.distributed.rendezvous` is a function, and the module behind it.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = module._rendezvous_handlers
    by_environment, by_address = handlers["env"], handlers["tcp"]

    def from_environment(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        address = os.environ.get("MASTER_ADDR")
        if address is None or _is_run() or not _has_rank(url, by_torch="timeout" not in kwargs):
            yield from meet(url, **kwargs)
            return
        found = by_environment(url, **kwargs)
        text = f"waits for the other ranks at MASTER_ADDR={address}: without it the agents let them meet"
        with print_if_slow(text, _QUIET_S):
            first = next(found)
        yield first
        yield from found

    def from_address(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        yield from (meet if _is_run() else by_address)(url, **kwargs)

    handlers["env"], handlers["tcp"], handlers["nicps"] = from_environment, from_address, meet


def _is_run() -> bool:
    """This is a script of `nicps run`, whose agent has a rank, the size and a store for it."""
    return "NICPS_WEIGHTS" in os.environ


def _has_rank(url: str, *, by_torch: bool = False) -> bool:
    """The script or its environment says the rank, as under torchrun: one that an agent has given does not count.

    Args:
        by_torch: torch may have put RANK into the URL, as `init_rpc` does for a script that says no rank.
            `init_process_group`, which says a time-out, has no rank there but the script's.
    """
    said = os.environ.get("RANK")
    ranks = parse_qs(urlparse(url).query).get("rank", ())
    if ranks and not (by_torch and ranks[-1] == said):
        return True
    return said not in (None, *_given)


def meet(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Form the group: its size and this process's rank are in the URL or the environment, or the agent's to say.

    A process is in one group only: while that is under way, as when `init_rpc` comes behind `init_process_group`, its
    members meet in it again.
    """
    if not (_met and _met[-1].under_way):
        if _met:
            _met[-1].renumber()
        _form(url, timeout)
    met = _met[-1]
    yield met.store(timeout), met.group.rank, met.group.size


def _form(url: str, timeout: timedelta) -> None:
    query = {key: values[-1] for key, values in parse_qs(urlparse(url).query).items()}
    size = int(query.get("world_size", os.environ.get("WORLD_SIZE", 0)))
    said = query.get("rank", os.environ.get("RANK"))
    group, tcp = form_with_tcp(max(size, 0), int(said) if said is not None else None, timeout)
    if tcp.refusal:  # Gloo would find the store, and wait for connections that cannot be made
        os.environ.setdefault("GLOO_SOCKET_IFNAME", NO_TCP)
    _formed[:] = [(group, tcp)]
    if "RANK" not in os.environ:
        _given.add(str(group.rank))
    for name, value in (("RANK", group.rank), ("WORLD_SIZE", group.size), ("LOCAL_RANK", 0)):
        os.environ.setdefault(name, str(value))
    _met[:] = [_Met(group, _said())]


def take(rank: int, size: int, timeout: timedelta) -> tuple[Group, Tcp]:
    """The group that the rendezvous has formed, or one of that rank and size."""
    return _formed.pop() if _formed else form_with_tcp(size, rank, timeout)


def form_with_tcp(size: int, rank: int | None, timeout: timedelta) -> tuple[Group, Tcp]:
    """Form the group, and let its members agree on what goes over TCP.

    Raises:
        NicpsError: one of both is not possible. The others go on without this process.
    """
    group = form(size, rank, timeout)
    with left_if_it_fails(group):
        tcp = Tcp.agree(group)
    return group, tcp


@contextlib.contextmanager
def left_if_it_fails(group: Group) -> Iterator[None]:
    """A script may go on behind the error: the others must not wait for it, and it may form another group."""
    try:
        yield
    except BaseException as error:
        group.__exit__(type(error))
        raise


def form(size: int, rank: int | None, timeout: timedelta) -> Group:
    """Wait for the others.

    Raises:
        UsageProblem: several processes of this host want to join.
        NetworkProblem: no agent is there, or the others have not come in time.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local > 1:
        raise UsageProblem(
            f"nicps has one rank a host, and LOCAL_WORLD_SIZE is {local}: start one process on every host"
        )
    seconds = max(timeout.total_seconds(), _LEAST_S)
    forming_s = min(max(seconds, _FORMING_S), 1e6)
    of = f"of {size} hosts" if size else "of all hosts"
    how = "" if _is_run() else ": start the script on every host, as `nicps run` does"
    text = f"waits for the other ranks {of}{how}"
    with print_if_slow(text, _QUIET_S):
        return Group.form(
            size, name="torch", rank=rank, forming_s=forming_s, timeout_s=seconds, late=True
        )


def too_early() -> CollectiveFailed:
    """Of a sum with others: a script that has come late, and trains alone, would never notice."""
    return CollectiveFailed(
        "this process has come late to a group that is under way, and is not in it: let the script make a"
        " nicps.torch.State, and call its sync() on all ranks before the first step (docs/pytorch.md)"
    )
