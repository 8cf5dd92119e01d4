# SPDX-License-Identifier: Apache-2.0
"""What a member writes down: a line a round, and on request every round's vectors."""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from nicps.client import Commit
from trainer.errors import JobError

REPORT_SECONDS = 0.25
TIMES = ("seconds_compute", "seconds_wait", "seconds_network")


class Metrics:
    """metrics.jsonl, flushed line by line; also sums up where the time went between reports."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._sums = dict.fromkeys(TIMES, 0.0)
        self._reported = -math.inf
        self._urgent = False

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self._path, error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # every line has been flushed, or has failed
                self._file.close()

    def round(self, values: Mapping[str, Any]) -> None:
        """Write one round's line.

        Raises:
            JobError: the disk is full, or gone.
        """
        assert self._file is not None
        for key in TIMES:
            self._sums[key] += values[key]
        self._urgent = values["phase"] == "test"
        line = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def shares(self, now: float) -> dict[str, float] | None:
        """Shares of the time since the last call that gave any; None if that is not long ago.

        Empty where no row has been written since: a server of parameters that does not pull writes none.
        """
        if now - self._reported < REPORT_SECONDS and not self._urgent:
            return None
        self._reported = now
        whole = sum(self._sums.values())
        spent = self._sums if whole else {}
        shares = {key.replace("seconds", "share"): spent[key] / whole for key in spent}
        self._sums = dict.fromkeys(TIMES, 0.0)
        return shares


_LATELY = 50  # steps


class Steps:
    """Seconds of the training steps of this run, since the last plan is in force where steps have one.

    Attributes: `planned`, whether they have.
    """

    def __init__(self) -> None:
        self.planned = False
        self._channels = 1
        self._predicted: float | None = None
        self._took, self._waited = array("d"), array("d")

    def note(self, row: Mapping[str, Any]) -> None:
        """One, by its row."""
        self.planned = "channels" in row
        plan = row.get("channels", 1), row.get("predicted_seconds")
        if plan != (self._channels, self._predicted):
            self._channels, self._predicted = plan
            self._took, self._waited = array("d"), array("d")
        self._took.append(row["t_end"] - row["t_start"])
        self._waited.append(row["seconds_wait"] + row["seconds_network"])

    @property
    def figures(self) -> dict[str, Any]:
        """For the result: medians, None without a step; and what the plan was predicted to take, None without one."""
        return self._figures(0)

    @property
    def lately(self) -> dict[str, Any]:
        """The same of the last steps."""
        return self._figures(-_LATELY)

    def _figures(self, first: int) -> dict[str, Any]:
        took, waited = self._took[first:], self._waited[first:]
        return {
            "channels": self._channels,
            "step_seconds": median(took) if took else None,
            "wait_seconds": median(waited) if waited else None,
            "predicted_seconds": self._predicted,
        }


def save_gradients(out: Path, round_: int, life: str, number: int, **values: Any) -> None:
    """Keep what this member knows of a round as out/gradients/ROUND.npz; all that was known of it is replaced.

    life: ends where the residual, what rounding left over of former gradients, is forgotten. number: this member's.
    values: `vector`, what it contributes, float32 (lanes,), the sum over `samples` samples (0: nothing); after the
    commit `sum_of` as well.
    """
    path = out / "gradients" / f"{round_}.npz"
    part = path.with_suffix(".part")  # who is killed meanwhile leaves the former one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, life=life, number=number, **values)
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def sum_of(commit: Commit, total: npt.NDArray[np.float32]) -> dict[str, Any]:
    """What all members have of a round.

    total: the sum that they read, float32 (lanes,), over `n` samples, with accumulators whose lowest bit is 2**unit.
    members: of so many a switch adds the lanes, 0 if the hosts add. counted: rows (member number, samples). exchange:
    its name.
    """
    return {
        "total": total,
        "n": commit.samples,
        "unit": commit.unit,
        "members": commit.members,
        "exchange": commit.exchange.name,
        "counted": np.array(sorted(commit.counted.items()), np.int64).reshape(-1, 2),
    }


def _unwritable(path: Path, error: OSError) -> JobError:
    return JobError(f"cannot write {path}: {error.strerror}")
