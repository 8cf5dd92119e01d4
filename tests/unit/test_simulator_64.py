# SPDX-License-Identifier: Apache-2.0
"""64 members, as many as a network has, in the exchanges in which all send at once.

`tests/unit/test_simulator.py:test_64_hosts_of_which_two_die` is the same with broadcast.
"""

from __future__ import annotations

import pytest

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from tests.simulator import schedules
from tests.simulator.drill import ends_well
from tests.simulator.faults import Faults
from tests.simulator.lan import Lan

pytestmark = [pytest.mark.unit, pytest.mark.long]

HOSTS = 64
ROUNDS = 3


def job(exchange: Exchange) -> tuple[Lan, Faults]:
    """A job of a few rounds, in which each member has a stripe of two fragments."""
    plan = Plan("job", batch=10 * HOSTS, width=8, alarm_below=0.0, exchange=exchange)
    lan = Lan(HOSTS, None, 7, plan, rounds=ROUNDS, fragments=2 * HOSTS)
    lan.records = 0
    lan.hosts[0].submit()
    lan.at(0.5, lambda: schedules.watch(lan, "", 0.0))
    return lan, Faults(lan, lan.random)


@pytest.mark.parametrize(
    "exchange", [Exchange.STRIPES, Exchange.LINUX_SWITCH], ids=["stripes", "linux-switch"]
)
def test_without_faults_all_64_count_in_every_round(exchange: Exchange) -> None:
    lan, _ = job(exchange)
    assert schedules.finish(lan).what == "done"
    assert lan.hosts[0].node.view.number == 1
    sums = lan.checks.sums
    assert len(sums.made) == ROUNDS and sums.balance()
    assert len(sums.central) == (ROUNDS if exchange.central else 0)


@pytest.mark.parametrize(
    "exchange", [Exchange.STRIPES, Exchange.LINUX_SWITCH], ids=["stripes", "linux-switch"]
)
def test_64_hosts_of_which_two_die(exchange: Exchange) -> None:
    """A member dies as it commits a round, then the lead. The others train on, and share its stripe."""
    lan, faults = job(exchange)
    faults.at_moment("committed", HOSTS * 2 + 20, "kill")
    faults.at_moment("committed", HOSTS * 3 + 20, "lead kill")
    ends_well(lan)
    assert lan.hosts[5].node.view.number == 3
    assert len(lan.checks.sums.made) == ROUNDS
