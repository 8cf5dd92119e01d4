# SPDX-License-Identifier: Apache-2.0
"""Who comes back and fails again is not taken back at once: each return costs all the others a while (R20)."""

from __future__ import annotations

from dataclasses import dataclass

#: Rounds in which a host must have been counted: before the third is sent, the first one's digests have been compared.
AGREED = 3
_MOST = 9  # doublings


@dataclass(slots=True)
class _Back:
    times: int = 0  # without having been counted in so many rounds
    rounds: int = 0  # since the last time
    not_before: float = 0.0


class RejoinBackoff:
    """The wait is twice as long each time, until the host has trained with the others; by MAC address.

    Args:
        first_s: half of what a host waits that has come back once and was lost again.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._back: dict[bytes, _Back] = {}

    def __bool__(self) -> bool:
        return bool(self._back)

    def note_joined(self, mac: bytes) -> None:
        """It is back, or new."""
        back = self._back.setdefault(mac, _Back())
        back.times, back.rounds = back.times + 1, 0

    def note_lost(self, now: float, mac: bytes) -> None:
        """It is in the view no more."""
        back = self._back.get(mac)
        if back is not None:
            back.not_before = now + self._first_s * 2 ** min(back.times, _MOST)

    def note_counted(self, mac: bytes) -> None:
        """Its gradient is in a committed sum."""
        back = self._back.get(mac)
        if back is not None:
            back.rounds += 1
            if back.rounds == AGREED:
                del self._back[mac]

    def must_wait(self, now: float, mac: bytes) -> bool:
        """Whether it is too early to take it in."""
        back = self._back.get(mac)
        return back is not None and now < back.not_before
