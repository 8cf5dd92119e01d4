# SPDX-License-Identifier: Apache-2.0
"""Phases with channels, under seeded schedules of faults (docs/channels.md, "What the simulator drives").

A seed that fails names itself: `python -m tests.simulator --seed N --channels --trace 200`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nicps.protocol.actions import Action
from nicps.protocol.carried import Carried
from nicps.protocol.channels import Channel, ChannelledRing
from nicps.protocol.exchange import StripesExchanger
from nicps.protocol.kernel import ChannelState
from nicps.protocol.open_round import OpenRound
from nicps.protocol.phase import Phase
from nicps.protocol.step import Step
from tests.simulator import channel_lan
from tests.simulator.schedules import Violation

pytestmark = pytest.mark.unit


def run(seeds: Sequence[int]) -> None:
    for seed in seeds:
        try:
            channel_lan.finish(channel_lan.lan_of(seed))
        except Violation as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("first", [0, 8])
def test_seeds(first: int) -> None:
    run(range(first, first + 8))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25))


def test_a_seed_is_the_same_twice() -> None:
    digests = set()
    for _ in range(2):
        lan = channel_lan.lan_of(4)
        channel_lan.finish(lan)
        digests.add(lan.digest.hexdigest())
    assert len(digests) == 1


# ---- mistakes that are made on purpose: the class, the method, what it does instead, and a seed that shows it


def _no_list(carry: Callable[[ChannelledRing], Carried]) -> Callable[[ChannelledRing], Carried]:
    return lambda self: replace(carry(self), listed=None)


def _other_parity(
    kernel: Callable[[Channel, Phase], ChannelState],
) -> Callable[[Channel, Phase], ChannelState]:
    def state(self: Channel, phase: Phase) -> ChannelState:
        found = kernel(self, phase)
        return replace(found, offered=(found.offered[1], found.offered[0]))

    return state


def _saves_nothing(
    note: Callable[[Step, int, Mapping[int, int]], None],
) -> Callable[[Step, int, Mapping[int, int]], None]:
    def committed(self: Step, channel: int, counted: Mapping[int, int]) -> None:
        note(self, channel, counted)
        self.saves = False

    return committed


def _decided(
    note: Callable[[Step, int, Mapping[int, int]], None],
) -> Callable[[Step, int, Mapping[int, int]], None]:
    def committed(self: Step, channel: int, counted: Mapping[int, int]) -> None:
        note(self, channel, counted)
        self.undecided = False

    return committed


def _settles_channel_0(settle: Any) -> Callable[[ChannelledRing, Sequence[int]], list[Action]]:
    return lambda self, rounds: settle(self, rounds[:1])


MISTAKES: dict[str, tuple[type, str, Callable[[Any], Any], int]] = {}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, method, wrong, seed = MISTAKES[name]
    right = cls.__dict__[method]
    monkeypatch.setattr(cls, method, wrong(right))
    with pytest.raises(Violation):
        channel_lan.finish(channel_lan.lan_of(seed))


_USED = (OpenRound, StripesExchanger)
