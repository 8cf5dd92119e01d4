# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does at a host, as a model: it goes on while the agent is stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nicps import wire
from nicps.protocol import KernelState
from tests.simulator.stripes import Stripes

if TYPE_CHECKING:
    from tests.simulator.host import Host

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
        self.stripes.clear()

    @property
    def state(self) -> KernelState | None:
        """What the agent has written for it, as of the agent's last step."""
        host = self.host
        if host.stepped:
            host.stepped = False
            self._state = host.node.kernel
        return self._state

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
