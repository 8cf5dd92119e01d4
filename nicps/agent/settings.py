# SPDX-License-Identifier: Apache-2.0
"""The settings of `nicps join`."""

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
    its results. `key` is the network's key file; None: every host on the LAN is trusted. `switch_key` is that of a
    Linux switch whose sums are believed; in a network without a key `trust_switch` is enough. `alarm_hook` is a shell
    command for when a job has been given up, or no majority is left, with the reason as $1 (R18, R22). Frames go to
    `destination`: to all, or to a multicast group. `exchange` is that of the jobs that this host leads,
    and the one whose sums it believes; of a P4 switch, in a network with a key, only with `trust_switch`. `metrics` is
    where Prometheus finds the agent's metrics, HOST:PORT; empty: nowhere. With `shape_bps` this
    host's frames leave in order of urgency, at that rate. `tagged`: they have an 802.1p tag.

    Raises:
        UsageProblem: a switch is to add where hosts have a key, and is not trusted explicitly; or a setting for a Linux
            switch does not fit the network.
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
    switch_key: Path | None = None
    alarm_hook: str = ""
    ethertype: int = ETHERTYPE
    destination: bytes = BROADCAST
    exchange: Exchange = Exchange.BROADCAST
    trust_switch: bool = False
    timings: Timings = field(default_factory=Timings)
    metrics: str = ""
    shape_bps: int | None = None
    tagged: bool = False

    def __post_init__(self) -> None:
        if self.exchange.needs_trust and self.key is not None and not self.trust_switch:
            raise UsageProblem(
                "a switch has no key, so nothing shows that its sums are right: add --trust-switch, or leave"
                " --mode switch out"
            )
        if self.tagged and (self.trust_switch or self.switch_key or self.exchange.needs_trust):
            raise UsageProblem(
                "a switch that adds takes no frames with a tag: leave --tags out, or do not let the switch add"
            )
        if self.switch_key is not None and self.key is None:
            raise UsageProblem(
                "--switch-key is for a network with a key (--key): in one without, give --trust-switch"
            )
        trusts_linux = self.trust_switch and not self.exchange.needs_trust
        if trusts_linux and self.switch_key is not None:
            raise UsageProblem(
                "--switch-key says already that the switch is believed: leave --trust-switch out"
            )
        if trusts_linux and self.key is not None:
            raise UsageProblem(
                "in a network with a key a Linux switch must have one, too: give --switch-key FILE in place of"
                " --trust-switch (or, for a P4 switch, add --mode switch)"
            )

    @property
    def believes_switch(self) -> bool:
        """Whether this host believes the sums of a Linux switch."""
        return self.switch_key is not None or (self.trust_switch and not self.exchange.needs_trust)
