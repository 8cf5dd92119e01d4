# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.distributed (docs/pytorch.md). Importing it makes it known:

import torch.distributed as dist
import nicps.torch

dist.init_process_group("nicps")

agreed.py     what all ranks agree on of a model's parts
backend.py    the process group: collectives of tensors
callbacks.py  futures whose callbacks make calls
compress.py   DDP's gradients in narrow lanes, averaged over the hosts that were counted
elastic.py    hosts that come back, or late: the state that they get
flowing.py    parts on their way, each on a channel
factors.py    matrices as products of thin factors: PowerSGD's arithmetic, the same bits everywhere
guarded.py    tensors and states that wait before their value is used
join.py       rank and world size from the agent
local_sgd.py  models that are averaged every few steps, in narrow lanes
low_rank.py   DDP's gradients as such factors
need.py       the order in which a forward pass needs parameters
on_device.py  means in narrow lanes, converted where the gradients are
overlap.py    scripts whose next forward pass runs while gradients are on their way
parts.py      a step of an optimizer, part by part, as sums arrive
pending.py    parameters that wait for their update, and the loop around them
planner.py    when a script's steps are measured, and what follows
refused.py    what is refused of such scripts
shares.py     which parameters make a part, and on which channel it travels
staging.py    tensors of a GPU
store.py      the store that all ranks share
tcp.py        what goes over TCP: Gloo
trainers.py   what trainers and scripts do around a model that is averaged in parts
waiting.py    what a script says that waits for the others
works.py      what a call gives back
"""

import torch.distributed

from nicps.torch import join
from nicps.torch.backend import ProcessGroupNicps
from nicps.torch.compress import compress
from nicps.torch.elastic import State, average
from nicps.torch.local_sgd import ChangeAverager
from nicps.torch.overlap import overlap


def register() -> None:
    """Make the backend known. Newer PyTorch calls this when a script names it: an entry point in pyproject.toml."""
    if not hasattr(torch.distributed.Backend, "NICPS"):
        torch.distributed.Backend.register_backend(
            "nicps", ProcessGroupNicps.create, devices=["cpu", "cuda"]
        )
        join.register()


register()

__all__ = [
    "ChangeAverager",
    "ProcessGroupNicps",
    "State",
    "average",
    "compress",
    "overlap",
    "register",
]
