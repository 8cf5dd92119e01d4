# SPDX-License-Identifier: Apache-2.0
"""The `nicps` command, and `python -m nicps`: a process of its own, which starts and ends quickly."""

from __future__ import annotations

import sys
from typing import NoReturn

from nicps.startup import leave, permanent


def run() -> NoReturn:
    """Run one command, and end with its exit code."""
    try:
        with permanent():
            from nicps import cli

            cli.import_command(sys.argv[1:])
        code = cli.main()
    except KeyboardInterrupt:  # so early that `main` could not take it
        code = 130
    leave(code)


if __name__ == "__main__":
    run()
