# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's process group over `nicps.collective`.

A tensor's memory goes to the collective as it is, and the result is written when it is there. A call that fails raises
from its work's `wait()`, and out of `backward()` as a RuntimeError.
"""

from __future__ import annotations

import gc
import hashlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from nicps.collective import Group
from nicps.collective.kinds import Array
from nicps.errors import UsageProblem
from nicps.torch import join

_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
_OVER_TCP = (
    'use a group of Gloo for it, which needs TCP between the hosts: dist.new_group(backend="gloo")'
)

#: Their methods have the types of C++.
_Work: Any = _distributed_c10d.Work
_ProcessGroup: Any = dist.ProcessGroup
_Tensors = Sequence[torch.Tensor]
T = TypeVar("T")


class ProcessGroupNicps(_ProcessGroup):  # type: ignore[misc]
    """All ranks of a group, one on each host. Tensors are the processor's.

    Attributes: `group`, the collectives, with `lost` and `on_loss`.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        group.on_loss = self._warn_of_loss

    @classmethod
    def create(
        cls, store: _distributed_c10d.Store, rank: int, size: int, timeout: timedelta
    ) -> Self:
        """What `init_process_group` calls.

        Raises:
            UsageProblem: this process has a group already.
        """
        if dist.is_initialized():
            raise UsageProblem(f"nicps has one group of all ranks, and no subgroups: {_OVER_TCP}")
        return cls(join.take(rank, size, timeout))

    def getBackendName(self) -> str:  # noqa: N802
        """For people."""
        return "nicps"

    name = getBackendName

    def shutdown(self) -> None:
        """`destroy_process_group`: leave, once all others do; under `nicps run`, with a digest of the weights."""
        if path := os.environ.get("NICPS_WEIGHTS"):
            leave_digest(Path(path))
        self.group.close()

    abort = shutdown

    def _warn_of_loss(self, lost: tuple[int, ...]) -> None:
        names = ", ".join(f"{self.group.names[rank]} (rank {rank})" for rank in lost)
        left = self.group.size - len(lost)
        warnings.warn(
            f"nicps: lost {names}: sums are over the {left} members that are left from now on, while DDP goes on"
            f" dividing by {self.group.size}",
            stacklevel=2,
        )

    # ---- collectives

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """One tensor, in place."""
        tensor = _only(tensors)
        operation = _operation(opts)
        future = self.group.all_reduce(_numbers(tensor), operation, dtype=_name(tensor))
        return _work(future, partial(_write, tensor), [tensor])

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Each by itself."""
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return _all(works, list(tensors))

    def broadcast(self, tensors: _Tensors, opts: Any) -> Any:
        """One tensor, in place."""
        tensor = _only(tensors)
        future = self.group.broadcast(_numbers(tensor), opts.rootRank, dtype=_name(tensor))
        return _work(future, partial(_write, tensor), [tensor])

    def reduce(self, tensors: _Tensors, opts: Any) -> Any:
        """One tensor, at the root in place."""
        tensor = _only(tensors)
        future = self.group.reduce(
            _numbers(tensor), opts.rootRank, _operation(opts), dtype=_name(tensor)
        )

        def write(result: Array | None) -> None:
            if result is not None:
                _write(tensor, result)

        return _work(future, write, [tensor])

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """One tensor of each rank, as large as this rank's."""
        tensor, out = _only(inputs), _only(outputs)
        _check_sizes(out, tensor, self.group.size)
        future = self.group.all_gather(_numbers(tensor), dtype=_name(tensor))
        return _work(future, partial(_write_each, out), [out])

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """The same into one tensor, one behind the other."""
        if output.numel() != tensor.numel() * self.group.size or output.dtype != tensor.dtype:
            raise UsageProblem(
                f"all_gather_into_tensor: {output.numel():,} numbers of {output.dtype} do not hold"
                f" {self.group.size} times {tensor.numel():,} of {tensor.dtype}"
            )
        future = self.group.all_gather(_numbers(tensor), dtype=_name(tensor))
        return _work(future, partial(_write, output), [output])

    _allgather_base = all_gather_single

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> Any:
        """As `allgather`, of which only the root keeps the result."""
        tensor, root = _only(inputs), opts.rootRank == self.group.rank
        if root:
            _check_sizes(_only(outputs), tensor, self.group.size)
        future = self.group.all_gather(_numbers(tensor), dtype=_name(tensor))
        out = _only(outputs) if root else []
        return _work(future, partial(_write_each, out), [out])

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> Any:
        """The root's tensors, one for each rank: all are broadcast, and each rank keeps its own."""
        tensor, size = _only(outputs), self.group.size
        mine = _numbers(tensor)
        if opts.rootRank == self.group.rank:
            _check_sizes(_only(inputs), tensor, size)
            whole = np.concatenate([_numbers(each) for each in _only(inputs)])
        else:
            whole = np.zeros(len(mine) * size, mine.dtype)
        future = self.group.broadcast(whole, opts.rootRank, dtype=_name(tensor))
        at = self.group.rank * len(mine)

        def write(result: Array) -> None:
            _write(tensor, result[at : at + len(mine)])

        return _work(future, write, [tensor])

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> Any:
        """One tensor for each rank, as large as its own."""
        tensor = _only(outputs)
        _check_sizes(_only(inputs), tensor, self.group.size)
        whole = np.concatenate([_numbers(each) for each in _only(inputs)])
        return self._scatter_sum(tensor, whole, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """The same out of one tensor."""
        if tensor.numel() != output.numel() * self.group.size or output.dtype != tensor.dtype:
            raise UsageProblem(
                f"reduce_scatter_tensor: {tensor.numel():,} numbers of {tensor.dtype} are not"
                f" {self.group.size} times {output.numel():,} of {output.dtype}"
            )
        return self._scatter_sum(output, _numbers(tensor), opts)

    _reduce_scatter_base = reduce_scatter_single

    def _scatter_sum(self, output: torch.Tensor, whole: Array, opts: Any) -> Any:
        future = self.group.reduce_scatter(whole, _operation(opts), dtype=_name(output))
        return _work(future, partial(_write, output), [output])

    def barrier(self, opts: Any = None) -> Any:
        """All ranks that are left have called it."""
        return _work(self.group.barrier(), lambda _: None, [])

    # ---- what it does not do

    def send(self, *_: Any, **__: Any) -> NoReturn:
        """Not native."""
        _refuse("send")

    def recv(self, *_: Any, **__: Any) -> NoReturn:
        """Not native."""
        _refuse("recv")

    def recv_anysource(self, *_: Any, **__: Any) -> NoReturn:
        """Not native."""
        _refuse("recv")

    def alltoall(self, *_: Any, **__: Any) -> NoReturn:
        """Not native."""
        _refuse("all_to_all")

    def all_to_all_single(self, *_: Any, **__: Any) -> NoReturn:
        """Not native."""
        _refuse("all_to_all_single")

    alltoall_base = all_to_all_single

    def monitored_barrier(self, *_: Any, **__: Any) -> NoReturn:
        """Not native."""
        _refuse("monitored_barrier")


def _refuse(what: str) -> NoReturn:
    raise UsageProblem(f"nicps has no {what}: {_OVER_TCP}")


def leave_digest(path: Path) -> None:
    """Write a digest of the parameters of all DDP modules, in hexadecimal; nothing where there is none."""
    found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    if not found:
        return
    digest = hashlib.blake2b(digest_size=16)
    for module in found:
        for tensor in module.parameters():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(flat.numpy().tobytes())
    path.write_text(digest.hexdigest())


# ---- tensors and vectors


def _only(items: Sequence[T]) -> T:
    if len(items) != 1:
        raise UsageProblem(f"nicps takes one tensor a rank, not {len(items)}")
    return items[0]


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _numbers(tensor: torch.Tensor) -> Array:
    """A tensor's memory, flat; a copy where it is not in one piece.

    Raises:
        UsageProblem: it is not the processor's, or sparse.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UsageProblem(
            f"nicps takes dense tensors of the processor, not {tensor.layout} on {tensor.device}: use tensor.cpu()"
        )
    flat = tensor.detach().contiguous().reshape(-1)
    if tensor.dtype is torch.bfloat16:
        flat = flat.view(torch.uint16)
    found: Array = flat.resolve_conj().resolve_neg().numpy()
    return found


def _write(tensor: torch.Tensor, result: Array) -> None:
    found = torch.from_numpy(np.ascontiguousarray(result)).reshape(-1)
    if tensor.dtype is torch.bfloat16:
        found = found.view(torch.bfloat16)
    with torch.no_grad():
        tensor.detach().copy_(found.view(tensor.shape))


def _write_each(tensors: _Tensors, rows: Array) -> None:
    for tensor, row in zip(tensors, rows, strict=False):
        _write(tensor, row)


def _check_sizes(tensors: _Tensors, like: torch.Tensor, size: int) -> None:
    fit = all((t.numel(), t.dtype) == (like.numel(), like.dtype) for t in tensors)
    if len(tensors) != size or not fit:
        raise UsageProblem(
            f"a list must have {size} tensors of {like.numel():,} {like.dtype}, one for each rank"
        )


def _operation(opts: Any) -> str:
    wanted = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    for known, name in _OPERATIONS.items():
        if wanted == known:
            return name
    raise UsageProblem(f"nicps has no {wanted}: {', '.join(_OPERATIONS.values())} it has")


# ---- works


class Work(_Work):  # type: ignore[misc]
    """A call that is under way. A work that torch makes of a future forgets what has failed: this one raises."""

    def __init__(self, done: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._done = done
        _recent.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; the group's own time-out counts.

        Raises:
            RuntimeError: it has failed.
        """
        self._done.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Done with it."""
        return self._done

    def is_completed(self) -> bool:
        """Whether it has come to an end."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether it has come to a good one."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it has failed with."""
        try:
            self._done.wait()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> Any:
        """The tensors."""
        return self._done.wait()


#: C++ asks a work for its future after Python has let go of it.
_recent: deque[Work] = deque(maxlen=64)


def _work(future: Future[Any], write: Callable[[Any], None], result: list[Any]) -> Work:
    """Done once the result is written; what has failed raises out of `wait()`.

    An exception that is set in a torch future from Python ends the interpreter: it is raised in a callback.
    """
    base: torch.futures.Future[None] = torch.futures.Future()

    def finish(_: torch.futures.Future[None]) -> list[Any]:
        write(future.result())
        return result

    done = base.then(finish)
    future.add_done_callback(lambda _: base.set_result(None))
    return Work(done)


def _all(works: Sequence[Work], result: list[torch.Tensor]) -> Work:
    together = torch.futures.collect_all([work.get_future() for work in works])

    def finish(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> list[torch.Tensor]:
        for each in done.value():
            each.wait()
        return result

    return Work(together.then(finish))
