# SPDX-License-Identifier: Apache-2.0
"""What is said about the store that the members of a group share (docs/collective.md): the one definition.

A program asks its agent on a connection of its own. Agents say the same to each other, as lines of JSON in their
streams. Values are base64 everywhere but at their users.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from nicps.errors import UsageProblem
from nicps.session.fields import (
    COUNT,
    TEXT,
    VIEW,
    Conversation,
    Field,
    Message,
    choice,
    listed,
    record,
    text,
    whole,
)
from nicps.session.messages import MEMBER, Error

MOST_KEY = 4096  # characters
MOST_VALUE = 1 << 18  # bytes
MOST_CALL = 1 << 19  # bytes of all keys and values of a call
MOST_AMOUNT = (1 << 63) - 1
#: They wait until all their keys are there.
WAITING = ("get", "wait")
READING = (*WAITING, "check", "count", "list")
WRITING = ("set", "add", "swap", "delete", "append")

_AMOUNT = whole(-MOST_AMOUNT - 1, MOST_AMOUNT)


# ---- a program to its agent


@dataclass(frozen=True, slots=True)
class Ask(Message):
    """A call. `set` and `append` have a value for each key; `swap` has the value expected and the one wanted."""

    op: ClassVar[str] = "ask"
    number: Annotated[int, Field(COUNT, "of the call")]
    what: Annotated[str, Field(choice(*READING, *WRITING), "what to do")]
    keys: Annotated[tuple[str, ...], Field(listed(text(MOST_KEY), "keys"), "its keys")] = ()
    values: Annotated[tuple[str, ...], Field(listed(TEXT, "texts"), "values, in base64")] = ()
    amount: Annotated[int, Field(_AMOUNT, "that `add` adds")] = 0

    def check(self) -> None:
        """Whether it can be meant.

        Raises:
            UsageProblem: it is too large, or has too few keys or values.
        """
        keys, values = len(self.keys), len(self.values)
        wanted = {"set": keys, "append": 1, "swap": 2}.get(self.what, 0)
        single = self.what in ("append", "swap", "add", "delete")
        if values != wanted or (single and keys != 1):
            raise UsageProblem(
                f"the store cannot {self.what} {keys} keys with {values} values: give a value for each key"
            )
        for key in self.keys:
            if len(key) > MOST_KEY:
                raise UsageProblem(
                    f"a key of {len(key):,} characters is too long for the store: at most {MOST_KEY:,}"
                )
        size = sum(len(key) for key in self.keys)
        for value in self.values:
            size += (each := size_of(value))
            if each > MOST_VALUE:
                raise too_large(self.keys[0], each)
            unpack(value)
        if size > MOST_CALL:
            raise UsageProblem(
                f"a call of {size:,} bytes is too large for the store, which takes at most {MOST_CALL:,}: set fewer"
                " keys at once"
            )


@dataclass(frozen=True, slots=True)
class Forget(Message):
    """Nobody waits for the answer to a call any more."""

    op: ClassVar[str] = "forget"
    number: Annotated[int, Field(COUNT, "of the call")]


FromUser: TypeAlias = Ask | Forget
FROM_USER: Conversation[FromUser] = Conversation("the agent's store", Ask, Forget)


# ---- an agent to its program


@dataclass(frozen=True, slots=True)
class Answer(Message):
    """What came of a call. `values`: of `get` and `swap`, in base64; of `list` the keys."""

    op: ClassVar[str] = "answer"
    number: Annotated[int, Field(COUNT, "of the call")]
    values: Annotated[tuple[str, ...], Field(listed(TEXT, "texts"), "what was asked for")] = ()
    amount: Annotated[int, Field(_AMOUNT, "a sum, a number of keys, or 1 for yes")] = 0
    error: Annotated[str, Field(TEXT, "why nothing was done, in one line")] = ""


TO_USER: Conversation[Answer | Error] = Conversation("a user of the store", Answer, Error)


# ---- a host's stream in a view


@dataclass(frozen=True, slots=True)
class Base(Message):
    """The first line of every stream."""

    op: ClassVar[str] = "base"
    base: Annotated[int, Field(VIEW, "in which this host's copy was last complete; 0: never")]


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """This host has heard the bases of all, and is the sequencer: its copy follows."""

    op: ClassVar[str] = "begin"


@dataclass(frozen=True, slots=True)
class Value(Message):
    """Of the sequencer's copy."""

    op: ClassVar[str] = "value"
    key: Annotated[str, Field(TEXT, "a key")]
    value: Annotated[str, Field(TEXT, "what it holds, in base64")]


@dataclass(frozen=True, slots=True)
class Last(Message):
    """Of the sequencer's copy: what the last call of a member has come to that has written something."""

    op: ClassVar[str] = "last"
    member: Annotated[int, Field(MEMBER, "the member")]
    answer: Annotated[Answer, Field(record(Answer), "the answer to it")]


@dataclass(frozen=True, slots=True)
class Whole(Message):
    """The copy is complete; calls follow."""

    op: ClassVar[str] = "whole"


@dataclass(frozen=True, slots=True)
class Do(Message):
    """The next call in order."""

    op: ClassVar[str] = "do"
    member: Annotated[int, Field(MEMBER, "the member that calls")]
    ask: Annotated[Ask, Field(record(Ask), "the call")]


Line: TypeAlias = Base | Begin | Value | Last | Whole | Do | Ask
LINES: Conversation[Line] = Conversation("the store", Base, Begin, Value, Last, Whole, Do, Ask)


# ---- values


def pack(value: bytes) -> str:
    """As it travels."""
    return base64.b64encode(value).decode()


def unpack(value: str) -> bytes:
    """What `pack` has made.

    Raises:
        UsageProblem: it is not that.
    """
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise UsageProblem("a value of the store is not in base64") from None


def size_of(value: str) -> int:
    """Bytes of a packed value."""
    return len(value) // 4 * 3 - value[-2:].count("=")


def too_large(key: str, size: int) -> UsageProblem:
    """The error for a value of so many bytes."""
    return UsageProblem(
        f"{key!r}: a value of {size:,} bytes is too large for the store, which takes at most {MOST_VALUE:,}: send it"
        " with a collective"
    )
