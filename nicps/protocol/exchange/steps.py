# SPDX-License-Identifier: Apache-2.0
"""A worker's steps and pulls (docs/servers.md): one of them at a time is under way, to all servers at once.

A step goes to the servers as PUSH, or as CONTRIBUTION to a synchronisation; each fragment is acknowledged by the server
of its part. A pull asks each server for its part, or a partner for some of it. What does not come is sent again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from nicps import wire
from nicps.protocol.actions import SendServed
from nicps.protocol.exchange import windows
from nicps.protocol.exchange.windows import Ranges, RoundTrip, Window, overtaken, share_of
from nicps.protocol.kernel import ServedReceiver
from nicps.protocol.partners import Pairing
from nicps.protocol.phase import Phase, Timings
from nicps.protocol.progress import Progress
from nicps.protocol.serving import Serving, Shares, per_push, pulled_fragments
from nicps.protocol.signals import Lacks

#: Questions to a partner without any parameters, after which the servers are asked.
_PARTNERS_ASKS = 5
#: After a refusal the same is asked again so soon.
_AGAIN_S = 0.001
#: After a partner's; each time three times as late. The round waits for a partner that is late, whoever else answers.
_PARTNER_AGAIN_S = 0.002
#: While a partner is not asked for all that it may have yet, what has come is looked at so often.
_PACE_S = 0.002


#: By server, a version.
Versions: TypeAlias = Mapping[int, int]


class Source(NamedTuple):
    """Fragments `first` to `end` (exclusive) go to the member `owner`, or are pulled from it, on that channel."""

    owner: int
    first: int
    end: int
    channel: int = 0


class Steps:
    """What of a worker's newest step, or of its newest pull, is under way in a view.

    Args:
        pairing: which half of a pull is a partner's, if this worker has one.

    Attributes: `number` of it, 0 before the first.
    """

    def __init__(
        self,
        phase: Phase,
        view: int,
        number: int,
        receiver: ServedReceiver,
        timings: Timings,
        pairing: Pairing | None = None,
    ) -> None:
        assert phase.serving is not None
        self._serving: Serving = phase.serving
        self._fragments, self._width = phase.fragments, phase.width
        self._view, self._own, self._receiver = view, number, receiver
        self._pairing = pairing
        trains = phase.shares[number - 1] > 0
        self._skipped = 0 if trains else number  # such a server has its part by itself
        self._shares = self._serving.shares(phase.fragments, phase.width)
        self._window = share_of(max(1, sum(share > 0 for share in phase.shares)))
        self._overtake = overtaken(self._window)
        self._round_trip = RoundTrip(timings.repeat_s)
        self._progress = Progress(timings)
        self.number = self._round = self._members = 0
        self._type = wire.FrameType.PUSH
        self._windows: list[Window] = []
        self._paced_until = math.inf
        self._versions: Versions = {}

    # ---- what is begun

    def versions(self, round_: int) -> Versions:
        """What the next step is computed from, which is pulled: by server, the least version of its part."""
        each, found = per_push(self._width), dict[int, int]()
        for server, part in self._parts():
            pulled_in, version = self._receiver.least_version(part.start * each, part.stop * each)
            found[server] = version if pulled_in == round_ else 0
        return found

    def push(self, now: float, number: int, round_: int, versions: Versions) -> list[SendServed]:
        """A step of that number is converted: it goes to all servers.

        Args:
            versions: as they were when it began. Answers to its own fragments may have brought newer parameters.
        """
        self._versions = versions
        return self._begin(now, wire.FrameType.PUSH, number, round_, self._targets())

    def contribute(self, now: float, number: int, round_: int, members: int) -> list[SendServed]:
        """A step of that number is on the closed list, `members`, of a synchronisation."""
        self._members = members
        return self._begin(now, wire.FrameType.CONTRIBUTION, number, round_, self._targets())

    def pull(
        self, now: float, number: int, round_: int, sources: Sequence[Source] = ()
    ) -> list[SendServed]:
        """All parameters are asked for, under that number, which is above that of each step before.

        Args:
            sources: from whom, all fragments between them; by default the servers, and a partner if there is one.
        """
        found = sources or self._sources()
        return self._begin(now, wire.FrameType.PULL, number, round_, found)

    def _begin(
        self, now: float, kind: wire.FrameType, number: int, round_: int, sources: Sequence[Source]
    ) -> list[SendServed]:
        assert number > self.number, "numbers rise"
        self._type, self.number, self._round = kind, number, round_
        windows = [self._window_of(source) for source in sources]
        for window in windows:  # what has come in the view before stays
            here, _ = self._reached(window, window.end)
            window.here = window.sent = window.beyond = window.asked = here
        self._windows = [window for window in windows if window.here < window.end]
        for window in self._windows:
            window.due = now + self._round_trip.timeout_s(1)
        self._progress.open()
        return self.advance(now)

    # ---- what follows

    @property
    def whole(self) -> bool:
        """All of it is acknowledged, or here."""
        return all(window.here == window.end for window in self._windows)

    @property
    def clock(self) -> int:
        """The kernel wakes the agent each time that so many have come."""
        return max(1, self._window // 2)

    def has_brought(self, number: int) -> bool:
        """Whether the answers to that step have brought all parameters."""
        return self._receiver.pulled_to(number, 0, self._room)[0] == self._room

    def advance(self, now: float) -> list[SendServed]:
        """Something has come, or `deadline` has passed: send what there is room for, and again what is lost."""
        sent: list[SendServed] = []
        asked, self._paced_until = 0, math.inf
        for window in tuple(self._windows):
            if window.here == window.end:
                continue
            window.note_come(now, *self._reached(window, self._seen(window)), self._round_trip)
            if self._gives_up(window):
                self._ask_servers(window)
            elif window.sent > window.here:  # else nothing can be lost
                lost = self._find_lost(now, window)
                asked += sum(count for _, count in lost)
                sent += self._send(window, lost, repair=True)
        for window in self._windows:  # the first ones take what room there is
            room = self._room_of(now, window) if window.here < window.end else 0
            if room > 0:
                if window.sent == window.here:
                    window.due = now + self._round_trip.timeout_s(0)
                sent += self._send(window, [window.take(now, room)], repair=False)
        if asked:
            have = sum(window.here - window.first for window in self._windows)
            self._progress.note(now, have, asked)
        return sent

    def hear_refusal(self, now: float, member: int, number: int) -> None:
        """That member has answered that it cannot do something yet: `deadline` is soon.

        The kernel reports at most one refusal in a tick of its clock: it may stand for those of other servers.

        Args:
            number: of the step or the pull that it refuses. What is sent again of an earlier one says nothing.
        """
        if number != self.number:
            return
        serves = member in self._serving.servers
        for window in self._windows:
            if window.here == window.end or serves == self._is_partners(window):
                continue
            if serves:
                window.due = min(window.due, now + _AGAIN_S)
            else:
                ends = window.unanswered >= _PARTNERS_ASKS
                window.hold(now, 0.0 if ends else _PARTNER_AGAIN_S * 3**window.unanswered)

    def deadline(self) -> float:
        """When the next one has not come for too long, or a partner may have more."""
        due = [self._paced_until]
        for window in self._windows:
            if window.here < window.end:
                due.append(window.due if window.sent > window.here else math.inf)
                due.append(window.held_until or math.inf)
        return min(due)

    def take_report(self, now: float) -> Lacks:
        """By hosts that do not answer, what is sent again and again in vain, if a report is due (R16)."""
        if not self._progress.take_report(now):
            return {}
        late = Counter[int]()
        for window in self._windows:
            if window.here < window.end and not self._is_partners(window):
                late[window.owner] += window.end - window.here
        return dict(late)

    # ---- the windows

    @property
    def _room(self) -> int:
        return pulled_fragments(self._fragments, self._width)

    def _parts(self) -> list[tuple[int, range]]:
        serving = self._serving
        parts = (
            (server, serving.part(rank, self._fragments))
            for rank, server in enumerate(serving.servers)
        )
        return [(server, part) for server, part in parts if server != self._skipped and len(part)]

    def _servers(self, first: int, end: int) -> list[Source]:
        """Whom to ask for these fragments of parameters, if not a partner: first what is needed first."""
        return self._cut(first, end, per_push(self._width), self._shares)

    def _targets(self) -> list[Source]:
        """Where a step's fragments go: the last ones first, if there is an order, as backward makes them so."""
        targets = self._cut(0, self._fragments, 1, self._shares)
        return targets[::-1] if self._serving.channels else targets

    def _cut(self, first: int, end: int, each: int, shares: Shares) -> list[Source]:
        """Fragments by server and channel; `each` are a push fragment."""
        cut = (
            Source(
                server,
                max(first, part.start * each, share.start * each),
                min(end, part.stop * each, share.stop * each),
                channel,
            )
            for share, channel in shares
            for server, part in self._parts()
        )
        return [source for source in cut if source.first < source.end]

    def _window_of(self, source: Source) -> Window:
        window = Window.begin(source.owner, source.first, source.end)
        window.channel = source.channel
        window.down = self._serving.channels > 0 and self._type is not wire.FrameType.PULL
        return window

    def _reached(self, window: Window, end: int) -> tuple[int, int]:
        if self._type is wire.FrameType.PULL:
            return self._receiver.pulled_to(self.number, window.here, end)
        if not window.down:
            return self._receiver.acknowledged_to(self.number, window.here, end)
        gaps = self._missing(window, window.here, end, end - window.here)
        if not gaps:
            return end, end
        last, count = gaps[-1]
        return gaps[0][0], last if last + count == end else end

    def _missing(self, window: Window, first: int, end: int, limit: int) -> Ranges:
        if self._type is wire.FrameType.PULL:
            return self._receiver.missing_parameters(self.number, first, end, limit)
        missing = self._receiver.missing_acknowledgements
        if not window.down:
            return missing(self.number, first, end, limit)
        ((low, count),) = window.in_order([(first, end - first)])
        gaps = missing(self.number, low, low + count, count)
        return window.in_order(gaps[::-1])[:limit]

    def _find_lost(self, now: float, window: Window) -> Ranges:
        missing = partial(self._missing, window)
        return window.find_lost(now, self._round_trip, self._overtake, missing, windows.PROBES)

    # ---- a partner's half of a pull

    def _sources(self) -> list[Source]:
        """Each server gives its part of the own set, the partner each server's part of the other one."""
        pairing = self._pairing
        if pairing is None:
            return self._servers(0, self._room)
        whole = [(range(self._fragments), 0)]
        rest = pairing.other.start, pairing.other.stop, per_push(self._width), whole
        return [
            *self._servers(pairing.own.start, pairing.own.stop),
            *(source._replace(owner=pairing.partner) for source in self._cut(*rest)),
        ]

    def _is_partners(self, window: Window) -> bool:
        return window.owner not in self._serving.servers

    def _seen(self, window: Window) -> int:
        """How far to look at what has come: a partner may still answer what `Window.hold` counts as never asked."""
        if self._is_partners(window):
            return min(window.end, window.sent + self._window)
        return window.sent

    def _room_of(self, now: float, window: Window) -> int:
        """How many fragments can be asked for now that have not been; of a partner, as many as it may have."""
        if not self._is_partners(window):
            under_way = sum(w.sent - w.here for w in self._windows if w.owner == window.owner)
            return min(window.end - window.sent, self._window - under_way)
        limit = window.end
        pairing = self._pairing
        if pairing is not None:  # a part of the other set can be asked for at its server by now
            missing = sum(w.end - w.here for w in self._windows if w.first in pairing.own)
            limit = pairing.limit(window.first, window.end, missing, self._window)
        if limit < window.end:
            self._paced_until = now + _PACE_S
        window.sent = max(window.sent, window.beyond)
        room = min(limit, window.here + self._window) - window.sent
        if now < window.held_until:
            return 0
        window.held_until = 0.0
        return min(room, windows.PROBES) if window.unanswered else room

    def _gives_up(self, window: Window) -> bool:
        """A partner has not answered so often that the servers are asked."""
        return self._is_partners(window) and window.unanswered > _PARTNERS_ASKS

    def _ask_servers(self, window: Window) -> None:
        """For the rest of what a partner does not give."""
        self._windows.remove(window)
        self._windows += map(self._window_of, self._servers(window.here, window.end))

    def _send(self, window: Window, ranges: Ranges, *, repair: bool) -> list[SendServed]:
        if not ranges:
            return []
        fragments = tuple(window.in_order(ranges))
        what = self._view, self._round, self._type, self.number, window.owner, fragments
        pushes = self._type is wire.FrameType.PUSH
        listed = self._type is wire.FrameType.CONTRIBUTION
        version = self._versions.get(window.owner, 0) if pushes else 0
        how = repair, window.channel, window.down
        return [SendServed(*what, version, self._members if listed else 0, *how)]
