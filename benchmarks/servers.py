# SPDX-License-Identifier: Apache-2.0
"""Parameter servers in labs of namespaces, as root: what a server's kernel gives, and how jobs train with it.

    .venv/bin/python -m benchmarks.servers pulls
    .venv/bin/python -m benchmarks.servers training --job digits --target 0.95 --out digits.jsonl

`pulls`: workers pull all parameters from one server, at several rates of the line. `training`: four workers, one of
them four times slower, in each of several ways until a test reaches the target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import pulls, served_training
from benchmarks.command import finish
from benchmarks.time_to_accuracy import setting, share
from nicps.bench.arguments import as_type, duration, host_count, several, whole
from nicps.rates import parse_line_rate, parse_rate


def _add_pulls(commands: Any) -> None:
    parser = commands.add_parser("pulls", help="what a server's kernel gives")
    rates = "of the line, with commas (%(default)s)"
    parser.add_argument(
        "--rate",
        type=as_type(several(parse_line_rate)),
        default="1gbit,10gbit,unshaped",
        help=rates,
    )
    parser.add_argument("--workers", type=host_count(1, 1), default=1, help="(%(default)s)")
    parser.add_argument("--params", type=whole(1), default=11_700_000, help="(%(default)s)")
    parser.add_argument("--pulls", type=whole(1), default=10, help="counted (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON list as the last line")
    parser.set_defaults(run=pulls.run)


def _add_training(commands: Any) -> None:
    parser = commands.add_parser(
        "training",
        help="seconds to an accuracy",
        epilog=f"ways:\n{served_training.FORMS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--job", default="digits", help="a folder in trainer/jobs (%(default)s)")
    add("--data", help="what the job's data() is given; default: NICPS_DATA")
    add("--target", type=share, required=True, help="accuracy on the test set")
    ways, rates = as_type(served_training.parse_ways), as_type(served_training.parse_rates)
    add("--ways", type=ways, default=served_training.DEFAULT, help="(%(default)s)")
    said = "learning rates that are tried with seed 1; the best one is kept (%(default)s)"
    add("--rates", type=rates, default="0.03,0.1,0.3,1", help=said)
    add("--seeds", type=whole(1), default=5, help="(%(default)s)")
    add("--batch", type=whole(served_training.WORKERS), default=128, help="(%(default)s)")
    add("--test-every", type=whole(1), default=64, help="rounds; T is at most that (%(default)s)")
    add("--microbatch", type=duration, default=0.005, help="seconds of each (%(default)s)")
    add("--rate", type=as_type(parse_rate), default="1gbit", help="of the line (%(default)s)")
    add("--limit", type=duration, default=120.0, help="seconds (%(default)g)")
    add("--set", type=setting, action="append", default=[], metavar="KEY=VALUE")
    add("--out", type=Path, help="JSON lines: what is there is not run again")
    add("--json", action="store_true", help="a JSON list as the last line")
    parser.set_defaults(run=served_training.run)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.servers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    _add_pulls(commands)
    _add_training(commands)
    args = parser.parse_args(arguments)
    return finish("servers", args.run, args)


if __name__ == "__main__":
    sys.exit(main())
