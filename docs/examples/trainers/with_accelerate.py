# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Accelerate over nicps. Start it on every host, each beside `nicps join`: python with_accelerate.py

The process group is made before the Accelerator, which then takes it as it is. On the processor, Accelerate insists on
MASTER_ADDR; nobody connects to it. With --overlap gradients travel while the next forward pass runs.
"""

from __future__ import annotations

import os

import digits
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader

import nicps.torch

dist.init_process_group("nicps")
os.environ.setdefault("MASTER_ADDR", "unused")
accelerator = Accelerator(cpu=True)

train, test = digits.data_sets()
model = digits.network()
optimizer = torch.optim.SGD(model.parameters(), lr=digits.RATE, momentum=0.9)
loader = DataLoader(train, digits.BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if digits.OVERLAP:
    handle = nicps.torch.overlap(model, optimizer)
for _ in range(digits.EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(x), y))
        optimizer.step()

trained = accelerator.unwrap_model(model)
score = digits.accuracy(trained, test)
print(f"rank {dist.get_rank()}: accuracy {score:.4f}, weights {digits.digest(trained)}")
if digits.OVERLAP:
    print(handle.figures)
dist.destroy_process_group()
