# SPDX-License-Identifier: Apache-2.0
"""How long a host that fails again and again is not taken back (R20)."""

from __future__ import annotations

import pytest

from nicps.protocol.backoff import AGREED, RejoinBackoff

pytestmark = pytest.mark.unit

ONE, OTHER = b"\x02\0\0\0\0\1", b"\x02\0\0\0\0\2"


def wait(backoff: RejoinBackoff, mac: bytes = ONE) -> float:
    """After being lost at 100 s, in half seconds."""
    backoff.note_lost(100.0, mac)
    return next(k / 2 for k in range(2000) if not backoff.must_wait(100.0 + k / 2, mac))


def test_the_first_time_it_is_taken_back_at_once() -> None:
    backoff = RejoinBackoff(0.5)
    assert wait(backoff) == 0.0
    assert not backoff


def test_each_time_it_waits_twice_as_long() -> None:
    backoff = RejoinBackoff(0.5)
    waits = []
    for _ in range(12):
        backoff.note_joined(ONE)
        waits.append(wait(backoff))
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256, 256]
    assert wait(backoff, OTHER) == 0.0


def test_who_has_trained_with_the_others_begins_anew() -> None:
    backoff = RejoinBackoff(0.5)
    for _ in range(3):
        backoff.note_joined(ONE)
        backoff.note_lost(0.0, ONE)
    backoff.note_joined(ONE)
    for _ in range(AGREED - 1):
        backoff.note_counted(ONE)
    assert wait(backoff) == 8.0, "perhaps nobody has compared yet"
    backoff.note_joined(ONE)
    for _ in range(AGREED):
        backoff.note_counted(ONE)
    assert wait(backoff) == 0.0
