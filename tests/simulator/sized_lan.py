# SPDX-License-Identifier: Apache-2.0
"""A LAN of hosts whose programs are a group with channels: rounds have sizes of their own, and no step binds them."""

from __future__ import annotations

import math
import random

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Action, Committed, Send, Timings
from tests.simulator import channel_lan
from tests.simulator.channel_lan import ChannelLan
from tests.simulator.faults import Moment
from tests.simulator.host import Host
from tests.simulator.lan import Conditions
from tests.simulator.sized_calls import Calls
from tests.simulator.sized_checks import SizedChecks
from tests.simulator.sized_host import SizedHost


def beside_another(host: Host, action: Action) -> bool:
    """A round of a channel is committed at a host while contributions of another one are on their way."""
    others = getattr(host.node.rings.current, "_all", ())
    return isinstance(action, Committed) and any(
        of.channel != action.channel and of.exchange.under_way for of in others
    )


def is_replanned(host: Host, action: Action) -> bool:
    """A member is prepared for another plan: if the decision comes to nothing, it goes back to the phase in force."""
    if not isinstance(action, Send) or not isinstance(action.frame.body, wire.Ack):
        return False
    return bool(action.frame.body.prepared) and host.node.rings.current is not None


MOMENTS: dict[str, Moment] = {
    **{
        name: moment
        for name, moment in channel_lan.MOMENTS.items()
        if name != "between two commits"
    },
    "beside another": beside_another,
    "replanned": is_replanned,
}


class SizedLan(ChannelLan):
    """Attributes: `calls`, what the programs call; `rounds`, how many sections of calls that is.

    `struck`: until when a fault lasts that has come already.
    """

    checks: SizedChecks
    moments_of_faults = MOMENTS
    nths = 1, 3, 8, 20, 100, 300
    most_faults = 6

    def __init__(self, seed: int, rng: random.Random, hosts: int, conditions: Conditions) -> None:
        self.struck = -math.inf
        share = random.Random(f"share {seed}").choice((0.3, 0.9, 1.0))
        super().__init__(seed, rng, hosts, conditions, Timings(urgent_share=share))
        self.plan = Plan(
            "group", 1, 32, exchange=Exchange.STRIPES, alarm_below=0.0, feedback=False, group=True
        )
        self.calls = Calls(seed, self.rounds, hosts, 9 if conditions.loss else 40)
        self.checks = SizedChecks(self)

    @property
    def lasts_s(self) -> float:
        """About how long all of it takes."""
        return self.rounds * 0.3

    def trouble(self, until: float) -> None:
        """A fault lasts until then. Before all begins they are only laid out."""
        super().trouble(until)
        if self.now:
            self.struck = max(self.struck, until)

    def _host(self, index: int, rate: float) -> SizedHost:
        return SizedHost(self, index, rate)  # type: ignore[arg-type]


def lan_of(seed: int, hosts: int | None = None, faults: int | None = None) -> SizedLan:
    """The LAN of a seed, with its faults laid out, and the group begun.

    Args:
        faults: how many, at most; default: as many as the seed has.
    """
    rng = random.Random(f"sized {seed}")
    lan = channel_lan.laid_out(seed, hosts, rng, SizedLan, faults)
    assert isinstance(lan, SizedLan)
    return lan
