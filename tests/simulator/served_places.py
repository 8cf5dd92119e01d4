# SPDX-License-Identifier: Apache-2.0
"""Frames of servers, and the memory that a kernel has for them (docs/servers.md).

A step is one token, and parameters are the steps that are in them, each with its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.simulator.places import KernelFrame

Token: TypeAlias = tuple[str, int]  # of a step: whose, and the how manieth
Weight: TypeAlias = tuple[str, int]  # "push" and its staleness, or "mean" and of how many
Content: TypeAlias = Mapping[Token, Weight]  # never changed, but replaced
NOTHING: Content = {}


@dataclass(slots=True)
class ServedFrame(KernelFrame):
    """A frame of servers. `content`: of HELD."""

    number: int
    index: int
    version: int = 0
    members: int = 0
    staleness: int = 0
    reason: int = 0
    token: Token = ("", 0)
    content: Content = field(default_factory=dict)


@dataclass(slots=True)
class Home:
    """A push fragment's place at its server. `index`: of the fragment."""

    index: int
    content: Content = field(default_factory=dict)
    claimed: bool = False
    sums: Content = field(default_factory=dict)
    tag: int = 0
    seen: int = 0
    members: int = 0
    due: bool = False
    last: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Stored:
    """Parameters that a worker has pulled; `rest`: round and version."""

    content: Content = field(default_factory=dict)
    tag: int = 0
    rest: tuple[int, int] = (0, 0)


class Part:
    """The homes of one server, filled from `contents` (by push fragment).

    `name` tells one part from another; `since`, the first round of the phase that it was made for.
    """

    def __init__(
        self, name: int, since: int, indices: range, contents: Mapping[int, Content]
    ) -> None:
        self.name, self.since, self.indices = name, since, indices
        self.homes = {index: Home(index, contents[index]) for index in indices}
