# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that are no command of `nicps`: `python -m benchmarks.NAME`. README.md has the figures."""

import signal
import sys

if sys.argv[0] == "-m":  # one of them is about to run: SIGTERM, too, takes its lab down
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
