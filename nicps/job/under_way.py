# SPDX-License-Identifier: Apache-2.0
"""A group or a run that is under way, as its hosts name it to hosts that stand by (R20, docs/collective.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_RUN = "run "
_TEXT = re.compile(r"group (.+) \(size ([0-9]{1,2}), members ([1-9][0-9]?)\)")


@dataclass(frozen=True, slots=True)
class UnderWay:
    """In a call it takes the place of a job's name; a job's name has no blanks.

    `size`: the size that its programs have asked for; `members`: the number in its list, lost ones included.
    """

    name: str
    size: int
    members: int

    def __str__(self) -> str:
        return f"group {self.name} (size {self.size}, members {self.members})"

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Read it; None: the text is a job's name."""
        found = _TEXT.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3])) if found is not None else None

    def is_for(self, name: str, size: int) -> bool:
        """Whether it is the group of a program that waits for one of that name and size."""
        return name == self.name and size in (0, self.size, self.members)


def name_run(job: str) -> str:
    """How hosts name a run of `nicps run` to one that calls for a job."""
    return f"{_RUN}{job}"


def is_run(text: str) -> bool:
    """Whether it is the name of a run."""
    return text.startswith(_RUN)
