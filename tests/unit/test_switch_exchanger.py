# SPDX-License-Identifier: Apache-2.0
"""The exchange where a Linux switch adds, at one member: what differs from stripes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from nicps import wire
from nicps.errors import WireError
from nicps.exchange import Exchange
from nicps.protocol import NO_REST, Committed, NotAdded, Phase, Rest, View
from nicps.protocol.carried import Carried
from nicps.protocol.control import Control
from nicps.protocol.exchange import StripesExchanger, exchanger_of
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.progress import Standstill
from nicps.protocol.ring import Ring
from nicps.protocol.signals import Lacking
from tests import striped_member as stripes
from tests.ring_parts import node_of
from tests.striped_member import FRAGMENTS, ROUND, TIMINGS, VIEW, Kernel, closed, only

pytestmark = pytest.mark.unit

PHASE = replace(stripes.PHASE, exchange=Exchange.LINUX_SWITCH)
WINDOW = 85  # of one aggregator, in a queue of 170 frames
ONE = stripes.CONVERSION


def member(
    number: int = 2,
    kernel: Kernel | None = None,
    view: View = VIEW,
    phase: Phase = PHASE,
    rest: Rest = NO_REST,
) -> StripesExchanger:
    part = exchanger_of(phase, view, number, kernel or Kernel(), TIMINGS, 0.0)
    assert isinstance(part, StripesExchanger)
    part.open(ROUND)
    part.conversion, part.rest = ONE, rest
    return part


def test_there_is_one_aggregator_and_nobody_has_a_stripe() -> None:
    part = member()
    assert part.aggregators == (0,)
    action = only(part.on_token(0.0, closed(1, 2, 4)))
    assert action.ranges == ((0, WINDOW),) and action.exchange is Exchange.LINUX_SWITCH
    assert action.striped is not None and action.striped.owner(FRAGMENTS - 1, FRAGMENTS) == 0


def test_a_member_enters_as_soon_as_it_has_an_offer() -> None:
    kernel = Kernel()
    kernel.lanes = range(0)
    assert member(kernel=kernel).may_enter()


def test_a_lone_member_enters_once_all_is_converted() -> None:
    """It commits what it enters at once, and reads its own lanes."""
    kernel, alone = Kernel(), View(3, VIEW.members, frozenset({2}), 2)
    kernel.lanes = range(FRAGMENTS - 1)
    part = member(kernel=kernel, view=alone)
    assert not part.may_enter()
    kernel.lanes = range(FRAGMENTS)
    assert part.may_enter()


# ---- remainders


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        (NO_REST, (0, 0)),
        ((3, ROUND - 1), (3, 1)),
        ((2, ROUND - 5), (2, 5)),
    ],
)
def test_contributions_name_the_round_whose_remainders_belong_to_them(
    rest: Rest, named: tuple[int, int]
) -> None:
    striped = only(member(rest=rest).on_token(0.0, closed(1, 2, 4))).striped
    assert striped is not None and (striped.rest_view, striped.behind) == named


def test_what_lies_too_far_back_is_not_named() -> None:
    for behind, named in ((255, (2, 255)), (256, (0, 0))):
        phase = replace(PHASE, first_round=1000)
        part = exchanger_of(phase, VIEW, 2, Kernel(), TIMINGS, 0.0)
        assert isinstance(part, StripesExchanger)
        part.open(1000)
        part.rest = 2, 1000 - behind
        assert part._remainders(alone=False) == named


def test_no_remainders_without_error_feedback_nor_in_stripes() -> None:
    without = member(phase=replace(PHASE, feedback=False), rest=(3, ROUND - 1))
    hosts = member(phase=stripes.PHASE, rest=(3, ROUND - 1))
    for part in (without, hosts):
        striped = only(part.on_token(0.0, closed(1, 2, 4))).striped
        assert striped is not None and not striped.behind


def commit(exchange: Exchange, counted: Mapping[int, int], feedback: bool = True) -> Committed:
    phase = replace(PHASE, exchange=exchange, feedback=feedback)
    return Committed(phase, ROUND, counted, -40, -40, exchange, 3, phase.aggregators({1, 2}))


def test_only_sums_of_a_switch_leave_remainders_there() -> None:
    before, two = (2, 4), {1: 4, 2: 4}
    assert commit(Exchange.LINUX_SWITCH, two).rest_after(before) == (3, ROUND)
    for other in (
        commit(Exchange.LINUX_SWITCH, {1: 4}),
        commit(Exchange.LINUX_SWITCH, {}),
        commit(Exchange.STRIPES, two),
        commit(Exchange.LINUX_SWITCH, two, feedback=False),
    ):
        assert other.rest_after(before) == before


def test_the_control_follows_the_commits_and_takes_it_into_the_next_view() -> None:
    exchange = member()
    phase = replace(PHASE, rest=(2, 5))
    control = Control(phase, VIEW, 2, exchange, Carried.at_the_start(phase))
    assert exchange.rest == (2, 5) == control.carry().rest
    control.token = closed(1, 2)
    control.complete = True
    control.settle()
    assert exchange.rest == (VIEW.number, ROUND) == control.carry().rest


# ---- the decision


def unpacked(phase: Phase) -> Phase:
    body = wire.Decision(phase.number, phase.generation, phase.kind)
    return Phase.unpack(body, phase.pack(), len(phase.shares))


def test_the_decision_says_so_only_where_there_is_something_to_say() -> None:
    assert b"rest" not in PHASE.pack() and b"feedback" not in PHASE.pack()
    for phase in (PHASE, replace(PHASE, rest=(7, 100)), replace(PHASE, feedback=False)):
        assert unpacked(phase) == phase


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(b"[7,100]", b"[7]"), (b"[7,100]", b"[7,-1]"), (b"[7,100]", b'"no"'), (b":false", b":0")],
)
def test_a_decision_that_cannot_be_meant(right: bytes, wrong: bytes) -> None:
    phase = replace(PHASE, rest=(7, 100), feedback=False)
    body = wire.Decision(1, 1, phase.kind)
    assert right in phase.pack()
    with pytest.raises(WireError):
        Phase.unpack(body, phase.pack().replace(right, wrong), len(phase.shares))


# ---- a switch that does not answer


def vain(part: StripesExchanger, absent: int | None = None) -> Mapping[int, int]:
    """What a member reports that asks in vain for long enough; `absent`: what the switch answers."""
    part.on_token(0.0, closed(1, 2, 4))
    now = 0.0
    for _ in range(400):
        now += 0.2
        part.advance(now)
        if absent is not None:
            for index in range(4):
                body = wire.Lacking(absent, index, FRAGMENTS, 1, 16, 0, 0)
                part.on_lacking(now, body)
        if lacks := part.take_report(now, closed(1, 2, 4)):
            return lacks
    return {}


def test_a_switch_that_does_not_answer_is_reported_as_number_0() -> None:
    assert set(vain(member())) == {0}


def test_what_a_switch_has_answered_before_it_went_accuses_nobody() -> None:
    part = member()
    part.on_token(0.0, closed(1, 2, 4))
    part.advance(0.1)
    for index in range(4):
        part.on_lacking(0.1, wire.Lacking(0b1000, index, FRAGMENTS, 1, 16, 0, 0))
    assert set(vain(part)) == {0}


def test_members_that_the_switch_lacks_are_reported() -> None:
    assert set(vain(member(), absent=0b1000)) == {4}


def test_a_member_whose_contributions_the_switch_refuses_does_not_accuse_others() -> None:
    assert set(vain(member(), absent=0b1010)) == {0}


def test_a_member_that_has_nothing_to_send_yet_waits() -> None:
    """In stripes, and here: whoever waits for it reports it."""
    kernel = Kernel()
    kernel.lanes = range(0)
    assert 0 not in vain(member(kernel=kernel), absent=0b0010)


@pytest.mark.parametrize("case", ["lead", "member", "marked", "between phases"])
def test_the_lead_alone_gives_the_switch_up_and_nobody_is_evicted(case: str) -> None:
    """Not once it has marked the round: others may have committed it."""
    number = 2 if case == "member" else 1
    ring = Ring(PHASE, VIEW, number, Kernel(), TIMINGS, AdaptiveTimeout(TIMINGS))
    ring._control.complete = case == "marked"
    node = node_of(number, ring if case != "between phases" else None, VIEW)
    found = node._carry_out(1.0, [Lacking(ROUND, 4, {0: 9, 2: 5})] * 5)
    expected = NotAdded(ROUND, Exchange.LINUX_SWITCH)
    assert found == ([expected] * 5 if case == "lead" else [])


@pytest.mark.parametrize("excused", [False, True])
def test_nobody_is_evicted_in_a_round_in_which_the_switch_does_not_answer_somebody(
    excused: bool,
) -> None:
    host = LocalHost(VIEW.members[0].mac, "h1", NodeState.MEMBER, VIEW, 1)
    standstill, now = Standstill(host, TIMINGS), 1.0
    if excused:
        standstill.excuse(ROUND)
    evicted = set[int]()
    for _ in range(40):
        now += 0.1
        for reporter in (1, 2):
            found = standstill.hear(now, Lacking(ROUND, reporter, {4: 9}), ())
            evicted |= {one.evicted for one in found if one.evicted}
    assert evicted == (set() if excused else {4})


def test_the_network_is_at_fault_as_long_as_the_switch_has_made_no_sums_for_all() -> None:
    host = LocalHost(VIEW.members[0].mac, "h1", NodeState.MEMBER, VIEW, 1)
    standstill = Standstill(host, TIMINGS)
    assert standstill.blames_network(PHASE)
    standstill.note_counted(commit(Exchange.LINUX_SWITCH, {1: 4, 2: 4}))
    assert standstill.blames_network(PHASE), "member 4 was not counted"
    standstill.note_counted(commit(Exchange.LINUX_SWITCH, {4: 4, 2: 4}))
    assert not standstill.blames_network(PHASE)
