# SPDX-License-Identifier: Apache-2.0
"""What becomes of a program's groups as its process ends, and in a process that is forked.

A process can end while a thread of a group is at work. The interpreter stops such a thread where it is, and where that
is in the middle of PyTorch the process aborts. So groups are left, and their threads ended, before.

A forked process (a worker of a DataLoader, say) has copies of all descriptors. A connection is at its end for the agent
once all copies are closed: if the workers kept theirs, the others would wait for a program that was killed.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


class Owned(Protocol):
    """A group, as its process owns it."""

    def give_up(self) -> None:
        """The process ends: if the group was not closed, the others go on without it."""

    def disown(self) -> None:
        """This process was forked: the group is the other one's. A lock may be held by a thread that is not here."""


_groups: WeakSet[Owned] = WeakSet()
#: What is called once the groups are left: threads that have waited for their calls end then.
afterwards: list[Callable[[], None]] = []


def note(group: Owned) -> None:
    """This process is in that group."""
    _groups.add(group)


def _give_up() -> None:
    for group in tuple(_groups):
        group.give_up()
    for each in afterwards:
        each()


def _disown() -> None:
    for group in tuple(_groups):
        group.disown()


# Once this is imported: what a script registers after that, which may close the group, is called before.
atexit.register(_give_up)
os.register_at_fork(after_in_child=_disown)
