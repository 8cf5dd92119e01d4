# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from nicps.session.channel import DEFAULT_SOCKET


def add_socket(parser: argparse.ArgumentParser) -> None:
    """`--socket`, the address of this host's agent."""
    parser.add_argument(
        "--socket", default=DEFAULT_SOCKET, metavar="ADDRESS", help="the agent's (%(default)s)"
    )


def add_data(parser: argparse.ArgumentParser, whose: str = "job") -> None:
    """`--data`, the path of a job's data. A path that does not exist is refused, even if the job needs no data."""
    parser.add_argument(
        "--data",
        type=_existing,
        default=os.environ.get("NICPS_DATA") or None,
        metavar="PATH",
        help=f"where the {whose} finds its data ($NICPS_DATA)",
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
