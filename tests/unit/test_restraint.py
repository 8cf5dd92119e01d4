# SPDX-License-Identifier: Apache-2.0
"""The share of the line that urgent rounds may take beside bulk, where no step binds them together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol import Timings
from nicps.protocol.carried import Offer
from nicps.protocol.plan import ChannelPlan
from tests import channelled
from tests.channelled import Members, phase_of
from tests.ring_parts import START, node_of

pytestmark = pytest.mark.unit

SAMPLES = wire.sized_samples(90, 1, 16)
TOOK_S = 0.9


class Sized(Members):
    """Members whose rounds have sizes of their own; channel 1 is the urgent one. Bulk is under way at member 2."""

    def __init__(self) -> None:
        plans = ChannelPlan(0, 90), ChannelPlan(1, 90)
        phase = phase_of(quorum=12, sized=True, channels=plans, fragments=90, last_fragments=90)
        super().__init__(phase)
        self.begin()

    def urgent_round(self) -> None:
        """Member 2 has its sums `TOOK_S` after the list was closed."""
        kernel = self[2].kernel
        kernel.lacks |= {1}
        self.offer(1, samples=SAMPLES)
        kernel.lacks -= {1}
        self.now += TOOK_S
        self.take(2, self[2].ring.advance(self.now))
        self.take(1, self[1].ring.go_on(self.now, saves=False, channel=1))

    def wait(self, until: float) -> None:
        """Time passes at member 2, which hears that the token's holder lives."""
        ring = self[2].ring
        assert ring.token is not None
        beacon = wire.Frame(self.view.header(ring.token.owner, ring.round), wire.Want(0, 0), ((),))
        self.take(2, ring.on_want(until, beacon))
        self.take(2, ring.tick(until))

    def offers(self, number: int = 2) -> bool:
        """Whether that member's offer to the next urgent round goes out at once."""
        before = len(self.sent)
        self.offer(1, number, samples=SAMPLES)
        return any(
            wire.channel_of(frame.header.flags) == 1 and frame.header.flags & wire.Flag.OFFERED
            for sender, frame in self.sent[before:]
            if sender == number
        )


@pytest.fixture
def members(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sized:
    share = getattr(request, "param", 0.9)
    monkeypatch.setattr(channelled, "TIMINGS", replace(Timings(), urgent_share=share))
    made = Sized()
    made[2].kernel.lacks |= {0}
    made.offer(0, samples=SAMPLES)
    made.urgent_round()
    assert made[2].done(1) == [1]
    return made


def test_the_next_urgent_round_leaves_the_line_a_tenth_of_the_time(members: Sized) -> None:
    ring = members[2].ring
    assert not members.offers()
    free_at = START + TOOK_S + TOOK_S / 9
    assert ring.deadline() <= free_at + 1e-9
    members.wait(free_at - 0.001)
    assert not ring._all[1].has_offered
    members.wait(free_at + 0.001)
    assert ring._all[1].has_offered
    assert members.offers(1), "member 1 has no bulk under way"


def test_without_bulk_it_goes_on_at_once(members: Sized) -> None:
    members[2].kernel.lacks -= {0}
    members.take(2, members[2].ring.advance(members.now))
    assert members.offers()


def test_it_need_not_wait_any_more_once_bulk_is_done(members: Sized) -> None:
    ring = members[2].ring
    assert not members.offers()
    members[2].kernel.lacks -= {0}
    members.take(2, ring.advance(members.now))
    assert ring.deadline() <= members.now
    members.take(2, ring.tick(members.now))
    assert ring._all[1].has_offered


def test_the_kernel_ends_bulk_without_an_event(members: Sized) -> None:
    """The node's deadline, which is kept from change to change, is not kept while an offer waits for that."""
    node = node_of(2, members[2].ring, members.view)
    assert not members.offers()
    assert node.deadline() > -math.inf
    members[2].kernel.lacks -= {0}
    assert node.deadline() == -math.inf


def test_bulk_itself_never_waits(members: Sized) -> None:
    """Nothing is less urgent."""
    ring = members[2].ring
    members[2].kernel.lacks -= {0}
    members.take(2, ring.advance(members.now))
    members.take(1, members[1].ring.go_on(members.now, saves=False))
    round_ = ring.rounds[0]
    members.take(2, ring.offer(members.now, Offer(round_, SAMPLES, 0, False, 8)))
    assert ring._all[0].has_offered


@pytest.mark.parametrize("members", [1.0], indirect=True)
def test_with_a_share_of_one_nothing_waits(members: Sized) -> None:
    assert members.offers()


@pytest.mark.parametrize("members", [0.5], indirect=True)
def test_with_half_of_the_time_it_waits_as_long_as_it_took(members: Sized) -> None:
    assert not members.offers()
    ring = members[2].ring
    members.wait(START + 2 * TOOK_S - 0.01)
    assert not ring._all[1].has_offered
    members.wait(START + 2 * TOOK_S + 0.01)
    assert ring._all[1].has_offered


@pytest.mark.parametrize("frozen", [True, False])
def test_an_offer_that_waits_goes_along_into_the_next_view(members: Sized, frozen: bool) -> None:
    ring = members[2].ring
    assert not members.offers()
    if frozen:
        ring.freeze()
    (other,) = ring.carry().others
    assert other.offer is not None and other.offer.round == 2
    assert not ring._all[1].has_offered and ring._restraint.due() == math.inf


def test_a_step_needs_no_such_limit() -> None:
    members = Members()
    assert members[2].ring._restraint._pause == 0
