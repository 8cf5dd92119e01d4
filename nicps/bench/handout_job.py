# SPDX-License-Identifier: Apache-2.0
"""The training program of `nicps bench handout`: one large file for all hosts, one round, the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nicps.bench import program
from nicps.bench.program import leave_record
from nicps.client import Session

_PIECE = 1 << 22


def prepare(out: Path, settings: Mapping[str, Any]) -> list[str]:
    """A file of `bytes` random bytes that every member keeps."""
    generator, left = np.random.default_rng(1), int(settings["bytes"])
    with (out / "payload.bin").open("wb") as file:
        while left:
            piece = min(left, _PIECE)
            file.write(generator.bytes(piece))
            left -= piece
    return ["payload.bin"]


def run(workdir: Path) -> None:
    """One round, so that the job has an end like any other."""
    size = (workdir / "payload.bin").stat().st_size
    session = Session.attach()
    session.ready(1, f"payload of {size} bytes")
    while (phase := session.next_phase()).kind == "train":
        session.all_reduce(phase.first_round, np.ones(1, np.float32))
        if session.number == 1:
            session.decide(phase.first_round, "end")
        leave_record(workdir, str(size))


if __name__ == "__main__":
    sys.exit(program.main("nicps.bench.handout_job", run, prepare))
