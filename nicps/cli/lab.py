# SPDX-License-Identifier: Apache-2.0
"""`nicps lab`: a LAN of network namespaces on this machine.

`exec` ends with the exit code of its command (126: not executable, 127: not found), `run` with that
of `nicps submit`; the others with the codes of `nicps`.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from nicps.cli.submit import parse_settings
from nicps.errors import JobFailed, UsageProblem
from nicps.lab import (
    Lab,
    LabNotFound,
    LabSettings,
    down,
    format_rate,
    parse_loss,
    parse_rate,
    standing,
)
from nicps.lab.jobs import RunSettings, run_job
from nicps.lab.lab import require_root
from nicps.lab.processes import Running
from nicps.lab.shield import orderly

DEFAULT_NAME = "lab"


def add_parser(subparsers: Any) -> None:
    """Add `lab` and its sub-commands."""
    parser = subparsers.add_parser("lab", help="a LAN of namespaces on this machine")
    commands = parser.add_subparsers(dest="lab_command", metavar="COMMAND", required=True)

    command = _add(commands, "up", _up, "make hosts h1 to hN, joined by a switch")
    _add_shape(command, LabSettings())
    command.add_argument("--json", action="store_true", help="print the lab as JSON")

    command = _add(commands, "exec", _exec, "run a command on a host")
    command.add_argument("host", metavar="HOST", help="h1 to hN")
    command.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command")

    command = _add(commands, "status", _status, "show the labs that stand", None, "all")
    command.add_argument("--json", action="store_true", help="print JSON")

    command = _add(commands, "down", _down, "take a lab down, with all that runs in it")
    command.add_argument("--all", action="store_true", help="every lab on this machine")
    command.add_argument("--json", action="store_true", help="print JSON")

    text = "make a lab, run a job in it, take it down; ends with a JSON line"
    command = _add(commands, "run", _run, text, None, "a new one")
    _add_shape(command, LabSettings())
    command.add_argument("job", metavar="JOB_DIR", type=Path, help="the job's folder")
    command.add_argument("--data", metavar="PATH", type=Path, help="the job's data")
    command.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the job: quorum, seed, slow.hN, microbatch_seconds, ...",
    )
    command.add_argument(
        "--user", help="who trains (default: nobody, if that user can read what it needs)"
    )
    command.add_argument(
        "--runs", metavar="DIR", type=Path, default=Path("runs"), help="where results go"
    )
    command.add_argument(
        "--json", action="store_true", help="only the JSON line on stdout, no summary"
    )


def _add(
    commands: Any,
    name: str,
    run: Callable[..., int],
    text: str,
    lab: str | None = DEFAULT_NAME,
    otherwise: str = "",
) -> argparse.ArgumentParser:
    command = cast(argparse.ArgumentParser, commands.add_parser(name, help=text, description=text))
    command.set_defaults(func=_in_order(run))
    command.add_argument(
        "--lab", metavar="NAME", default=lab, help=f"the lab's name (default: {lab or otherwise})"
    )
    return command


def _add_shape(command: argparse.ArgumentParser, defaults: LabSettings) -> None:
    command.add_argument(
        "--hosts", metavar="N", type=int, default=defaults.hosts, help="default: %(default)s"
    )
    command.add_argument("--rate", help="1gbit, 100mbit ...: shape both ends of every cable")
    command.add_argument(
        "--mtu", metavar="M", type=int, default=defaults.mtu, help="default: %(default)s"
    )
    command.add_argument(
        "--loss", metavar="P", default="0", help="2%% or 0.02: each port, each direction"
    )


def _in_order(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def guarded(args: argparse.Namespace) -> int:
        with orderly():
            return run(args)

    return guarded


def _settings(args: argparse.Namespace, name: str) -> LabSettings:
    return LabSettings(
        name=name,
        hosts=args.hosts,
        rate_bps=parse_rate(args.rate) if args.rate is not None else None,
        mtu=args.mtu,
        loss=parse_loss(args.loss),
    )


def _up(args: argparse.Namespace) -> int:
    lab = Lab(_settings(args, args.lab))
    try:
        lab.up()
        described = json.dumps(_describe(lab))
    except BaseException:
        lab.close()
        raise
    if args.json:
        print(described)
        return 0
    _print_lab(lab)
    option = "" if lab.name == DEFAULT_NAME else f" --lab {lab.name}"
    print(f"run on a host: nicps lab exec{option} h1 -- ping -c1 {lab.hosts[-1].ip}")
    return 0


def _exec(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise UsageProblem("there is no command: nicps lab exec HOST -- CMD")
    return Lab.open(args.lab).become(args.host, argv)


def _status(args: argparse.Namespace) -> int:
    require_root()
    whole, half = [], []
    for name in standing() if args.lab is None else [args.lab]:
        try:
            whole.append(Lab.open(name))
        except LabNotFound:
            if args.lab is not None:
                raise
            half.append(name)
    if args.json:
        print(json.dumps({"labs": [_describe(lab) for lab in whole], "half_made": half}))
        return 0
    if not whole and not half:
        print("no lab stands; make one with `nicps lab up`")
    for lab in whole:
        _print_lab(lab)
    for name in half:
        print(f"lab {name} is half made: run `nicps lab down --lab {name}`")
    return 0


def _down(args: argparse.Namespace) -> int:
    require_root()
    report = {}
    for name in standing() if args.all else [args.lab]:
        there = name in standing()
        removed = down(name)
        report[name] = {
            "namespaces": list(removed.namespaces),
            "ended": [_process(process) for process in removed.ended],
            "left_running": [_process(process) for process in removed.strangers],
        }
        for process in removed.strangers:
            print(
                f"nicps: process {process.pid} ({process.command}) was in lab {name} but not "
                "started by it: it is left running, without a network",
                file=sys.stderr,
            )
        if not args.json:
            count = len(removed.ended)
            ended = f"{count} process{'' if count == 1 else 'es'} ended"
            print(f"lab {name} is down; {ended}" if there else f"no lab {name} stands")
    if args.json:
        print(json.dumps({"labs": report}))
    elif not report:
        print("no lab stands")
    return 0


def _run(args: argparse.Namespace) -> int:
    parse_settings(args.settings)  # refuse what cannot be read before anything is made
    name = args.lab or f"run-{secrets.token_hex(3)}"
    outcome = run_job(
        RunSettings(
            job=args.job,
            shape=_settings(args, name),
            data=args.data,
            settings=tuple(args.settings),
            user=args.user,
            runs=args.runs,
        )
    )
    result = outcome.result
    if result is not None:
        if not args.json:
            for line in _aligned([(key, str(value)) for key, value in result.items()]):
                print(line)
        print(json.dumps(result), flush=True)
        if outcome.exit_code == 0 and result.get("weights_identical") is False:
            raise JobFailed("the hosts' weights differ: see metrics.jsonl of each host")
    return outcome.exit_code


def _process(process: Running) -> dict[str, Any]:
    return {"pid": process.pid, "command": process.command}


def _describe(lab: Lab) -> dict[str, Any]:
    counters = lab.counters()
    processes = lab.processes()
    hosts = []
    for host in lab.hosts:
        port = counters[host.name]
        hosts.append(
            {
                **asdict(host),
                "up": host.read_link().up,
                "port": {
                    "xdp_mode": port.link.xdp_mode,
                    "from_host": {
                        "packets": port.link.rx_packets,
                        "bytes": port.link.rx_bytes,
                        **asdict(port.from_host),
                    },
                    "to_host": {
                        "packets": port.link.tx_packets,
                        "bytes": port.link.tx_bytes,
                        **asdict(port.to_host),
                    },
                },
                "processes": [_process(process) for process in processes[host.name]],
            }
        )
    return {**asdict(lab.settings), "switch_netns": lab.switch_netns, "hosts": hosts}


def _print_lab(lab: Lab) -> None:
    shape = lab.settings
    print(
        f"lab {lab.name}: {shape.hosts} hosts, {format_rate(shape.rate_bps)}, MTU {shape.mtu}, "
        f"loss {100 * shape.loss:.4g}%, namespaces {lab.hosts[0].netns} ..."
    )
    counters, processes = lab.counters(), lab.processes()
    rows = [("HOST", "IP", "MAC", "LINK", "SENT", "RECEIVED", "LOST", "PROCESSES")]
    for host in lab.hosts:
        port = counters[host.name]
        lost = f"{port.from_host.dropped}+{port.to_host.dropped}" if shape.loss else "-"
        commands = "; ".join(f"{p.pid} {p.command[:40]}" for p in processes[host.name])
        rows.append(
            (
                host.name,
                host.ip,
                host.mac,
                "up" if host.read_link().up else "down",
                str(port.link.rx_packets),
                str(port.link.tx_packets),
                lost,
                commands or "-",
            )
        )
    for line in _aligned(rows):
        print(line)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
