# SPDX-License-Identifier: Apache-2.0
"""Texts of a training program, for users and for the token."""

from __future__ import annotations

from nicps.errors import JobFailed

_MOST_TEXT = 300


def one_line(text: object) -> str:
    """For users: printable, in one line, and not too long for a frame."""
    plain = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(plain.split())[:_MOST_TEXT]


def is_run_name(text: str) -> bool:
    """Whether a folder can have that name."""
    return "/" not in text and text not in ("", ".", "..")


def shorten(digest: str) -> int:
    """A state's digest as it travels in the token: 32 bits, 0 for none.

    Raises:
        JobFailed: it is not hexadecimal.
    """
    try:
        return int(digest[:8], 16) or 1 if digest else 0
    except ValueError:
        raise JobFailed(f"the training program's digest {digest!r} is not hexadecimal") from None
