# SPDX-License-Identifier: Apache-2.0
"""`nicps status`: show the network, its members and the job."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import orjson

from nicps.cli.arguments import add_socket
from nicps.cli.submit import progress_line
from nicps.cli.topframe import STATES, slow_hosts
from nicps.session.commands import ask, connect
from nicps.session.fields import values
from nicps.session.messages import AskStatus, Status


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps status`."""
    parser = subparsers.add_parser("status", help="show the network, its members and the job")
    add_socket(parser)
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object (a line each with --watch)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the state once, or every second."""
    with connect(args.socket) as channel:
        while True:
            status = ask(channel, AskStatus(), Status)
            if args.json:
                sys.stdout.write(orjson.dumps(values(status)).decode() + "\n")
            else:
                if args.watch and sys.stdout.isatty():
                    sys.stdout.write("\x1b[H\x1b[J")
                sys.stdout.write(text(status))
            sys.stdout.flush()
            if not args.watch:
                return 0
            time.sleep(1.0)


def text(status: Status) -> str:
    """Aligned for users."""
    lines = [
        f"network    {status.network}",
        f"interface  {status.iface} (XDP {status.xdp_mode})",
        f"key        {'yes' if status.keyed else 'no: every host on this LAN is trusted'}",
        f"state      {status.state}{' · ' + status.phase if status.phase else ''}",
        f"view       {status.view}",
        f"open round {status.round}",
    ]
    if status.trouble:
        lines.append(f"trouble    {status.trouble}")
    if status.warning:
        lines.append(f"warning    {status.warning}")
    if status.switch:
        lines.append(f"switch     {status.switch}")
    if status.activity is not None and status.activity.preparing:
        lines.append(f"preparing  {status.activity.preparing}")
    if status.job:
        lines.append(f"job        {status.job}")
        if (doing := status.activity) is not None and doing.exchange and doing.lane:
            lines.append(f"exchange   {doing.exchange}, lanes {doing.lane}")
        if status.progress:
            lines.append(f"progress   training {progress_line(status.progress)}")
        if slow := slow_hosts(status):
            lines.append(f"slow       {slow}")
    if status.other_job:
        lines.append(
            f"other job  {status.other_job}: without this host, which takes part in the next"
        )
    last = status.last_job
    if last and not status.job:
        result = last.result
        done = f"{result['lead']} has its result" if "lead" in result else None
        accuracy = result.get("test_accuracy")
        tested = f"test accuracy {accuracy}" if accuracy is not None else "done"
        outcome = last.error or done or tested
        lines.append(f"last job   {last.job_id or 'was refused'}: {outcome}")
    if status.members:
        width = max(len(m.name) for m in status.members)
        lines.append("")
        lines.append(f"{'no':>3}  {'name':<{max(width, 4)}}  {'mac':<17}  state")
        for m in status.members:
            leads = status.state == "member" and m.number == status.lead
            marks = ["this host"] * m.is_self + ["lead"] * leads + [m.role] * bool(m.role)
            state = STATES.get(m.state, m.state)
            mark = f"  ({', '.join(marks)})" if marks else ""
            lines.append(f"{m.number:>3}  {m.name:<{max(width, 4)}}  {m.mac}  {state}{mark}")
    return "\n".join(lines) + "\n"
