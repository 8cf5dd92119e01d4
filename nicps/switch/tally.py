# SPDX-License-Identifier: Apache-2.0
"""The answers of members about their list: a majority of a list's own members puts it in force."""

from __future__ import annotations

from typing import Generic, TypeVar

from nicps.protocol.view import View

K = TypeVar("K")
T = TypeVar("T")


class Tally(Generic[K, T]):
    """Answers by list, each with its further value; a member's first answer counts."""

    def __init__(self) -> None:
        self._answers: dict[K, dict[int, T]] = {}

    def add(self, name: K, view: View, number: int, value: T) -> dict[int, T] | None:
        """A live member of the list answers.

        Args:
            name: no other list has it.

        Returns: all answers with this list, by member, once they are a majority of it (`View.agreed`).
        """
        self._answers.setdefault(name, {}).setdefault(number, value)
        return self.agreed(name, view)

    def agreed(self, name: K, view: View) -> dict[int, T] | None:
        """The answers with this list so far."""
        heard = self._answers.get(name, {})
        return dict(heard) if view.agreed(heard) else None

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()
