# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.distributed (docs/pytorch.md). Importing it makes it known:

import torch.distributed as dist
import nicps.torch

dist.init_process_group("nicps")

backend.py  the process group: collectives of tensors
works.py    what a call gives back
join.py     rank and world size from the agent, and the store
tcp.py      what goes over TCP: a store that all ranks share, and Gloo
staging.py  tensors of a GPU
"""

import torch.distributed

from nicps.torch import join
from nicps.torch.backend import ProcessGroupNicps


def register() -> None:
    """Make the backend known. Newer PyTorch calls this when a script names it: an entry point in pyproject.toml."""
    if not hasattr(torch.distributed.Backend, "NICPS"):
        torch.distributed.Backend.register_backend(
            "nicps", ProcessGroupNicps.create, devices=["cpu", "cuda"]
        )
        join.register()


register()

__all__ = ["ProcessGroupNicps", "register"]
