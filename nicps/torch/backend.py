# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's process group over `nicps.collective`.

A tensor's memory goes to the collective as it is, and the result is written when it is there; a tensor of a GPU goes by
way of the host. A call that fails raises from its work's `wait()`, and out of `backward()` as a RuntimeError.
"""

from __future__ import annotations

import gc
import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from nicps.collective import Group
from nicps.collective.kinds import Array
from nicps.errors import UsageProblem
from nicps.torch import join, staging
from nicps.torch.tcp import Tcp
from nicps.torch.works import Event, Work, all_of, event_of, work_of

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

#: Its methods have the types of C++.
_ProcessGroup: Any = dist.ProcessGroup
_Tensors = Sequence[torch.Tensor]
T = TypeVar("T")
#: Of the bucket that DDP exchanges first, unless the script says `bucket_cap_mb`. PyTorch's 1 MiB makes two rounds of a
#: small model's gradients, and a round takes some milliseconds however small it is.
FIRST_BUCKET_BYTES = 4 << 20


class ProcessGroupNicps(_ProcessGroup):  # type: ignore[misc]
    """All ranks of a group, one on each host.

    Attributes: `group`, the collectives, with `lost` and `on_loss`; `tcp`, whether Gloo can do what nicps does not.
    `averages`, a hook averages DDP's gradients over the ranks that are there.
    """

    def __init__(self, group: Group, tcp: Tcp, gloo: Any = None) -> None:
        super().__init__(group.rank, group.size)
        self.group, self.tcp, self._gloo = group, tcp, gloo
        self.averages = False
        group.on_loss = self._warn_of_loss
        group.farewell = "destroy_process_group"

    @classmethod
    def create(
        cls, store: _distributed_c10d.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """What `init_process_group` calls, and `new_group`, whose group is one of Gloo.

        Raises:
            UsageProblem: there is no TCP between the hosts, and this would be a subgroup.
        """
        if dist.is_initialized():
            tcp = _world_tcp()
            if tcp.refusal:
                raise UsageProblem(f"nicps has no subgroups without TCP: {tcp.refusal}")
            return tcp.gloo(store, rank, size, timeout, lazy=False)
        dist._DEFAULT_FIRST_BUCKET_BYTES = FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        group, tcp = join.take(rank, size, timeout)
        with join.left_if_it_fails(group):
            gloo = None if tcp.refusal else tcp.gloo(store, rank, size, timeout, lazy=True)
        return cls(group, tcp, gloo)

    def getBackendName(self) -> str:  # noqa: N802
        """For people."""
        return "nicps"

    name = getBackendName

    def rank(self) -> int:
        """This process's; one that comes late gets it at its first `State.sync`."""
        return self.group.rank

    def size(self) -> int:
        """The ranks that there are; who is lost is among them."""
        return self.group.size

    getRank = rank  # noqa: N815

    def getSize(self) -> int:  # noqa: N802
        """What C++ takes for the world size, and plain DDP divides by: that of the beginning."""
        return self.group.world

    def shutdown(self) -> None:
        """`destroy_process_group`: leave, once all others do; under `nicps run`, with a digest of the weights."""
        try:
            if path := os.environ.get("NICPS_WEIGHTS"):
                leave_digest(Path(path))
        finally:
            self.group.close()

    def abort(self) -> None:
        """Leave at once: calls that are under way raise here, and the others go on without this rank."""
        self.group.give_up()

    def _warn_of_loss(self, lost: tuple[int, ...]) -> None:
        warn_of_loss(self.group, lost, averages=self.averages)

    # ---- collectives

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """One tensor, in place; of a sparse one Gloo makes the sum."""
        tensor = _only(tensors)
        if tensor.layout is not torch.strided:
            return self._over_tcp("all_reduce of sparse tensors").allreduce(tensors, opts)
        return self._allreduce(tensor, opts, event_of("all_reduce", [tensor]))

    def _allreduce(self, tensor: torch.Tensor, opts: Any, event: Event | None = None) -> Work:
        operation = _operation(opts)
        reduce = self.group.all_reduce
        future = self._reduced(reduce, _numbers(tensor), operation, dtype=_name(tensor))
        return work_of(event, future, partial(_write, tensor), [tensor])

    def _reduced(
        self, reduce: Callable[..., Future[Any]], *given: Any, dtype: str | None
    ) -> Future[Any]:
        """What the group's call comes to; it fails in a process that has come late, which would train alone."""
        if not self.group.late:
            return reduce(*given, dtype=dtype)
        future: Future[Any] = Future()
        future.set_exception(join.too_early())
        return future

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Each by itself."""
        works = [self._allreduce(tensor, opts) for tensor in tensors]
        return all_of(works, list(tensors), event_of("all_reduce", tensors))

    def broadcast(self, tensors: _Tensors, opts: Any) -> Any:
        """One tensor, in place."""
        tensor = _only(tensors)
        future = self.group.broadcast(_numbers(tensor), opts.rootRank, dtype=_name(tensor))
        return work_of(event_of("broadcast", [tensor]), future, partial(_write, tensor), [tensor])

    def reduce(self, tensors: _Tensors, opts: Any) -> Any:
        """One tensor, at the root in place."""
        tensor, about = _only(tensors), (opts.rootRank, _operation(opts))
        future = self._reduced(self.group.reduce, _numbers(tensor), *about, dtype=_name(tensor))

        def write(result: Array | None) -> None:
            if result is not None:
                _write(tensor, result)

        return work_of(event_of("reduce", [tensor]), future, write, [tensor])

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """One tensor of each rank, as large as this rank's."""
        tensor, out = _only(inputs), _only(outputs)
        _check_sizes(out, tensor, self.group.size)
        return self._allgather(out, tensor, event_of("all_gather", inputs))

    def _allgather(self, out: _Tensors, tensor: torch.Tensor, event: Event | None = None) -> Work:
        future = self.group.all_gather(_numbers(tensor), dtype=_name(tensor))
        return work_of(event, future, partial(_write_each, out), [out])

    def allgather_coalesced(
        self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None
    ) -> Any:
        """Several tensors, each as `allgather`; `outputs` is by rank."""
        columns = [[row[at] for row in outputs] for at in range(len(inputs))]
        works = [
            self._allgather(column, each) for column, each in zip(columns, inputs, strict=True)
        ]
        return all_of(works, list(outputs), event_of("all_gather", inputs))

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
        return work_of(
            event_of("_all_gather_base", [tensor]), future, partial(_write, output), [output]
        )

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> Any:
        """Several."""
        works = [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        return all_of(works, list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> Any:
        """As `allgather`, of which only the root keeps the result."""
        tensor, root = _only(inputs), opts.rootRank == self.group.rank
        if root:
            _check_sizes(_only(outputs), tensor, self.group.size)
        future = self.group.all_gather(_numbers(tensor), dtype=_name(tensor))
        out = _only(outputs) if root else []
        return work_of(event_of("gather", inputs), future, partial(_write_each, out), [out])

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

        return work_of(event_of("scatter", outputs), future, write, [tensor])

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

    def reduce_scatter_tensor_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> Any:
        """Several."""
        works = [
            self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)
        ]
        return all_of(works, list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_sum(self, output: torch.Tensor, whole: Array, opts: Any) -> Any:
        reduce, operation = self.group.reduce_scatter, _operation(opts)
        future = self._reduced(reduce, whole, operation, dtype=_name(output))
        return work_of(
            event_of("reduce_scatter", [output]), future, partial(_write, output), [output]
        )

    def barrier(self, opts: Any = None) -> Any:
        """All ranks that are left have called it."""
        work = work_of(event_of("barrier", []), self.group.barrier(), lambda _: None, [])
        if opts is not None:
            work.limit = opts.timeout  # below 0: the script has said none
        return work

    # ---- what Gloo does

    def send(self, tensors: _Tensors, to: int, tag: int) -> Any:
        """One tensor to a rank."""
        return self._over_tcp("send").send(tensors, to, tag)

    def recv(self, tensors: _Tensors, sender: int, tag: int) -> Any:
        """One tensor of a rank."""
        return self._over_tcp("recv").recv(tensors, sender, tag)

    def recv_anysource(self, tensors: _Tensors, tag: int) -> Any:
        """One tensor of any rank."""
        return self._over_tcp("recv").recv_anysource(tensors, tag)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """One tensor to each rank. Gloo has it for tensors of one size only, so they go as parts of one tensor."""
        gloo = self._over_tcp("all_to_all")
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        found = whole.new_empty(sum(sizes[0]))
        gloo.alltoall_base(found, whole, *sizes).wait()
        for tensor, part in zip(outputs, torch.split(found, sizes[0]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(list(outputs))
        return Work(done)

    def all_to_all_single(self, *arguments: Any) -> Any:
        """A part of one tensor to each rank."""
        return self._over_tcp("all_to_all_single").alltoall_base(*arguments)

    alltoall_base = all_to_all_single

    def monitored_barrier(self, *arguments: Any, **options: Any) -> Any:
        """A barrier that says which ranks have not come."""
        return self._over_tcp("monitored_barrier").monitored_barrier(*arguments, **options)

    def _over_tcp(self, what: str) -> Any:
        if self._gloo is None:
            raise UsageProblem(f"nicps has no {what} without TCP: {self.tcp.refusal}")
        return self._gloo


def _world_tcp() -> Tcp:
    world: Any = dist.group.WORLD
    tcp: Tcp = (
        world.tcp
        if isinstance(world, ProcessGroupNicps)
        else Tcp("the default group is not nicps's")
    )
    return tcp


def leave_digest(path: Path) -> None:
    """Write a digest of the parameters of all DDP modules, in hexadecimal; nothing where there is none.

    Ranks collect garbage at different times: modules that a script has let go of do not count, nor does their order.
    """
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    if not found:
        return
    digests = sorted(map(_digest, found))
    path.write_text(hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest())


def _digest(module: DistributedDataParallel) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in module.parameters():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.digest()


def warn_of_loss(group: Group, lost: tuple[int, ...], *, averages: bool) -> None:
    """Tell a script what comes of it. `averages`: gradients are averaged over the ranks that are left.

    The caller is a thread of the group, in which no line is the script's: the warning names none, so that Python prints
    one line, and none of nicps's source.
    """
    names = ", ".join(f"{group.names[rank]} (rank {rank})" for rank in lost)
    left = group.size - len(lost)
    comes = (
        f"gradients are averaged over the {left} hosts that are left"
        if averages
        else f"sums are over the {left} members that are left from now on, while DDP goes on dividing by {group.world}"
    )
    said = f"nicps: lost {names}: {comes}"
    warnings.warn_explicit(said, UserWarning, "<nicps>", 0, module="nicps.torch")


# ---- tensors and vectors


def _only(items: Sequence[T]) -> T:
    if len(items) != 1:
        raise UsageProblem(f"nicps takes one tensor a rank, not {len(items)}")
    return items[0]


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _numbers(tensor: torch.Tensor) -> Array:
    """A tensor's memory, flat; a copy where it is not in one piece, or a GPU's.

    Raises:
        UsageProblem: it is sparse, or of another device.
    """
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
        raise UsageProblem(
            f"nicps takes dense tensors of the processor and of CUDA, not {tensor.layout} on {tensor.device}:"
            " use tensor.to_dense() or tensor.cpu()"
        )
    tensor = tensor.detach()
    if tensor.is_cuda:
        tensor = staging.to_host(tensor)
    flat = tensor.contiguous().reshape(-1)
    if tensor.dtype is torch.bfloat16:
        flat = flat.view(torch.uint16)
    found: Array = flat.resolve_conj().resolve_neg().numpy()
    return found


def _write(tensor: torch.Tensor, result: Array) -> None:
    found = torch.from_numpy(np.ascontiguousarray(result)).reshape(-1)
    if tensor.dtype is torch.bfloat16:
        found = found.view(torch.bfloat16)
    with torch.no_grad():
        if tensor.is_cuda:
            staging.to_device(found.view(tensor.shape), tensor.detach())
        else:
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
