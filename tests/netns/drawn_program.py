# SPDX-License-Identifier: Apache-2.0
"""Calls of torch.distributed that a test has drawn, on every host: `python -m tests.netns.drawn_program FILE`.

A second argument is the number of a call behind which this program stands still, until its agent is killed. Each
result is checked against NumPy. It prints a JSON object a line.
"""

from __future__ import annotations

import hashlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist

import nicps.torch
from tests.collectives import Drawn

Array = np.ndarray[Any, Any]
_STILL_S = 1.0


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def tensor_of(vector: Array, kind: str) -> torch.Tensor:
    """A tensor of its own."""
    made = torch.from_numpy(vector.copy())
    return made.view(torch.bfloat16) if kind == "bfloat16" else made


def array_of(tensor: torch.Tensor) -> Array:
    """Its numbers; of bfloat16 as uint16."""
    found = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return np.array(found)


def make(call: Drawn, rank: int) -> Array | None:
    """Make a call; what this rank has then."""
    tensor = tensor_of(call.vector(rank), call.type)
    operation = getattr(dist.ReduceOp, call.operation.upper())
    match call.what:
        case "all_reduce":
            dist.all_reduce(tensor, operation)
        case "reduce":
            dist.reduce(tensor, call.root, operation)
            return array_of(tensor) if rank == call.root else None
        case "reduce_scatter":
            part = tensor.new_empty(call.length // call.size)
            dist.reduce_scatter_tensor(part, tensor, operation)
            return array_of(part)
        case "broadcast":
            dist.broadcast(tensor, call.root)
        case "all_gather":
            rows = [torch.empty_like(tensor) for _ in range(call.size)]
            dist.all_gather(rows, tensor)
            return np.stack([array_of(row) for row in rows])
        case _:
            dist.barrier()
            return None
    return array_of(tensor)


def main(path: str, last: int = -1) -> int:
    """All calls, one after the other."""
    calls = [
        Drawn(**{**each, "seed": tuple(each["seed"])})
        for each in orjson.loads(Path(path).read_bytes())
    ]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("nicps")
    rank, world = dist.get_rank(), dist.group.WORLD
    assert isinstance(world, nicps.torch.ProcessGroupNicps)
    say(rank=rank)
    for number, call in enumerate(calls):
        try:
            result = make(call, rank)
        except RuntimeError as error:
            if "the group is over here" in str(error):
                say(ended=str(error))
                return 1
            if not call.needs() & set(world.group.lost):
                raise
            say(call=number, lost=True)
            continue
        counted = [k for k in range(call.size) if k not in world.group.lost]
        call.check(result, rank, counted)
        same = call.what in ("all_reduce", "broadcast", "all_gather")
        digest = hashlib.sha256(result.tobytes()).hexdigest() if same and result is not None else ""
        say(call=number, counted=counted, digest=digest)
        if number == last:
            time.sleep(_STILL_S)
    dist.destroy_process_group()
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
