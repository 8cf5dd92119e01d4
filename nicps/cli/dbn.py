# SPDX-License-Identifier: Apache-2.0
"""`nicps dbn`: a deep belief network by iterative reduce; it starts `python -m trainer.dbn` (docs/dbn.md)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any, NoReturn

APPLICATION = "trainer.dbn"


def add_parser(subparsers: Any) -> None:
    """All arguments that follow are the application's, `--help` too."""
    parser = subparsers.add_parser("dbn", help="train a deep belief network")
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> NoReturn:
    """Become the application."""
    command = [sys.executable, "-P", "-m", APPLICATION, *args.arguments]
    if {"-h", "--help"} & set(args.arguments):
        print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout, end="")
        sys.exit(0)
    sys.stdout.flush()
    os.execv(sys.executable, command)
