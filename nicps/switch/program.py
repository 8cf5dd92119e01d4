# SPDX-License-Identifier: Apache-2.0
"""Our P4 program: its path, and the numbers and names in its text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from nicps.errors import EnvironmentProblem

_PACKAGE = Path(__file__).resolve().parent.parent
_DEFINE = re.compile(r"^#define NICPS_(\w+) (\d+)", re.MULTILINE)


def folder() -> Path:
    """The folder of the P4 sources: the checkout's `p4/`, else the packaged copy `nicps/_p4`.

    Raises:
        EnvironmentProblem: neither exists.
    """
    for candidate in (_PACKAGE.parent / "p4", _PACKAGE / "_p4"):
        if (candidate / "nicps.p4").is_file():
            return candidate
    raise EnvironmentProblem(f"the P4 program is not beside {_PACKAGE}: install nicps again")


def compiled() -> Path:
    """The program as p4c has compiled it for `simple_switch`: nicps.json."""
    return folder() / "nicps.json"


@cache
def numbers() -> dict[str, int]:
    """The plain numbers of include/nicps_state.p4 by name: multicast groups, sizes, reasons."""
    text = (folder() / "include" / "nicps_state.p4").read_text()
    return {name: int(value) for name, value in _DEFINE.findall(text)}


@cache
def reasons() -> tuple[str, ...]:
    """The names that the counter `frames` counts, in order: `switched`, `control`, `token`, ..."""
    count = numbers()["COUNTERS"]
    named = {v: k for k, v in numbers().items() if k.startswith("COUNT_")}
    return tuple(named[place].removeprefix("COUNT_").lower() for place in range(count))
