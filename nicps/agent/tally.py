# SPDX-License-Identifier: Apache-2.0
"""The counts of an agent for its status (`nicps.session.activity`): a few numbers a round, none a frame."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from nicps import wire
from nicps.job.actions import EnterView, NoteCommit
from nicps.protocol import Member, Phase, SendFragments

#: Upper ends of the classes that rounds are counted in, by their seconds.
BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class Tally:
    """Counted since the agent began; members by their MAC addresses, as a list may give them other numbers. A Linux
    switch has the address `wire.SWITCH`.

    Attributes: `round_counts`, rounds by the class of their seconds (`BOUNDS`), the last one for all above;
    `samples_of`, counted of each member; `asked_of`, fragments that it was asked for again; `resent_to`, fragments
    that were sent again to it alone. The others are as in `nicps.session.activity.Activity`.
    """

    def __init__(self, now: float) -> None:
        self.began = now
        self.rounds = self.tests = self.samples = 0
        self.round_counts = [0] * (len(BOUNDS) + 1)
        self.round_seconds = 0.0
        self.views = self.evictions = self.returns = 0
        self.samples_of: Counter[bytes] = Counter()
        self.asked_of: Counter[bytes] = Counter()
        self.resent_to: Counter[bytes] = Counter()
        self.pushes = 0
        self._pushed = "", 0  # a job, and this host's pushes in it
        self._ahead: dict[
            bytes, int
        ] = {}  # samples of this host's pushes that the next commit counts again
        self._live: frozenset[bytes] = frozenset()  # of the last view
        self._last: tuple[int, float] | None = (
            None  # a step's last round, and when it was committed
        )

    def note_commit(self, now: float, commit: NoteCommit, members: Sequence[Member]) -> None:
        """A training step or a test counts, with that list."""
        last, self._last = self._last, None
        if commit.test:
            self.tests += 1
            return
        self.rounds += 1
        for number, samples in commit.counted.items():
            mac = members[number - 1].mac
            self._count(mac, max(0, samples - self._ahead.pop(mac, 0)))
        if last is not None and commit.round == last[0] + commit.rounds:
            seconds = max(0.0, now - last[1])
            self.round_counts[bisect_left(BOUNDS, seconds)] += 1
            self.round_seconds += seconds
        self._last = commit.round, now

    def note_pushes(self, job: str, pushes: int, share: int, mac: bytes) -> None:
        """This host has pushed so many steps to parameter servers in that job, now each of so many samples."""
        before = self._pushed[1] if self._pushed[0] == job else 0
        if self._pushed[0] != job:
            self._ahead.clear()
        self._pushed = job, pushes
        samples = (pushes - before) * share
        self.pushes += pushes - before
        self._count(mac, samples)
        self._ahead[mac] = self._ahead.get(mac, 0) + samples

    def _count(self, mac: bytes, samples: int) -> None:
        self.samples += samples
        self.samples_of[mac] += samples

    def note_view(self, action: EnterView) -> None:
        """Another list is in force. A network that has just formed has lost no member."""
        view = action.view
        live = frozenset(member.mac for member in view.members if member.number in view.live)
        listed = frozenset(member.mac for member in view.members)
        self.views += 1
        self.evictions += len((self._live & listed) - live)
        if self._live & live:
            self.returns += len(live - self._live)
        self._live = live

    def note_network_gone(self) -> None:
        """The network is no more: a host in the next one has not come back."""
        self._live = frozenset()
        self._last = None

    def note_repairs(self, action: SendFragments, phase: Phase, members: Sequence[Member]) -> None:
        """Count fragments that are sent again, or asked for; a request to one member only counts for that member."""
        striped = action.striped
        if not action.repair or striped is None:
            return
        counts = self.asked_of if action.asks else self.resent_to
        total = striped.fragments or phase.fragments_in(action.round, action.channel)
        for first, count in action.ranges:
            owner = striped.owner(first, total)  # a range lies in one stripe
            counts[members[owner - 1].mac if owner else wire.SWITCH] += count
