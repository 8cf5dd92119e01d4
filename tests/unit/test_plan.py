# SPDX-License-Identifier: Apache-2.0
"""Channels on the wire, and the plan of a phase that has several (docs/channels.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.errors import WireError
from nicps.exchange import Exchange
from nicps.protocol.phase import Phase
from nicps.protocol.plan import ChannelPlan
from tests.vectors import encode

BULK, URGENT = ChannelPlan(0, 40, (40, 30, 8)), ChannelPlan(5, 12, (12, 3))
PHASE = Phase(
    number=3,
    generation=4,
    kind=wire.PhaseKind.TRAIN,
    first_round=10,
    fragments=40,
    last_fragments=40,
    width=32,
    shares=(4, 4, 4),
    quorum=12,
    exchange=Exchange.STRIPES,
    channels=(BULK, URGENT),
)


def unpacked(phase: Phase, tail: bytes | None = None) -> Phase:
    """The phase as another member reads it."""
    decision = wire.Decision(phase.number, phase.generation, phase.kind)
    return Phase.unpack(decision, phase.pack() if tail is None else tail, 3)


def test_the_channel_is_in_the_three_highest_bits_of_the_flags() -> None:
    for channel in range(wire.MAX_CHANNELS):
        flags = wire.channel_flags(channel) | wire.Flag.OFFERED
        assert flags == channel << 13 | 256
        assert wire.channel_of(flags) == channel
        assert not flags & ~wire.CHANNEL_MASK & ~wire.Flag.OFFERED
    assert not wire.CHANNEL_MASK & sum(wire.Flag)
    assert wire.channel_flags(5) == encode.CHANNEL_5


def test_a_standing_has_rounds_of_32_bits() -> None:
    for round_ in (0, 1, 0xFFFF, 0x10000, 0xFFFFFFFF):
        standing = wire.Standing.at(7, round_, complete=True)
        assert (standing.round, standing.channel, standing.complete) == (round_, 7, 1)


def test_steps_and_places() -> None:
    """Channel 0 has three rounds a step, channel 1 has two; all begin with round 10."""
    assert (PHASE.channel_count, PHASE.planned) == (2, True)
    bulk = [(PHASE.step_of(r), PHASE.place_of(r), PHASE.fragments_in(r)) for r in range(10, 17)]
    assert bulk == [
        *((0, 0, 40), (0, 1, 30), (0, 2, 8)),
        *((1, 0, 40), (1, 1, 30), (1, 2, 8)),
        (2, 0, 40),
    ]
    urgent = [
        (PHASE.step_of(r, 1), PHASE.place_of(r, 1), PHASE.fragments_in(r, 1)) for r in range(10, 15)
    ]
    assert urgent == [(0, 0, 12), (0, 1, 3), (1, 0, 12), (1, 1, 3), (2, 0, 12)]
    assert [PHASE.first_of(2, channel) for channel in (0, 1)] == [16, 14]


def test_without_a_plan_each_round_is_a_step_of_one_channel() -> None:
    phase = replace(PHASE, channels=())
    assert (phase.channel_count, phase.planned, phase.rounds_per_step()) == (1, False, 1)
    assert [(phase.step_of(r), phase.place_of(r)) for r in (10, 11)] == [(0, 0), (1, 0)]
    assert "channels" not in phase.pack().decode()


def test_where_rounds_have_sizes_of_their_own_no_step_binds_the_channels() -> None:
    plans = ChannelPlan(6, 40), ChannelPlan(0, 9)
    phase = replace(PHASE, sized=True, channels=plans)
    assert unpacked(phase) == phase
    assert not phase.planned
    assert [phase.fragments_in(10, channel) for channel in (0, 1)] == [40, 9]
    assert [phase.step_of(12, channel) for channel in (0, 1)] == [2, 2]


def test_a_decision_carries_the_plan() -> None:
    assert b'"channels":[[0,40,[40,30,8]],[5,12,[12,3]]]' in PHASE.pack()
    assert unpacked(PHASE) == PHASE
    goes_on = PHASE.among({1, 3}, 7, -20)
    assert goes_on.channels == PHASE.channels


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": (BULK,) * 9},
        {"channels": (replace(BULK, rounds=(40,) * 20), replace(BULK, rounds=(40,) * 13))},
        {"channels": (replace(BULK, urgency=8), URGENT)},
        {"channels": (replace(BULK, urgency=-1), URGENT)},
        {"channels": (BULK, replace(URGENT, room=13))},
        {"channels": (BULK, replace(URGENT, rounds=(12, 13)))},
        {"channels": (BULK, replace(URGENT, rounds=(12, 0)))},
        {"channels": (BULK, replace(URGENT, rounds=()))},
        {"channels": (BULK, URGENT), "sized": True},
        {"channels": (ChannelPlan(0, 40), ChannelPlan(0, 8192)), "sized": True},
        {"fragments": 41},
        {"opened": (1,) * 8},
        {"opened": (-1,)},
        {"opened": (1 << 31,)},
        {"last_fragments": 8},
        {"rounds": 6},
        {"kind": wire.PhaseKind.TEST},
        {"exchange": Exchange.BROADCAST},
        {"exchange": Exchange.LINUX_SWITCH},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="decision 3"):
        unpacked(replace(PHASE, **changes))


@pytest.mark.parametrize(
    "channels",
    ["7", "[7]", "[[0,40]]", '[[0,40,["a"]]]', "[[0,40,8]]", "[[0,true,[1]]]", "[[0.0,1,[1]]]"],
)
def test_channels_of_another_form_are_refused(channels: str) -> None:
    tail = replace(PHASE, channels=()).pack()[:-1] + f',"channels":{channels}}}'.encode()
    with pytest.raises(WireError, match="cannot be read"):
        unpacked(PHASE, tail)
