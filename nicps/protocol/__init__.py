# SPDX-License-Identifier: Apache-2.0
"""The protocol as pure state machines: frames and `now` come in, actions go out.

No clock, no socket, no BPF: the same code runs under the agent and under a test's virtual time.

    formation.py   R1 to R3: who is in the network
    decision.py    node 1 decides, everybody acknowledges (R5 to R7, R14)
    ring.py        the token and the round that closes in two turns (R9 to R13)
    node.py        one member: the three above behind one set of events
    phase.py       what a decision starts
    actions.py     what the machines ask for
"""

from nicps.protocol.actions import (
    Action,
    Closed,
    Committed,
    Failed,
    Formed,
    Need,
    PhaseAgreed,
    Prepare,
    Receiver,
    Send,
    SendFragments,
)
from nicps.protocol.node import Node, NodeState
from nicps.protocol.phase import Member, Phase, Timings

__all__ = [
    "Action",
    "Closed",
    "Committed",
    "Failed",
    "Formed",
    "Member",
    "Need",
    "Node",
    "NodeState",
    "Phase",
    "PhaseAgreed",
    "Prepare",
    "Receiver",
    "Send",
    "SendFragments",
    "Timings",
]
