# SPDX-License-Identifier: Apache-2.0
"""The protocol as pure state machines: frames and `now` come in, actions go out.

No clock, no socket, no BPF: the same code runs under the agent and under a test's virtual time.

    actions.py       what the machines ask for
    signals.py       what a part reports to the part above it
    kernel.py        the XDP program as the machines know it
    offers.py        broadcast offers, which tell a round's list without the token
    phase.py         what a decision starts; waiting times
    plan.py          the rounds of a training step on each channel
    serving.py       which members are parameter servers, of which part
    partners.py      which workers pull from each other
    view.py          the member list in force, and what follows it
    token.py         the token, as its holder works on it
    progress.py      fragments that are sent again and never arrive (R16)
    fault_finder.py  what comes of reports of that
    exchange/        how the contributions of a round become one sum (R10, R11)
    digests.py       whether all hold the same weights (R19)
    open_round.py    the open round at one member: list, close, mark, commit (R11 to R13)
    announcer.py     its offers and marks, where they are broadcast
    control.py       the open round, with the token
    carried.py       what a member offers, and takes along from view to view
    goes_on.py       with servers: GO, before which nobody pushes or offers
    served.py        with servers: what a worker does between two rounds
    served_ring.py   the ring, with that
    step.py          the training step that binds several channels together
    ring_parts.py    the parts of a ring, and what others ask of them
    timers.py        retransmission, want, failure detector (R16, R17)
    ring.py          the token at one member: take it, forward it, wait for it (R9, R10, R16)
    channels.py      the ring of a phase with several channels
    early_lists.py   lists that the kernel tells of before their round is open
    restraint.py     the share of the line that urgent rounds may take
    local_host.py    this host in the network: its state, its view, its number
    rings.py         the ring in force, and that of the phase to come
    decision.py      a decision at the lead, until all have acknowledged it
    deciding.py      one member's part in decisions (R5 to R7, R14)
    departure.py     a host says that it goes (R17)
    formation.py     who is in the network (R1 to R3)
    standing.py      where a member stands, as its promise tells
    view_change.py   how one view follows another, by ballot (R17, R18)
    installation.py  a list in force is sent to everybody (R18, R19)
    backoff.py       the rejoin back-off (R20)
    readmission.py   the lead calls hosts back (R20)
    lead.py          signs of life between phases (R17)
    membership.py    one member's part in views (R3, R17 to R20)
    bystander.py     a host that comes while a job admits nobody
    switch_link.py   a Linux switch that adds: what is known of it, what it is granted
    admission.py     calls and answers (R2, R19, R20)
    inbox.py         which part a frame is for
    parts.py         the parts of a node, and what others ask of them
    node.py          all of this behind one set of events
"""

from nicps.protocol.actions import (
    Action,
    Answered,
    Called,
    Cancelled,
    Closed,
    Committed,
    Cut,
    Declined,
    Differs,
    Evicted,
    Failed,
    Installed,
    Joiner,
    Narrow,
    Need,
    NoProgress,
    NotAdded,
    NotAdmitted,
    PhaseAgreed,
    Prepare,
    Pulled,
    ReadByAll,
    Ready,
    Send,
    SendFragments,
    SendServed,
    ServerLost,
    Stepped,
    Striped,
    SwitchChanged,
)
from nicps.protocol.carried import Offer
from nicps.protocol.exchange.steps import Source
from nicps.protocol.formation import Group
from nicps.protocol.kernel import KernelState, Receiver
from nicps.protocol.node import Node, NodeState
from nicps.protocol.phase import NO_REST, Member, Phase, Rest, Timings
from nicps.protocol.switch_link import SwitchLink
from nicps.protocol.view import View

__all__ = [
    "NO_REST",
    "Action",
    "Answered",
    "Called",
    "Cancelled",
    "Closed",
    "Committed",
    "Cut",
    "Declined",
    "Differs",
    "Evicted",
    "Failed",
    "Group",
    "Installed",
    "Joiner",
    "KernelState",
    "Member",
    "Narrow",
    "Need",
    "NoProgress",
    "Node",
    "NodeState",
    "NotAdded",
    "NotAdmitted",
    "Offer",
    "Phase",
    "PhaseAgreed",
    "Prepare",
    "Pulled",
    "ReadByAll",
    "Ready",
    "Receiver",
    "Rest",
    "Send",
    "SendFragments",
    "SendServed",
    "ServerLost",
    "Source",
    "Stepped",
    "Striped",
    "SwitchChanged",
    "SwitchLink",
    "Timings",
    "View",
]
