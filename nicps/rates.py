# SPDX-License-Identifier: Apache-2.0
"""Rates of lines, and sizes of memory, as users write them."""

from __future__ import annotations

import re

from nicps.errors import UsageProblem

LEAST_RATE_BPS, MOST_RATE_BPS = 8_000, 34_000_000_000  # what the kernel's shapers take
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:bit|bps|bit/s)?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_rate(text: str) -> int:
    """Bits per second from `1gbit`, `100mbit`, `2.5g` or a bare number of bits per second.

    Raises:
        UsageProblem: it is no rate.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(f"{text!r} is not a rate: write 1gbit, 100mbit or bits per second")
    return round(float(match[1]) * _SCALE[match[2].lower()])


def parse_line_rate(text: str) -> int | None:
    """Bits per second as `parse_rate` reads them, or None for `unshaped`.

    Raises:
        UsageProblem: it is neither.
    """
    return None if text.strip() == format_rate(None) else parse_rate(text)


def format_rate(rate_bps: int | None) -> str:
    """`1gbit` for 10**9; `unshaped` for None."""
    if rate_bps is None:
        return "unshaped"
    for unit in ("g", "m", "k"):
        if rate_bps >= _SCALE[unit]:
            return f"{rate_bps / _SCALE[unit]:g}{unit}bit"
    return f"{rate_bps}bit"


def parse_size(text: str) -> int:
    """Bytes from `256M`, `2G`, `1.5g`, `64MiB` or a bare number; the letters mean powers of 1024.

    Raises:
        UsageProblem: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(f"{text!r} is not a size: write 256M, 2G or bytes")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
