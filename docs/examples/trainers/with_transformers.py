# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face's Transformers over nicps. Start it on every host, each beside `nicps join`:
python with_transformers.py

The process group is made before the TrainingArguments, whose Accelerator then takes it as it is; `ddp_backend` stays
unset, as its choices do not have ours. On the processor, Accelerate insists on MASTER_ADDR; nobody connects to it.
With --overlap gradients travel part by part. The Trainer reads their norm in each step, so it waits for all of them.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import nicps.torch

dist.init_process_group("nicps")
os.environ.setdefault("MASTER_ADDR", "unused")


class Classifier(nn.Module):
    """The network, in the form that the Trainer wants: it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = digits.network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """`loss` and `logits` of a batch."""
        logits = self.network(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A data set as the Trainer wants its rows."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Overlap(TrainerCallback):
    """Calls `overlap` once the Trainer has wrapped the model, and made the optimizer."""

    def on_train_begin(self, *_: Any, **more: Any) -> None:
        """As the Trainer calls it."""
        self.handle = nicps.torch.overlap(trainer.model_wrapped, trainer.optimizer)


train, test = digits.data_sets()
model = Classifier()
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=digits.BATCH,
        num_train_epochs=digits.EPOCHS,
        learning_rate=5e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Rows(*train.tensors))
    overlap = Overlap()
    if digits.OVERLAP:
        trainer.add_callback(overlap)
    trainer.train()
score = digits.accuracy(model.network, test)
print(f"rank {dist.get_rank()}: accuracy {score:.4f}, weights {digits.digest(model.network)}")
if digits.OVERLAP:
    print(overlap.handle.figures)
dist.destroy_process_group()
