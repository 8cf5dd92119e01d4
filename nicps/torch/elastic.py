# SPDX-License-Identifier: Apache-2.0
"""Scripts that go on without a host, and take it back: docs/pytorch.md, "Hosts that come back"."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nicps.collective import Group, GroupClosed, MemberLost
from nicps.errors import UsageProblem
from nicps.torch.backend import ProcessGroupNicps
from nicps.torch.callbacks import callback
from nicps.torch.waiting import print_if_slow

_QUIET_S = 3.0  # until a process that waits to come in says so
_WAITS = "this process has come to a group that is under way: it waits until the other ranks call State.sync()"
_MOST_HANDLES = 64  # of one process, that are told of to the others
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)


class State:
    """All that a process which comes late must get: whatever has a `state_dict`, and plain values.

        state = nicps.torch.State(model=model, optimizer=optimizer, epoch=0)
        while state.epoch < EPOCHS:
            state.sync()
            ...
            state.epoch += 1

    What is named becomes an attribute. At a process that comes late `sync` loads the former in place, and sets the
    latter. Plain values are numbers, texts, tensors, and lists and dicts of these.
    """

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            if name in ("sync",):
                raise UsageProblem(f"{name!r} cannot be the name of a part of the state")
            _check(name, part)
            setattr(self, name, part)
        self._names = tuple(parts)

    def sync(self) -> bool:
        """Take in the processes that wait for it, and give them the state. All ranks call it at the same point.

        The rank, the world size and the values of the state may be others afterwards. Where nobody waits it costs two
        small rounds.

        Returns:
            Whether anybody has come in, perhaps this process.

        Raises:
            UsageProblem: the backend is not nicps, or the state is not plain.
            NicpsError: the group is over, or nobody is left who has the state.
        """
        group = _group()
        try:
            return self._sync(group)
        except GroupClosed:
            if not group.out:
                raise
        return self._sync(group)  # the others have gone on without this process: it comes back

    def _sync(self, group: Group) -> bool:
        handles = _renewed_of(group)
        with (
            print_if_slow(_WAITS, _QUIET_S) if group.late or group.out else contextlib.nullcontext()
        ):
            admission = group.admit().result()
        if not admission.ranks:
            return False
        for source in admission.sources:
            try:
                data = _broadcast(group, self._pack() if group.rank == source else b"", source)
            except MemberLost:
                continue  # it is lost meanwhile, as all ranks know
            if admission.late:
                for handle in handles:
                    handle.forget()
                self._load(data)
            for handle in common(group, handles):
                handle.renew()
            return True
        raise MemberLost("nobody is left of the ranks that had the state")

    def _pack(self) -> bytes:
        whole = {}
        for name in self._names:
            part = getattr(self, name)
            whole[name] = part.state_dict() if _has_state(part) else part
        buffer = io.BytesIO()
        torch.save(whole, buffer)
        return buffer.getvalue()

    def _load(self, data: bytes) -> None:
        try:
            whole = torch.load(io.BytesIO(data), weights_only=True)
        except pickle.UnpicklingError as error:
            kind = re.search(r"GLOBAL (\S+)", str(error))
            what = f"a {kind[1]}" if kind else "what torch.load refuses"
            raise UsageProblem(
                f"the state of the others has {what}: a state_dict may have numbers, texts, tensors, and lists and"
                " dicts of these"
            ) from None
        if whole.keys() != set(self._names):
            raise UsageProblem(
                f"the state has {', '.join(self._names)} here, and {', '.join(whole)} at the others: start the same"
                " script on every host"
            )
        for name, found in whole.items():
            part = getattr(self, name)
            if _has_state(part):
                part.load_state_dict(found)
            else:
                setattr(self, name, found)


class Renewed(Protocol):
    """What must know of hosts that have come in.

    Attributes: `alike`, a checksum of what must be the same at all ranks if `renew` makes calls; 0: it makes none.
    """

    @property
    def alike(self) -> int: ...

    def forget(self) -> None:
        """This process takes the state of the others."""

    def renew(self) -> None:
        """All ranks have the same state now, and call this at the same point."""


_renewed: WeakKeyDictionary[Group, list[ref[Renewed]]] = WeakKeyDictionary()


def note_renewed(group: Group, handle: Renewed) -> None:
    """Tell the handle as long as it lives."""
    _renewed.setdefault(group, []).append(ref(handle))


def forget_renewed(group: Group, handle: Renewed) -> None:
    """It is closed."""
    _renewed[group] = [each for each in _renewed.get(group, ()) if each() is not handle]


def _renewed_of(group: Group) -> list[Renewed]:
    return [handle for each in _renewed.get(group, ()) if (handle := each()) is not None]


def common(group: Group, handles: Sequence[Renewed]) -> list[Renewed]:
    """Those that all ranks have, in an order that is the same at all of them. All ranks call it.

    One that a script has let go of without closing it may be left at some ranks only: garbage is collected at no point
    that all have in common, and a process that has come in did not make it. Of equal ones the last made are meant.

    Raises:
        UsageProblem: the ranks have handles of different models or settings. All of them get it.
    """
    table = np.zeros((group.size, 1 + _MOST_HANDLES), np.int32)
    last = [each for each in handles if each.alike][-_MOST_HANDLES:]
    table[group.rank, : 1 + len(last)] = 1, *(each.alike for each in last)
    found = group.all_reduce(table.reshape(-1)).result().reshape(table.shape)
    has = {rank: Counter(row[row > 0].tolist()) for rank, row in enumerate(found[:, 1:])}
    has = {rank: each for rank, each in has.items() if found[rank, 0]}
    shared = reduce(and_, has.values())
    rest = {rank: left for rank, each in has.items() if (left := set(each - shared))}
    first = min(rest, default=0)
    differ = [r for r, left in rest.items() if left - rest[first] and rest[first] - left]
    if differ:
        names = ", ".join(f"{group.names[rank]} (rank {rank})" for rank in differ)
        raise UsageProblem(
            f"the model or the settings of overlap() at {names} are not those of {group.names[first]} (rank {first}):"
            " start the same script on every host, and close() a handle that it does not need any more"
        )
    taken = []
    for each in reversed(last):
        if shared[each.alike]:
            shared[each.alike] -= 1
            taken.append(each)
    return [each for each in handles if not each.alike] + sorted(taken, key=lambda each: each.alike)


def average(_, bucket):  # type: ignore[no-untyped-def]
    """A hook for DDP: gradients are averaged over the ranks that are there, where DDP divides by those at the start.

    model.register_comm_hook(None, nicps.torch.average)
    """
    if isinstance(dist.group.WORLD, ProcessGroupNicps):
        dist.group.WORLD.averages = True
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    done: torch.futures.Future[Any] = work.get_future()
    return done.then(callback(lambda: work.result()[0]))


def _group() -> Group:
    process_group = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(process_group, ProcessGroupNicps):
        raise UsageProblem(
            'State.sync needs the process group of nicps: dist.init_process_group("nicps")'
        )
    return process_group.group


def _broadcast(group: Group, data: bytes, source: int) -> bytes:
    length = int(group.broadcast(np.array([len(data)]), source).result()[0])
    whole = np.frombuffer(data, np.uint8) if data else np.zeros(length, np.uint8)
    return group.broadcast(whole, source).result().tobytes()


def _has_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _check(name: str, part: Any) -> None:
    if isinstance(part, DistributedDataParallel):
        if not part.find_unused_parameters:
            raise UsageProblem(
                f"{name}: DistributedDataParallel lays out its buckets anew after the first step, and a process that"
                " comes late would lay them out otherwise: give it find_unused_parameters=True"
            )
    elif not (_has_state(part) or _is_plain(part)):
        raise UsageProblem(
            f"{name}: {type(part).__name__} has no state_dict and load_state_dict, and is no plain value: a number, a"
            " text, a tensor, or a list or dict of these"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)
