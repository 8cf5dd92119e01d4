# SPDX-License-Identifier: Apache-2.0
"""The state machines under seeded schedules of faults, in virtual time.

A seed that fails names itself. To read what happened: `python -m tests.simulator --seed N --trace 200`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from _pytest.mark import ParameterSet

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import (
    Action,
    Committed,
    Installed,
    Timings,
)
from tests.simulator import schedules
from tests.simulator.__main__ import Job, one
from tests.simulator.drill import TRAINING_S, ends_well, job, run, training
from tests.simulator.faults import MOMENTS
from tests.simulator.host import Host
from tests.simulator.lan import Conditions, Lan

pytestmark = pytest.mark.unit

CHUNK = 25
#: How many of seeds 0 to 24 end well, how many of seeds 25 to 49, and so on.
DONE = (17, 20, 17, 17, 17, 18, 19, 16, 13, 23, 22, 19, 17, 18, 18, 20, 19, 23, 20, 24)


@pytest.mark.short("0-17")
@pytest.mark.parametrize(("chunk", "done"), list(enumerate(DONE)))
def test_seeds(chunk: int, done: int) -> None:
    """So many of a chunk end well, give or take one: in the others the starter is lost, or a majority."""
    assert run(range(chunk * CHUNK, (chunk + 1) * CHUNK))["done"] >= done - 1


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 12_000, CHUNK))
def test_more_seeds(first: int) -> None:
    run(range(first, first + CHUNK))


@pytest.mark.short("0")
@pytest.mark.parametrize("first", range(0, 50, CHUNK))
def test_two_hosts_of_which_one_may_go_on_alone(first: int) -> None:
    run(range(first, first + CHUNK), hosts=2)


@pytest.mark.parametrize("seed", [1114, 2757])
def test_who_has_gone_on_alone_comes_back_without_a_state(seed: int) -> None:
    """Both have done so, in views of the same number; the view that follows is the other's."""
    _, what, why = one(Job(seed, 2, Exchange.BROADCAST))
    assert what == "done", why


def test_who_departs_unheard_learns_of_the_end() -> None:
    """Of two hosts, one of which may go on alone, both training programs are lost: neither waits for ever."""
    assert run(range(142, 143), hosts=2)


def test_nobody_is_handed_the_state_while_training_is_opened() -> None:
    """A program that lags says of a round before what is to come after it, to a lead that has decided to train."""
    assert run(range(23040, 23041))


@pytest.mark.parametrize("seed", [43590, 536])
def test_a_lead_decides_once_everybody_has_the_view(seed: int) -> None:
    """A hand-out is ready, or a round is judged, while the view is installed: that takes effect once all have it."""
    assert run(range(seed, seed + 1))


def test_a_leads_program_hangs_and_the_round_closes_without_it() -> None:
    """It has the round before still to judge, and all wait for that."""
    assert run(range(587, 588))


def test_the_end_is_decided_on_in_two_views() -> None:
    """Nobody closes what it hands out to the lead."""
    assert run(range(7802, 7803))


def test_a_job_is_cancelled_while_training_is_opened() -> None:
    """What is saved has all rounds that count."""
    assert run(range(1398, 1399))


# ---- one fault, on purpose


def test_without_faults_everybody_counts_in_every_round() -> None:
    lan, _ = job()
    assert schedules.finish(lan).what == "done"
    counted = [dict(what[0]) for what in lan.checks.commits.values() if what[2] == 2]
    assert len(counted) == 12
    assert all(samples == dict.fromkeys(range(1, 6), 10) for samples in counted)
    assert {host.result for host in lan.hosts} == {lan.hosts[0].result}
    assert lan.hosts[0].node.view.number == 1


KINDS = ("lead kill", "kill", "lead pause", "lead isolate", "lead program", "lead hang")


def some_short(names: Sequence[str]) -> list[ParameterSet]:
    """Moments with kinds of faults. A sixth of the pairs is short: of each moment one kind, in turn."""
    return [
        pytest.param(name, kind, marks=pytest.mark.long if (at + of) % len(KINDS) else ())
        for at, name in enumerate(names)
        for of, kind in enumerate(KINDS)
    ]


#: Moments at which not everybody has the job: the starter's death may cost it.
EARLY = (
    *("forming", "installed", "installing", "voting", "hand-out"),
    *("deciding", "broadcast", "closing", "committed"),
)


@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(("name", "kind"), some_short(EARLY))
def test_any_host_may_die_before_everybody_has_the_job(name: str, kind: str, nth: int) -> None:
    """Whatever comes of it is judged as in the schedules: if it is stopped nobody has the job."""
    lan, faults = job()
    faults.at_moment(name, nth, kind)
    schedules.finish(lan)
    assert not lan.moments, "the moment has never come"


@pytest.mark.parametrize("nth", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "kind"), some_short([name for name in MOMENTS if name not in ("forming", "hand-out")])
)
def test_any_host_may_die_at_any_moment_of_the_training(name: str, kind: str, nth: int) -> None:
    """One fault among five hosts, of which one has been lost before and comes back: the job is done all the same."""
    lan, faults = training(lost=(4,))
    lan.at(TRAINING_S, lambda: faults.at_moment(name, nth, kind))
    ends_well(lan)


def test_who_takes_over_as_it_stores_the_job_waits_for_its_disk() -> None:
    """The starter and who commits the hand-out's end first are cut off: the others' new view commits it, and trains."""
    lan, _ = job()

    def cut(host: Host, action: Action) -> bool:
        if isinstance(action, Committed) and action.round == 3:
            starters = frozenset({0, host.index, 1 if host.index == 0 else host.index})
            lan.cut([starters, frozenset(range(5)) - starters])
            lan.trouble(lan.now + 1.0)
            lan.at(lan.now + 1.0, lambda: lan.cut([]))
            return True
        return False

    lan.moments.append(cut)
    ends_well(lan)
    assert max(host.node.view.number for host in lan.hosts) > 1


def test_who_was_not_told_of_a_view_hears_of_it_though_its_lead_is_dead() -> None:
    """Of three hosts one comes back; the lead dies before the other has heard of it. The two of them go on."""
    lan, _ = training(hosts=3, lost=(2,))

    def cut(host: Host, action: Action) -> bool:
        if not isinstance(action, Installed) or action.view.number < 3:
            return False
        lan.cut([frozenset({0, 2}), frozenset({1})])
        lan.trouble(lan.now + 1.0)
        lan.at(lan.now + 0.01, lan.hosts[0].kill)
        lan.at(lan.now + 1.0, lambda: lan.cut([]))
        lan.at(lan.now + 1.0, lan.hosts[0].restart)
        return True

    lan.moments.append(cut)
    ends_well(lan)


@pytest.mark.parametrize(
    ("name", "kind"), some_short(["installed", "files", "state", "training", "committed"])
)
def test_who_learns_does_not_lead(name: str, kind: str) -> None:
    """Two hosts come back at once, and the lead is lost: neither of the two takes the other for one who can lead."""
    lan, faults = training(lost=(1, 2))
    lan.at(TRAINING_S + 0.5, lambda: faults.at_moment(name, 5, kind))
    ends_well(lan)


@pytest.mark.parametrize("host", range(5))
def test_who_was_tampered_with_is_struck_off_and_takes_the_state_again(host: int) -> None:
    lan, faults = job()
    faults.at_moment("closing", 20, "pause")  # something to recover from at the same time
    faults.at_time(0.8, "tamper", lan.hosts[host])
    assert schedules.finish(lan).what == "done"
    assert any("STRUCK" in line and f"h{host + 1} " in line for line in lan.trace)
    assert len({h.result for h in lan.hosts if h.result}) == 1


@pytest.mark.short("1-1.0", "4-3.0", "1-10.0")
@pytest.mark.parametrize("slowness", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("host", [1, 4])
def test_damage_is_found_while_one_host_lags(host: int, slowness: float) -> None:
    """Four of five make the quorum; the fifth applies each round after its own micro-batch, behind the others."""
    plan = Plan("job", batch=50, width=16, quorum=0.7, alarm_below=0.0)
    lan, _ = job(plan=plan, compute_s=0.02, rounds=60)
    lan.hosts[4].slowness = slowness
    lan.at(1.2, lan.hosts[host].tamper)
    assert lan.run(lambda: any(f"h{host + 1}  STRUCK" in line for line in lan.trace), limit_s=1.8)
    assert schedules.finish(lan).what == "done"
    assert len({h.result for h in lan.hosts if h.result}) == 1


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 4])
def test_who_differs_again_and_again_comes_back_less_and_less(number: int) -> None:
    """Each return stops the training of all for a while. Mended, the host is counted again, and its past forgotten."""
    lan, faults = job(rounds=800, compute_s=0.02)
    host = lan.hosts[number - 1]
    lan.at(1.0, lambda: setattr(host, "differs", True))
    returns: list[float] = []

    def back(_: Host, action: Action) -> bool:
        if isinstance(action, Installed) and number in action.view.live:
            before = not returns or lan.now > returns[-1] + 0.1  # at all hosts, about now
            returns.extend([lan.now] if before and lan.now > 1.0 else [])
        return False

    lan.moments.append(back)
    lan.run(lambda: lan.now > 12.0)
    gaps = [b - a for a, b in itertools.pairwise(returns)]
    assert len(gaps) == 3 and all(b > 1.5 * a for a, b in itertools.pairwise(gaps)), returns
    host.differs = False
    lan.run(lambda: len(returns) == 5)
    counted = lan.now + 1.0
    lan.at(counted, lambda: faults.kill(host))
    assert schedules.finish(lan).what == "done"
    assert len(returns) == 6 and returns[-1] < counted + 5.0, "no wait but for the restart"


@pytest.mark.long
def test_64_hosts_of_which_two_die() -> None:
    lan, faults = job(hosts=64, rounds=3, fragments=2, records=0)
    faults.at_moment("committed", 64 * 2 + 20, "kill")
    faults.at_moment("committed", 64 * 3 + 20, "lead kill")
    ends_well(lan)
    assert lan.hosts[5].node.view.number == 3


def test_a_tie_raises_the_alarm() -> None:
    lan, faults = job(hosts=2)
    faults.at_time(0.8, "tamper", lan.hosts[1])
    outcome = schedules.finish(lan)
    assert outcome.what == "stopped"
    assert "the members' weights differ, and no half agrees" in outcome.why


def test_too_few_members_raise_the_alarm() -> None:
    lan, faults = job(hosts=5, plan=Plan("job", batch=50, width=16, alarm_below=0.9))
    faults.at_time(0.8, "kill", lan.hosts[3])
    outcome = schedules.finish(lan)
    assert outcome.why == "h4 left: 4 of 5 members remain"


@pytest.mark.parametrize("admit", [True, False])
def test_a_new_host_is_admitted(admit: bool) -> None:
    """R20: hosts that come during training get a number and the state, and count; if the job's `admit` says so."""
    plan = Plan("job", batch=50, width=16, alarm_below=0.0, admit=admit)
    lan, _ = job(late=2, plan=plan, rounds=100, compute_s=0.05)
    for at, host in enumerate(lan.hosts[5:]):
        lan.at(1.0 + at, host.restart)
    assert schedules.finish(lan).what == "done"
    view = lan.hosts[0].node.view
    assert [view.number_of(host.mac) for host in lan.hosts[:5]] == [1, 2, 3, 4, 5]
    assert [view.number_of(host.mac) for host in lan.hosts[5:]] == ([6, 7] if admit else [0, 0])
    commits = lan.checks.commits.values()
    counted = [dict(what[0]) for what in commits if what[2] == wire.PhaseKind.TRAIN]
    assert len(counted) == 100
    for number in (6, 7) if admit else ():
        rounds = [at for at, samples in enumerate(counted) if samples.get(number)]
        assert len(rounds) > 30 and rounds[0] > 10, "from the middle of the training on"
    assert set().union(*counted) == set(range(1, 8 if admit else 6))
    assert all(sum(samples.values()) == 50 for samples in counted)
    took_part = lan.hosts if admit else lan.hosts[:5]
    assert {host.result for host in took_part} == {lan.hosts[0].result}
    assert all(host.result is None for host in lan.hosts if host not in took_part)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("what", ["kill_program", "leave"])
def test_of_two_hosts_one_departs_and_the_other_goes_on(what: str, number: int) -> None:
    """Its agent still votes: one and one are a majority of two, whichever it is that goes on."""
    lan, faults = job(hosts=2, rounds=120, compute_s=0.01)
    lan.at(1.2, lambda: getattr(faults, what)(lan.hosts[number - 1]))
    assert schedules.finish(lan).what == "done"
    assert lan.hosts[2 - number].result is not None
    if what == "kill_program":
        assert lan.hosts[0].result == lan.hosts[1].result
        assert lan.hosts[0].node.view.live == {1, 2}


@pytest.mark.short("1-kill_program", "3-kill", "1-new")
@pytest.mark.parametrize("what", ["kill_program", "kill", "new"])
@pytest.mark.parametrize("number", [1, 3])
def test_who_cannot_take_part_leaves_the_job_to_the_others(what: str, number: int) -> None:
    """Its training program ends with an error as soon as it is started: for all others nothing ends."""
    plan = Plan("job", batch=50, width=16, alarm_below=0.0, admit=True)
    lan, faults = job(late=1, plan=plan, rounds=100, compute_s=0.05)
    host = lan.hosts[5] if what == "new" else lan.hosts[number - 1]
    lan.at(1.5, lambda: setattr(host, "sick", True))
    if what == "new":
        lan.at(1.5, host.restart)
    else:
        lan.at(1.5, lambda: getattr(faults, what)(host))
    assert schedules.finish(lan).what == "done"
    said = [line for line in lan.trace if "DECLINES" in line]
    assert 1 <= len(said) <= 2, "again, if it had answered a call before: then it leaves"
    assert all("it ended with an error" in line for line in said)
    assert len({h.result for h in lan.hosts if h.result}) == 1
    assert host.result is None


def test_a_slow_round_is_not_a_silent_host() -> None:
    """Computing may take far longer than silence: the parked token goes round."""
    lan, _ = job(compute_s=8.0, rounds=2)
    assert schedules.finish(lan).what == "done"
    assert lan.hosts[0].node.view.number == 1


def test_a_lossy_lan_costs_nobody_its_membership() -> None:
    lan, _ = job(conditions=Conditions(loss=0.02, duplicate=0.02, late=0.02))
    assert schedules.finish(lan).what == "done"
    assert lan.hosts[0].node.view.live == frozenset(range(1, 6))


@pytest.mark.parametrize("hosts", [2, 5])
def test_nobody_is_left_out_where_answers_take_a_quarter_of_a_second(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the view waits for promises in proportion to `--silence`."""
    monkeypatch.setattr("tests.simulator.lan.HOP_S", 0.125)
    lan = Lan(hosts, rounds=12, fragments=2, timings=Timings(silence_s=3.0))
    lan.hosts[0].submit()
    lan.at(8.0, lan.hosts[hosts - 1].renew)
    assert schedules.finish(lan).what == "done"
    view = lan.hosts[0].node.view
    assert view.number == 2 and view.live == frozenset(range(1, hosts + 1))


def test_the_lead_decides_before_the_next_round_is_committed() -> None:
    """R14 with a quorum that one gradient fills: others run ahead, but never by a round that the lead may drop."""
    plan = Plan("job", batch=50, width=16, quorum=0.2, alarm_below=0.0)
    lan, _ = job(conditions=Conditions(loss=0.1), plan=plan)
    assert schedules.finish(lan).what == "done"
    assert lan.hosts[0].result is not None
    assert lan.hosts[0].result[0] == lan.rounds


def test_two_starters_at_once_make_one_network() -> None:
    """R3: the lower MAC address wins, the other joins it."""
    lan, _ = job(hosts=4)
    other = lan.hosts[2]
    lan.at(2e-5, other.submit)
    assert schedules.finish(lan).what == "done"
    assert {(h.node.view.number, h.node.view.live) for h in lan.hosts} == {
        (1, frozenset({1, 2, 3, 4}))
    }
    assert any("h3  FAILED" in line for line in lan.trace)
