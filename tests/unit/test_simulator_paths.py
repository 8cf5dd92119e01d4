# SPDX-License-Identifier: Apache-2.0
"""Paths between hosts that are broken in one direction, or between two hosts only; and two networks on one LAN."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from tests.simulator.drill import job
from tests.simulator.host import Host
from tests.simulator.lan import Lan

pytestmark = pytest.mark.unit

BROKEN_S = 1.0  # when the path breaks, in the middle of training


def _job(hosts: int, exchange: Exchange = Exchange.BROADCAST, **settings: object) -> Lan:
    plan = Plan("job", batch=10 * hosts, width=16, alarm_below=0.0, exchange=exchange)
    about = {"rounds": 25, "compute_s": 0.02, "test_every": 1000, **settings}
    lan, _ = job(hosts=hosts, plan=plan, **about)
    lan.trouble(BROKEN_S)
    return lan


def _break(lan: Lan, sender: int, receiver: int) -> None:
    """Frames of one host do not reach one other host, by their indices."""
    host, mac = lan.hosts[receiver], lan.hosts[sender].mac
    take = host.take_frame

    def take_frame(source: bytes, data: bytes, key: bytes | None) -> None:
        if source != mac:
            take(source, data, key)

    host.take_frame = take_frame  # type: ignore[method-assign]
    lan.starved.add((sender, receiver))


def _live(host: Host) -> set[int]:
    return set(host.node.view.live)


@pytest.mark.parametrize(("hosts", "deaf"), [(2, 1), (3, 2)])
def test_a_host_that_hears_nothing_and_is_heard(hosts: int, deaf: int) -> None:
    """It proposes a view again and again, and never hears that the others promise: they take over."""
    lan = _job(hosts)

    def deafen() -> None:
        for other in range(hosts):
            _break(lan, other, deaf)

    lan.at(BROKEN_S, deafen)
    lan.run(lambda: bool(lan.ended), BROKEN_S + 20)
    assert lan.well
    others = [host for host in lan.hosts if host is not lan.hosts[deaf]]
    assert all(_live(host) == {*range(1, hosts + 1)} - {deaf + 1} for host in others)


@pytest.mark.parametrize(
    ("hosts", "paths", "exchange"),
    [
        (4, [(1, 2)], Exchange.BROADCAST),
        (4, [(1, 2), (2, 1)], Exchange.STRIPES),
        pytest.param(4, [(0, 2), (2, 0)], Exchange.BROADCAST, marks=pytest.mark.long),
    ],
    ids=["to the next of the ring", "between neighbours", "not on the token's way"],
)
def test_a_path_between_two_hosts(
    hosts: int, paths: list[tuple[int, int]], exchange: Exchange
) -> None:
    """All others hear both: a suspect answers each proposal, and yet no round is committed, so it must go.

    Off the token's way each of the two accuses the other, and the one to propose so is one of them.
    """
    lan = _job(hosts, exchange)
    lan.at(BROKEN_S, lambda: [_break(lan, *path) for path in paths])
    lan.run(lambda: bool(lan.ended), BROKEN_S + 40)
    assert lan.well
    gone = {k for host in lan.hosts for k in {*range(1, hosts + 1)} - _live(host)}
    assert gone <= {paths[0][0] + 1, paths[0][1] + 1}


@pytest.mark.parametrize("admits", ["the first", "the second"])
def test_a_job_of_its_own_takes_nobody_from_another_one(admits: str) -> None:
    """A host that comes late submits a job. Its first view has the number of the others', or a smaller one."""
    plan = Plan("job", batch=30, width=16, alarm_below=0.0, admit=admits == "the first")
    lan, _ = job(hosts=3, late=1, plan=plan, rounds=200, compute_s=0.02, test_every=1000)
    lan.checks.fail = lambda what: None  # type: ignore[method-assign]  # they are of one network
    late = lan.hosts[3]

    def begin() -> None:
        late.restart()
        lan.plan = replace(plan, admit=admits == "the second")
        late.submit()

    if admits == "the first":
        lan.at(BROKEN_S - 0.05, lan.hosts[0].renew)
    lan.at(BROKEN_S, begin)
    lan.trouble(30.0)
    lan.run(lambda: False, 3.5)
    assert all(host.part is not None for host in lan.hosts)
    assert [host.part.id for host in lan.hosts if host.part] == ["job1"] * 3 + ["job2"]
    assert [_live(host) for host in lan.hosts] == [{1, 2, 3}] * 3 + [{1}]
