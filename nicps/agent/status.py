# SPDX-License-Identifier: Apache-2.0
"""What `nicps status` shows of an agent."""

from __future__ import annotations

from nicps import wire
from nicps.agent.frames import Frames
from nicps.agent.keyring import Keyring
from nicps.dataplane import DataPlane
from nicps.job import Life
from nicps.protocol import NodeState
from nicps.session.messages import MemberStatus, Status


def status_of(life: Life, frames: Frames, keys: Keyring, dataplane: DataPlane) -> Status:
    """What `nicps status` shows."""
    node, publisher = life.node, life.roles.publisher
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
        network=life.settings.network,
        name=life.settings.name,
        iface=dataplane.iface,
        xdp_mode=dataplane.mode,
        state=node.state.value,
        phase=phase,
        view=view.number,
        lead=view.lead,
        trouble=publisher.trouble,
        switch=_switch_of(life),
        other_job=publisher.other_job,
        warning=keys.doubt,
        keyed=keys.keyed,
        round=node.open_round,
        number=node.number,
        members=tuple(members),
        job=life.part.id if life.part is not None else None,
        progress=publisher.progress,
        last_job=publisher.last_job,
        token_turns=life.turns,
        fragments_sent=frames.sender.fragments,
        frames_malformed=frames.malformed,
        control_refused=dict(keys.refused),
        counters=dataplane.maps.counters(),
    )


def _switch_of(life: Life) -> str:
    """What is to be said of a Linux switch."""
    phase, told = life.node.phase_in_force, life.node.switch.describe()
    adds = phase is not None and phase.exchange.central and len(life.node.view.live) > 1
    return "adds" if adds and told == "ready" else told
