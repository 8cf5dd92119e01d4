# SPDX-License-Identifier: Apache-2.0
"""Spans of time."""

from __future__ import annotations

from collections.abc import Iterable


def most_open(spans: Iterable[tuple[float, float]]) -> int:
    """How many of them there are at one time, at most. One that begins as another one ends comes after it."""
    events = sorted(event for begun, ended in spans for event in ((begun, 1), (ended, -1)))
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
