# SPDX-License-Identifier: Apache-2.0
"""What a worker's kernel does with a partner's question (nicps_hand_over), and what must hold of the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nicps.protocol.serving import per_push
from nicps.wire import Refusal

if TYPE_CHECKING:
    from tests.simulator.served_host import ServedHost
    from tests.simulator.served_places import ServedFrame
    from tests.simulator.servers import ServersKernel


def hand_over(kernel: ServersKernel, frame: ServedFrame) -> Iterator[None]:
    """Pass on what was pulled in the frame's round."""
    stored = kernel.store[frame.index]
    yield  # CHECKED
    if not stored.tag or stored.rest[0] != frame.round:
        kernel.answer(frame, reason=Refusal.ABSENT)
        return
    content, version = stored.content, stored.rest[1]
    check(kernel.host, frame)
    kernel.passed_on += 1
    kernel.answer(frame, version, content=content)


def check(host: ServedHost, frame: ServedFrame) -> None:
    """11: what a partner passes on is what the server would have answered in that round."""
    lan, view = host.lan, host.node.view
    index = frame.index // per_push(lan.plan.width)
    for server in lan.hosts:
        part, there = server.servers.part, server.node.view.number == view.number
        if server.dead or not there or part is None or index not in part.homes:
            continue
        home, settled = part.homes[index], server.servers.settled
        if server.servers.round != frame.round or part.since > frame.round:
            continue
        due = home.due and home.tag & 0xFFFFFFFF <= settled
        expected = {**home.content, **home.sums} if due else home.content
        if dict(host.servers.store[frame.index].content) != dict(expected):
            lan.checks.fail(
                f"11: {host.name} passes on fragment {frame.index} of round {frame.round}, which {server.name} has"
                " otherwise"
            )
