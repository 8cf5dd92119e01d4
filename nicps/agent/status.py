# SPDX-License-Identifier: Apache-2.0
"""What `nicps status` shows of an agent."""

from __future__ import annotations

from nicps import wire
from nicps.agent.flows import FlowWatch
from nicps.agent.frames import Frames
from nicps.agent.keyring import Keyring
from nicps.agent.tally import BOUNDS, Tally
from nicps.agent.waits import Host, Waits, find_late
from nicps.dataplane import DataPlane
from nicps.dataplane.interface import read_traffic
from nicps.job import Life
from nicps.protocol import Node, NodeState
from nicps.session.activity import Activity, MemberActivity, Seconds, SlowActivity, Traffic
from nicps.session.messages import MemberStatus, Status


def status_of(
    life: Life,
    frames: Frames,
    keys: Keyring,
    dataplane: DataPlane,
    tally: Tally,
    flows: FlowWatch,
    waits: Waits,
    preparing: str,
    now: float,
    run: str | None = None,
) -> Status:
    """What `nicps status` shows.

    Args:
        preparing: the submission that is not in the network yet.
        run: the run of `nicps run`, once its scripts have begun.
    """
    note_pushes(life, tally)
    node, publisher, part = life.node, life.roles.publisher, life.part
    runs = run is not None and (part is None or part.job.group)  # the group is that of its scripts
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
                role=_role_of(node, member.number),
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
        job=run if runs or part is None else part.id,
        progress=publisher.progress,
        last_job=publisher.last_job,
        token_turns=life.turns,
        fragments_sent=frames.sender.fragments,
        frames_malformed=frames.malformed,
        control_refused=dict(keys.refused),
        counters=dataplane.maps.counters(),
        activity=_activity_of(
            node,
            frames,
            dataplane,
            tally,
            flows,
            waits,
            preparing,
            now,
            script=runs or (part is not None and part.job.script),
        ),
    )


def _activity_of(
    node: Node,
    frames: Frames,
    dataplane: DataPlane,
    tally: Tally,
    flows: FlowWatch,
    waits: Waits,
    preparing: str,
    now: float,
    *,
    script: bool,
) -> Activity:
    """The counts, and the members that are waited for."""
    ring, phase, traffic = node.ring, node.phase_in_force, read_traffic(dataplane.iface)
    waits_for = frozenset(find_late(node)).union(
        *(flows.awaited(channel) for channel in range(1, len(node.rounds)))
    )
    return Activity(
        uptime_s=now - tally.began,
        exchange=phase.exchange.among(len(node.view.live)).name if phase and ring else "",
        lane=f"i{phase.width}" if phase and ring and phase.width else "",
        rounds=tally.rounds,
        tests=tally.tests,
        samples=tally.samples,
        round_seconds=Seconds(BOUNDS, tuple(tally.round_counts), tally.round_seconds),
        views=tally.views,
        evictions=tally.evictions,
        returns=tally.returns,
        parked=ring is not None and ring.holding and ring.parked,
        frames_sent=frames.sender.small + frames.sender.fragments,
        fragments_resent=frames.sender.again,
        fragments_asked=tally.asked_of.total(),
        members=tuple(
            MemberActivity(
                member.number,
                member.number in waits_for,
                tally.samples_of[member.mac],
                tally.asked_of[member.mac],
                tally.resent_to[member.mac],
            )
            for member in node.members
        ),
        traffic=Traffic(*traffic) if traffic is not None else None,
        preparing=preparing,
        script=script,
        pushes=tally.pushes,
        channels=flows.activity(),
        slow=tuple(
            SlowActivity(_number_of(node, of.host), of.part, of.what.value) for of in waits.slow()
        ),
        switch_asked=tally.asked_of[wire.SWITCH],
        switch_resent=tally.resent_to[wire.SWITCH],
    )


def note_pushes(life: Life, tally: Tally) -> None:
    """With parameter servers most samples are in pushes, between the rounds that count: count those of this host."""
    part, number = life.part, life.node.number
    phase = part.served.phase if part is not None else None
    if part is not None and phase is not None and phase.shares[number - 1]:
        mac = life.node.members[number - 1].mac
        tally.note_pushes(part.id, part.finish.pushes, phase.shares[number - 1], mac)


def _role_of(node: Node, number: int) -> str:
    """What a member does in a job with parameter servers, as far as this host knows."""
    phase = node.phase_in_force
    if phase is None or phase.serving is None or number not in node.view.live:
        return ""
    return "server" if number in phase.serving.servers else "worker"


def _number_of(node: Node, host: Host) -> int:
    """The number of the member with that MAC address; 0: it is a Linux switch."""
    return next((m.number for m in node.members if m.mac == host), 0)


def _switch_of(life: Life) -> str:
    """The status line of a Linux switch."""
    phase, told = life.node.phase_in_force, life.node.switch.describe()
    adds = phase is not None and phase.exchange.central and len(life.node.view.live) > 1
    return "adds" if adds and told == "ready" else told
