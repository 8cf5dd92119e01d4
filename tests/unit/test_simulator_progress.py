# SPDX-License-Identifier: Apache-2.0
"""Fragments that can never be taken: tokens and control frames pass, full frames do not (R16)."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import (
    Action,
    Committed,
    Installed,
    Member,
    NoProgress,
    NotAdded,
    Timings,
    View,
)
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.progress import IN_VAIN, Progress, Standstill, find_fault
from nicps.protocol.signals import Lacking
from tests.listed import members_of
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S
from tests.simulator.faults import MOMENTS
from tests.simulator.host import Host
from tests.simulator.lan import Conditions, Lan

pytestmark = pytest.mark.unit

#: Short, so that little is simulated; a host that comes back does so rarely.
TIMINGS = Timings(silence_most_s=0.6, call_back_s=2.0)
#: Seeds of jobs that end well without such links.
ENDING_WELL = (0, 2, 7, 9, 12, 13, 15, 26, 27, 29, 32, 34, 35, 37)
Pairs = Iterable[tuple[int, int]]  # indices of who sends and who does not get it; -1 is a switch


@pytest.fixture(autouse=True)
def slow_lan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token goes round with nothing new: fewer times a second than it would."""
    monkeypatch.setattr("tests.simulator.lan.HOP_S", 1e-3)


def trains(
    hosts: int = 4,
    conditions: Conditions | None = None,
    seed: int = 7,
    exchange: Exchange = Exchange.BROADCAST,
    timings: Timings = TIMINGS,
    rounds: int = 20,
    fragments: int = 4,
) -> Lan:
    """A job that trains while fragments begin to get lost."""
    plan = Plan("job", batch=10 * hosts, width=16, alarm_below=0.0, exchange=exchange)
    lan = Lan(hosts, conditions, seed, plan, rounds, 8, fragments, 0.05, timings=timings)
    lan.hosts[0].submit()
    lan.at(0.5, lambda: schedules.watch(lan, "", 0.0))
    return lan


def found_in(lan: Lan) -> list[NoProgress]:
    """All that any host will find."""
    found: list[NoProgress] = []

    def note(_: Host, action: Action) -> bool:
        if isinstance(action, NoProgress):
            found.append(action)
        return False

    lan.moments.append(note)
    return found


def starved(lan: Lan, pairs: Pairs, since: float = TRAINING_S) -> list[NoProgress]:
    """From then on, for ever, fragments do not pass between these hosts."""
    lan.at(since, lambda: lan.starved.update(pairs))
    lan.trouble(since)
    return found_in(lan)


def ever_out(lan: Lan) -> set[int]:
    """Members that some view was without."""
    views = lan.checks.views.values()
    return {member.number for members, live, *_ in views for member in members} - set.intersection(
        *(set(live) for _, live, *_ in views)
    )


def done(lan: Lan) -> None:
    assert schedules.finish(lan).what == "done"


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("member", [2, 3])
def test_who_lacks_one_members_fragments_is_evicted(owner: int, member: int) -> None:
    lan = trains()
    found = starved(lan, {(owner, member)})
    done(lan)
    assert ever_out(lan) == {member + 1}
    assert {f.evicted for f in found} == {0, member + 1}
    assert found[0] == NoProgress(found[0].round, {member + 1: {owner + 1: 4}})


@pytest.mark.parametrize("member", [0, 3])
def test_who_gets_nobodys_fragments_is_evicted(member: int) -> None:
    """Also the lead: the lowest of the others goes on with the job."""
    lan = trains()
    starved(lan, {(k, member) for k in range(4)})
    done(lan)
    assert ever_out(lan) == {member + 1}


@pytest.mark.parametrize("owner", [0, 3])
def test_whose_fragments_reach_nobody_is_evicted(owner: int) -> None:
    """The others all lack the same: they stay."""
    lan = trains()
    found = starved(lan, {(owner, k) for k in range(4)})
    done(lan)
    assert ever_out(lan) == {owner + 1}
    reports = [f for f in found if not f.evicted]
    assert {k for f in reports for k in f.lacks} == set(range(1, 5)) - {owner + 1}


@pytest.mark.parametrize("host", [0, 3])
def test_a_link_that_passes_no_full_frames_either_way(host: int) -> None:
    lan = trains()
    starved(lan, {(host, k) for k in range(4)} | {(k, host) for k in range(4)})
    done(lan)
    assert ever_out(lan) == {host + 1}


@pytest.mark.parametrize("left", [{0, 1}, {0, 1, 2}])
def test_a_middle_link_that_passes_no_full_frames(left: set[int]) -> None:
    """One after the other is evicted, and comes back to what it cannot take: the job goes on among the others."""
    lan = trains(4)
    right = set(range(4)) - left
    pairs = {(a, b) for a in left for b in right}
    starved(lan, pairs | {(b, a) for a, b in pairs})
    done(lan)
    assert ever_out(lan) in ({k + 1 for k in left}, {k + 1 for k in right})


@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
def test_of_two_hosts_the_one_that_cannot_take_is_evicted(pair: tuple[int, int]) -> None:
    lan = trains(2)
    starved(lan, {pair})
    done(lan)
    assert ever_out(lan) == {pair[1] + 1}


def test_of_two_hosts_that_do_not_get_each_others_one_goes_on() -> None:
    lan = trains(2)
    starved(lan, {(0, 1), (1, 0)})
    done(lan)
    assert ever_out(lan) == {2}


def test_a_hand_out_that_one_host_cannot_take() -> None:
    lan = trains()
    starved(lan, {(0, 3)}, since=0.0)
    done(lan)
    assert ever_out(lan) == {4}


def test_a_hand_out_that_nobody_can_take() -> None:
    """Only the host that has the job cannot be heard with it: it is evicted, and the job is stopped, with a reason."""
    lan = trains()
    starved(lan, {(0, k) for k in range(1, 4)}, since=0.0)
    outcome = schedules.finish(lan)
    assert (outcome.what, outcome.why) == ("stopped", "nobody is left who has the whole job")


@pytest.mark.parametrize("member", [1, 3])
def test_a_switch_whose_sums_do_not_reach_a_host(member: int) -> None:
    """The hosts add from then on; where the others' fragments do not reach it either, it is evicted."""
    lan = trains(exchange=Exchange.SWITCH)
    starved(lan, {(k, member) for k in range(-1, 4)})
    done(lan)
    assert ever_out(lan) == {member + 1}


def lose_late_tokens(lead: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead gets no token of a complete round in the 60 ms before its wait for a switch ends."""
    take = lead.take_frame

    def take_frame(source: bytes, data: bytes, key: bytes | None) -> None:
        ring, leads = lead.node.ring, lead.machine.roles.lead
        lost = data[1] == wire.FrameType.TOKEN and ring is not None and ring.complete
        if not (lost and leads is not None and leads.deadline() < lead.clock() + 0.06):
            take(source, data, key)

    monkeypatch.setattr(lead, "take_frame", take_frame)


@pytest.mark.parametrize("exchange", [Exchange.STRIPES, Exchange.LINUX_SWITCH])
@pytest.mark.parametrize("host", [0, 3])
def test_an_exchange_that_one_host_has_made_fail_is_used_again(
    host: int, exchange: Exchange
) -> None:
    """It has made no sum yet, so the network may be at fault, and every host adds for itself. Then that host turns out
    to be at fault, also the lead, and is evicted.
    """
    lan = trains(exchange=exchange, rounds=30)
    pairs = {(host, k) for k in range(-1, 4)} | {(k, host) for k in range(-1, 4)}
    used: list[Exchange] = []

    def begins(by: Host, action: Action) -> bool:
        if not MOMENTS["training"](by, action):
            return False
        lan.starved.update(pairs)
        return True

    def note(_: Host, action: Action) -> bool:
        if isinstance(action, Committed) and action.phase.kind is wire.PhaseKind.TRAIN:
            used.append(action.exchange)
        return False

    lan.trouble(TRAINING_S)
    lan.moments += [begins, note]
    done(lan)
    assert ever_out(lan) == {host + 1}
    assert used[-1] is exchange and used.count(exchange) > used.count(Exchange.BROADCAST), used


def test_the_lead_that_waits_for_a_switch_decides_in_the_middle_of_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One host has made switch and stripes fail, and is gone. They are tried again after the round, but the switch is
    not ready, and meanwhile the view changes. Were the next round committed then, the lead would decide after it has
    marked that, and the token that tells it of the commit is lost.
    """
    monkeypatch.setattr("nicps.job.lead.SWITCH_S", 0.4)
    lan = trains(exchange=Exchange.LINUX_SWITCH, rounds=40, timings=replace(TIMINGS, call_back_s=9))
    lan.test_every = 1000
    lead, bad, ready = lan.hosts[0], lan.hosts[3], int(wire.SwitchStep.READY)
    used = list[Exchange]()

    def begins(by: Host, action: Action) -> bool:
        if not MOMENTS["training"](by, action):
            return False
        lan.starved.update({(3, k) for k in range(-1, 4)} | {(k, 3) for k in range(-1, 4)})
        return True

    def without_it(_: Host, action: Action) -> bool:
        if not (isinstance(action, Installed) and len(action.view.live) == 3):
            return False
        lan.linux.lose[ready] = 1000
        lan.at(lan.now, bad.kill)
        return True

    def summed(_: Host, action: Action) -> bool:
        if not isinstance(action, Committed) or action.phase.kind is not wire.PhaseKind.TRAIN:
            return False
        used.append(action.exchange)
        lan.at(lan.now + 0.1, lead.renew)
        return True

    lose_late_tokens(lead, monkeypatch)
    lan.trouble(TRAINING_S)
    lan.moments += [begins, without_it, summed]
    done(lan)
    assert used == [Exchange.BROADCAST] and not lan.moments


def test_the_lead_of_stripes_that_fail_decides_in_the_middle_of_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A switch is there and not ready. Were it waited for, the sums of the open round might come after all: the lead
    would decide after it has marked that round, and the token that tells it of the commit is lost.
    """
    monkeypatch.setattr("nicps.job.lead.SWITCH_S", 0.4)
    lan = trains(exchange=Exchange.LINUX_SWITCH, timings=replace(TIMINGS, call_back_s=9))
    lan.linux.there = False
    lead = lan.hosts[0]
    pairs = {(a, b) for a in range(4) for b in range(4) if a != b}
    used = list[Exchange]()

    def begins(by: Host, action: Action) -> bool:
        if not MOMENTS["training"](by, action):
            return False
        lan.starved.update(pairs)
        lan.linux.there, lan.linux.lose[int(wire.SwitchStep.READY)] = True, 1000
        lan.linux.start()
        return True

    def fails(by: Host, action: Action) -> bool:
        if not isinstance(action, NotAdded):
            return False
        lan.starved.difference_update(pairs)
        return True

    def note(_: Host, action: Action) -> bool:
        if isinstance(action, Committed) and action.phase.kind is wire.PhaseKind.TRAIN:
            used.append(action.exchange)
        return False

    lose_late_tokens(lead, monkeypatch)
    lan.trouble(TRAINING_S)
    lan.moments += [begins, fails, note]
    done(lan)
    assert used[0] is Exchange.BROADCAST and lan.moments == [note]


@pytest.mark.parametrize("pairs", [{(1, 2)}, {(3, k) for k in range(3)}])
def test_a_slow_line(pairs: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn takes longer than the others wait for reports, as each sends again all that is lacking."""
    lan = trains()
    found = starved(lan, pairs)
    lan.at(TRAINING_S, lambda: monkeypatch.setattr("tests.simulator.outbox.FRAGMENT_S", 0.06))
    lan.run(lambda: any(f.evicted for f in found), limit_s=TRAINING_S + 10)
    assert {f.evicted for f in found} - {0} == ({3} if len(pairs) == 1 else {4})


def test_it_is_said_each_time_that_a_host_comes_back() -> None:
    """Each return takes longer to be let in than the one before: the others train in between."""
    lan = trains(rounds=60)
    found = starved(lan, {(0, 3)})
    done(lan)
    rounds = {f.round for f in found if f.evicted}
    assert len(rounds) > 1


@pytest.mark.short("0", "2", "3", "6")
@pytest.mark.parametrize("seed", range(8))
def test_seeds_in_which_fragments_do_not_pass(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules of other faults, and for a while, or longer than the job, links that pass no full frames."""
    monkeypatch.setattr(schedules, "Timings", functools.partial(Timings, silence_most_s=0.6))
    rng = random.Random(f"fragments {seed}")
    lan = schedules.lan_of(rng.choice(ENDING_WELL))
    hosts = range(len(lan.hosts))
    for _ in range(rng.randint(1, 2)):
        one, half = rng.choice(hosts), set(rng.sample(hosts, len(hosts) // 2))
        receives = {(k, one) for k in (-1, *hosts)}
        sends = {(one, k) for k in hosts}
        middle = {(a, b) for a in half for b in hosts if b not in half}
        pairs = rng.choice((receives, sends, receives | sends, {(one, rng.choice(hosts))}, middle))
        start = 0.2 + rng.random() * 2
        end = start + rng.choice((0.3, 2.0, 5.0))
        lan.at(start, functools.partial(lan.starved.update, pairs))
        lan.at(end, functools.partial(lan.starved.difference_update, pairs))
        lan.trouble(end)
    schedules.finish(lan)


def test_a_lost_report_and_a_late_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members judge before all have heard the same reports, and each verdict names another member to propose."""
    lan = trains(3, rounds=12, fragments=6)
    starved(lan, {(0, 1), (0, 2)})
    lead, late = lan.hosts[:2]
    take_fragment, take_frame = late.kernel.take_fragment, lead.take_frame
    lost: list[bytes] = []

    def take_one(*fragment: Any) -> None:
        lan.starved.add((0, 1))
        take_fragment(*fragment)

    def lose_one_report(source: bytes, data: bytes, key: bytes | None) -> None:
        is_report = data[1] == wire.FrameType.WANT and any(wire.unpack(data).items)
        if is_report and not lost:
            lost.append(data)
        else:
            take_frame(source, data, key)

    def let_one_pass() -> None:
        """Its watch starts again."""
        lan.starved.discard((0, 1))
        monkeypatch.setattr(late.kernel, "take_fragment", take_one)

    monkeypatch.setattr(lead, "take_frame", lose_one_report)
    lan.at(TRAINING_S + 0.285, let_one_pass)
    done(lan)
    assert lost


# ---- what must not be taken for it


@pytest.mark.parametrize("seed", range(4))
def test_loss_alone_is_none_of_it(seed: int) -> None:
    """A frame is lost with 30 % at the sender and 30 % on the way to each receiver."""
    lan = trains(3, Conditions(loss=0.3), seed, rounds=10, fragments=40)
    found = found_in(lan)
    schedules.finish(lan)
    assert not found


def test_a_host_that_stands_still_is_none_of_it() -> None:
    """Its kernel drops what comes for longer than the limit; its agent goes on before the others have given it up."""
    lan = trains(timings=Timings(silence_s=5.0, silence_most_s=5.0))
    lan.at(TRAINING_S, lambda: lan.starved.update({(k, 3) for k in range(4)}))
    lan.at(TRAINING_S + 0.01, lan.hosts[3].pause)
    lan.at(TRAINING_S + 4.5, lan.hosts[3].resume)
    lan.at(TRAINING_S + 4.6, lan.starved.clear)
    lan.trouble(TRAINING_S + 4.6)
    found = found_in(lan)
    done(lan)
    assert not found and not ever_out(lan)


def test_a_pause_counts_in_part() -> None:
    progress = Progress(Timings())
    for now in (0.0, 100.0, 200.0):  # two seconds
        progress.note(now, 5, 100)
    assert not progress.take_report(now)
    progress.note(201.0, 5, 100)
    assert progress.take_report(201.0)
    progress.note(201.05, 5, 100)
    assert not progress.take_report(201.05), "it has just reported"
    progress.note(201.2, 5, 100)
    assert progress.take_report(201.2)
    progress.note(205.0, 6, 100)
    assert not progress.take_report(205.0), "a fragment has come"


@pytest.mark.parametrize("every_s", [0.0001, 0.05, 2.0, 60.0])
def test_one_fragment_is_sent_again_thirty_times(every_s: float) -> None:
    """Fewer are a matter of loss, however slow the ring is; and on a fast one it takes three seconds."""
    progress = Progress(Timings())
    for asks in range(40_000):
        progress.note(asks * every_s, 5, 1)
        if progress.take_report(asks * every_s):
            break
    assert asks == pytest.approx(max(IN_VAIN, 3.0 / every_s), abs=1)


# ---- whose fault it is, and how it is told


def test_what_the_user_is_told() -> None:
    members = tuple(Member(k, bytes(6), f"h{k}") for k in (1, 2, 3))
    seen = View(1, members, frozenset({1, 2, 3}), 1)
    lacks = {3: {1: 40, 2: 1}}
    assert NoProgress(7, lacks).explain(seen) == (
        "round 7: h3 lacks fragments (40 of h1, 1 of h2), and gets none of them, however often they are sent again"
    )
    assert NoProgress(7, lacks, 3).explain(seen) == (
        "round 7: h3 takes nothing of what the others send again, and is evicted; do full frames (1514 bytes) pass on"
        " its way?"
    )
    assert (
        NoProgress(7, {2: {1: 1}, 3: {1: 1}}, 1)
        .explain(seen)
        .startswith("round 7: h1 sends what does not reach h2, h3, and is evicted")
    )


@pytest.mark.parametrize(
    ("members", "learners", "lacks", "fault"),
    [
        (2, (), {1: {2: 4}}, 1),
        (2, (), {1: {2: 4}, 2: {1: 4}}, 2),
        (3, (), {3: {1: 1}}, 3),
        (3, (), {2: {1: 1}, 3: {1: 1}}, 1),
        (3, (2, 3), {2: {1: 1}, 3: {1: 1}}, 3),
        (3, (3,), {2: {1: 1}, 3: {1: 1}}, 3),
        (3, (), {1: {2: 1, 3: 1}, 2: {1: 1}, 3: {1: 1}}, 1),
        (4, (), {3: {1: 1, 2: 1, 4: 1}, 4: {1: 1, 2: 1, 3: 1}}, 4),
        (4, (2,), {2: {1: 1}, 3: {1: 1}, 4: {1: 1}}, 1),
        (5, (), {4: {1: 1}, 5: {1: 1}}, 5),
        (5, (), {3: {1: 1}, 4: {1: 1}, 5: {1: 1}}, 1),
        (64, (), {k: {7: 3} for k in range(1, 65) if k != 7}, 7),
        (64, (), {7: {k: 3 for k in range(1, 65) if k != 7}}, 7),
    ],
)
def test_whose_fault_it_is(
    members: int, learners: tuple[int, ...], lacks: dict[int, dict[int, int]], fault: int
) -> None:
    assert find_fault(lacks, range(1, members + 1), learners) == fault


def test_members_judge_again_while_nobody_proposes() -> None:
    """Member 1 misses a report and judges later than the others, on more. Then each verdict names another proposer."""
    seen = View(1, members_of(3), frozenset({1, 2, 3}), 1)
    hosts = {
        m.number: Standstill(
            LocalHost(m.mac, m.name, NodeState.MEMBER, seen, m.number), Timings(silence_most_s=3.0)
        )
        for m in seen.members
    }
    reports = [(0.1 * turn, 3) for turn in range(25)]
    reports += [(1.05 + 0.1 * turn, 2) for turn in range(15)]
    verdicts: list[tuple[int, int]] = []  # the member that judges, and whom it finds at fault
    for now, member in sorted(reports):
        for number, standstill in hosts.items():
            if (number, member, now) != (1, 3, 0.0):
                found = standstill.hear(now, Lacking(7, member, {1: 40}), frozenset())
                verdicts += [(number, f.evicted) for f in found if f.evicted]
    assert verdicts[:3] == [(2, 3), (3, 3), (1, 1)], "each names a proposer that found another"
    assert sorted(verdicts[3:]) == [(1, 1), (2, 1), (3, 1)]
