# SPDX-License-Identifier: Apache-2.0
"""802.1p tags: a frame's priority, as a hint for switches (docs/channels.md, "Order on the wire").

They are of no network (VID 0). The XDP program takes them off, and nobody reads the priority: a frame's channel
is in its header.
"""

from __future__ import annotations

import struct

from nicps.layout import layout

_TPID = 0x8100
_SHIFT = 13
#: By urgency. 1 is below 0, which frames without a tag have, and 7 is of control frames.
_PRIORITIES = (0, 2, 3, 4, 5, 6, 6, 6)
#: Bytes that a tag adds to a frame.
BYTES = 4
PRIORITIES = 8


def control() -> int:
    """The priority of tokens and control frames."""
    return layout().limits["PRIORITY_CONTROL"]


def of_urgency(urgency: int) -> int:
    """The priority of frames of that urgency, 0 to 7."""
    return _PRIORITIES[urgency]


def tag(priority: int) -> bytes:
    """What stands before the EtherType."""
    return struct.pack(">HH", _TPID, priority << _SHIFT)
