# SPDX-License-Identifier: Apache-2.0
"""The parser of a command line: its errors take one line, and name what is unknown and what is spelt like it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from nicps.errors import UsageProblem

_NUMBER = re.compile(r"-\.?\d")


class OneLineParser(argparse.ArgumentParser):
    """A parser that refuses what it does not know itself, so that the error is that of the sub-command.

    Attributes: `beside_unknown`, what is said beside unknown options, and the option without which it is not said
    (empty: always).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        # Python 3.14 has suggestions of its own, 3.11 has none: these are ours.
        self.suggest_on_error = False
        self.beside_unknown = ("", "")
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of them: none is left over, and the list of those is empty."""
        self._words = list(sys.argv[1:] if args is None else args)
        found, left = super().parse_known_args(self._words, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """End the program with one line. Unknown options go before what else is wrong, as they may be its cause."""
        if unknown := list(dict.fromkeys(self._unknown_options())):
            message = f"unrecognized arguments: {' '.join(unknown)}"
            near = dict.fromkeys(filter(None, (self._option_like(name) for name in unknown)))
            also, needed = self.beside_unknown
            if near:
                message += f": did you mean {', '.join(near)}?"
            if also and (not needed or needed in self._words):
                message += f" {also[:1].upper()}{also[1:]}" if near else f": {also}"
        line = f"nicps: error: {message} (see `{self.prog} --help`)\n"
        self.exit(UsageProblem.exit_code, line)

    def _unknown_options(self) -> Iterator[str]:
        """In front of `--`, and of the first positional where all that follows it is another's."""
        passes_on = any(
            each.nargs in (argparse.REMAINDER, argparse.PARSER) for each in self._actions
        )
        values = 0.0
        for word in self._words:
            if word == "--":
                return
            name, joined, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is not None:
                values = 0 if joined else _most_values(action)
            elif _is_option(word):
                yield name
                values = 0
            elif values <= 0 and passes_on:
                return
            else:
                values -= 1

    def _option_like(self, name: str) -> str | None:
        options = {option.lstrip("-"): option for option in self._option_string_actions}
        near = _near(name.lstrip("-"), options)
        return options[near] if near is not None else None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = _near(
                str(value), (each for each in action.choices or () if isinstance(each, str))
            )
            if near is None:
                raise
            said = f"invalid choice: {value!r}: did you mean {near!r}?"
            raise argparse.ArgumentError(action, said) from error


def _is_option(word: str) -> bool:
    """As argparse sees it."""
    return word.startswith("-") and word != "-" and " " not in word and not _NUMBER.match(word)


def _most_values(action: argparse.Action) -> float:
    if isinstance(action.nargs, int):
        return action.nargs
    return 1 if action.nargs in (None, argparse.OPTIONAL) else float("inf")


def _near(word: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(known), 1)), None)
