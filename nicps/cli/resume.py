# SPDX-License-Identifier: Apache-2.0
"""`nicps resume`: go on from the model of an alarm, or from the last checkpoint (R22)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nicps.cli.submit import add_options, submit
from nicps.errors import UsageProblem
from nicps.session.messages import Submit

DESCRIPTION = """\
Go on with a job from its last checkpoint: weights, optimizer, scheduler, and how far it was. The host that led the
job writes one every checkpoint_s seconds, and when too few members are left, into RUN/checkpoint; so does every host
that is left without a majority. The job's code comes from there; its data are read again. Every host adds what it
has kept there of rounding errors (NAME.residual.npz) if that belongs to the checkpoint."""


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps resume`."""
    parser = subparsers.add_parser(
        "resume", help="go on with a job that was saved", description=DESCRIPTION
    )
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="the folder of the run or of its checkpoint, or the run's name under --runs "
        "(default: the newest one that has a checkpoint)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("/var/lib/nicps/runs"),
        metavar="DIR",
        help="where this host's agent leaves results (%(default)s)",
    )
    add_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Submit the checkpoint, and wait if asked to."""
    checkpoint = find(args.runs, args.run)
    saved, code = checkpoint / "checkpoint.npz", checkpoint / "job.tar"
    for path in (saved, code):
        if not path.is_file():
            raise UsageProblem(f"{path} is missing: there is nothing to go on from")
    return submit(args, Submit(str(code), resume=str(saved)))


def find(runs: Path, name: str | None) -> Path:
    """The folder with the checkpoint of a run.

    Raises:
        UsageProblem: there is none.
    """
    if name is None:
        found = sorted(runs.glob("*/checkpoint/checkpoint.npz"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise UsageProblem(
                f"no run in {runs} has a checkpoint: name the run's folder, or --runs"
            )
        return found[-1].parent.absolute()
    places = (Path(name).absolute(), (runs / name).absolute())
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        looked_at = " nor ".join(map(str, dict.fromkeys(places)))
        raise UsageProblem(
            f"there is no run {name!r}: no folder {looked_at}; name the run's folder, or --runs"
        )
    if (folder / "checkpoint.npz").is_file():
        return folder  # the checkpoint's own folder, as messages name it
    if not (folder / "checkpoint" / "checkpoint.npz").is_file():
        raise UsageProblem(
            f"{folder} holds no checkpoint: the job ended before one was written, or it is on the host that led the"
            " job, or that was left without a majority"
        )
    return folder / "checkpoint"
