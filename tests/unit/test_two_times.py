# SPDX-License-Identifier: Apache-2.0
"""A ring keeps the time of the last token apart from that of the last fragment; the exchange says which one counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Send, exchange
from nicps.protocol.lead import LeadWatch
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.ring import Ring
from nicps.protocol.signals import Silent
from tests.ring_parts import START, TIMINGS, VIEW, ring_of

pytestmark = pytest.mark.unit

#: Its members send at any time: tokens overtake fragments.
OVERTAKING = replace(Exchange.BROADCAST, name="overtaking", token_waits=False)


@pytest.fixture(autouse=True)
def overtaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring can have that exchange."""
    table = "nicps.protocol.exchange._EXCHANGERS"
    monkeypatch.setattr(table, {**exchange._EXCHANGERS, OVERTAKING: exchange.BroadcastExchanger})


class Kernel:
    """Nothing has been taken."""

    def count(self, round_: int, view: int, sender: int) -> int:
        return 0

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        return [(0, fragments)]


def ring(exchange: Exchange, timeout: AdaptiveTimeout | None = None) -> Ring:
    """The lead's, which has just handed the token to the next."""
    made = ring_of(1, exchange, timeout, Kernel())
    made.create(START)
    assert made.token is not None and made.token.owner == 2
    return made


def while_fragments_come(made: Ring, until: float) -> list[object]:
    """Every millisecond a fragment of some member, and no token."""
    steps: list[object] = []
    assert made.token is not None
    seen = made.token.key
    for ms in range(round((until - START) * 1000)):
        now = START + ms / 1000
        made.kernel_saw(seen, START, now)
        steps += made.tick(now)
    return steps


@pytest.mark.parametrize(("exchange", "repeats"), [(Exchange.BROADCAST, 0), (OVERTAKING, 3)])
def test_fragments_put_a_retransmission_off_only_where_a_token_waits_for_them(
    exchange: Exchange, repeats: int
) -> None:
    steps = while_fragments_come(ring(exchange), START + 0.06)
    again = [
        step
        for step in steps
        if isinstance(step, Send) and step.frame.header.flags & wire.Flag.REPEAT
    ]
    assert len(again) == repeats, "after 8 ms, then 16 and 32 more"


@pytest.mark.parametrize(("exchange", "found"), [(Exchange.BROADCAST, []), (OVERTAKING, [2])])
def test_fragments_hide_a_dead_holder_only_where_they_are_its_own(
    exchange: Exchange, found: list[int]
) -> None:
    steps = while_fragments_come(ring(exchange), START + 0.7)
    assert [step.number for step in steps if isinstance(step, Silent)] == found


def test_gaps_are_measured_between_what_counts() -> None:
    """Where tokens overtake fragments they are the signs of life, and what one waits for follows their gaps."""
    timeout = AdaptiveTimeout(TIMINGS)
    made = ring(OVERTAKING, timeout)
    for step in range(1, 40):
        token_at = START + step * 0.4
        made.kernel_saw((1, 2 + step), token_at, token_at)
        made.kernel_saw((1, 2 + step), token_at, token_at + 0.2)
    assert timeout.seconds == pytest.approx(0.4, abs=0.05)


def test_a_leads_beacon_does_not_say_that_it_has_read() -> None:
    """A beacon from between two phases can come late, to the holder of a parked token."""
    made = ring(OVERTAKING)
    token = made.token
    assert token is not None
    host = LocalHost(VIEW.members[0].mac, "h1", NodeState.MEMBER, VIEW, 1)
    beacon = LeadWatch(host, TIMINGS, AdaptiveTimeout(TIMINGS)).beacon(START, 1).frame
    read = token.lines[0].read
    assert isinstance(beacon.body, wire.Want)
    made._control.hear_read(1, beacon.body)
    assert token.lines[0].read == read


def test_a_beacon_of_the_holder_counts_in_any_exchange() -> None:
    made = ring(OVERTAKING)
    for step in range(10):
        now = START + step * 0.1
        header = wire.Header(view=1, round=1, sender=2)
        made.on_want(now, wire.Frame(header, wire.Want(0, 0)))
        assert not any(isinstance(s, Silent) for s in made.tick(now + 0.05))


@pytest.mark.parametrize(
    ("flags", "lacks"),
    [
        (wire.Flag.OFFERED, ()),
        (wire.Flag.COMPLETE, ()),
        (wire.Flag.TOKEN_WANTED, ()),
        (0, (wire.Lack(8, 3),)),
    ],
)
def test_what_an_owner_repeats_does_not_hide_that_the_token_is_lost(
    flags: int, lacks: tuple[wire.Lack, ...]
) -> None:
    """The token has never come to it, and the member that sent it is dead."""
    made, found = ring(OVERTAKING), list[int]()
    for step in range(70):
        now = START + step * 0.01
        header = wire.Header(view=1, round=1, sender=2, flags=flags)
        made.on_want(now, wire.Frame(header, wire.Want(0, 0, lacks=len(lacks)), (lacks,)))
        found += [one.number for one in made.tick(now) if isinstance(one, Silent)]
    assert found == [2]
