# SPDX-License-Identifier: Apache-2.0
"""The exchange stripes under seeded schedules of faults, and that the simulator can find a mistake in it.

A seed that fails names itself: `python -m tests.simulator --seed N --exchange stripes --trace 200`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job import program as job_program
from nicps.job.accumulators import Accumulators, Memory
from nicps.job.plan import Plan
from nicps.protocol import Member, Phase, Send, View
from nicps.protocol.exchange.stripes import StripesExchanger
from nicps.protocol.exchange.windows import RoundTrip
from nicps.protocol.phase import Timings
from nicps.session.events import Warned
from tests.parts import FakeNode
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, run
from tests.simulator.host import Host
from tests.simulator.lan import Conditions, Lan
from tests.simulator.places import Places, Records, StripeFrame
from tests.simulator.program import Program
from tests.simulator.schedules import Violation
from tests.simulator.stripes import Stripes
from tests.simulator.sums import SumChecks

pytestmark = pytest.mark.unit

CHUNK = 15
#: How many of seeds 0 to 14 end well, and so on.
DONE = (9, 11, 12)


@pytest.mark.short("0-9")
@pytest.mark.parametrize(("chunk", "done"), list(enumerate(DONE)))
def test_seeds(chunk: int, done: int) -> None:
    """In the others the starter is lost, or a majority, or nobody is left who has the job."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    assert run(seeds, exchange=Exchange.STRIPES)["done"] >= done - 1


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 11_000, 25))
def test_more_seeds(first: int) -> None:
    run(range(first, first + 25), exchange=Exchange.STRIPES)


@pytest.mark.long
def test_two_hosts_of_which_one_may_go_on_alone() -> None:
    run(range(100), hosts=2, exchange=Exchange.STRIPES)


def job(hosts: int = 5, conditions: Conditions | None = None, **settings: Any) -> Lan:
    """A job in stripes, without any fault as yet."""
    plan = Plan("job", batch=10 * hosts, width=8, alarm_below=0.0, exchange=Exchange.STRIPES)
    lan = Lan(hosts, conditions, 7, plan, rounds=12, fragments=12, **settings)
    lan.hosts[0].submit()
    lan.at(0.5, lambda: schedules.watch(lan, "", 0.0))
    return lan


def test_without_faults_all_that_is_counted_is_in_the_weights_or_left_over() -> None:
    lan = job()
    assert schedules.finish(lan).what == "done"
    assert len(lan.checks.sums.made) == 12
    assert lan.checks.sums.balance(), "all residuals are known"
    assert any(rest for made in lan.checks.sums.made.values() for rest in made.rests)


@pytest.mark.parametrize(
    "pairs", [[(0, 2)], [(3, k) for k in range(4)], [(k, 0) for k in range(4)]]
)
def test_who_does_not_get_frames_or_whose_reach_nobody_is_evicted(
    pairs: list[tuple[int, int]],
) -> None:
    """R16: aggregators say who is missing in their places, others that an aggregator does not answer."""
    lan = job(4, timings=Timings(silence_most_s=0.6, call_back_s=2.0), compute_s=0.05)
    lan.at(TRAINING_S, lambda: lan.starved.update(pairs))
    lan.trouble(TRAINING_S)
    assert schedules.finish(lan).what == "done"
    live = [set(live) for _, live, *_ in lan.checks.views.values()]
    at_fault = pairs[0][1] if len({b for _, b in pairs}) == 1 else pairs[0][0]
    assert {1, 2, 3, 4} - set.intersection(*live) == {at_fault + 1}


def test_a_token_is_lost_with_the_member_that_has_passed_it_on() -> None:
    """The token is parked at h1 and goes round. h2, the next, passes it to h3, which is cut off from both, and dies.
    So h1 takes h3 for the holder, h3 and h4 take h1 for it, and all three repeat their offers.
    """
    lan = job(4, compute_s=0.05)
    h1, h2, h3, h4 = lan.hosts
    h2.slowness = 20.0
    lan.trouble(3.0)

    def owner_at(host: Host) -> int:
        ring = host.node.ring
        return ring.token.owner if ring is not None and ring.token is not None else 0

    def is_parked() -> bool:
        rings = [host.node.ring for host in lan.hosts]
        parked = all(ring is not None and ring.parked for ring in rings)
        offers = rings[0] is not None and rings[0].offered == {1, 3, 4}
        return parked and offers and {owner_at(host) for host in lan.hosts} == {1}

    assert lan.run(is_parked, 3.0)
    assert [host.node.number for host in lan.hosts] == [1, 2, 3, 4]
    lan.cut([frozenset({0, 1}), frozenset({2, 3})])
    assert lan.run(lambda: owner_at(h1) == 3, lan.now + 0.2)
    assert owner_at(h3) == owner_at(h4) == 1
    h2.kill()
    lan.cut([])
    assert lan.run(lambda: h1.node.view.number > 1, lan.now + 3.0)
    assert schedules.finish(lan).what == "done"


@pytest.mark.parametrize(("unicast", "mute"), [(False, ()), (True, (2,)), (True, range(4))])
def test_a_network_that_cannot_do_stripes(unicast: bool, mute: Collection[int]) -> None:
    """Frames to one host do not arrive, or those of XDP programs. Nobody is evicted; every host adds for itself."""
    lan = job(4, timings=Timings(silence_most_s=0.6, call_back_s=2.0), compute_s=0.05)
    lan.unicast = unicast
    lan.answers_lost |= set(mute)
    lan.trouble(0.0)
    assert schedules.finish(lan).what == "done"
    assert {tuple(sorted(live)) for _, live, *_ in lan.checks.views.values()} == {(1, 2, 3, 4)}
    assert not lan.checks.sums.made


@pytest.mark.parametrize("refusing", [{0}, {2}, range(4)])
def test_a_kernel_that_refuses_the_program_of_stripes(refusing: Collection[int]) -> None:
    """Every host adds for itself then, and the user is told once."""
    lan = job(4)
    for index in refusing:
        lan.hosts[index].refuses_stripes = True
    assert schedules.finish(lan).what == "done"
    assert {tuple(sorted(live)) for _, live, *_ in lan.checks.views.values()} == {(1, 2, 3, 4)}
    assert not lan.checks.sums.made
    said = [p.message.message for p in lan.hosts[0].published if isinstance(p.message, Warned)]
    assert len(said) == 1 and "exchange broadcast" in said[0], said
    assert "the kernel refuses nicps_stripes" in said[0]


@pytest.mark.parametrize("refusing", [1, 3])
@pytest.mark.parametrize("phase", [2, 3])
@pytest.mark.parametrize("what", ["PREPARES", "AGREED"])
def test_a_lead_that_dies_while_a_kernel_refuses_stripes(
    what: str, phase: int, refusing: int
) -> None:
    """The next lead, h2, is told, at the latest when the host that refuses has come back."""
    lan = job(4, timings=Timings(silence_most_s=0.6, call_back_s=2.0))
    lan.hosts[refusing].refuses_stripes = True
    lead = lan.hosts[0]
    note = lead.note

    def dies(text: str) -> None:
        note(text)
        if text.split(" from ")[0] == f"{what} TRAIN {phase}":
            lan.trouble(lan.now)
            lan.at(lan.now, lead.kill)

    lead.note = dies  # type: ignore[method-assign]
    assert schedules.finish(lan).what == "done"
    assert lead.dead
    _, live, *_ = lan.checks.views[max(lan.checks.views)]
    assert set(live) == {2, 3, 4}


def test_a_host_that_comes_back_and_refuses_stripes() -> None:
    """The rounds before were of stripes."""
    lan = job(4)
    host = lan.hosts[2]

    def comes_back() -> None:
        host.refuses_stripes = True
        host.restart()

    lan.at(TRAINING_S, host.kill)
    lan.at(TRAINING_S + 0.5, comes_back)
    lan.trouble(TRAINING_S + 0.5)
    assert schedules.finish(lan).what == "done"
    assert lan.checks.sums.made


def test_an_exchange_that_has_worked_is_not_given_up() -> None:
    """Then a member is at fault."""
    lan = job(4, timings=Timings(silence_most_s=0.6, call_back_s=2.0), compute_s=0.05)
    lan.at(TRAINING_S, lambda: lan.answers_lost.add(2))
    lan.trouble(TRAINING_S)
    assert schedules.finish(lan).what == "done"
    live = [set(live) for _, live, *_ in lan.checks.views.values()]
    assert {1, 2, 3, 4} - set.intersection(*live) == {3}


def test_members_do_not_wait_longer_because_others_do() -> None:
    """A sum that waits for contributions that were lost says nothing of the way there and back."""
    trip = RoundTrip(Timings().repeat_s)
    for seconds in (1.0, 5.0, 30.0):
        trip.add(seconds)
    assert trip.timeout_s(0) == trip.timeout_s(9) == 25 * Timings().repeat_s
    lan = job(8, Conditions(loss=0.05))
    assert schedules.finish(lan).what == "done"
    assert lan.now < 10.0


def test_a_view_shows_no_remainders_to_a_program_without_their_room() -> None:
    """It has not connected, or has been in no phase of stripes: with its first one it gets all."""
    view = View(3, (Member(1, bytes(6), "h1"),), frozenset({1}), 1)
    node = FakeNode(view=view, leads=True, open_round=5)
    phase = Phase(2, 1, wire.PhaseKind.TRAIN, 5, shares=(1,), exchange=Exchange.STRIPES)
    program, memory = job_program.Program(1, 60.0, 0.0), Memory(1, 12, 3, (1, 1, 1))
    (before,) = program.show_view(0.0, node, phase, memory)
    (entered,) = program.enter(0.0, phase, 5, memory, node)
    (longer,) = program.show_view(0.0, node, phase, Memory(1, 12, 4, (1, 1, 2)))
    assert before.message.places == 0
    assert (entered.message.room, entered.message.places) == (12, 3)
    assert longer.message.places == 4


@pytest.mark.parametrize("seconds", [0.30, 0.32, 0.34])
def test_a_dead_owner_of_the_token_is_given_up_by_who_asks_it_for_sums(seconds: float) -> None:
    """What a member sends puts nothing off, where the token does not wait for it."""
    lan = job(3, compute_s=0.05)
    lan.at(TRAINING_S, lambda: lan.starved.update({(2, 0), (0, 1), (1, 2)}))

    def kill() -> None:
        next(h for h in lan.hosts if h.node.ring is not None and h.node.ring.holding).kill()

    lan.at(TRAINING_S + seconds, kill)
    agreed = TRAINING_S + seconds + 1.5
    lan.run(lambda: False, agreed)
    assert {h.node.view.number for h in lan.hosts if not h.dead} == {2}


def test_a_lead_that_comes_back_to_a_phase_owes_its_judgement() -> None:
    """Its program hangs, the open round closes without it, and all wait for what comes after the round before."""
    view = View(3, (Member(1, bytes(6), "h1"),), frozenset({1}), 1)
    node = FakeNode(view=view, leads=True, open_round=5)
    phase = Phase(2, 1, wire.PhaseKind.TRAIN, 3, shares=(1,))
    program = job_program.Program(1, 60.0, 0.0)
    for first, duty in ((3, ""), (5, "judge")):
        program.enter(0.0, phase, first, Memory(), node)
        program.close_round(first)
        assert program.duty == duty


def test_a_program_that_converts_asks_for_the_token_once() -> None:
    lan = job(conditions=Conditions(loss=0.05))

    def asks(host: Host) -> bool:
        ring = host.node.ring
        if ring is None or not ring.parked or ring.holding or ring._want.at == math.inf:
            return False
        return ring._control.wants_token()

    assert lan.run(lambda: any(map(asks, lan.hosts)), 5.0)
    host = next(filter(asks, lan.hosts))
    assert not [a for a in host.node.advance(host.clock()) if isinstance(a, Send)]


# ---- the simulator can find what is wrong


@pytest.mark.parametrize("compares", [True, False])
def test_an_older_contribution_that_is_added_is_found(
    compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor stalls with a copy of it, until its place has been made whole in a later round of the same bank."""
    add = Stripes._add
    stalled: list[tuple[StripeFrame, Iterator[None]]] = []

    def overtaken(
        stripes: Stripes, frame: StripeFrame, local: int, records: Records, places: Places
    ) -> Iterator[None]:
        yield from add(stripes, frame, local, records, places)
        made = records.sums[frame.round & 1][frame.index].tag == frame.tag
        if not stalled:
            stalled.append((frame, add(stripes, frame, local, records, places)))
        before, rest = stalled[0]
        if (before.to, before.index, before.round + 2) == (frame.to, frame.index, frame.round):
            list(rest if made else [])

    monkeypatch.setattr(Stripes, "_add", overtaken)
    if compares:
        assert schedules.finish(job()).what == "done"
        return
    monkeypatch.setattr(Stripes, "is_fresh", lambda _, place, tag: place.tag != tag)
    with pytest.raises(Violation, match="uses the remainder"):
        schedules.finish(job())


def test_a_contribution_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stripes, "has_contributed", lambda *_: False)
    with pytest.raises(Violation, match=r"fragment .* of round .* is Lane"):
        schedules.finish(job(conditions=Conditions(duplicate=0.1)))


def test_lanes_that_were_not_offered_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The aggregator adds its own lanes of two rounds before: it does not convert its own stripe first."""
    monkeypatch.setattr("tests.simulator.program.bounds", lambda *_: (0, 0))
    monkeypatch.setattr(Stripes, "_is_offered", lambda *_: True)
    monkeypatch.setattr(Stripes, "_send_next", lambda *_: iter(()))  # it would send such lanes
    monkeypatch.setattr(StripesExchanger, "may_enter", lambda self: True)
    lan = job()
    lan.odds.converting_s = 0.01
    with pytest.raises(Violation, match=r"fragment .* of round .* is Lane"):
        schedules.finish(lan)


def test_a_member_that_lacks_sums_and_says_it_is_complete_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StripesExchanger, "is_complete", lambda *_: True)
    with pytest.raises(Violation, match=r"fragment .* of round .* is None"):
        schedules.finish(job())


def test_a_remainder_that_is_used_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = SumChecks.take_rests

    def twice(checks: SumChecks, *what: Any) -> None:
        take(checks, *what)
        take(checks, *what)

    monkeypatch.setattr(SumChecks, "take_rests", twice)
    with pytest.raises(Violation, match="used before: True"):
        schedules.finish(job())


def test_a_remainder_that_is_not_used_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SumChecks, "take_rests", lambda *_: None)
    with pytest.raises(Violation, match="has not used the remainders"):
        schedules.finish(job())


def test_a_residual_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = SumChecks.counted

    def forget(checks: SumChecks, program: Program, *what: Any) -> None:
        counted(checks, program, *what)
        program.residual = [0] * len(program.residual)

    monkeypatch.setattr(SumChecks, "counted", forget)
    with pytest.raises(Violation, match="was lost"):
        schedules.finish(job())


def test_another_unit_than_the_lists_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = StripesExchanger.on_closed

    def coarser(exchanger: StripesExchanger, now: float, token: Any) -> Any:
        for line in token.lines:
            line.unit += line.contributed
        return close(exchanger, now, token)

    monkeypatch.setattr(StripesExchanger, "on_closed", coarser)
    with pytest.raises(Violation, match="has the unit"):
        schedules.finish(job())


def test_a_stripe_that_grows_without_its_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five hosts are lost: each of the others adds more."""
    monkeypatch.setattr(Accumulators, "renew", lambda *_: [])
    lan = job(compute_s=0.05)
    for host in lan.hosts[3:]:
        lan.at(TRAINING_S, host.kill)
    with pytest.raises(Violation, match="blocks for TRAIN"):
        schedules.finish(lan)


def test_members_that_send_nothing_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StripesExchanger, "on_lacking", lambda *_: [])
    monkeypatch.setattr(schedules, "LIMIT_S", 3.0)
    with pytest.raises(Violation, match="the job has not ended"):
        schedules.finish(job(conditions=Conditions(loss=0.05)))
