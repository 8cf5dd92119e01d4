# SPDX-License-Identifier: Apache-2.0
"""The starter's part of a job (R5, R6): data, model and code as files that can be handed out."""

from __future__ import annotations

import io
import json
import os
import pwd
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nicps.errors import UsageProblem
from trainer import records, trackers, weights
from trainer.errors import FolderError, JobError, Untraceable
from trainer.job import Job, load
from trainer.settings import State, check_idle, check_pushes, chosen_pushes, flat

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.packing import Sets
    from trainer.training import Training

MAX_JOB_BYTES = 64 << 20
MOST_SERVED = 2.0**22
RESUME = "resume.npz"  # the state that a resumed job begins with
_LATE = (
    "a worker computes a step once all parameters have come, as the model is compiled or scripted, or reads some "
    "before it calls the module that holds them (docs/jobs.md)"
)
SKIPPED = {"__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def prepare(
    source: Path,
    out: Path,
    data: str | None,
    overrides: Mapping[str, Any],
    resume: Path | None = None,
    *,
    packed: bool = False,
) -> dict[str, Any]:
    """Write job.tar, model.npz, train.bin, test.bin and prepared.json into `out`.

    Args:
        source: the job's folder, or a job.tar that was made of one.
        out: an existing or new folder.
        data: handed to the job's `data`; default: the environment's NICPS_DATA.
        overrides: settings by key, over the job's own.
        resume: a checkpoint to go on from (R22). `overrides` are then over the settings that it was made under, and
            its state goes along as resume.npz.
        packed: B1: branches are packed into two sets, and the vector is laid out with set 1 first, as in each job of
            system B. prepared.json has `sets` then, how many numbers of the vector belong to each; `branches`, which
            are in which set, for people; and `orders`, the nodes of the traced model in the order of a member that
            pulls set 1 from the servers, and in that of one that pulls set 2.

    Returns:
        What is in prepared.json.

    Raises:
        JobError: job, data or model are wrong, or cannot be read or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as unpacked:
            if source.is_file():
                unpack(source, Path(unpacked))
                return _prepare(Path(unpacked), out, data, overrides, resume, packed)
            return _prepare(source.resolve(), out, data, overrides, resume, packed)
    except OSError as error:
        raise JobError(explain_files(error, source, out)) from None


def explain_files(error: OSError, source: Path, out: Path) -> str:
    """What could not be read or written, in one line; what is in `source` was to be read."""
    path = Path(error.filename or out).absolute()
    read = path.is_relative_to(source.absolute()) or path.is_relative_to(source.resolve())
    if path.is_relative_to(out.absolute()) or not read:
        return f"cannot write {path}: {error.strerror}"
    if not isinstance(error, PermissionError):
        return f"cannot read {path}: {error.strerror}"
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    return f"the user {user}, who trains, cannot read {path}: chmod it and the folders above, or join with --user NAME"


def _prepare(
    folder: Path,
    out: Path,
    data: str | None,
    overrides: Mapping[str, Any],
    resume: Path | None,
    packed: bool,
) -> dict[str, Any]:
    saved, name, asked = None, None, overrides
    if resume is not None:
        from trainer.state import Saved

        saved = Saved(resume)
        overrides = {**saved.head.get("settings", {}), **overrides}
        name = saved.head.get("job")
    job = load(folder, overrides, name)
    check_idle(job.settings, asked)
    trackers.check(job.settings)
    sets = dict(zip(("train", "test"), job.data(data or os.environ.get("NICPS_DATA")), strict=True))
    fields = {what: records.fields_of(what, arrays) for what, arrays in sets.items()}
    counts = {what: len(next(iter(arrays.values()))) for what, arrays in sets.items()}
    if counts["train"] == 0:
        raise JobError("job.py: data(): there are no training samples")
    between = job.settings.rounds_between_tests(counts["train"])
    check_pushes(job.settings, between)
    chosen, lowered = chosen_pushes(job.settings, between)
    job.change(chosen)
    notes = [lowered]  # what the user is told as the job begins
    # After the cheap errors: PyTorch takes seconds.
    limit_threads(job.settings.threads)
    branches = pack_branches(job) if packed or job.settings.packed else None
    need = needed_first(job, sets["train"])
    first = branches.order(need) if branches else need
    training = training_of(job, counts["train"], first)
    if saved is not None and resume is not None:
        training.take(saved, resume)
        run = resume.parent.parent  # if it has ended in its last round, it has no result yet
        if os.path.exists(run / "result.json") and job.done(training.state, counts["train"]):
            plans = {"rounds": job.settings.rounds, "epochs": job.settings.epochs}
            planned = [f"{name}={value:g}" for name, value in plans.items() if value is not None]
            ends = f" ({', '.join(planned)}: what comes first ends it)" if planned else ""
            raise JobError(
                f"the job of {run} is done, after {training.state.round} rounds of training{ends}: "
                "--set rounds=N or epochs=N, or another run's folder, to go on"
            )
    pack(folder, out / "job.tar")
    weights.save(out / "model.npz", training.model.arrays())
    whole = ["job.tar", "model.npz", "prepared.json"]
    if saved is not None:
        training.save(out / RESUME)  # with the settings as they are now
        whole.append(RESUME)
    files: list[dict[str, Any]] = [{"path": path, "store": "all"} for path in whole]
    for what, arrays in sets.items():
        # Shuffled, so that every contiguous shard is a fair sample of the whole.
        key = (job.settings.seed, what == "test")
        order = np.random.default_rng(key).permutation(counts[what])
        size = records.write(out / f"{what}.bin", arrays, order)
        files.append(
            {
                "path": f"{what}.bin",
                "store": "all" if job.settings.redeal else "shard",
                "record_bytes": size,
                "records": counts[what],
            }
        )
    resumed = {"rounds": training.commits, "unit": training.unit}
    if resume is not None:  # by which each host finds its residual
        resumed |= {"run": resume.parent.parent.name, "state": training.digest()}
    unfit = unservable(training.model.arrays()) if job.settings.served else {}
    averaged = rehearse(training, sets)  # it changes everything: after all else is written
    if saved is not None:  # what has stopped moving may move again: the largest value so far
        averaged |= frozenset(saved.head.get("averaged", ()))
    prepared = {
        "job": job.name,
        "data": job.name,
        "settings": flat(job.settings),
        "files": files,
        "train": {"fields": fields["train"], "records": counts["train"]},
        "test": {"fields": fields["test"], "records": counts["test"]},
        "model": weights.averaging(training.model.layout, averaged),
    }
    for entry in prepared["model"]:
        if entry["kind"] in weights.IN_VECTOR and entry["name"] in unfit:
            raise JobError(
                f"{entry['kind']} {entry['name']!r} holds {unfit[entry['name']]:g}, and servers hold numbers below "
                "2**22: use system=R"
            )
    if branches is not None:
        prepared["sets"] = branches.lanes(prepared["model"])
        prepared["branches"] = branches.describe()
        orders, alone = order_branches(job, prepared, two_of(sets["train"]))
        if orders:
            prepared["orders"] = orders
        notes += [branches.warning() or "", alone]
    elif job.settings.served:
        prepared["ahead"] = computes_ahead(job, prepared, two_of(sets["train"]))
        notes += [] if prepared["ahead"] else [_LATE]
    if saved is not None:
        prepared["resume"] = resumed
    if notes := [note for note in notes if note]:
        prepared["notes"] = notes
        for note in notes:
            print(f"trainer: warning: {note}", file=sys.stderr, flush=True)
    (out / "prepared.json").write_text(json.dumps(prepared, indent=1) + "\n")
    return prepared


def limit_threads(threads: int) -> None:
    """From now on PyTorch computes with so many threads in this process, as in the training programs.

    By default it has one for each processor. They wait for each other without sleeping: where other programs use the
    processors, too, the preparation took three times as long.
    """
    import torch

    torch.set_num_threads(threads)


def unservable(arrays: weights.Arrays) -> dict[str, float]:
    """By name, a number that parameter servers cannot hold (docs/servers.md, "Numbers")."""
    found = {}
    for name, array in arrays.items():
        wrong = ~(np.abs(array) < MOST_SERVED)  # NaN, too
        if wrong.any():
            found[name] = float(array[wrong][0])
    return found


def pack_branches(job: Job) -> Sets:
    """B1: the two sets of the model's branches.

    Raises:
        JobError: branches cannot be found, or are named wrongly.
    """
    from trainer.branches import items_of
    from trainer.packing import pack

    return pack(items_of(job))


def needed_first(job: Job, samples: Mapping[str, Any]) -> list[str]:
    """The order of the vector: that in which the forward pass needs its tensors. Else the model's own order.

    It counts where steps have a plan (P2), in which averaged buffers are behind all parameters. It also counts where
    parameters are pulled from servers: a module's buffers are beside them there.

    Raises:
        JobError: the job's functions fail.
    """
    planned = job.settings.priorities is not None and not job.settings.served
    if not (planned or job.settings.served):
        return []
    from nicps.torch.need import order_of_need
    from trainer.flat import FlatModel

    model, batch = job.model(), FlatModel.tensors(two_of(samples))
    model.train()
    order = order_of_need(model, lambda whole: job.loss(whole, batch))
    parameters = {name for name, _ in model.named_parameters()}
    return [name for name in order if name in parameters] if planned else order


def order_branches(
    job: Job, prepared: Mapping[str, Any], samples: Mapping[str, Any]
) -> tuple[list[list[str]], str]:
    """B3: the orders of computing, tried on these samples; none where the model computes as it is written, and why.

    Raises:
        JobError: such a model cannot have partners.
    """
    from trainer import order
    from trainer.flat import FlatModel

    batch = FlatModel.tensors(samples)
    layout, seed = prepared["model"], job.settings.seed

    def run(model: nn.Module) -> Tensor:
        return job.loss(model, batch)

    try:
        return order.orders_of(job.model, run, layout, prepared["sets"], seed), ""
    except Untraceable as error:
        alone = f"the model computes in its own order, whatever has arrived: {error}"
    order.verify(job.model, run, layout, seed)
    return [], alone


def computes_ahead(job: Job, prepared: Mapping[str, Any], samples: Mapping[str, Any]) -> bool:
    """Whether a worker may compute its next step while it pulls, each module once its own parameters have come.

    Raises:
        JobError: the job's functions fail.
    """
    from nicps.torch.pending import check_model
    from trainer import order
    from trainer.flat import FlatModel

    batch, layout = FlatModel.tensors(samples), prepared["model"]
    try:
        check_model(job.model())
        order.verify(job.model, lambda model: job.loss(model, batch), layout, job.settings.seed)
    except (UsageProblem, order.Differs):
        return False
    return True


def training_of(job: Job, records: int, order: Sequence[str] = ()) -> Training:
    """The job's model, as it is before the first round; `order` of its vector as for `FlatModel`."""
    from trainer.flat import FlatModel
    from trainer.training import Training

    return Training(job, FlatModel(job.model(), order=order), records)


def rehearse(training: Training, sets: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Try the job's functions on two samples, so that mistakes show before anything is handed out.

    Returns:
        The names of the buffers that are to be averaged: those that training has changed, or all float32 buffers if
        the job says so.

    Raises:
        JobError: one of them raises, or returns the wrong thing; or the optimizer's state cannot be saved.
    """

    job, model = training.job, training.model
    training.begin(job.settings.seed)
    training.compute(two_of(sets["train"]), 1)
    changed = model.changed_buffers()
    training.step(model.finish(1), 1)
    training.packed()
    if len(next(iter(sets["test"].values()))):
        next(training.test([two_of(sets["test"])]))
    job.done(State(), training.records)
    return weights.averaged(model.layout) if job.settings.average_all_buffers else changed


def two_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Two samples, or the only one."""
    return {name: array[:2].copy() for name, array in arrays.items()}


def pack(folder: Path, path: Path, whose: str = "job", instead: str = "let data() read it") -> None:
    """The folder of a job, or of a script, as a tar, the same bytes for the same files.

    Raises:
        FolderError: as `files_of`.
    """
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for source in files_of(folder, whose, instead):
            content = source.read_bytes()
            entry = tarfile.TarInfo(source.relative_to(folder).as_posix())
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def files_of(
    folder: Path, whose: str = "job", instead: str = "let data() read it"
) -> Iterator[Path]:
    """The files that are sent, in order.

    Args:
        whose: folder it is, for people.
        instead: what to do with data that are too large for it.

    Raises:
        FolderError: it is larger than `MAX_JOB_BYTES`, or holds links or devices.
        OSError: it cannot be read.
    """
    total = 0
    for source in sorted(_files(folder)):
        if source.is_symlink() or not source.is_file():
            raise FolderError(f"{source} is not a plain file: a {whose}'s folder is sent as it is")
        total += source.stat().st_size
        if total > MAX_JOB_BYTES:
            raise FolderError(
                f"the {whose}'s folder {folder} holds more than {MAX_JOB_BYTES >> 20} MiB: keep "
                f"data elsewhere, and {instead}"
            )
        yield source


def _files(folder: Path) -> list[Path]:
    def unreadable(error: OSError) -> None:
        raise error

    found = []
    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(root, name) for name in names if not name.endswith(".pyc")]
        found += [Path(root, name) for name in folders if Path(root, name).is_symlink()]
    return found


def unpack(path: Path, folder: Path) -> None:
    """Extract a job.tar: plain files within `folder`, and nothing else.

    Raises:
        JobError: it is no such tar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(path, "r:") as archive:
            for entry in archive:
                parts = Path(entry.name).parts
                if not entry.isreg() or ".." in parts or Path(entry.name).is_absolute():
                    raise JobError(f"{path}: {entry.name!r} is not a plain file inside the job")
                target = folder / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(entry)
                assert content is not None
                target.write_bytes(content.read())
    except (tarfile.TarError, OSError) as error:
        raise JobError(f"cannot unpack {path}: {error}") from None
