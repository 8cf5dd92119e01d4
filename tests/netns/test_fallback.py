# SPDX-License-Identifier: Apache-2.0
"""A job that names no exchange, on a LAN that cannot do stripes: every host adds for itself, and none is evicted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from nicps.lab import Lab
from nicps.lab.links import index_of, port_name, with_netlink
from nicps.lab.namespaces import switch_name
from nicps.session.events import Warned
from nicps.wire import FrameType
from tests import reference
from tests.netns.labs import ROOT
from tests.netns.members import LIGHT, Network, tiny_job
from tests.netns.scenes import Drill, Stage

HOSTS = 3
REFUSED = [sys.executable, str(ROOT / "tests" / "netns" / "refused_stripes.py")]
#: No host is taken for silent, however busy the machine is: without h3 the others would train in stripes.
PATIENT = ("--silence", "20")


def none_evicted(network: Network) -> None:
    """All hosts have been in all views."""
    logs = {host: network.log(host) for host in network.names}
    assert not any("not in it: " in log or "standing by: " in log for log in logs.values()), logs


def lose_sums(lab: Lab) -> None:
    """Like a driver without XDP_TX: no sum leaves its aggregator."""
    lab.lose_next("all", FrameType.SUM, 1 << 30)


def lose_unicast(lab: Lab) -> None:
    """The bridge forgets the addresses, learns none, and floods no frame to one host."""

    def work(ipr: Any) -> None:
        for number in range(1, HOSTS + 1):
            index = index_of(ipr, port_name(number))
            ipr.brport("set", index=index, learning=0, unicast_flood=0, flush=1)

    with_netlink(switch_name(lab.name), work)


@pytest.mark.short("lose_unicast")
@pytest.mark.parametrize("lose", [lose_sums, lose_unicast])
def test_a_network_that_cannot_do_stripes(lose: Callable[[Lab], None]) -> None:
    with Network(HOSTS, program=LIGHT) as network:
        network.up()
        lose(network.lab)
        run = network.train(tiny_job(network.folder), save_gradients=True, exchange="auto")
        assert run.result["weights_identical"] is True
        said = [event.message for event in run.events if isinstance(event, Warned)]
        assert any("the sums of stripes do not come: every host adds for itself" in s for s in said)
        none_evicted(network)
        assert reference.check(16, run.gradients()) == 3 * HOSTS


@pytest.mark.short("h3")
@pytest.mark.parametrize("refusing", ["h1", "h3"])
def test_a_kernel_that_refuses_the_program_of_stripes(refusing: str) -> None:
    """The lead's, or another host's; it is reported once."""
    with Network(HOSTS, program=LIGHT, arguments=PATIENT) as network:
        network.lab.up()
        for host in network.names:
            network.join(host, wrap=REFUSED if host == refusing else ())
        for host in network.names:
            network.answered(host)
        run = network.train(tiny_job(network.folder), save_gradients=True, exchange="auto")
        assert run.result["weights_identical"] is True
        said = [event.message for event in run.events if isinstance(event, Warned)]
        (text,) = [s for s in said if "every host adds for itself" in s]
        assert text.startswith(f"{refusing}: the kernel refuses nicps_stripes of nicps.c: "), text
        none_evicted(network)
        assert reference.check(16, run.gradients()) == 3 * HOSTS


@pytest.mark.long
def test_what_rounding_has_left_over_goes_on_in_the_next_exchange() -> None:
    """Two hosts train in stripes. Then one is admitted whose kernel refuses the program: every host adds for itself."""
    with Drill(Stage(3, away={"h3"}), settings={"admit": True, "exchange": "auto"}) as drill:
        stage = drill.stage
        drill.begin()
        stage.away.clear()
        stage.join("h3", wrap=REFUSED)
        drill.all_train()
        drill.end()
        assert drill.made["stripes"] >= 6 and drill.made["broadcast"] >= 9, drill.made
