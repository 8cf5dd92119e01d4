# SPDX-License-Identifier: Apache-2.0
"""`nicps join`: take part in the network on an interface, until stopped."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
from pathlib import Path
from typing import Any

from nicps import startup, wire
from nicps.errors import UsageProblem
from nicps.exchange import Exchange
from nicps.protocol.phase import Timings
from nicps.rates import MOST_RATE_BPS, parse_rate
from nicps.session.channel import DEFAULT_SOCKET
from nicps.shutdown import noted_interrupts

LEAST_SHAPE_BPS = 1_000_000
_BRIDGES = bytes.fromhex("0180c20000")  # 802.1D: switches never forward 01:80:c2:00:00:0x

DESCRIPTION = """\
Load the XDP program on an interface and take part in the network until SIGINT, SIGTERM or `nicps leave`.
Whoever submits a job on its own host starts the network with it; the others answer, train, and stand by for
the next job. Needs root; the capabilities in packaging/nicps@.service are enough."""


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps join`."""
    parser = subparsers.add_parser(
        "join", help="be in the network on an interface, until stopped", description=DESCRIPTION
    )
    parser.add_argument("--iface", required=True, metavar="IF", help="the LAN's interface")
    parser.add_argument("--network", default="nicps", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--name", metavar="NAME", help="this host's name (default: its host name)")
    parser.add_argument(
        "--socket",
        default=DEFAULT_SOCKET,
        metavar="ADDRESS",
        help="where commands find the agent: a path, or @NAME, which is private to this network"
        " namespace (%(default)s)",
    )
    parser.add_argument(
        "--user", default="nobody", help="the user that training code runs as (%(default)s)"
    )
    parser.add_argument(
        "--group",
        default="",
        metavar="NAME",
        help="a group whose members may give commands at the socket (default: only root and the agent's own user)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("/var/lib/nicps/runs"),
        metavar="DIR",
        help="where jobs leave their results (%(default)s)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/var/tmp"),
        metavar="DIR",
        help="where a job's model and data lie while it runs (%(default)s)",
    )
    parser.add_argument(
        "--trainer",
        metavar="COMMAND",
        help="the training program, in place of the PyTorch one; it speaks to the agent's socket (NICPS_SOCKET)",
    )
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the network's key (`nicps key new` makes one): only hosts that hold it are heard",
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=Timings().silence_s,
        metavar="SECONDS",
        help="how long a member may say nothing before the others go on without it; they wait longer where"
        " answers are slow (%(default)s)",
    )
    parser.add_argument(
        "--go-on-alone",
        action="store_true",
        help="of two hosts either may go on when the other is gone; cut apart, both do, and one's work is lost",
    )
    parser.add_argument(
        "--alarm-hook",
        default="",
        metavar="COMMAND",
        help="run by the shell, as the agent's user, when too few members are left, or no majority, and the job was"
        " saved or could not be; $1 is the reason",
    )
    parser.add_argument(
        "--multicast",
        nargs="?",
        const=wire.mac_text(wire.GROUP),
        metavar="GROUP",
        help="send to this multicast MAC address instead of broadcasting, which some switches throttle;"
        " the same on all hosts (without GROUP: %(const)s)",
    )
    parser.add_argument(
        "--mode",
        choices=("ring", "switch"),
        default="ring",
        help="who adds the gradients up: the hosts, or the network's P4 switch (docs/switch.md) (%(default)s)",
    )
    parser.add_argument(
        "--trust-switch",
        action="store_true",
        help="believe the sums of a Linux switch that adds (`nicps switch xdp run`), in a network without a key; with"
        " --mode switch and a key: those of the P4 switch, which nothing authenticates",
    )
    parser.add_argument(
        "--switch-key",
        type=Path,
        metavar="FILE",
        help="in a network with a key: believe the Linux switch that holds this key (`nicps key new FILE` makes one; it"
        " is not the network's)",
    )
    parser.add_argument(
        "--metrics",
        default="",
        metavar="[HOST]:PORT",
        help="serve metrics for Prometheus there, to whoever can connect; without HOST on this host only"
        " (docs/monitoring.md)",
    )
    parser.add_argument(
        "--shape",
        metavar="RATE",
        help="send urgent frames before others, at this rate for all programs of this host together: a little less than"
        " the line's, as 950mbit (docs/own-network.md); taken away at the end",
    )
    parser.add_argument(
        "--tags",
        action="store_true",
        help="send frames with an 802.1p tag, whose priority switches may heed; hosts take frames with and without one."
        " Some switches drop frames with a tag: `nicps doctor --network` tells (docs/own-network.md)",
    )
    parser.add_argument(
        "--urgent-share",
        type=float,
        default=Timings().urgent_share,
        metavar="SHARE",
        help="in a group with channels: the part of the time that this host's urgent rounds may take while less urgent"
        " ones are under way, above 0 and at most 1 (%(default)s)",
    )
    parser.set_defaults(func=run)


def group_address(text: str) -> bytes:
    """The six bytes of a multicast MAC address.

    Raises:
        UsageProblem: the address is not valid, or is one that bridges keep for themselves.
    """
    digits = re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", text.lower())
    address = bytes.fromhex(text.replace(":", "")) if digits else bytes(6)
    if not address[0] & 1 or address == wire.BROADCAST or address[:5] == _BRIDGES:
        raise UsageProblem(
            f"--multicast takes a multicast MAC address that switches forward, such as"
            f" {wire.mac_text(wire.GROUP)}, not {text!r}"
        )
    return address


def urgent_share(value: float) -> float:
    """A part of the time.

    Raises:
        UsageProblem: it is none.
    """
    if not 0 < value <= 1:
        raise UsageProblem(f"--urgent-share is above 0 and at most 1, not {value:g}")
    return value


def shape_rate(text: str | None) -> int | None:
    """The rate that `--shape` names, in bit/s; None without it.

    Raises:
        UsageProblem: it is no rate, or none that the kernel shapes to.
    """
    if text is None:
        return None
    rate_bps = parse_rate(text)
    if not LEAST_SHAPE_BPS <= rate_bps <= MOST_RATE_BPS:
        raise UsageProblem(f"--shape takes 1mbit to 34gbit, not {text}")
    return rate_bps


def run(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    with noted_interrupts() as interrupts:
        return _serve(args, interrupts)


def _serve(args: argparse.Namespace, interrupts: list[int]) -> int:
    # The agent needs no threads of NumPy. Its child processes get an environment of their own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with startup.permanent():
        from nicps.agent import Agent, AgentSettings

    if not 0.05 <= args.silence <= 60:
        raise UsageProblem(f"--silence takes 0.05 to 60 seconds, not {args.silence:g}")

    settings = AgentSettings(
        iface=args.iface,
        network=args.network,
        socket=args.socket,
        user=args.user,
        group=args.group,
        runs=args.runs.absolute(),
        work=args.work.absolute(),
        trainer=tuple(shlex.split(args.trainer or "")),
        key=args.key,
        switch_key=args.switch_key,
        alarm_hook=args.alarm_hook,
        destination=group_address(args.multicast) if args.multicast else wire.BROADCAST,
        exchange=Exchange.SWITCH if args.mode == "switch" else Exchange.BROADCAST,
        trust_switch=args.trust_switch,
        metrics=args.metrics,
        shape_bps=shape_rate(args.shape),
        tagged=args.tags,
        timings=Timings(
            silence_s=args.silence,
            silence_most_s=max(args.silence, Timings().silence_most_s),
            alone=args.go_on_alone,
            urgent_share=urgent_share(args.urgent_share),
        ),
        **({"name": args.name} if args.name else {}),
    )
    with contextlib.ExitStack() as stack:
        with startup.permanent():
            agent = stack.enter_context(Agent(settings))
        agent.children.adopt()
        agent.announce()
        if interrupts:
            raise KeyboardInterrupt
        agent.run()
    return 0
