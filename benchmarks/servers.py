# SPDX-License-Identifier: Apache-2.0
"""Parameter servers in labs of namespaces, as root: what a server's kernel gives, and how jobs train with it.

    .venv/bin/python -m benchmarks.servers pulls
    .venv/bin/python -m benchmarks.servers training --job digits --target 0.95 --out digits.tsv

`pulls`: workers pull all parameters from one server, at several rates of the line. `training`: four workers, one of
them four times slower, in each of several ways until a test reaches the target.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import pulls
from nicps.bench.arguments import as_type, host_count, in_order, whole
from nicps.errors import NicpsError
from nicps.lab.settings import parse_rate


def _rates(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "unshaped" else parse_rate(part) for part in text.split(","))


def _add_pulls(commands: Any) -> None:
    parser = commands.add_parser("pulls", help="what a server's kernel gives")
    rates = "of the line, with commas (%(default)s)"
    parser.add_argument("--rate", type=as_type(_rates), default="1gbit,10gbit,unshaped", help=rates)
    parser.add_argument("--workers", type=host_count(1, 1), default=1, help="(%(default)s)")
    parser.add_argument("--params", type=whole(1), default=11_700_000, help="(%(default)s)")
    parser.add_argument("--pulls", type=whole(1), default=10, help="counted (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON list as the last line")
    parser.set_defaults(run=pulls.run)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.servers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    _add_pulls(commands)
    args = parser.parse_args(arguments)
    try:
        return in_order(args.run)(args)
    except NicpsError as error:
        print(f"servers: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
