# SPDX-License-Identifier: Apache-2.0
"""What trainers do, with `nicps.torch.overlap` and without, on every host: `python -m tests.netns.trainers_program
SETTINGS`. It prints a JSON object a line.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nicps.torch

STEPS = 12
Handle = Any
Run = Callable[[nn.Module, bool], tuple[list[torch.Tensor], Handle]]


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def network() -> nn.Module:
    """The same at all ranks."""
    torch.manual_seed(1)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def rows(batches: int = STEPS) -> TensorDataset:
    """Batches of 8 for each rank."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(8 * batches * dist.get_world_size(), 16, generator=random)
    return TensorDataset(x, x[:, :4].sin())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Steps that are proportional to gradients: what is wrong with these is seen."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def values(found: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(found, torch.Tensor):
        yield found.detach().float().reshape(-1).clone()
    elif isinstance(found, dict):
        for key in sorted(found, key=str):
            yield from values(found[key])
    elif isinstance(found, list | tuple):
        for each in found:
            yield from values(each)


def weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters only: BatchNorm's statistics are each rank's own."""
    yield from values([*model.parameters()])


# ---- Accelerate


def accelerate(
    *, clip: bool = False, every: int = 1, saves: bool = False, mixed: str = "no"
) -> Run:
    """A run with these features."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def run(model: nn.Module, overlaps: bool) -> tuple[list[torch.Tensor], Handle]:
        AcceleratorState._reset_state()
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=every, mixed_precision=mixed
        )
        optimizer: Any = optimizer_of(model)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        loader: Any = DataLoader(rows(STEPS * every), 8)
        whole, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        handle = nicps.torch.overlap(whole, optimizer) if overlaps else None
        kept: list[torch.Tensor] = []
        for at, (x, y) in enumerate(loader):
            with accelerator.accumulate(whole):
                accelerator.backward(nn.functional.mse_loss(whole(x), y))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(whole.parameters(), 0.05)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if saves and at == 8:
                kept += values(optimizer.state_dict()["state"])
                kept += weights(accelerator.unwrap_model(whole))
                with tempfile.TemporaryDirectory() as folder:
                    accelerator.save_state(folder)
                optimizer.load_state_dict(optimizer.state_dict())
                whole.load_state_dict(whole.state_dict())
        return [*weights(model), *kept], handle

    return run


# ---- Lightning


def lightning(*, saves: bool = False, by_hand: bool = False, **options: Any) -> Run:
    """A run with these features."""
    import lightning as found
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(found.LightningModule):
        def __init__(self, model: nn.Module, overlaps: bool) -> None:
            super().__init__()
            self.network, self.overlaps = model, overlaps
            self.handle: Handle = None
            self.automatic_optimization = not by_hand

        def on_train_start(self) -> None:
            if self.overlaps:
                self.handle = nicps.torch.overlap(self.trainer.strategy.model, self.optimizers())  # type: ignore[arg-type]

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            loss = nn.functional.mse_loss(self.network(x), y)
            if not by_hand:
                return loss
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.network)

    def run(model: nn.Module, overlaps: bool) -> tuple[list[torch.Tensor], Handle]:
        module = Module(model, overlaps)
        with tempfile.TemporaryDirectory() as folder:
            trainer = found.Trainer(
                accelerator="cpu",
                devices=1,
                num_nodes=dist.get_world_size(),
                strategy="ddp",
                max_epochs=1,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=saves,
                callbacks=[ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)] * saves,
                **options,
            )
            batches = STEPS * options.get("accumulate_grad_batches", 1)
            trainer.fit(module, DataLoader(rows(batches), 8, shuffle=False))
            kept: list[torch.Tensor] = []
            if saves and dist.get_rank() == 0:
                for path in sorted(Path(folder).glob("*.ckpt")):
                    state = torch.load(path, weights_only=False)
                    kept += values(state["optimizer_states"])
                    kept += [
                        each for name in sorted(state["state_dict"]) if "running" not in name
                        for each in values(state["state_dict"][name])
                    ]  # fmt: skip
        return [*weights(model), *kept], module.handle

    return run


# ---- the Trainer of Transformers


def transformers(*, saves: bool = False, every: int = 1, **options: Any) -> Run:
    """A run with these features."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.network = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.mse_loss(self.network(x), labels)}

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __init__(self) -> None:
            self.rows = rows(STEPS * every)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            x, y = self.rows[index]
            return {"x": x, "labels": y}

    def run(model: nn.Module, overlaps: bool) -> tuple[list[torch.Tensor], Handle]:
        handles: list[Handle] = []

        class Begins(TrainerCallback):
            def on_train_begin(self, *_: Any, **more: Any) -> None:
                if overlaps:
                    handles.append(nicps.torch.overlap(trainer.model_wrapped, trainer.optimizer))

        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=every,
                num_train_epochs=1,
                learning_rate=0.1,
                optim="sgd",
                save_strategy="steps" if saves else "no",
                save_steps=5,
                logging_steps=3,
                report_to="none",
                disable_tqdm=True,
                **{"max_grad_norm": 0.0, **options},
            )
            trainer = Trainer(
                model=Loss(model), args=settings, train_dataset=Rows(), callbacks=[Begins()]
            )
            trainer.remove_callback(PrinterCallback)  # stdout has lines of JSON only
            trainer.train()
            kept: list[torch.Tensor] = []
            if saves and dist.get_rank() == 0:
                from safetensors.torch import load_file

                for path in sorted(Path(folder).glob("checkpoint-*")):
                    found = load_file(path / "model.safetensors")
                    kept += values({k: each for k, each in found.items() if "running" not in k})
        return [*weights(model), *kept], handles[0] if handles else None

    return run


TRAINERS: dict[str, tuple[Callable[..., Run], dict[str, dict[str, Any]]]] = {
    "accelerate": (
        accelerate,
        {
            "plain": {},
            "clip": {"clip": True},
            "accumulates": {"every": 2},
            "bfloat16": {"mixed": "bf16"},
            "saves": {"saves": True},
        },
    ),
    "lightning": (
        lightning,
        {
            "plain": {},
            "clip": {"gradient_clip_val": 0.05},
            "accumulates": {"accumulate_grad_batches": 2},
            "bfloat16": {"precision": "bf16-mixed"},
            "saves": {"saves": True},
            "by hand": {"by_hand": True},
        },
    ),
    "transformers": (
        transformers,
        {
            "plain": {},
            "clip": {"max_grad_norm": 0.05},
            "accumulates": {"every": 2},
            "bfloat16": {"bf16": True},
            "saves": {"saves": True},
        },
    ),
}


def run(trainer: str) -> None:
    """Each feature, without overlap and with it."""
    dist.init_process_group("nicps")
    os.environ.setdefault("MASTER_ADDR", "unused")
    os.environ["NODE_RANK"] = os.environ["RANK"]
    make, features = TRAINERS[trainer]
    for what, options in features.items():
        begun = torch.cat([*weights(network())])
        plain, _ = make(**options)(network(), False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found, handle = make(**options)(network(), True)
        count = len([*network().parameters()])
        bits = hashlib.sha256(torch.cat(found[:count]).numpy().tobytes()).hexdigest()[:16]
        assert len(found) == len(plain)
        say(
            what=what,
            digest=bits,
            moved=float((torch.cat(plain[:count]) - begun).abs().max()),
            off=float((torch.cat(found) - torch.cat(plain)).abs().max()),
            steps=handle.figures.steps,
            waits=any("this step waits for all sums" in str(each.message) for each in told),
            why=[str(each.message) for each in told if str(each.message).startswith("nicps: ")],
        )
        handle.close()
    dist.destroy_process_group()
    say(done=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(**orjson.loads(sys.argv[1]))
