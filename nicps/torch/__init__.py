# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.distributed (docs/pytorch.md). Importing it makes it known:

import torch.distributed as dist
import nicps.torch

dist.init_process_group("nicps")

backend.py  the process group: collectives of tensors
callbacks.py futures whose callbacks make calls
compress.py DDP's gradients in narrow lanes, averaged over the hosts that were counted
factors.py  matrices as products of thin factors: PowerSGD's arithmetic, the same bits everywhere
low_rank.py DDP's gradients as such factors
join.py     rank and world size from the agent, and the store
"""

import torch.distributed

from nicps.torch import join
from nicps.torch.backend import ProcessGroupNicps
from nicps.torch.compress import compress

torch.distributed.Backend.register_backend("nicps", ProcessGroupNicps.create, devices=["cpu"])
join.register()

__all__ = ["ProcessGroupNicps", "compress"]
