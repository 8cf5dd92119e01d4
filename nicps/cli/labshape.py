# SPDX-License-Identifier: Apache-2.0
"""The options of `nicps lab up` and `nicps lab run` that say what the lab is like."""

from __future__ import annotations

import argparse

from nicps import wire
from nicps.errors import UsageProblem
from nicps.lab import LabSettings, parse_loss
from nicps.lab.settings import SWITCHES
from nicps.rates import parse_rate, parse_size


def add_shape(command: argparse.ArgumentParser, defaults: LabSettings) -> None:
    """The options for hosts and cables."""
    command.add_argument(
        "--hosts", metavar="N", type=int, default=defaults.hosts, help="default: %(default)s"
    )
    command.add_argument("--rate", help="1gbit, 100mbit ...: shape both ends of every cable")
    command.add_argument(
        "--priorities",
        action="store_true",
        help="with --rate: ports send frames of a higher 802.1p priority first (`nicps join --tags`); hosts are not"
        " shaped (`nicps join --shape`)",
    )
    command.add_argument(
        "--queue",
        metavar="SIZE",
        help="with --rate: bytes that can wait in a port of the switch, 64K ...; what comes beyond that is lost (4M)",
    )
    command.add_argument(
        "--mtu",
        metavar="M",
        type=int,
        default=defaults.mtu,
        help=f"agents need {wire.LEAST_MTU} (default: %(default)s)",
    )
    command.add_argument(
        "--loss", metavar="P", default="0", help="2%% or 0.02: each port, each direction"
    )


def add_switch(command: argparse.ArgumentParser) -> None:
    """The options for the switch."""
    command.add_argument(
        "--switch",
        choices=SWITCHES,
        default="bridge",
        help="xdp: `nicps switch xdp run` on the switch's ports, which adds; the cables' middle is shaped"
        " (default: %(default)s)",
    )
    command.add_argument(
        "--memory", metavar="SIZE", help="with --switch xdp: the most that it may take for sums"
    )
    command.add_argument(
        "--key",
        action="store_true",
        help="with --switch xdp: fresh keys, one of the network and one of the switch",
    )


def settings_of(args: argparse.Namespace, name: str) -> LabSettings:
    """The lab of that name that the options describe."""
    return LabSettings(
        name=name,
        hosts=args.hosts,
        rate_bps=parse_rate(args.rate) if args.rate is not None else None,
        mtu=args.mtu,
        loss=parse_loss(args.loss),
        switch=args.switch,
        priorities=args.priorities,
        queue_bytes=LabSettings.queue_bytes if args.queue is None else parse_size(args.queue),
    )


def switch_arguments(args: argparse.Namespace) -> tuple[str, ...]:
    """Further arguments of `nicps switch xdp run`, except its key."""
    if args.switch == "bridge" and (args.memory is not None or args.key):
        option = "--key" if args.key else "--memory"
        raise UsageProblem(f"{option} needs --switch xdp")
    if args.memory is None:
        return ()
    parse_size(args.memory)
    return ("--memory", args.memory)
