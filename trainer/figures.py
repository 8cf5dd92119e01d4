# SPDX-License-Identifier: Apache-2.0
"""A line of metrics.jsonl as the report needs it: `round` must be there, every other figure may be left out.

Any program may have written it (docs/socket.md), so a figure of another kind counts as left out.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
MOMENTS = ("t_start", "t_offer", "t_commit", "t_end")
_MOST = 1 << 63  # what is larger, or not finite, is no figure
SECONDS = ("seconds_compute", "seconds_wait", "seconds_network")


def read_row(line: Any) -> Row | None:
    """A round's figures under their names in jobs.md; None if the line is of no round.

    Left out are: `loss`, `accuracy`, `counted` as None; `staleness` as []; whole numbers and seconds as 0; the moments
    as None, all four of them, so that `is_timed` tells; `waits` as None, and `updates` as [].
    """
    round_ = line.get("round") if isinstance(line, dict) else None
    if type(round_) is not int or not 0 <= round_ < _MOST:
        return None
    return {
        "round": round_,
        "phase": _phase(line),
        "view": _whole(line, "view"),
        "loss": _number(line, "loss"),
        "accuracy": _accuracy(line),
        "samples": _whole(line, "samples"),
        "own_samples": _whole(line, "own_samples"),
        "counted": _counted(line.get("counted")),
        "staleness": _staleness(line.get("staleness")),
        **{key: max(0.0, _number(line, key) or 0.0) for key in SECONDS},
        **_moments(line),
        **_spans(line),
    }


def is_timed(row: Row) -> bool:
    """Whether the row says when the round was; a row that does not is missing from time lines only."""
    return row["t_start"] is not None


def _phase(line: Row) -> str:
    phase = line.get("phase")
    if phase in ("train", "test", "push"):
        return str(phase)
    return "test" if {"accuracy", "succeeded"} & line.keys() else "train"


def _accuracy(line: Row) -> float | None:
    accuracy = _number(line, "accuracy")
    succeeded, tested = (
        _whole(line, "succeeded"),
        _whole(line, "succeeded") + _whole(line, "failed"),
    )
    return succeeded / tested if accuracy is None and tested else accuracy


def _counted(counted: Any) -> dict[str, int] | None:
    if not isinstance(counted, dict):
        return None
    return {str(number): _whole(counted, number) for number in counted}


def _staleness(values: Any) -> list[int]:
    if not isinstance(values, list):
        return []
    return [value for value in values if type(value) is int and 0 < value < _MOST]


def _moments(line: Row) -> dict[str, float | None]:
    moments = [_number(line, key) for key in MOMENTS]
    known = [moment for moment in moments if moment is not None]
    if len(known) < len(MOMENTS) or known != sorted(known):
        return dict.fromkeys(MOMENTS)
    return dict(zip(MOMENTS, moments, strict=True))


def _spans(line: Row) -> Row:
    """What the next forward pass has waited for, and when parameters were updated."""
    waits, updates = line.get("waits"), line.get("updates")
    if _moments(line)["t_offer"] is None or not (_are_spans(waits, 4) and _are_spans(updates, 2)):
        return {"waits": None, "updates": []}
    return {
        "waits": [[*span[:2], str(span[2]), span[3]] for span in waits or ()],
        "updates": updates,
    }


def _are_spans(spans: Any, count: int) -> bool:
    """Lists of so many, of which the first two are moments that rise."""
    if not isinstance(spans, list):
        return False
    at = 0.0
    for span in spans:
        if not isinstance(span, list) or len(span) != count:
            return False
        if any(type(moment) is not float for moment in span[:2]) or not at <= span[0] <= span[1]:
            return False
        at = span[1]
    return at < _MOST


def _whole(line: Row, key: str) -> int:
    value = line.get(key)
    return value if type(value) is int and 0 < value < _MOST else 0


def _number(line: Row, key: str) -> float | None:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:
        return None
    return float(value)
