# SPDX-License-Identifier: Apache-2.0
"""What a training program says to its agent (docs/socket.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nicps.errors import JobFailed

_MOST_ROUNDS = _MOST_SAMPLES = (1 << 31) - 1
_MOST_LANES = 1 << 33
_MOST_DIGEST = 128
_MOST_TEXT = 300


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is built: so many float32 a round, and the digest of the model and its state."""

    lanes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """It is in the phase of that number."""

    number: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A micro-batch is done."""

    round: int
    samples: int


@dataclass(frozen=True, slots=True)
class Offered:
    """It has a gradient. `unit`: what the next round's should be; `skip`: this one is too large for its round's."""

    round: int
    samples: int
    unit: int | None
    skip: bool


@dataclass(frozen=True, slots=True)
class Read:
    """It has read and applied the sum of a round; the digest of the state after it, or an empty text."""

    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Saved:
    """Its state file is complete, with the state after so many trained rounds; or `error` says why it is not."""

    number: int
    round: int
    digest: str
    error: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """It has read the state file; the digest of the state that it has now."""

    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """It has written a checkpoint with the state after so many trained rounds; or `error` says why it has not."""

    round: int
    error: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What comes after a round: "continue", "test" or "end" (R14)."""

    round: int
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """Live progress, and warnings."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alive:
    """It is at work."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot go on here."""

    message: str


Said: TypeAlias = (
    Ready
    | Prepared
    | Progress
    | Offered
    | Read
    | Saved
    | Loaded
    | Checkpoint
    | Judged
    | Report
    | Alive
    | Failed
)


def parse(message: Mapping[str, Any]) -> Said | None:
    """A message of a training program; None if it is not one that this agent knows.

    Raises:
        JobFailed, KeyError, TypeError: it cannot be meant.
    """
    op = message["op"]
    if op == "ready":
        return Ready(_whole(message, "lanes", 1, _MOST_LANES), _digest(message))
    if op == "prepared":
        return Prepared(message["number"])
    if op == "progress":
        return Progress(_round(message), _whole(message, "samples", 0, _MOST_SAMPLES))
    if op == "offer":
        unit = None if message["unit"] is None else _whole(message, "unit", -100, 100)
        samples = _whole(message, "samples", 1, _MOST_SAMPLES)
        return Offered(_round(message), samples, unit, message["skip"] is True)
    if op == "read":
        digest = _digest(message)
        shorten(digest)
        return Read(_round(message), digest)
    if op == "saved":
        error = one_line(message.get("error") or "")
        return Saved(message["number"], _round(message), _digest(message), error)
    if op == "loaded":
        return Loaded(message["number"], _digest(message))
    if op == "checkpoint":
        return Checkpoint(_round(message), one_line(message.get("error") or ""))
    if op == "decide":
        return Judged(_round(message), str(message["what"]))
    if op == "report":
        return Report(dict(message["values"]))
    if op == "alive":
        return Alive()
    if op == "fail":
        return Failed(str(message["message"]))
    return None


def one_line(text: object) -> str:
    """What a training program says, for people: printable, in one line, and not too long for a frame."""
    plain = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(plain.split())[:_MOST_TEXT]


def shorten(digest: str) -> int:
    """A state's digest as it travels in the token: 32 bits, 0 for none.

    Raises:
        JobFailed: it is not hexadecimal.
    """
    try:
        return int(digest[:8], 16) or 1 if digest else 0
    except ValueError:
        raise JobFailed(f"the training program's digest {digest!r} is not hexadecimal") from None


def _round(message: Mapping[str, Any]) -> int:
    return _whole(message, "round", 0, _MOST_ROUNDS)


def _digest(message: Mapping[str, Any]) -> str:
    digest = message.get("digest", "")
    if not isinstance(digest, str) or len(digest) > _MOST_DIGEST:
        raise JobFailed("the training program's digest is not a short text")
    return digest


def _whole(message: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = message[key]
    if type(value) is not int or not least <= value <= most:
        raise JobFailed(
            f"the training program says {key} {value!r}, not a number from {least} to {most}"
        )
    return value
