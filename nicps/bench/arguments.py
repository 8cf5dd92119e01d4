# SPDX-License-Identifier: Apache-2.0
"""The values of the benchmarks' options: values that can be measured, and that fit this machine."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from nicps.errors import UsageProblem
from nicps.lab.settings import MOST_HOSTS
from nicps.lab.shield import orderly

Run = Callable[[argparse.Namespace], int]
T = TypeVar("T")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """For `type=`: a whole number from `least` to `most`; `1e9` is one too."""

    def parse(text: str) -> int:
        number = _number(text)
        high = math.inf if most is None else most
        if not number.is_integer() or not least <= number <= high:
            span = f"from {least} on" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"takes a whole number {span}, not {text!r}")
        return int(text) if text.strip().isdecimal() else int(number)

    return parse


def several(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """For `type=`: values that `parse` takes, with commas."""
    return lambda text: tuple(parse(part) for part in text.split(","))


def host_count(least: int = 2, besides: int = 0) -> Callable[[str], int]:
    """For `--hosts`: as many as fit a lab that has so many other hosts `besides`."""
    return whole(least, MOST_HOSTS - besides)


def duration(text: str) -> float:
    """For `type=`: a time above zero."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"takes seconds, more than 0, not {text!r}")
    return number


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For `type=`: some of the known names, with commas."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(name for name in text.split(",") if name)
        if not given or set(given) - set(known):
            raise argparse.ArgumentTypeError(f"takes some of {','.join(known)}, not {text!r}")
        return given

    return parse


def as_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For `type=`: `parse`, whose UsageProblem becomes the option's error."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageProblem as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def free_memory() -> int:
    """Bytes that this machine has free, as the kernel estimates them."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return (
        int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


def need_memory(size: float, what: str) -> None:
    """Refuse sizes that do not fit the memory: the kernel would end processes of others, too.

    Raises:
        UsageProblem: it is more than this machine has free.
    """
    free = free_memory()
    if size > free:
        raise UsageProblem(_too_much(what, size, free, "memory"))


def need_disk(size: float, what: str) -> None:
    """The same for the disk of temporary files."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise UsageProblem(_too_much(what, size, free, f"space in {tempfile.gettempdir()}"))


def _too_much(what: str, size: float, free: int, of: str) -> str:
    return f"{what} needs {size / 1e9:.3g} GB of {of}, and {free / 1e9:.3g} GB are free: give less"


def _number(text: str) -> float:
    """The number; NaN if the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def in_order(run: Run) -> Run:
    """A benchmark that removes its labs and processes in whatever way the user ends it."""

    def measure(args: argparse.Namespace) -> int:
        with orderly():
            return run(args)

    return measure
