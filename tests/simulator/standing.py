# SPDX-License-Identifier: Apache-2.0
"""Who may still go on: what each host that is there knows of the views, and whom it can tell.

A view binds its members from when it is agreed on, even where all who knew that have been killed. So only a majority of
the newest may go on: those in it, and those who can be told of it. That is who is in an older view, or was, and asks;
and who stands by, as long as somebody has the nonce that it has now. A host that has started again has another one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from nicps.protocol.view import NO_BALLOT, View
from tests.simulator.faults import member

if TYPE_CHECKING:
    from tests.simulator.host import Host
    from tests.simulator.lan import Lan


def stuck(lan: Lan) -> str:
    """Why nobody may go on, or an empty text if somebody should."""
    alone = lan.timings.alone
    members = [h for h in lan.hosts if member(h)]
    has = [h for h in lan.hosts if not h.dead and h.has_state]
    starter, life = lan.starter
    if not members and not has and starter.life > life:  # it has been killed
        return "the starter was lost before anybody had the job"
    if members and all(_hangs_alone(h) for h in members):
        return "the only training program hangs, and its host warns of that"
    newest = lan.checks.newest
    if members and alone:
        newest = max(members, key=lambda h: (h.node.view.number, h.node.view.ballot)).node.view
    elif newest is not None:
        newest = _seen_agreed(lan, newest) or newest
    if newest is None:
        return ""
    able = sorted(_able(lan, newest))
    ended = any(h.node.ended and not h.dead and _has(h, newest) for h in lan.hosts)
    if ended or newest.agreed(able, alone=alone):
        return ""  # who has heard the end tells it to all
    why = f"of view {newest.number} with {sorted(newest.live)} only {able} are left"
    untold = [k for k in newest.order if _untold(lan, newest, k)]
    return f"{why} to whom it was told" if newest.agreed([*able, *untold], alone=alone) else why


def _hangs_alone(host: Host) -> bool:
    """No other host waits for that one, so its agent does not end the program, which has the only state."""
    return len(host.node.view.live) == 1 and host.process is not None and host.process.hung


def _able(lan: Lan, view: View) -> set[int]:
    """Who of the view is in it, or can come to be."""
    there = {k: h for k in view.order if not (h := _host(lan, view, k)).dead}
    inside = {k for k, h in there.items() if member(h) and _has(h, view)}
    if not inside and not _known(lan, view):
        return inside
    before = {k: h for k, h in there.items() if h.node.view.number < view.number}
    asking = {k for k, h in before.items() if member(h) or h.node.asks}
    tellers = [_nonces(there[k], view) for k in inside | asking]
    fresh = {k: h.node.membership.fresh for k, h in before.items()}
    named = {k for k in before if any(t.get(k) == fresh[k] for t in tellers)}
    return inside | asking | named


def _nonces(host: Host, view: View) -> dict[int, int]:
    """Whom that member tells of the view unasked, or would as soon as it had it."""
    membership = host.node.membership
    if _has(host, view):
        installation = membership.installation
        return installation.nonces if installation and membership.announcing else {}
    return membership.view_change.nonces if membership.view_change else {}


def _known(lan: Lan, view: View) -> bool:
    """Whether anybody who is there has learnt of the view, or a majority of the one before can find it agreed on."""
    if any(not h.dead and (h.index, h.life) in lan.checks.knows[view.seed] for h in lan.hosts):
        return True
    base = lan.checks.before(view)
    if base is None:
        return False
    seen = _seen_agreed(lan, base)
    return base.agreed(_able(lan, base)) or (seen is not None and seen.seed == view.seed)


def _seen_agreed(lan: Lan, base: View) -> View | None:
    """What has been agreed on to follow a view, if those who are there have accepted it.

    Whoever put it to the vote had accepted it first, and counts even if it is dead.
    """
    votes: defaultdict[tuple[int, bytes], set[int]] = defaultdict(set)
    for host in filter(member, lan.hosts):
        view_change = host.node.membership.view_change
        if view_change is None or not _has(host, base) or view_change._accepted == NO_BALLOT:
            continue
        order, successor = view_change._accepted, view_change._successor
        votes[order] |= {host.node.number, base.number_of(order[1])}
        if successor is not None and base.agreed(votes[order]):
            return successor.view(base.number + 1, order[0])
    return None


def _untold(lan: Lan, view: View, number: int) -> bool:
    """Whether that member is there, and never learnt of the view, in no life."""
    host = _host(lan, view, number)
    return not host.dead and all(index != host.index for index, _ in lan.checks.knows[view.seed])


def _has(host: Host, view: View) -> bool:
    return host.node.view.seed == view.seed


def _host(lan: Lan, view: View, number: int) -> Host:
    mac = view.members[number - 1].mac
    return next(h for h in lan.hosts if h.mac == mac)
