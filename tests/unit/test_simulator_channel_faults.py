# SPDX-License-Identifier: Apache-2.0
"""One fault each, in the middle of a step on several channels, or of frames of one channel (docs/faults.md).

A test shows that its fault has struck where it was meant to, and how the others have gone on after it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from nicps import wire
from nicps.protocol import Committed, Phase
from nicps.protocol.plan import ChannelPlan
from nicps.session import shared_form as says
from nicps.wire import Flag, FrameType
from tests.simulator import channel_lan, schedules, sized_lan
from tests.simulator.channel_lan import ChannelLan
from tests.simulator.faults import Faults
from tests.simulator.host import Host
from tests.simulator.lan import Conditions
from tests.simulator.planned_host import PlannedHost
from tests.simulator.planned_lan import PlannedLan
from tests.simulator.sized_lan import SizedLan

pytestmark = pytest.mark.unit


def job(hosts: int) -> PlannedLan:
    """A job of six steps, on two channels or more. All members are in each step."""
    lans = (
        PlannedLan(seed, random.Random(seed), hosts, Conditions()) for seed in itertools.count()
    )
    found = next(each for each in lans if each.plan.quorum == 1 and _is_small(each.first_plan))
    found.rounds, found.test_every, found.plans = 6, 100, lambda: found.first_plan  # type: ignore[method-assign]
    found.hosts[0].submit()
    found.at(schedules.WATCH_S, lambda: schedules.watch(found, "", 0.0))
    return found


def _is_small(plan: tuple[ChannelPlan, ...]) -> bool:
    return len(plan) == 2 and sum(sum(channel.rounds) for channel in plan) < 20


class MidStep:
    """Does something once, as a host commits a channel's round of a step, and another channel has some to commit.

    Attributes: `done` and `left` are the step's rounds by channel: that were committed anywhere, and that were not.
    `trained`, the steps before it.
    """

    def __init__(self, lan: PlannedLan, strike: Callable[[Host], None], at: int = 1) -> None:
        self.done, self.left = set[tuple[int, int]](), set[tuple[int, int]]()
        self.trained = 0
        self._lan, self._strike, self._at = lan, strike, at
        lan.moments.append(self._come)

    def _come(self, host: Host, action: Any) -> bool:
        ring, lan = host.node.rings.current, self._lan
        step = getattr(ring, "step", None)
        if not isinstance(action, Committed) or step is None or host.index != self._at:
            return False
        if lan.checks.trained < 2 or not step.under_way:
            return False
        phase, current = action.phase, step.current
        rounds = [
            (channel, round_)
            for channel in range(phase.channel_count)
            for round_ in range(
                phase.first_of(current, channel), phase.first_of(current + 1, channel)
            )
        ]
        done = {(c, r) for c, r in rounds if r < step.rounds[c]}
        left = {of for of in rounds if not self._committed(*of)} - done
        if not {c for c, _ in left} - {c for c, _ in done}:
            return False
        self.done, self.left, self.trained = done, left, lan.checks.trained
        lan.note(f"MID-STEP {done} {left}")
        lan.trouble(lan.now)
        self._strike(host)
        return True

    def _committed(self, channel: int, round_: int) -> bool:
        return any(key[2:] == (channel, round_) for key in self._lan.checks.done)

    def counted(self, rounds: set[tuple[int, int]]) -> set[frozenset[int]]:
        """The lists of these rounds, all of which are committed by now."""
        found = {key[2:]: frozenset(of) for key, of in self._lan.checks.done.items()}
        return {found[each] for each in rounds}


@pytest.mark.parametrize("victim", [2, 0], ids=["member", "lead"])
def test_a_host_is_lost_between_two_channels_commits_of_a_step_and_comes_back(victim: int) -> None:
    """Its gradient is in what was committed, and in nothing that was offered later. The step goes on to its end."""
    lan = job(4)
    number = victim + 1
    everybody, rest = frozenset({1, 2, 3, 4}), frozenset({1, 2, 3, 4} - {number})
    committed, lists = lan.checks.committed, list[frozenset[int]]()

    def kill(host: Host) -> None:
        lost = lan.hosts[victim]
        lost.kill()
        lan.trouble(lan.now + 0.5)
        lan.at(lan.now + 0.5, lost.restart)

    def note(host: Host, commit: Committed, phase: Phase) -> None:
        committed(host, commit, phase)
        if mid.done and phase.planned:
            lists.append(frozenset(commit.counted))
            if rest in lists and lists[-1] == everybody and lan.hosts[victim].life:
                lan.rounds = min(lan.rounds, lan.checks.trained + 2)  # the job ends soon

    mid = MidStep(lan, kill)
    lan.checks.committed = note  # type: ignore[method-assign]
    lan.rounds = 1000
    assert schedules.finish(lan).what == "done"
    assert everybody in mid.counted(mid.done), "it was in the step's list"
    assert mid.counted(mid.left) <= {everybody, rest} and rest in mid.counted(mid.left)
    assert lan.rounds < 1000, "the others have trained on, and it is counted again"


def test_a_job_is_cancelled_between_two_channels_commits_of_a_step() -> None:
    """The step goes on to its end with all members, and then the state after it is saved."""
    lan = job(4)
    mid = MidStep(lan, lambda host: Faults(lan, random.Random(1)).cancel(host))
    assert schedules.finish(lan).what == "stopped" and "cancel" in lan.ended
    everybody = frozenset({1, 2, 3, 4})
    assert mid.done and mid.counted(mid.done | mid.left) == {everybody}
    saved = lan.hosts[0].checkpoint
    assert saved is not None and mid.trained < saved.trained < lan.rounds


def test_the_majority_is_lost_between_two_channels_commits_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last member of three saves the state before that step, and commits nothing more of it."""
    lan = job(3)
    kept, hear = list[tuple[int, str]](), PlannedHost.hear

    def heard(self: PlannedHost, process: Any, message: Any) -> None:
        if isinstance(message, says.Checkpoint) and self.index == 1:
            kept.append((message.round, message.error))
        hear(self, process, message)

    monkeypatch.setattr(PlannedHost, "hear", heard)

    def kill(host: Host) -> None:
        lan.hosts[0].kill()
        lan.hosts[2].kill()

    mid = MidStep(lan, kill)
    assert schedules.finish(lan).what == "standing by"
    assert mid.done and mid.left and kept
    trained, error = kept[-1]
    assert trained == mid.trained and error in ("", "the step is under way")
    process = lan.hosts[1].process
    assert process is not None and process.state.trained == mid.trained
    committed = {key[2:] for key in lan.checks.done}
    assert not committed & mid.left


# ---- frames of one channel


class Lost:
    """The first WANT with that flag of each channel, once so much is committed, reaches nobody.

    Attributes: `rounds`, by channel: whose it was.
    """

    def __init__(self, lan: ChannelLan, flag: Flag) -> None:
        self.rounds: dict[int, int] = {}
        self._lan, self._flag, self._broadcast = lan, flag, lan.broadcast
        lan.broadcast = self._lose  # type: ignore[method-assign]

    def _lose(self, sender: Host, frame: bytes, key: bytes | None, when: float) -> None:
        header = wire.unpack(frame).header
        channel = wire.channel_of(header.flags)
        first = channel not in self.rounds and len(self._lan.checks.done) > 5
        wants = frame[1] == FrameType.WANT and header.flags & self._flag
        if wants and first and not header.flags & Flag.REPEAT:
            self.rounds[channel] = header.round
        else:
            self._broadcast(sender, frame, key, when)


@pytest.mark.parametrize("flag", [Flag.OFFERED, Flag.COMPLETE], ids=["offer", "mark"])
@pytest.mark.parametrize("kind", ["steps", "sized"])
def test_an_offer_or_a_mark_of_each_channel_is_lost(kind: str, flag: Flag) -> None:
    """What a token of a channel would carry. It is sent again, and no view changes."""
    lan = without_faults(kind)
    lost = Lost(lan, flag)
    channel_lan.finish(lan)
    committed = {(channel, round_) for _, channel, round_ in lan.checks.done}
    assert len(lost.rounds) > 1 and {*lost.rounds.items()} <= committed
    assert all((channel, round_ + 1) in committed for channel, round_ in lost.rounds.items())
    assert {number for _, number in lan.checks.views} == {1}


def without_faults(kind: str) -> ChannelLan:
    """With several channels, of which each has rounds to come."""
    lan: ChannelLan
    plan = ChannelPlan(0, 3, (3, 1)), ChannelPlan(1, 3, (1, 3, 1))
    for seed in itertools.count():
        if kind == "sized":
            lan = sized_lan.lan_of(seed, 3, faults=0)
            assert isinstance(lan, SizedLan)
            sections = lan.calls.sections
            alike = len({section.plan for section in sections}) == 1
            count = len(sections[0].plan) if alike and not lan.conditions.loss else 0
        else:
            lan = channel_lan.lan_of(seed, 3, faults=0)
            lan.plans = lambda: plan  # type: ignore[method-assign]
            count = 0 if lan.conditions.loss or lan.rounds > 6 else len(plan)
        if count in (2, 3):
            return lan
    raise AssertionError


def test_tokens_are_lost_while_rounds_of_several_channels_are_open() -> None:
    """Only channel 0 has one. It is sent again, and no view changes."""
    lan, seen = without_faults("sized"), list[int]()

    def lose(host: Host, action: Any) -> bool:
        others = getattr(host.node.rings.current, "_all", ())
        open_ = {of.channel for of in others if of.has_offered}
        if len(open_) < 2 or len(lan.checks.done) < 5:
            return False
        lan.lose[FrameType.TOKEN] = 5
        seen.append(len(lan.checks.done))
        return True

    lan.moments.append(lose)
    channel_lan.finish(lan)
    assert seen and lan.lose[FrameType.TOKEN] == 0, "they were lost"
    assert len(lan.checks.done) > seen[0] + 5
    assert {number for _, number in lan.checks.views} == {1}
