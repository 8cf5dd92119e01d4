# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning over nicps. Start it on every host, each beside `nicps join`: python with_lightning.py

The process group is made before the Trainer, which then takes it as it is. Lightning numbers processes by node.
With --overlap gradients travel while the next forward pass runs.
"""

from __future__ import annotations

import os

import digits
import lightning
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader

import nicps.torch

dist.init_process_group("nicps")
os.environ["NODE_RANK"] = os.environ["RANK"]  # one process a host


class Classifier(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = digits.network()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        return functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=digits.RATE, momentum=0.9)

    def on_train_start(self) -> None:
        """The Trainer has wrapped the model, and made the optimizer."""
        if digits.OVERLAP:
            self.handle = nicps.torch.overlap(self.trainer.strategy.model, self.optimizers())


train, test = digits.data_sets()
model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=dist.get_world_size(),
    strategy="ddp",
    max_epochs=digits.EPOCHS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(train, digits.BATCH, shuffle=True))
score = digits.accuracy(model.network, test)
print(f"rank {dist.get_rank()}: accuracy {score:.4f}, weights {digits.digest(model.network)}")
if digits.OVERLAP:
    print(model.handle.figures)
dist.destroy_process_group()
