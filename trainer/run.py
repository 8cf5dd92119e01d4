# SPDX-License-Identifier: Apache-2.0
"""A member's training process: from the files that were handed out to the trained model."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nicps.client import Session
from nicps.errors import EnvironmentProblem, NicpsError
from nicps.extras import missing_extra
from trainer import weights
from trainer.errors import JobError, print_cause
from trainer.flat import FlatModel
from trainer.job import load
from trainer.loop import Loop
from trainer.prepare import RESUME, unpack
from trainer.records import Records
from trainer.training import Training


def run(workdir: Path) -> None:
    """Attach to the agent (NICPS_SOCKET) and train what is in `workdir`.

    Raises:
        NicpsError: it cannot go on; where the fault is this member's the agent has been told why.
    """
    session = Session.attach()
    try:
        train(session, workdir)
    except NicpsError as error:
        print_cause(error)  # before the agent ends this process
        if isinstance(error, JobError | EnvironmentProblem):
            session.fail(str(error))
        raise
    except Exception as error:
        traceback.print_exception(error)
        session.fail(f"the trainer failed: {type(error).__name__}: {' '.join(str(error).split())}")
        raise
    finally:
        session.close()


def train(session: Session, workdir: Path) -> None:
    """Build the job in `workdir`, train it with `session`, and save the model in workdir/out.

    Raises:
        NicpsError: it cannot go on.
    """
    prepared = _prepared(workdir / "prepared.json")
    unpack(workdir / "job.tar", workdir / "job")
    job = load(workdir / "job", prepared["settings"], prepared["job"])
    torch.set_num_threads(job.settings.threads)
    torch.set_deterministic_debug_mode("warn")
    layout = prepared["model"]
    model = FlatModel(job.model(), weights.averaged(layout), weights.order(layout))
    model.load(weights.load(workdir / "model.npz"))
    training = Training(job, model, prepared["train"]["records"])
    if "resume" in prepared:
        training.load(workdir / RESUME)
    loop = Loop(
        session,
        training,
        Records(workdir / "train.bin", prepared["train"]["fields"]),
        Records(workdir / "test.bin", prepared["test"]["fields"]),
        workdir,
        prepared.get("orders", ()),
        ahead=bool(prepared.get("ahead")),
    )
    state = loop.run()
    final = {
        "job": job.name,
        "rounds": state.round,
        "accuracy": state.accuracy,
        "weights_sha256": model.sha256(),
        "seconds": state.seconds,
        **loop.figures,
    }
    save(model, final, workdir / "out")


def save(model: FlatModel, final: dict[str, Any], out: Path) -> None:
    """R14: write model.pt (a state_dict), the same as model.safetensors, and final.json; none is ever there in part.

    Raises:
        JobError: they cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
        torch.save(state, out / "model.pt.part")
        os.replace(out / "model.pt.part", out / "model.pt")
        _save_safetensors(state, out / "model.safetensors")
        (out / "final.json.part").write_text(json.dumps(final) + "\n")
        os.replace(out / "final.json.part", out / "final.json")
    except (OSError, RuntimeError) as error:  # torch.save hides a full disk in a RuntimeError
        raise JobError(f"cannot write the model to {out}: {error}") from None


def _save_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """The state_dict once more, for readers that run no code out of a file. Without this copy the job is done, too."""
    part = path.with_suffix(".safetensors.part")
    try:
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, part, metadata={"format": "pt"})
        os.replace(part, path)
    except (
        Exception
    ) as error:  # a type that the format has not, a full disk, a package that is missing
        part.unlink(missing_ok=True)
        missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        text = " ".join(str(missing or error).split())
        print(f"trainer: warning: there is no {path.name}: {text}", file=sys.stderr, flush=True)


def _prepared(path: Path) -> dict[str, Any]:
    try:
        prepared: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise JobError(f"cannot read {path}: {error}") from None
    return prepared
