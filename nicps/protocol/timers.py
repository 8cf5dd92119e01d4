# SPDX-License-Identifier: Apache-2.0
"""The timers of a ring: retransmission of the token (R16), the want of it, and the failure detector (R17).

Each timer is asked for the time when it is due, and notes what has happened. None of them sends anything.
"""

from __future__ import annotations

import math

from nicps.protocol.phase import AdaptiveTimeout, Timings
from nicps.protocol.token import TokenState

_BACKOFF = 10.0  # an interval grows to this many times its first value


class Retransmission:
    """The last broadcaster sends its token again until it sees a newer one (R16).

    Attributes: `token`, the one that this member sent last, or None once somebody went on from it.
    """

    def __init__(self, timings: Timings) -> None:
        self.token: TokenState | None = None
        self._first_s = self._interval_s = timings.repeat_s
        self._sent_at = 0.0

    def restart(self, now: float, token: TokenState | None) -> None:
        """The token has left, through this host's kernel perhaps; None: there is nobody who could miss it."""
        self.token = token
        self._sent_at = now

    def reset_interval(self) -> None:
        """The next token is another one."""
        self._interval_s = self._first_s

    def left(self, now: float) -> None:
        """It has left again, or what was queued before it has left only now."""
        self._sent_at = now

    def back_off(self) -> None:
        """The next interval is longer."""
        self._interval_s = min(self._interval_s * 2, self._first_s * _BACKOFF)

    def is_newest(self, seen: tuple[int, int]) -> bool:
        """Whether no newer token than this member's own is known here."""
        return self.token is not None and self.token.key >= seen

    def may_answer(self, now: float) -> bool:
        """Whether the token may be sent again for a member that has not heard it.

        If it has just gone out it is on its way: answers to answers, and to every copy of a frame, would only grow.
        """
        return now >= self._sent_at + self._first_s / 4

    def due(self, heard: float) -> float:
        """When to send it again, if nothing of the ring is heard any more."""
        return max(self._sent_at, heard) + self._interval_s

    def due_parked(self, every_s: float) -> float:
        """When a token that this member keeps goes round."""
        return self._sent_at + every_s


class Want:
    """When this member asks for a token that does not come.

    Attributes: `at`, when it asks next; never while it wants nothing.
    """

    def __init__(self, timings: Timings) -> None:
        self.at = math.inf
        self._first_s = self._interval_s = timings.want_s

    def reset_interval(self) -> None:
        """A newer token has come."""
        self._interval_s = self._first_s

    def begin(self, now: float) -> None:
        """The token is on its way; ask if it does not come."""
        if self.at == math.inf:
            self.at = now + self._first_s

    def cancel(self) -> None:
        """This member would do nothing with the token."""
        self.at = math.inf

    def wait_for(self, heard: float, now: float) -> bool:
        """Whether the ring is busy, so that the token will come unasked; then it waits on."""
        if now >= heard + self._first_s:
            return False
        self.at = heard + self._first_s
        return True

    def asked(self, now: float) -> None:
        """This member has asked; the next interval is longer."""
        self.at = now + self._interval_s
        self._interval_s = min(self._interval_s * 2, self._first_s * _BACKOFF)


class MarkTimer:
    """When a member retransmits its offer or its mark of a round (`Exchange.broadcasts_marks`), one channel at a time.

    What is said on one channel for the first time puts off no retransmission on another one.
    """

    def __init__(self, timings: Timings) -> None:
        self._first_s = self._interval_s = timings.repeat_s
        self._said_at: dict[int, float] = {}  # by channel
        self._repeated_at = -math.inf  # on any channel

    def due(self, channel: int = 0) -> float:
        """When it does so on that channel, unless the round has been committed."""
        said_at = self._said_at.get(channel, math.inf)
        return max(said_at, self._repeated_at) + self._interval_s

    def said(self, now: float, channel: int = 0) -> None:
        """It has said so, or has answered who lacks it."""
        self._said_at[channel] = now

    def back_off(self, now: float) -> None:
        """It says so again; the next interval is longer."""
        self._repeated_at = now
        self._interval_s = min(self._interval_s * 2, self._first_s * _BACKOFF)

    def reset_interval(self) -> None:
        """It is another round's."""
        self._interval_s = self._first_s

    def may_answer(self, now: float, channel: int = 0) -> bool:
        """Whether to retransmit it for a member that has not heard it: answers to every copy would only grow."""
        return now >= self._said_at.get(channel, -math.inf) + self._first_s / 4


class FailureDetector:
    """Signs of life of the token's holder, and this member's own (R17).

    Two times are kept: of the last token, and of the last frame of a member, token or fragment. Where a token waits for
    the fragments that were queued before it, fragments are the holder's, and the token is on its way behind them.
    Elsewhere everybody sends them at any time: they do not show that the token, or its holder, is still there.

    Attributes: `reported`, the holder has been given up.
    """

    def __init__(
        self, timings: Timings, timeout: AdaptiveTimeout, now: float, *, token_waits: bool
    ) -> None:
        self.reported = False
        self._token_at = self._frame_at = now
        self._token_waits = token_waits
        self._timings = timings
        self._timeout = timeout
        self._forwarded_at = 0.0  # when this member gave the token away
        self._beacon_at = 0.0  # when the holder announced last that it keeps the token

    @property
    def heard(self) -> float:
        """When something came that shows that the token is on its way, or its holder at work."""
        if self._token_waits and self._frame_at > self._token_at:
            return self._frame_at
        return self._token_at

    def hear_token(self, now: float) -> None:
        """A token was accepted."""
        self._token_at = self._frame_at = now

    def measure(self, token_at: float, frame_at: float, holding: bool) -> bool:
        """The kernel accepted a token and a frame then: the gap before them tells how long to wait for the next.

        Returns whether one of them is later than the last one that was known.
        """
        if token_at <= self._token_at and frame_at <= self._frame_at:
            return False
        since, forwarded = self.heard, self._forwarded_at
        if forwarded > since:
            since = forwarded
        if token_at > self._token_at:
            self._token_at = token_at
        if frame_at > self._frame_at:
            self._frame_at = frame_at
        heard = self.heard
        if since and not holding and heard > since:
            self._timeout.add_gap(heard - since)
        return True

    def note_forwarded(self, now: float) -> None:
        """This member gave the token away, or its kernel did."""
        self._forwarded_at = now

    def hear_beacon(self, now: float) -> None:
        """The holder keeps the token, and lives; this member says so itself while it holds it."""
        self._beacon_at = now

    def beacon_due(self) -> float:
        """When the holder, busy with its own gradient, must be heard again; its fragments are heard anyway."""
        return max(self._forwarded_at, self._beacon_at) + self._timings.beacon_s

    def silent_at(self, rank: int) -> float:
        """When the holder has been silent for too long, for the member that comes `rank` places after it."""
        last = max(self.heard, self._beacon_at, self._forwarded_at)
        return last + rank * self._timeout.seconds
