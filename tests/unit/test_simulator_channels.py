# SPDX-License-Identifier: Apache-2.0
"""Phases with channels, under seeded schedules of faults (docs/channels.md, "What the simulator drives").

A seed that fails names itself: `python -m tests.simulator --seed N --channels --trace 200`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nicps.protocol import Committed
from nicps.protocol.channels import ChannelledRing
from nicps.protocol.exchange import StripesExchanger
from nicps.protocol.offers import Offers
from nicps.protocol.open_round import OpenRound
from nicps.protocol.step import Step
from nicps.protocol.token import TokenState
from tests.simulator import channel_lan
from tests.simulator.channel_host import ChannelHost
from tests.simulator.places import StripeFrame
from tests.simulator.schedules import Violation

pytestmark = pytest.mark.unit


def run(seeds: Sequence[int]) -> None:
    for seed in seeds:
        finish(channel_lan.lan_of(seed))


def finish(lan: channel_lan.ChannelLan) -> None:
    try:
        channel_lan.finish(lan)
    except Violation as error:
        raise AssertionError(f"seed {lan.seed}: {error}") from error


@pytest.mark.short("0")
@pytest.mark.parametrize("first", [0, 5, 10])
def test_seeds(first: int) -> None:
    run(range(first, first + 5))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25))


@pytest.mark.long
def test_a_seed_is_the_same_twice() -> None:
    digests = set()
    for _ in range(2):
        lan = channel_lan.lan_of(4)
        channel_lan.finish(lan)
        digests.add(lan.digest.hexdigest())
    assert len(digests) == 1


@pytest.mark.short("0")
@pytest.mark.parametrize("first", [0, 4])
def test_bulk_loses_frames_while_urgent_channels_lose_none(first: int) -> None:
    """What is more urgent goes on, and no channel waits for ever."""
    rounds = passed = 0
    for seed in range(first, first + 4):
        lan = channel_lan.lan_of(seed)
        bulk = LossyBulk(lan)
        finish(lan)
        assert bulk.lost_at, seed
        rounds, passed = rounds + len(bulk.lost_at), passed + len(bulk.passed)
    # In the others nothing urgent was left of the step, or bulk was repaired sooner.
    assert passed > rounds / 4, (passed, rounds)


class LossyBulk:
    """One of 20 frames of channel 0 is lost from now on.

    Attributes: `lost_at`, by round of channel 0, when its first frame was; `passed`, those of these rounds that were
    not yet committed anywhere when a host committed a more urgent round of their step.
    """

    def __init__(self, lan: channel_lan.ChannelLan) -> None:
        self.lost_at: dict[int, float] = {}
        self.passed: set[int] = set()
        self._lan, self._rng, self._committed = lan, random.Random(lan.seed), set[int]()
        self._stripe, self._commit = lan.stripe, lan.checks.committed_in
        lan.stripe = self._lose  # type: ignore[method-assign]
        lan.checks.committed_in = self._note  # type: ignore[method-assign]

    def _lose(self, sender: Any, frame: StripeFrame, when: float, **how: Any) -> None:
        if getattr(sender, "channel", 0) or self._rng.random() >= 0.05:
            self._stripe(sender, frame, when, **how)
        else:
            self.lost_at.setdefault(frame.round, self._lan.now)

    def _note(self, host: ChannelHost, commit: Committed) -> None:
        self._commit(host, commit)
        if not commit.channel:
            self._committed.add(commit.round)
            return
        phase = commit.phase
        step = phase.step_of(commit.round, commit.channel)
        self.passed |= {
            round_
            for round_ in self.lost_at.keys() - self._committed
            if round_ >= phase.first_round and phase.step_of(round_, 0) == step
        }


def test_a_member_that_commits_as_a_view_comes_may_not_know_that_the_lead_saves() -> None:
    """It has not heard the lead's mark (docs/protocol.md, "Checkpoints")."""
    run([700087])


# ---- mistakes that are made on purpose


def mistaken(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, wrong: Callable[..., Any], seed: int
) -> None:
    """That seed shows it."""
    monkeypatch.setattr(cls, name, wrong)
    with pytest.raises((Violation, StopIteration)):
        channel_lan.finish(channel_lan.lan_of(seed))


def test_a_lead_that_forgets_at_a_commit_that_it_saves_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = Step.note_committed

    def wrong(self: Step, channel: int, counted: Mapping[int, int]) -> None:
        note(self, channel, counted)
        self.saves = False

    mistaken(monkeypatch, Step, "note_committed", wrong, 7)


def test_a_lead_that_waits_for_no_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Step.note_committed

    def wrong(self: Step, channel: int, counted: Mapping[int, int]) -> None:
        note(self, channel, counted)
        self.undecided = False

    mistaken(monkeypatch, Step, "note_committed", wrong, 0)


def test_a_round_with_a_list_of_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    closes = Offers.closes

    def wrong(self: Offers, round_: int) -> bool:
        return closes(self, round_) if self._of_step is None else bool(self.members(round_))

    close = Offers.close

    def list_of_all(self: Offers, token: TokenState) -> TokenState:
        of_step, self._of_step = self._of_step, None
        found = close(self, token)
        self._of_step = of_step
        return found

    monkeypatch.setattr(Offers, "close", list_of_all)
    mistaken(monkeypatch, Offers, "closes", wrong, 0)


def test_a_view_in_which_no_list_stands_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = ChannelledRing.carry
    wrong = lambda self: replace(carry(self), listed=None)  # noqa: E731
    mistaken(monkeypatch, ChannelledRing, "carry", wrong, 0)


def test_stripes_of_the_size_of_another_channel_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda self, round_: self._phase.fragments_in(round_, 0)  # noqa: E731
    mistaken(monkeypatch, StripesExchanger, "_fragments_in", wrong, 0)


def test_an_offer_ahead_that_is_never_given_to_its_round_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistaken(monkeypatch, OpenRound, "_take_ahead", lambda self: None, 0)
