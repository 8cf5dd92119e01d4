# SPDX-License-Identifier: Apache-2.0
"""The protocol as pure state machines: frames and `now` come in, actions go out.

No clock, no socket, no BPF: the same code runs under the agent and under a test's virtual time.

    formation.py   R1 to R3: who is in the network
    view.py        the member list in force, and what follows it
    succession.py  how one view follows another, by ballot (R17, R18)
    decision.py    the lead decides, everybody acknowledges (R5 to R7, R14)
    ring.py        the token and the round that closes in two turns (R9 to R13, R16)
    node.py        one member: all of these behind one set of events
    phase.py       what a decision starts
    actions.py     what the machines ask for
"""

from nicps.protocol.actions import (
    Action,
    Answered,
    Closed,
    Committed,
    Cut,
    Differs,
    Failed,
    Installed,
    Joiner,
    Need,
    PhaseAgreed,
    Prepare,
    Ready,
    Receiver,
    Rekeyed,
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
    "Differs",
    "Failed",
    "Installed",
    "Joiner",
    "Member",
    "Need",
    "Node",
    "NodeState",
    "Phase",
    "PhaseAgreed",
    "Prepare",
    "Ready",
    "Receiver",
    "Rekeyed",
    "Send",
    "SendFragments",
    "Struck",
    "Timings",
    "View",
]
