# SPDX-License-Identifier: Apache-2.0
"""How a benchmark's command runs and ends."""

from __future__ import annotations

import argparse
import sys

from nicps.bench.arguments import Run, in_order
from nicps.errors import NicpsError


def finish(name: str, run: Run, args: argparse.Namespace) -> int:
    """Run it; return the exit code. An error is one line, and Ctrl-C is none."""
    try:
        return in_order(run)(args)
    except NicpsError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
