# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, which a training program writes: read row by row (`nicps.session.metrics`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from nicps.errors import JobFailed, MessageError
from nicps.session.fields import read_record
from nicps.session.metrics import MetricsRow

METRICS = "metrics.jsonl"
_LINE_BYTES = 1 << 16
_MOST_ROWS = 8  # a round; more than one, since views can change in it
_SPARE_ROWS = 1024


def read_metrics(path: Path, last_round: int) -> Iterator[MetricsRow]:
    """The rows of metrics.jsonl, one at a time.

    Args:
        last_round: the run's last one; the file holds no more rows than a run of so many rounds leaves.

    Raises:
        JobFailed: the file is missing, too long, or a row is not valid; the error names the row and the field.
    """
    most = _MOST_ROWS * (last_round + 1) + _SPARE_ROWS
    try:
        with path.open("rb") as file:
            for number in range(1, most + 1):
                line = file.readline(_LINE_BYTES + 1)
                if not line:
                    return
                yield _row(line, number)
            if file.readline(1):
                raise JobFailed(f"{METRICS}: there are more than {most} rows")
    except OSError as error:
        raise JobFailed(f"{METRICS} cannot be read: {error.strerror}") from None


def check_metrics(path: Path, last_round: int) -> None:
    """Read the whole file, to raise the errors of `read_metrics`."""
    for _ in read_metrics(path, last_round):
        pass


def _row(line: bytes, number: int) -> MetricsRow:
    if len(line) > _LINE_BYTES:
        raise _wrong(number, f"is longer than {_LINE_BYTES} bytes")
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _wrong(number, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _wrong(number, f"is {row!r:.40}, not an object")
    try:
        return read_record(MetricsRow, row, f"{METRICS}: row {number}")
    except MessageError as error:
        raise JobFailed(str(error)) from None


def _wrong(number: int, why: str) -> JobFailed:
    return JobFailed(f"{METRICS}: row {number} {why}")
