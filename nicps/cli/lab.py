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
from itertools import chain
from pathlib import Path
from typing import Any, cast

from nicps import wire
from nicps.cli.arguments import add_data
from nicps.cli.labshape import add_shape, add_switch, settings_of, switch_arguments
from nicps.cli.submit import label_of, parse_settings, readable
from nicps.errors import JobFailed, UsageProblem
from nicps.lab import (
    Lab,
    LabNotFound,
    LabProblem,
    LabSettings,
    adding,
    down,
    parse_delay,
    parse_probability,
    standing,
    state,
    the_only,
)
from nicps.lab.adding import Keys
from nicps.lab.jobs import RunSettings, run_job
from nicps.lab.shield import orderly
from nicps.lab.show import describe, describe_process, faults_text, headline, rows
from nicps.lab.teardown import require_root
from nicps.usage import OneLineParser

DEFAULT_NAME = "lab"

#: Option, the word for an invalid value, and the effect on a frame.
FAULTS = (
    ("loss", "loss", "lost"),
    ("duplicate", "duplication", "arrives twice"),
    ("corrupt", "corruption", "arrives with another byte in it"),
    ("reorder", "reordering", "held back for up to 5 ms"),
)
FRAME_TYPES = tuple(kind.name.lower() for kind in wire.FrameType)
SIGNALS = {"pause": "paused", "resume": "resumed", "kill": "killed"}


def add_parser(subparsers: Any) -> None:
    """Add `lab` and its sub-commands."""
    parser = subparsers.add_parser("lab", help="a LAN of namespaces on this machine")
    commands = parser.add_subparsers(dest="lab_command", metavar="COMMAND", required=True)

    text = "make hosts h1 to hN, joined by a switch"
    command = _add(commands, "up", _up, text, DEFAULT_NAME)
    add_shape(command, LabSettings())
    add_switch(command)
    command.add_argument("--json", action="store_true", help="print the lab as JSON")

    command = _add(commands, "exec", _exec, "run a command on a host")
    command.add_argument("host", metavar="HOST", help="h1 to hN, or a switch that adds")
    command.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command")

    command = _add(commands, "status", _status, "show the labs that stand", otherwise="all")
    command.add_argument("--json", action="store_true", help="print JSON")

    command = _add(commands, "fault", _fault, "let switch ports lose, spoil or delay frames")
    _add_hosts(command)
    for name, _, text in FAULTS:
        command.add_argument(f"--{name}", metavar="P", help=f"2%% or 0.02: {text}")
    command.add_argument("--delay", metavar="MS", help="milliseconds that each frame waits")
    command.add_argument("--clear", action="store_true", help="take all of these off")

    text = "lose the next frames of a type that hosts send"
    command = _add(commands, "lose-next", _lose_next, text)
    _add_hosts(command)
    command.add_argument("type", metavar="TYPE", choices=FRAME_TYPES, help=", ".join(FRAME_TYPES))
    command.add_argument("count", metavar="COUNT", type=int, help="how many")

    text = "cut hosts from all others, but not from one another"
    _add_hosts(_add(commands, "cut", _cut, text))
    _add(commands, "heal", _heal, "undo all cuts")

    command = _add(commands, "link", _link, "take hosts' interfaces down, or pull their cables")
    _add_hosts(command)
    command.add_argument("state", choices=("up", "down", "unplugged"), help="unplugged: no carrier")

    for name, text in (
        ("pause", "stop hosts' agents and what these have started (SIGSTOP)"),
        ("resume", "let them go on (SIGCONT)"),
        ("kill", "kill them (SIGKILL)"),
    ):
        command = _add(commands, name, _signal, text)
        _add_hosts(command)
        parts = command.add_mutually_exclusive_group()
        for part, what in (("agent", "the agents"), ("trainer", "what agents have started")):
            parts.add_argument(
                f"--{part}",
                dest="part",
                action="store_const",
                const=part,
                default="both",
                help=f"only {what}",
            )

    command = _add(commands, "start", _start, "start a switch that adds again, as it was started")
    command.add_argument("what", metavar="switch", choices=("switch",), help="the switch")

    command = _add(commands, "down", _down, "take a lab down, with all that runs in it")
    command.add_argument("--all", action="store_true", help="every lab on this machine")
    command.add_argument("--json", action="store_true", help="print JSON")

    text = "make a lab, run a job in it, take it down; ends with a JSON line"
    command = _add(commands, "run", _run, text, otherwise="a new one")
    add_shape(command, LabSettings())
    add_switch(command)
    command.add_argument(
        "job",
        metavar="JOB_DIR",
        nargs="*",
        help="the job's folder; with --script, after --, the script's arguments",
    )
    command.add_argument(
        "--script",
        metavar="FILE",
        type=Path,
        help="no job, but a script on every host (`nicps run`)",
    )
    add_data(command, "job or script")
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
    command.beside_unknown = ("a script's arguments go after --", "--script")


def _add(
    commands: Any,
    name: str,
    run: Callable[..., int],
    text: str,
    lab: str | None = None,
    otherwise: str = "the only one that stands",
) -> OneLineParser:
    command = cast(OneLineParser, commands.add_parser(name, help=text, description=text))
    command.set_defaults(func=_in_order(run))
    command.add_argument(
        "--lab", metavar="NAME", default=lab, help=f"the lab's name (default: {lab or otherwise})"
    )
    return command


def _add_hosts(command: argparse.ArgumentParser) -> None:
    command.add_argument("hosts", metavar="HOST", help="h1, several with commas, or all")


def _in_order(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def guarded(args: argparse.Namespace) -> int:
        with orderly():
            return run(args)

    return guarded


def _up(args: argparse.Namespace) -> int:
    arguments = switch_arguments(args)
    settings = settings_of(args, args.lab)
    lab = Lab(settings, _keys_folder(args.lab) if args.key else None)
    try:
        lab.up()
        keys = None
        if args.key:
            folder = _keys_folder(args.lab)
            folder.mkdir(mode=0o700)
            keys = Keys.make(folder)
        if settings.adds:
            adding.start(lab, *adding.key_arguments(keys), *arguments)
        described = json.dumps(describe(lab))
    except BaseException:
        lab.close()
        raise
    if args.json:
        print(described)
        return 0
    for line in _lines(lab):
        print(line)
    option = "" if standing() == [lab.name] else f" --lab {lab.name}"
    print(f"run on a host: nicps lab exec{option} h1 -- ping -c1 {lab.hosts[-1].ip}")
    if settings.adds:
        believe = " ".join(adding.trusting(keys))
        print(
            f"agents that believe the switch: nicps lab exec{option} h1 -- nicps join --iface eth1 {believe}"
        )
        print(f"what the switch says: {state.switch_log(lab.name)}")
    return 0


def _keys_folder(name: str) -> Path:
    """The folder of a lab's keys; it goes with the lab."""
    return state.LABS_DIR / f"{name}.keys"


def _opened(args: argparse.Namespace) -> Lab:
    """The lab that a command changes. If the user has not named it, a line on stderr does."""
    lab = Lab.open(args.lab)
    if args.lab is None:
        print(f"nicps: in lab {lab.name}, the only one that stands", file=sys.stderr, flush=True)
    return lab


def _start(args: argparse.Namespace) -> int:
    process = adding.start_again(_opened(args))
    print(f"started {process.pid} {args.what}")
    return 0


def _exec(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise UsageProblem("there is no command: nicps lab exec HOST -- CMD")
    return Lab.open(args.lab).become(args.host, argv)


def _status(args: argparse.Namespace) -> int:
    require_root()
    whole: list[Any] = []
    half: dict[str, str] = {}
    with state.lock():  # so that no lab is made or taken down meanwhile
        for name in standing() if args.lab is None else [args.lab]:
            try:
                lab = Lab.open(name)
                whole.append(describe(lab) if args.json else _lines(lab))
            except (LabNotFound, LabProblem) as error:
                if args.lab is not None:
                    raise
                half[name] = str(error)
    if args.json:
        print(json.dumps({"labs": whole, "half_made": [*half]}))
        return 0
    if not whole and not half:
        print("no lab stands; make one with `nicps lab up`")
    for line in chain(*whole, half.values()):
        print(line)
    return 0


def _down(args: argparse.Namespace) -> int:
    require_root()
    report = {}
    names = standing()
    if not args.all and (args.lab is not None or names):
        names = [args.lab if args.lab is not None else the_only()]
    for name in names:
        there = name in standing()
        removed = down(name)
        report[name] = {
            "namespaces": list(removed.namespaces),
            "ended": [describe_process(process) for process in removed.ended],
            "left_running": [describe_process(process) for process in removed.strangers],
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


def _fault(args: argparse.Namespace) -> int:
    given: dict[str, float] = {
        name: parse_probability(getattr(args, name), what)
        for name, what, _ in FAULTS
        if getattr(args, name) is not None
    }
    if args.delay is not None:
        given["delay_ms"] = parse_delay(args.delay)
    if args.clear == bool(given):
        options = ", ".join(f"--{name}" for name, _, _ in FAULTS)
        raise UsageProblem(f"say which faults: {options}, --delay, or --clear alone")
    lab = _opened(args)
    if args.clear:
        lab.clear(args.hosts)
    else:
        lab.fault(args.hosts, **given)
    return _print_faults(lab)


def _lose_next(args: argparse.Namespace) -> int:
    lab = _opened(args)
    lab.lose_next(args.hosts, wire.FrameType[args.type.upper()], args.count)
    return _print_faults(lab)


def _cut(args: argparse.Namespace) -> int:
    lab = _opened(args)
    lab.cut(args.hosts)
    return _print_faults(lab)


def _heal(args: argparse.Namespace) -> int:
    lab = _opened(args)
    lab.heal()
    return _print_faults(lab)


def _link(args: argparse.Namespace) -> int:
    _opened(args).link(args.hosts, args.state)
    return 0


def _signal(args: argparse.Namespace) -> int:
    lab = _opened(args)
    acts = {"pause": lab.pause, "resume": lab.resume, "kill": lab.kill}
    for process in acts[args.lab_command](args.hosts, args.part):
        print(f"{SIGNALS[args.lab_command]} {process.pid} {process.command}")
    return 0


def _print_faults(lab: Lab) -> int:
    told = lab.faults()
    for line in _aligned([(host, faults_text(told[host])) for host in told]):
        print(line)
    return 0


def _run(args: argparse.Namespace) -> int:
    from nicps.agent.folders import check_runs
    from nicps.agent.process import User

    values = parse_settings(args.settings)
    name = args.lab or f"run-{secrets.token_hex(3)}"
    if args.script is None and len(args.job) != 1:
        raise UsageProblem("name one job's folder, or a script with --script FILE")
    if args.script is not None and args.settings:
        raise UsageProblem("--set is for a job: a script takes arguments, after --")
    if args.script is not None and not args.script.is_file():
        raise UsageProblem(f"{args.script} is not a file: --script names a Python script")
    settings = RunSettings(
        job=args.script.resolve().parent if args.script else Path(args.job[0]),
        shape=settings_of(args, name),
        data=args.data,
        settings=values,
        user=args.user,
        runs=args.runs,
        switch=switch_arguments(args),
        keyed=args.key,
        script=args.script,
        arguments=tuple(args.job) if args.script else (),
        as_json=args.json,
    )
    require_root()
    check_runs(args.runs.absolute())
    if args.user is not None:
        User.named(args.user)
    outcome = run_job(settings)
    result = outcome.result
    if result is not None:
        if not args.json:
            for line in _aligned([(label_of(k, result), readable(v)) for k, v in result.items()]):
                print(line)
        print(json.dumps(result), flush=True)
        if outcome.exit_code == 0 and result.get("weights_identical") is False:
            raise JobFailed("the hosts' weights differ: see metrics.jsonl of each host")
    return outcome.exit_code


def _lines(lab: Lab) -> list[str]:
    found = [headline(lab), *_aligned(rows(lab))]
    if lab.line_lost():
        found.append(
            "the process in which delayed frames wait has ended: say `nicps lab fault` again"
        )
    return found


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
