# SPDX-License-Identifier: Apache-2.0
"""The lead calls hosts on standby back, and takes in only those that it may (R20)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nicps import wire
from nicps.protocol.actions import Committed, Send
from nicps.protocol.backoff import RejoinBackoff
from nicps.protocol.local_host import LocalHost
from nicps.protocol.phase import Timings
from nicps.protocol.signals import Steps


class Readmission:
    """Every member keeps the rejoin back-off of each host, so that it outlives the lead.

    Attributes: `job`, the name of the job that is led from here; `calls`, hosts are called for it; `closed`, it admits
    no host that is not in the list. `run`, what strangers are told of a run of `nicps run` whose script is under way
    here: no job begins beside it.
    """

    def __init__(self, host: LocalHost, timings: Timings, nonce: Callable[[], int]) -> None:
        self.job = self.run = ""
        self.calls = self.closed = False
        self._host = host
        self._timings = timings
        self._nonce = nonce
        self._call_at = self._announce_at = 0.0
        self._called: tuple[int, ...] = ()  # the nonces of the last two calls
        self._backoff = RejoinBackoff(timings.call_back_s)

    def reset(self, now: float) -> None:
        """This host has come to a network."""
        self._backoff = RejoinBackoff(self._timings.call_back_s)
        self._begin(now)

    def note_view(self, now: float, joined: Iterable[bytes], lost: Iterable[bytes]) -> None:
        """The view of this member has changed; hosts are named by their MAC addresses."""
        for mac in joined:
            self._backoff.note_joined(mac)
        for mac in lost:
            self._backoff.note_lost(now, mac)
        self._begin(now)

    def note_counted(self, commit: Committed) -> None:
        """Members have been counted in a round."""
        if self._backoff:
            for number in commit.counted:
                self._backoff.note_counted(self._host.view.members[number - 1].mac)

    def admits(self, now: float, mac: bytes, nonce: int, *, listed: bool) -> bool:
        """Whether an answer counts: to one of the last calls, and not too early after the host was lost.

        Args:
            listed: the host is in the view already.
        """
        return nonce in self._called and (listed or not self._backoff.must_wait(now, mac))

    def call_due(self) -> float:
        """When to call next."""
        return self._call_at

    def make_call(self, now: float) -> Send:
        """One call."""
        self._call_at = now + self._timings.call_back_s
        self._called = (self._nonce(), *self._called[:1])
        view = self._host.view
        body = wire.Call(self._called[0], view.number, view.ballot)
        return Send(wire.Frame(wire.Header(), body, tail=self.job.encode()))

    def announce_job(self, now: float) -> Steps:
        """A stranger asks: the job admits nobody. Questions of several are answered at once."""
        return self._announce(now, self.job) if self.job and self.closed else []

    def announce_run(self, now: float) -> Steps:
        """A stranger calls for a job, and a script is under way here."""
        return self._announce(now, self.run)

    def _announce(self, now: float, what: str) -> Steps:
        if now < self._announce_at:
            return []
        self._announce_at = now + self._timings.call_back_s / 2
        view = self._host.view
        body = wire.Call(0, view.number, view.ballot)
        return [Send(wire.Frame(wire.Header(), body, tail=what.encode()))]

    def _begin(self, now: float) -> None:
        self._called = ()
        self._call_at = now
