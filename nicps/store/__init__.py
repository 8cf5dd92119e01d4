# SPDX-License-Identifier: Apache-2.0
"""The store that the members of a group share, as state machines without clock and socket (docs/collective.md).

values.py    what it holds, and what each call does to it
streams.py   lines of JSON from one host to the others, over a network that loses
replica.py   one host's copy: who puts calls in order, and when they are answered
"""

from nicps.store.replica import Call, Piece, Replica
from nicps.store.values import Values

__all__ = ["Call", "Piece", "Replica", "Values"]
