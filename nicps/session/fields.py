# SPDX-License-Identifier: Apache-2.0
"""What messages of the agent's socket are made of: kinds of values, and how a class of messages becomes JSON and back.

    @dataclass(frozen=True, slots=True)
    class Progress(Message):
        '''A micro-batch is done.'''

        op: ClassVar[str] = "progress"
        round: Annotated[int, Field(ROUND, "the round that is open")]
        samples: Annotated[int, Field(SAMPLES, "samples of the round so far")]

A field with a default may be left out of a message. `encode` leaves it out where it has that default. Keys that no
field has are ignored. Classes are taken apart once, when their first message is read or written.

The messages themselves are in `messages`, `shared_form` and `json_form`. Only the standard library is used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_type_hints

from nicps.errors import MessageError

MOST_ROUND = MOST_SAMPLES = (1 << 31) - 1
MOST_DIGEST = 128  # characters
_MOST_COUNT = (1 << 63) - 1
_NUMBER_DIGITS = 5  # of a member's number
_SHOWN = 60  # characters of a value that an error shows


class Unfit(ValueError):
    """A value is not of its kind. The text follows the name of the field."""


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field can hold. `text` says so to people; `read` checks what JSON has, or raises `Unfit`."""

    text: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = _as_it_is
    record: type[Any] | None = None  # the class whose fields an object has


class Field(NamedTuple):
    """Of a message's field: its kind, what it means, and its key in JSON where that is not its name."""

    kind: Kind
    doc: str
    key: str = ""


class Message:
    """Base of all messages. `op` says which one it is; an event has its own name beside that."""

    __slots__ = ()
    op: ClassVar[str]
    event: ClassVar[str] = ""


T = TypeVar("T")
M = TypeVar("M", bound=Message)


# ---- kinds


def _misfit(value: Any, text: str) -> Unfit:
    if isinstance(value, list | dict):  # which may be deep, or large
        return Unfit(f" is {'a list' if isinstance(value, list) else 'an object'}, not {text}")
    return Unfit(f" is {repr(value)[:_SHOWN]}, not {text}")


def _typed(kind: type[Any], text: str) -> Kind:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _misfit(value, text)
        return value

    return Kind(text, read)


def whole(least: int, most: int = _MOST_COUNT) -> Kind:
    """Whole numbers in a range."""
    text = f"a whole number from {least} to {_limit(most)}"
    if most == _MOST_COUNT:
        text = f"a whole number from {least} on"
    if least == most:
        text = str(least)

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _misfit(value, text)
        return value

    return Kind(text, read)


def _limit(most: int) -> str:
    """A large power of two less one as people write it."""
    large = most >= MOST_ROUND and not most & (most + 1)
    return f"2^{most.bit_length()} - 1" if large else str(most)


def number(least: float = -math.inf, most: float = math.inf) -> Kind:
    """Finite numbers in a range."""
    text = "a number" if math.isinf(most) else f"a number from {least:g} to {most:g}"

    def read(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _misfit(value, text)
        if not least <= value <= most:
            raise _misfit(value, text)
        return float(value)

    return Kind(text, read)


def text(most: int | None = None) -> Kind:
    """Texts, of so many characters at most."""
    said = "a text" if most is None else f"a text of at most {most} characters"

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise _misfit(value, said)
        if most is not None and len(value) > most:
            raise Unfit(f" has {len(value)} characters, not at most {most}")
        return value

    return Kind(said, read)


def path() -> Kind:
    """Paths of files."""
    said = "a path"

    def read(value: Any) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise _misfit(value, said)
        return value

    return Kind(said, read)


def choice(*values: str) -> Kind:
    """One of these texts."""
    quoted = [f'"{value}"' for value in values]
    said = f"{', '.join(quoted[:-1])} or {quoted[-1]}"

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise _misfit(value, said)
        return value

    return Kind(said, read)


def constant(value: str) -> Kind:
    """This text."""
    said = f'"{value}"'

    def read(given: Any) -> str:
        if given != value or not isinstance(given, str):
            raise _misfit(given, said)
        return value

    return Kind(said, read)


def nullable(kind: Kind) -> Kind:
    """What `kind` holds, or null."""

    def read(value: Any) -> Any:
        return None if value is None else kind.read(value)

    def write(value: Any) -> Any:
        return None if value is None else kind.write(value)

    return Kind(f"{kind.text}, or null", read, write, kind.record)


def or_empty(kind: Kind) -> Kind:
    """What `kind` holds, or an empty object, which is None here."""

    def read(value: Any) -> Any:
        return None if value == {} else kind.read(value)

    def write(value: Any) -> Any:
        return {} if value is None else kind.write(value)

    return Kind(f"{kind.text}, or an empty one", read, write, kind.record)


def listed(kind: Kind, of: str) -> Kind:
    """A list of what `kind` holds; `of` names that in the plural."""
    said = f"a list of {of}"

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _misfit(value, said)
        found = []
        for place, item in enumerate(value, 1):
            try:
                found.append(kind.read(item))
            except Unfit as error:
                raise Unfit(f", entry {place}{error}") from None
        return tuple(found)

    def write(value: Any) -> list[Any]:
        return [kind.write(item) for item in value]

    return Kind(said, read, write, kind.record)


def record(cls: type[Any], said: str = "an object") -> Kind:
    """An object with the fields of a class."""

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _misfit(value, said)
        return codec(cls).read(value, ": ")

    def write(value: Any) -> dict[str, Any]:
        return codec(cls).write(value)

    return Kind(said, read, write, cls)


def by_number(kind: Kind, said: str) -> Kind:
    """An object whose keys are members' numbers, as texts, and whose values are of a kind."""

    def read(value: Any) -> dict[int, Any]:
        if not isinstance(value, dict):
            raise _misfit(value, said)
        found = {}
        for key, item in value.items():
            if not key.isdecimal() or len(key) > _NUMBER_DIGITS:
                raise Unfit(f" has the key {key[:_SHOWN]!r}, which is not a member's number")
            try:
                found[int(key)] = kind.read(item)
            except Unfit as error:
                raise Unfit(f", member {key}{error}") from None
        return found

    def write(value: Any) -> dict[str, Any]:
        return {str(key): kind.write(item) for key, item in sorted(value.items())}

    return Kind(said, read, write)


FLAG = _typed(bool, "true or false")
OBJECT = _typed(dict, "an object")
ANYTHING = Kind("any JSON", _as_it_is)
ROUND = whole(0, MOST_ROUND)
VIEW = whole(0, (1 << 32) - 1)
SAMPLES = whole(0, MOST_SAMPLES)
COUNT = whole(0)
TEXT = text()
DIGEST = text(MOST_DIGEST)

#: A field of this kind takes all keys that no other field has, as one mapping.
REST = Kind("any keys", _as_it_is)


# ---- classes of messages


class Row(NamedTuple):
    """One field of a class, as the codec needs it."""

    name: str
    key: str
    field: Field
    default: Any  # MISSING: the key is demanded


class Codec:
    """Reads and writes objects of one class."""

    def __init__(self, cls: type[Any]) -> None:
        hints = get_type_hints(cls, include_extras=True)
        self.cls = cls
        self.rows: list[Row] = []
        for field in fields(cls):
            (about,) = hints[field.name].__metadata__
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            self.rows.append(Row(field.name, about.key or field.name, about, default))
        self._head: dict[str, Any] = {}
        if issubclass(cls, Message):
            self._head["op"] = cls.op
            if cls.event:
                self._head["event"] = cls.event
        self._known = {row.key for row in self.rows} | self._head.keys()
        self._rest = [row.name for row in self.rows if row.field.kind is REST]
        self._steps = [
            (row.name, row.key, row.field.kind, row.default, row.field.kind is REST)
            for row in self.rows
        ]

    def read(self, raw: Mapping[str, Any], before: str) -> Any:
        """An instance, of an object of JSON.

        Args:
            before: what an error says before the field's name.

        Raises:
            Unfit: a field is missing, or not of its kind.
        """
        found = []
        for _, key, kind, default, rest in self._steps:
            if rest:
                found.append({k: v for k, v in raw.items() if k not in self._known})
            elif key in raw:
                try:
                    found.append(kind.read(raw[key]))
                except Unfit as error:
                    raise Unfit(f'{before}"{key}"{error}') from None
            elif default is MISSING:
                raise Unfit(f'{before}"{key}" is missing; it must be {kind.text}')
            else:
                found.append(default)
        return self.cls(*found)

    def write(self, message: Any) -> dict[str, Any]:
        """An object for JSON."""
        written: dict[str, Any] = {}
        for name in self._rest:  # first: its keys do not replace those of other fields
            written.update(getattr(message, name))
        written.update(self._head)
        for name, key, kind, default, rest in self._steps:
            value = getattr(message, name)
            if not rest and (default is MISSING or value != default):
                written[key] = kind.write(value)
        return written


_codecs: dict[type[Any], Codec] = {}


def codec(cls: type[Any]) -> Codec:
    """The codec of a class, made when it is first asked for."""
    found = _codecs.get(cls)
    if found is None:
        found = _codecs[cls] = Codec(cls)
    return found


def encode(message: Message) -> dict[str, Any]:
    """A message as JSON has it."""
    return codec(type(message)).write(message)


def values(message: Message) -> dict[str, Any]:
    """A message as JSON has it, without what says which one it is."""
    written = encode(message)
    del written["op"]
    return written


def read_record(cls: type[T], raw: Mapping[str, Any], what: str) -> T:
    """An instance of a class that is no message.

    Args:
        what: what an error calls it.

    Raises:
        MessageError: a field is missing, or not of its kind.
    """
    try:
        found: T = codec(cls).read(raw, f"{what}: ")
    except Unfit as error:
        raise MessageError(str(error)) from None
    return found


class Conversation(Generic[M]):
    """All messages that one side may send.

    Args:
        listener: the other side, for errors.
    """

    def __init__(self, listener: str, *classes: type[M]) -> None:
        self.listener = listener
        self.classes = classes
        self._classes = {_name(cls.op, cls.event): cls for cls in classes}

    def find(self, raw: Mapping[str, Any]) -> type[M] | None:
        """The class of a message; None if it is not one of these.

        Raises:
            MessageError: nothing says which one it is.
        """
        op = raw.get("op")
        if not isinstance(op, str):
            wrong = _misfit(op, "a text") if "op" in raw else " is missing"
            raise MessageError(f'the message\'s "op"{wrong}; {self._known}')
        event = raw.get("event", "") if op == "event" else ""
        return self._classes.get(_name(op, str(event)))

    def decode(self, raw: Mapping[str, Any]) -> M:
        """A message, of what JSON has.

        Raises:
            MessageError: it is none of these, or one of its fields is missing or wrong.
        """
        cls = self.find(raw)
        if cls is None:
            raise MessageError(f"{self.listener} knows no {raw['op'][:_SHOWN]!r}; {self._known}")
        return read_record(cls, raw, str(raw["op"]))

    @property
    def _known(self) -> str:
        return f"{self.listener} knows {', '.join(self._classes)}"


def _name(op: str, event: str) -> str:
    return f"{op} {event}" if event else op
