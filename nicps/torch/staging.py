# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GPU: copied to pinned memory of the host for a call, and its result back; or what is done beside the
script's own work, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, made after all that the current stream has been given so far."""
    with torch.cuda.device(tensor.device):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return host


def to_device(found: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write `found`, of the host, into the tensor. It is there when this returns, for any stream.

    A stream of its own, as this runs in the group's thread: the script's stream may be busy with what comes next.
    """
    with beside(tensor.device):
        tensor.copy_(found.pin_memory(), non_blocking=True)


def reached(device: torch.device) -> torch.cuda.Event | None:
    """What the device's current stream has been given so far; None of the processor, which has done it."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event


@contextmanager
def beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """What a GPU is given in it goes to a stream of its own, and is done when it ends.

    Args:
        after: what must be done first, of another stream.
    """
    if device.type != "cuda":
        with torch.no_grad():
            yield
        return
    with torch.cuda.device(device), torch.no_grad():
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            yield
        stream.synchronize()


def as_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers as float32 in memory of the host: the tensor's own, if it has them there."""
    tensor = tensor.detach()
    return (to_host(tensor) if tensor.is_cuda else tensor).to(torch.float32)


def write_back(found: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write what `as_float32` has given, and what was changed then, into the tensor."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        to_device(found.to(tensor.dtype), tensor)
    elif found.data_ptr() != tensor.data_ptr():
        tensor.copy_(found)
