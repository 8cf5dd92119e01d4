# SPDX-License-Identifier: Apache-2.0
"""What `nicps status` shows of an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nicps import wire
from nicps.protocol import NodeState
from nicps.session.messages import MemberStatus, Status

if TYPE_CHECKING:
    from nicps.agent.agent import Agent


def status_of(agent: Agent) -> Status:
    """What `nicps status` shows."""
    node = agent.node
    ring = node.ring
    phase = node.phase.kind.name.lower() if node.phase is not None and ring else ""
    view = node.view
    members = []
    for member in node.members:
        state = "left" if member.number not in view.live else "standby"
        if node.state is NodeState.MEMBER and member.number in view.live:
            state = phase or "member"
            if ring is not None and ring.token is not None and phase == "train":
                line = ring.token.lines[member.number - 1]
                state = "sent" if line.settled else "computing"
        members.append(
            MemberStatus(
                member.number,
                wire.mac_text(member.mac),
                member.name,
                state,
                is_self=member.number == node.number,
            )
        )
    return Status(
        network=agent.settings.network,
        name=agent.settings.name,
        iface=agent.settings.iface,
        xdp_mode=agent.dataplane.mode,
        state=node.state.value,
        phase=phase,
        view=view.number,
        lead=view.lead,
        trouble=agent.trouble,
        warning=agent.keys.doubt,
        keyed=agent.keys.keyed,
        round=node.open_round,
        number=node.number,
        members=tuple(members),
        job=agent.job.id if agent.job is not None else None,
        progress=agent.progress,
        last_job=agent.last_job,
        token_turns=agent.frames.turns,
        fragments_sent=agent.frames.sender.fragments,
        frames_malformed=agent.frames.malformed,
        control_refused=dict(agent.keys.refused),
        counters=agent.dataplane.counters(),
    )
