# SPDX-License-Identifier: Apache-2.0
"""Collectives over NumPy vectors of any length, between programs on the hosts of one network (docs/collective.md).

group = Group.form(size=4)                  # the same program on four hosts, each beside its agent
total = group.all_reduce(vector).result()   # every call returns a future
group.close()

errors.py     what a call or a group can fail with
kinds.py      types of numbers, and what can be done with them
lanes.py      numbers as lanes of fragments, and back
feedback.py   the same in narrow lanes, with what rounding leaves over
link.py       the connection to the agent: rounds on each channel
directly.py   which calls are made without the agents
store.py      keys and values that the members share
rounds.py     vectors of any length in rounds, the same list of members in all of them
calls.py      what is called, and how it is done in rounds
attempts.py   a call, begun again as members leave in its middle
channels.py   a thread for each channel, which carries calls out in order
operations.py  the calls, as a program makes them
group.py      the members, and calls of all on all channels
endings.py    what becomes of a group as its process ends, and in processes that it forks
admission.py  members that come late, or come back
"""

from nicps.collective.errors import (
    CallMismatch,
    CallTimeout,
    CollectiveFailed,
    GroupClosed,
    MemberLost,
    StoreRefused,
    StoreTimeout,
    UnderWay,
)
from nicps.collective.group import Group
from nicps.collective.kinds import OPERATIONS

__all__ = [
    "OPERATIONS",
    "CallMismatch",
    "CallTimeout",
    "CollectiveFailed",
    "Group",
    "GroupClosed",
    "MemberLost",
    "StoreRefused",
    "StoreTimeout",
    "UnderWay",
]
