# SPDX-License-Identifier: Apache-2.0
"""Futures whose callbacks may make calls, and wait for them.

PyTorch's hooks do so (PowerSGD). In the thread that carries out a group's calls they would wait for themselves.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
#: Threads are made as they are needed: each can wait for a call whose own callback needs another one.
_threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="nicps-callbacks")


def elsewhere(done: torch.futures.Future[T]) -> torch.futures.Future[T]:
    """Done, or failed, as that future; what is called then is called in a thread of its own."""
    base: torch.futures.Future[None] = torch.futures.Future()
    found = base.then(lambda _: done.wait())
    done.then(lambda _: _threads.submit(base.set_result, None) and None)
    return found
