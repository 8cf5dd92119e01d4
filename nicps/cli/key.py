# SPDX-License-Identifier: Apache-2.0
"""`nicps key`: make the key that all hosts of a network share.

nicps key new [FILE]           a fresh one; copied to every host, for `nicps join --key FILE`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nicps.auth import write_key

DEFAULT_KEY = Path("/etc/nicps/key")


def add_parser(subparsers: Any) -> None:
    """Add `key` and its `new`."""
    parser = subparsers.add_parser("key", help="make the key that all hosts of a network share")
    commands = parser.add_subparsers(metavar="new", required=True)
    new = commands.add_parser(
        "new",
        help="write a fresh key",
        description="Write a fresh 256-bit key to a file that only you can read. Whoever has it is a member: copy it to"
        " every host of the network over a way that nobody else can read (scp, say).",
    )
    new.add_argument(
        "file", type=Path, nargs="?", default=DEFAULT_KEY, metavar="FILE", help="(%(default)s)"
    )
    new.set_defaults(func=run_new)


def run_new(args: argparse.Namespace) -> int:
    """Write it, and say what to do with it."""
    path = args.file.absolute()
    write_key(path)
    print(
        f"nicps: wrote {path}: copy it to every host of the network, and `nicps join --key {path}` there",
        file=sys.stderr,
    )
    return 0
