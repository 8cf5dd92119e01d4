# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from nicps.errors import UsageProblem
from nicps.session.channel import DEFAULT_SOCKET

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def add_socket(parser: argparse.ArgumentParser) -> None:
    """`--socket`, the address of this host's agent."""
    parser.add_argument(
        "--socket", default=DEFAULT_SOCKET, metavar="ADDRESS", help="the agent's (%(default)s)"
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """`--data`, the path of a job's data. A path that does not exist is refused, even if the job needs no data."""
    parser.add_argument(
        "--data",
        type=_existing,
        default=os.environ.get("NICPS_DATA") or None,
        metavar="PATH",
        help="where the job finds its data ($NICPS_DATA)",
    )


def _existing(text: str) -> Path:
    try:
        os.stat(text)
    except PermissionError:
        pass  # the training user may see more than we do
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error.strerror}; name the data's folder, here or in NICPS_DATA"
        ) from None
    return Path(text)


def parse_size(text: str) -> int:
    """Bytes from `256M`, `2G`, `1.5g`, `64MiB` or a bare number; the letters mean powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(f"{text!r} is not a size: write 256M, 2G or bytes")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
