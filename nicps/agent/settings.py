# SPDX-License-Identifier: Apache-2.0
"""What `nicps join` was told."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from nicps.errors import UsageProblem
from nicps.exchange import Exchange
from nicps.protocol import Timings
from nicps.session.channel import DEFAULT_SOCKET
from nicps.wire import BROADCAST, ETHERTYPE


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one agent.

    `trainer` is the command that trains, in place of `python -m trainer run --workdir DIR`; it finds the agent through
    NICPS_SOCKET. Members of `group` may give commands at the socket. `work` holds a job's files while it runs, `runs`
    what it leaves. `key` is the network's key file; None: every host on the LAN is trusted. `alarm_hook` is a shell
    command for when a job has been given up, or no majority is left, with the reason as $1 (R18, R22). Frames go to
    `destination`: to all, or to a multicast group. `exchange` is that of the jobs that this host leads,
    and the one whose sums it believes; of a switch, in a network with a key, only with `trust_switch`.

    Raises:
        UsageProblem: a switch is to add where hosts have a key, and nobody has said that it is trusted; or somebody
            has, and none is to add.
    """

    iface: str
    network: str = "nicps"
    name: str = field(default_factory=lambda: socket.gethostname().split(".")[0])
    socket: str = DEFAULT_SOCKET
    user: str = "nobody"
    group: str = ""
    runs: Path = Path("/var/lib/nicps/runs")
    work: Path = Path("/var/tmp")
    trainer: tuple[str, ...] = ()
    key: Path | None = None
    alarm_hook: str = ""
    ethertype: int = ETHERTYPE
    destination: bytes = BROADCAST
    exchange: Exchange = Exchange.BROADCAST
    trust_switch: bool = False
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        if self.exchange.needs_trust and self.key is not None and not self.trust_switch:
            raise UsageProblem(
                "a switch has no key, so nothing shows that its sums are right: add --trust-switch, or leave"
                " --mode switch out"
            )
        if self.trust_switch and not self.exchange.needs_trust:
            raise UsageProblem("no switch is to add here: give --trust-switch with --mode switch")

    def believes(self, exchange: Exchange) -> bool:
        """Whether this host takes part in it: its user has said so where others' sums must be believed."""
        return not exchange.needs_trust or self.exchange.needs_trust
