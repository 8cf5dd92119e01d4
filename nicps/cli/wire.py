# SPDX-License-Identifier: Apache-2.0
"""`nicps wire`: print the frame formats, or read a capture.

nicps wire                     the formats as tables (--json, --markdown)
nicps wire dump FILE.pcap      one line a frame of ours (--json: one object a line)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson

from nicps import wire, wiredump, wiretable


def add_parser(subparsers: Any) -> None:
    """Add `wire` and its `dump`."""
    parser = subparsers.add_parser("wire", help="print the frame formats, read a capture")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the formats as one JSON object")
    form.add_argument("--markdown", action="store_true", help="the formats as docs/wire.md")
    parser.set_defaults(func=run)
    dump = parser.add_subparsers(metavar="dump").add_parser(
        "dump", help="print the frames of ours in a pcap or pcapng file"
    )
    dump.add_argument("file", type=Path, metavar="FILE", help="a capture, say of tcpdump -w")
    dump.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a frame"
    )
    dump.add_argument(
        "--ethertype",
        type=lambda text: int(text, 0),
        default=wire.ETHERTYPE,
        help=f"of our frames (default {wire.ETHERTYPE:#06x})",
    )
    dump.set_defaults(func=run_dump)


def run(args: argparse.Namespace) -> int:
    """Print the formats."""
    if args.json:
        print(orjson.dumps(wiretable.describe(), option=orjson.OPT_INDENT_2).decode())
    else:
        print(wiretable.markdown() if args.markdown else wiretable.text(), end="")
    return 0


def run_dump(args: argparse.Namespace) -> int:
    """Print the frames of a capture; the count of all comes last, on stderr."""
    counts = wiredump.Counts()
    start_s: float | None = None
    try:
        for seen in wiredump.read(args.file, counts, args.ethertype):
            start_s = seen.time_s if start_s is None else start_s
            if args.json:
                print(orjson.dumps(wiredump.record(seen)).decode())
            else:
                print(wiredump.line(seen, start_s))
    finally:
        sys.stdout.flush()
        if counts.ours or counts.foreign:
            print(
                f"{counts.ours} frames of ours, {counts.malformed} of them malformed; "
                f"{counts.foreign} frames of others skipped",
                file=sys.stderr,
            )
    return 0
