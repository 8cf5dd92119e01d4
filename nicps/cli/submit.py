# SPDX-License-Identifier: Apache-2.0
"""`nicps submit`: give a job to the local agent, which starts the network with it (R1)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from nicps.cli.arguments import add_data, add_socket
from nicps.errors import UsageProblem
from nicps.session.channel import Channel
from nicps.session.commands import connect, follow
from nicps.session.commands import submit as send
from nicps.session.events import Event, Formed, Progressed, Training
from nicps.session.fields import values
from nicps.session.messages import Result, Submit

DESCRIPTION = """\
Give a job (a folder with job.py, see docs/jobs.md) to the agent of this host. It prepares model and data, calls
the other hosts, hands everything out and trains. With --wait, progress goes to stderr and the end decides the
exit code (5: the job failed, 7: it was cancelled); without, the command returns once the agent has taken the job."""


def add_parser(subparsers: Any) -> None:
    """The arguments of `nicps submit`."""
    parser = subparsers.add_parser(
        "submit", help="give a job to the local agent", description=DESCRIPTION
    )
    parser.add_argument("job", type=Path, metavar="JOB_DIR", help="the folder with job.py")
    add_options(parser)
    parser.set_defaults(func=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments that a new job and a resumed one share."""
    add_data(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the job: quorum=0.75, seed=3, lane=i32, epochs=2, ...",
    )
    parser.add_argument("--wait", action="store_true", help="until the job has ended")
    parser.add_argument("--json", action="store_true", help="the result as one JSON line on stdout")
    add_socket(parser)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is JSON if it can be read as that, otherwise text.

    Raises:
        UsageProblem: a pair has no `=`.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageProblem(f"--set takes KEY=VALUE, not {pair!r}")
        try:
            settings[key] = orjson.loads(value)
        except orjson.JSONDecodeError:
            settings[key] = value
    return settings


def run(args: argparse.Namespace) -> int:
    """Submit, and wait if asked to."""
    job = args.job.absolute()
    if not (job / "job.py").is_file():
        raise UsageProblem(f"{job} holds no job.py (docs/jobs.md says what a job is)")
    return submit(args, Submit(str(job)))


def submit(args: argparse.Namespace, job: Submit) -> int:
    """Give the agent a job, with the data and the settings of the command line, and show its progress; return the
    exit code.
    """
    with connect(args.socket) as channel:
        data = str(Path(args.data).absolute()) if args.data else None
        send(channel, replace(job, data=data, settings=parse_settings(args.set)))
        try:
            return _follow(channel, args)
        except KeyboardInterrupt:
            # A line of its own on a terminal, where progress and ^C are on the line already.
            start = "\n" if sys.stderr.isatty() else ""
            print(
                f"{start}nicps: the job goes on without this command: `nicps status --watch` shows it, `nicps cancel`"
                " ends it",
                file=sys.stderr,
            )
            raise


def _follow(channel: Channel, args: argparse.Namespace) -> int:
    for message in follow(channel):
        if isinstance(message, Result):
            finish(message.result, as_json=args.json)
            return 0 if message.result.get("weights_identical", True) else 5
        if args.wait:
            show(message)
        elif isinstance(message, Formed | Training):
            print(f"job {message.job_id} is under way; `nicps status --watch` shows it")
            return 0
    raise AssertionError("a job ends with a result or an error")


def show(event: Event) -> None:
    """One line of an event on stderr; on a terminal progress is written over."""
    shown = {
        k: v for k, v in values(event).items() if k not in ("event", "job_id") and v is not None
    }
    if isinstance(event, Training):
        why = f": exchange {event.exchange}: {event.exchange_reason}" if event.exchange else ""
        print(f"nicps: {event.event}{why}", file=sys.stderr)
    elif not isinstance(event, Progressed):
        details = ", ".join(
            _short(v) if k == "message" else f"{k} {_short(v)}" for k, v in shown.items()
        )
        print(f"nicps: {event.event}{': ' + details if details else ''}", file=sys.stderr)
    elif sys.stderr.isatty():
        print(f"\r\x1b[K{progress_line(shown)}", end="", file=sys.stderr, flush=True)
    else:
        print(progress_line(shown), file=sys.stderr, flush=True)


def progress_line(report: Mapping[str, Any]) -> str:
    """A training program's report, in one line; unknown keys are printed as they are."""
    left = {k: v for k, v in report.items() if k not in ("round", "epoch")}
    done, total = left.pop("trained_rounds", report.get("round")), left.pop("rounds_total", None)
    parts = [f"round {done}{f'/{total}' if total else ''}"]
    if (loss := left.pop("loss", None)) is not None:
        parts.append(f"loss {loss:.4f}")
    if (accuracy := left.pop("accuracy", None)) is not None:
        parts.append(f"accuracy {accuracy:.2%}")
    if rate := left.pop("samples_per_second", None):
        parts.append(f"{rate:,.0f} samples/s")
    if (turns := left.pop("token_turns", None)) is not None:
        parts.append(f"{turns} token turns")
    shares = [
        f"{name} {left.pop(f'share_{key}'):.0%}"
        for key, name in (("compute", "computing"), ("wait", "waiting"), ("network", "network"))
        if left.get(f"share_{key}") is not None
    ]
    steps = [
        f"{name} {left.pop(key):.3f} s"
        for key, name in (
            ("step_seconds", "a step"),
            ("wait_seconds", "waiting in it"),
            ("predicted_seconds", "predicted"),
        )
        if left.get(key) is not None
    ]
    return "  ".join([*parts, *shares, *steps, *(f"{k} {_short(v)}" for k, v in left.items())])


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def readable(value: Any) -> str:
    """A value of the result, for people: settings as `key=value`, those that are not set left out; - for none."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={readable(of)}" for key, of in value.items() if of is not None)
    if isinstance(value, list):
        return " ".join(map(readable, value)) or "-"
    return "-" if value is None else str(value)


def label_of(key: str, result: Mapping[str, Any]) -> str:
    """A key of the result, for people: with servers a round of the network is a synchronisation."""
    served = result.get("system", "R") != "R"
    return key.replace("rounds", "synchronisations") if served and "rounds" in key else key


def finish(result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a job, for people or as JSON."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        print(orjson.dumps(dict(result)).decode())
        return
    if "lead" in result:
        print(f"job {result['job_id']} is done; {result['lead']} has led it and has the result")
        return
    resumed = ("trained_rounds",) if result.get("trained_rounds", 0) > result["rounds"] else ()
    for key in (
        "hosts",
        "rounds",
        *resumed,
        "test_accuracy",
        "weights_identical",
        "seconds",
        "report",
    ):
        print(f"{label_of(key, result).replace('_', ' '):<18} {result[key]}")
