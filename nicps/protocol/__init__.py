# SPDX-License-Identifier: Apache-2.0
"""The protocol as pure state machines: frames and `now` come in, actions go out.

No clock, no socket, no BPF: the same code runs under the agent and under a test's virtual time.

    formation.py     R1 to R3: who is in the network
    view.py          the member list in force, and what follows it
    succession.py    how one view follows another, by ballot (R17, R18)
    installation.py  a list in force is told to everybody (R18, R19)
    decision.py      the lead decides, everybody acknowledges (R5 to R7, R14)
    phase.py         what a decision starts; waiting times
    token.py         the token, as its holder works on it
    round.py         the open round at one member (R11 to R13)
    holder.py        what the holder of the token does (R9 to R13)
    ring.py          taking the token, waiting for it, repeating it (R10, R16, R17)
    returns.py       who comes back again and again waits (R20)
    host.py          one host: what the next three share
    deciding.py      its part in decisions
    membership.py    its part in views: joining, changing, coming back (R17 to R20)
    node.py          all of this behind one set of events
    actions.py       what the machines ask for
"""

from nicps.protocol.actions import (
    Action,
    Answered,
    Closed,
    Committed,
    Cut,
    Declined,
    Differs,
    Failed,
    Installed,
    Joiner,
    Need,
    NotAdded,
    PhaseAgreed,
    Prepare,
    Ready,
    Receiver,
    Send,
    SendFragments,
    Struck,
)
from nicps.protocol.node import Node, NodeState
from nicps.protocol.phase import Member, Phase, Timings
from nicps.protocol.view import View

__all__ = [
    "Action",
    "Answered",
    "Closed",
    "Committed",
    "Cut",
    "Declined",
    "Differs",
    "Failed",
    "Installed",
    "Joiner",
    "Member",
    "Need",
    "Node",
    "NodeState",
    "NotAdded",
    "Phase",
    "PhaseAgreed",
    "Prepare",
    "Ready",
    "Receiver",
    "Send",
    "SendFragments",
    "Struck",
    "Timings",
    "View",
]
