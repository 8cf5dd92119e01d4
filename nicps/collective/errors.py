# SPDX-License-Identifier: Apache-2.0
"""What a call of a group, or a group, can fail with."""

from __future__ import annotations

from nicps.errors import JobFailed


class CollectiveFailed(JobFailed, RuntimeError):
    """A call could not be done. Unless it is a leaf that says otherwise, the group goes on.

    It is a RuntimeError too, as torch.distributed raises it.
    """


class CallMismatch(CollectiveFailed):
    """The members have called different things. All of them get this error, and the group goes on."""


class MemberLost(CollectiveFailed):
    """What a lost member would have given is needed. All others get this error, and the group goes on."""


class CallTimeout(CollectiveFailed):
    """Not all members have called in time. The group is closed at this member."""


class StoreTimeout(CollectiveFailed):
    """A call of the store was not answered in time. The store goes on."""


class StoreRefused(CollectiveFailed):
    """A call of the store cannot be done. The store goes on."""


class UnderWay(CollectiveFailed):
    """The group is under way already. `members`: in its list, with those that are lost."""

    def __init__(self, message: str, members: int) -> None:
        super().__init__(message)
        self.members = members


class GroupClosed(CollectiveFailed):
    """The group is over at this member: it was closed, cancelled, or has gone on without this host."""
