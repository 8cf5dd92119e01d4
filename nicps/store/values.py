# SPDX-License-Identifier: Apache-2.0
"""What the store holds. The same calls in the same order come to the same at all hosts."""

from __future__ import annotations

from collections.abc import Iterator

from nicps.errors import UsageProblem
from nicps.session.store_form import (
    MOST_AMOUNT,
    MOST_VALUE,
    WAITING,
    Answer,
    Ask,
    Value,
    pack,
    size_of,
    too_large,
    unpack,
)

MOST_BYTES = 1 << 22  # of all keys and values
_KEY_BYTES = 64  # that a key costs beside its characters
_SHOWN = 40


class Values:
    """Keys, and values in base64."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def lines(self) -> Iterator[Value]:
        """All of it."""
        return (Value(key, value) for key, value in self._values.items())

    def put(self, key: str, value: str) -> None:
        """Set a key.

        Raises:
            UsageProblem: the store is full, or the value is too large.
        """
        self._set({key: value})

    def carry_out(self, ask: Ask) -> Answer | None:
        """What comes of a call; None if it waits for keys. A call that cannot be done changes nothing."""
        try:
            return self._carry_out(ask)
        except UsageProblem as error:
            return Answer(ask.number, error=str(error))

    def _carry_out(self, ask: Ask) -> Answer | None:
        number, keys, held = ask.number, ask.keys, self._values
        missing = [key for key in keys if key not in held]
        match ask.what:
            case _ if ask.what in WAITING:
                if missing:
                    return None
                found = tuple(held[key] for key in keys) if ask.what == "get" else ()
                return Answer(number, found)
            case "check":
                return Answer(number, amount=int(not missing))
            case "count":
                return Answer(number, amount=len(held))
            case "list":
                return Answer(number, tuple(held))
            case "delete":
                self._remove(keys[0])
                return Answer(number, amount=int(not missing))
            case "set":
                self._set(dict(zip(keys, ask.values, strict=True)))
                return Answer(number)
            case "append":
                before = unpack(held.get(keys[0], ""))
                self._set({keys[0]: pack(before + unpack(ask.values[0]))})
                return Answer(number)
            case "swap":
                return Answer(number, (self._swap(keys[0], *ask.values),))
            case _:
                return Answer(number, amount=self._add(keys[0], ask.amount))

    def _swap(self, key: str, expected: str, wanted: str) -> str:
        """What is there afterwards; of a key that is missing what was expected, as TCPStore has it."""
        held = self._values.get(key, "")
        if held != expected:
            return held if key in self._values else expected
        self._set({key: wanted})
        return wanted

    def _add(self, key: str, amount: int) -> int:
        before = unpack(self._values.get(key, pack(b"0")))
        try:
            total = int(before) + amount
        except ValueError:
            raise UsageProblem(
                f"{key!r} holds {before[:_SHOWN]!r}, which is no whole number: nothing can be added to it"
            ) from None
        if not -MOST_AMOUNT - 1 <= total <= MOST_AMOUNT:
            raise UsageProblem(f"{key!r}: the sum {total} has more than 64 bits")
        self._set({key: pack(str(total).encode())})
        return total

    def _set(self, new: dict[str, str]) -> None:
        growth = 0
        for key, value in new.items():
            if (size := size_of(value)) > MOST_VALUE:
                raise too_large(key, size)
            growth += _cost(key, value)
            if key in self._values:
                growth -= _cost(key, self._values[key])
        if self._bytes + growth > MOST_BYTES and growth > 0:
            raise UsageProblem(
                f"{next(iter(new))!r}: the store is full: all keys and values together have at most {MOST_BYTES:,}"
                " bytes; delete what is not needed any more"
            )
        self._bytes += growth
        self._values.update(new)

    def _remove(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= _cost(key, value)


def _cost(key: str, value: str) -> int:
    return len(key) + size_of(value) + _KEY_BYTES
