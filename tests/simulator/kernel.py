# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does at a host, as a model: it goes on while the agent is stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import KernelState
from tests.simulator.stripes import Stripes

if TYPE_CHECKING:
    from tests.simulator.host import Host

_LATE_S = 5e-3  # a long step of the agent
ALIVE_S = 0.2  # the kernel plays for its agent only so long after its last sign of life
_REPEAT_OR_PARKED = wire.Flag.REPEAT | wire.Flag.PARKED


class Kernel:
    """Fragments that were taken, and tokens that are handed on."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._state: KernelState | None = None
        self.stripes = Stripes(host)
        self.clear()

    def clear(self) -> None:
        """A new view."""
        self.taken: dict[tuple[int, int, int], set[int]] = {}  # (view, round, sender)
        self.sums: dict[tuple[int, int], dict[int, int]] = {}  # (view, round) -> fragment -> sum
        self.totals: dict[int, int] = {}  # round -> fragments taken
        self.seen = (0, 0)
        self.heard = 0.0  # a frame of a member
        self.token_at = 0.0  # of these, a token
        self.bounced: bytes | None = None
        self.alive = 0.0  # the agent's last sign of life
        self._late: tuple[KernelState, float] | None = None  # what it knew until a moment ago
        self.stripes.clear()

    @property
    def state(self) -> KernelState | None:
        """What the agent has written for it, as of the agent's last step."""
        host = self.host
        if host.stepped:
            host.stepped = False
            before, self._state = self._state, host.node.kernel
            stripes = (
                host.lan.plan.exchange == Exchange.STRIPES
            )  # other schedules stay as they were
            if stripes and before is not None and before.bounce and host.lan.odds.is_late():
                self._late = before, host.lan.now + _LATE_S
        return self._state

    def _bounces_by(self, state: KernelState) -> KernelState:
        """What it hands a token on by: the agent's step may be under way, and nothing of it be written yet."""
        if self._late is not None and self.host.lan.now < self._late[1]:
            return self._late[0]
        return state

    def take_fragment(
        self, view: int, key: bytes | None, sender: int, round_: int, index: int
    ) -> None:
        """Add it, if it is of a round that is open."""
        host, state = self.host, self.state
        current = host.node.view
        if state is None or view != current.number or sender not in current.live:
            return
        if key != current.seed:
            return
        if not state.round_low <= round_ <= state.round_high:
            return
        if state.sums_next if round_ > state.round else state.sums:
            return
        got = self.taken.setdefault((view, round_, sender), set())
        if index in got:
            return
        got.add(index)
        self.totals[round_] = self.totals.get(round_, 0) + 1
        self.heard = host.clock()
        sums = self.sums.setdefault((view, round_), {})
        sums[index] = sums.get(index, 0) + host.lan.checks.value(sender, round_, index)
        if len(got) == host.lan.checks.fragments(host, view, round_):
            mac = current.members[sender - 1].mac
            data = host.completion(round_, sender)
            host.wake(host.frame_up, mac, data)

    def take_sum(self, view: int, round_: int, index: int, value: int) -> None:
        """Keep a sum that the switch has made; it has no key."""
        host, state = self.host, self.state
        if state is None or view != host.node.view.number:
            return
        expected = state.sums_next if round_ > state.round else state.sums
        if not expected or not state.round_low <= round_ <= state.round_high:
            return
        got = self.taken.setdefault((view, round_, 0), set())
        if index not in got:
            got.add(index)
            self.heard = host.clock()
            self.sums.setdefault((view, round_), {})[index] = value
            if state.clock and len(got) % state.clock == 0 and not host.lan.odds.lose_bell():
                host.wake(host.sums_up)
            if len(got) == host.lan.checks.fragments(host, view, round_):
                data = host.completion(round_, 0)
                host.wake(host.frame_up, wire.SWITCH, data)

    def take_token(self, frame: wire.Frame) -> bool:
        """Whether it goes up to the agent."""
        host, state = self.host, self.state
        header, token = frame.header, frame.body
        assert isinstance(token, wire.Token)
        view, position = host.node.view, (token.generation, token.hop)
        if state is None or header.view != view.number or header.sender not in view.live:
            return False
        if position <= self.seen:
            return bool(header.flags & wire.Flag.REPEAT)
        self.seen = position
        self.heard = self.token_at = host.clock()
        if token.owner != host.node.number:
            return bool(
                header.flags & _REPEAT_OR_PARKED
                or header.round != state.round
                or token.sent != state.sent_seen
                or token.state != wire.TokenState.OPEN
            )
        state = self._bounces_by(state)
        bounce = (
            state.bounce
            and host.clock() < self.alive + ALIVE_S
            and token.state == wire.TokenState.OPEN
            and not token.ranges
            and token.idle + 1 < len(view.live)
            and header.round == state.round
            and self.totals.get(header.round, 0) + state.own_sent == token.sent
        )
        if not bounce:
            return True
        on = replace(
            token, owner=view.next_after(host.node.number), hop=token.hop + 1, idle=token.idle + 1
        )
        self.seen = (on.generation, on.hop)
        self.bounced = wire.pack(
            replace(header, flags=wire.Flag.BOUNCED, sender=host.node.number), on, *frame.items
        )
        host.lan.checks.owned(host, view.number, on)
        host.lan.broadcast(host, self.bounced, view.seed, host.lan.now)
        return False


class Receiver:
    """What has arrived, as the protocol asks for it (`nicps.protocol.Receiver`)."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def count(self, round_: int, view: int, sender: int) -> int:
        sums = self._kernel.stripes.count(round_, view) if not sender else 0
        return sums or len(self._kernel.taken.get((view, round_, sender), ()))

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        have = self._kernel.taken.get((view, round_, sender), set())
        return in_ranges((i for i in range(fragments) if i not in have), limit)

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        here = self._sums_here(round_, view, first, end)
        beyond = len(here)
        while beyond and not here[beyond - 1]:
            beyond -= 1
        return first + (here.index(False) if False in here else len(here)), first + beyond

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        here = self._sums_here(round_, view, first, end)
        return in_ranges((at for at, one in enumerate(here, first) if not one), limit)

    def _sums_here(self, round_: int, view: int, first: int, end: int) -> list[bool]:
        if self._kernel.host.lan.plan.exchange == Exchange.SWITCH:
            have = self._kernel.taken.get((view, round_, 0), set())
            return [index in have for index in range(first, end)]
        return self._kernel.stripes.here(round_, view, first, end)

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        return self._kernel.stripes.converted(round_, conversion, first, end)

    def next_to_send(self, round_: int, aggregator: int) -> int:
        return self._kernel.stripes.next_to_send(round_, aggregator)

    def absent(
        self, round_: int, view: int, first: int, count: int, members: int
    ) -> Mapping[int, int]:
        return self._kernel.stripes.absent(round_, view, count, members)


def in_ranges(missing: Iterable[int], limit: int) -> list[tuple[int, int]]:
    """As (first, count), at most so many."""
    ranges: list[tuple[int, int]] = []
    for i in missing:
        if ranges and sum(ranges[-1]) == i:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        elif len(ranges) < limit:
            ranges.append((i, 1))
        else:
            break
    return ranges
