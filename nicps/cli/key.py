# SPDX-License-Identifier: Apache-2.0
"""`nicps key`: make the key that all hosts of a network share.

nicps key new [FILE]           a fresh one; copied to every host, for `nicps join --key FILE`

The default file's folder is made if it is missing; that of a file which the user names is not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from nicps.auth import write_key
from nicps.errors import EnvironmentProblem

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
    """Write the key, and print what to do with it."""
    path = args.file.absolute()
    if path == DEFAULT_KEY:
        _make_folder(path.parent)
    write_key(path)
    print(
        f"nicps: wrote {path}: copy it to every host of the network, and `nicps join --key {path}` there",
        file=sys.stderr,
    )
    return 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the folder {folder}: {error.strerror}; run it as root, or name a file"
        ) from None
