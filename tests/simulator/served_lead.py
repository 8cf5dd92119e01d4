# SPDX-License-Identifier: Apache-2.0
"""What a simulated host of a job with parameter servers decides on for all, while it leads.

It chooses servers and where they are filled from, takes hosts back, tests, and ends, as docs/servers.md says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nicps import protocol, wire
from nicps.exchange import Exchange
from nicps.job.plan import stop, test_round
from nicps.protocol import Phase
from nicps.protocol.serving import Serving

if TYPE_CHECKING:
    from tests.simulator.served_host import ServedHost

TRAIN = wire.PhaseKind.TRAIN


class ServedLead:
    """One host's; each host has what it needs to lead."""

    def __init__(self, host: ServedHost) -> None:
        self._host = host
        self._word = 0, ""  # what its training program says, after a round
        self._read_by_all = 0
        self._reads: Mapping[int, int] = {}  # by worker, as a server was lost
        self._waiting: dict[bytes, protocol.Joiner] = {}

    # ---- what it is told

    def enter_view(self) -> None:
        """Another view is in force."""
        self._waiting = {}
        self._read_by_all = 0

    def note_waiting(self, joiner: protocol.Joiner) -> None:
        """A host has answered that can be taken back."""
        self._waiting[joiner.mac] = joiner

    def note_read(self, round_: int) -> None:
        """All have read the round."""
        self._read_by_all = round_
        self._host.later(0.0, self._act)

    def note_lost(self, reads: Mapping[int, int]) -> None:
        """A server has left, and what each worker has read is known."""
        self._reads = reads
        self._host.later(0.0, self._replace)

    def judge(self, round_: int) -> None:
        """Every program does; the lead's word counts."""
        host = self._host
        last = host.trained >= host.lan.rounds
        tests = last or host.trained % host.lan.test_every == 0
        if not host.lan.alike and not host.node.leads:
            tests |= (round_ + host.index) % 3 == 0
        self._word = round_, "test" if tests else "continue"
        host.later(0.0, self._act)

    # ---- what it does

    def decide(self, phase: Phase) -> None:
        """Propose the phase, if it leads."""
        host = self._host
        if host.node.leads:
            host.do(host.node.decide(host.clock(), phase))

    def go_on(self) -> None:
        """Everybody has the view, or a test is over: what comes next is decided, or goes on."""
        host, node = self._host, self._host.node
        if not node.leads or node.changing or not node.membership.ready:
            return
        view, phase = node.view, node.phase_in_force
        calls = len(view.live) < len(view.members) or bool(node.learners)
        node.call_hosts("job", calls=calls, closed=True)
        host.arm()
        if host.finishing:
            self.decide(Phase(0, 0, wire.PhaseKind.FINISH))
            return
        if phase is not None and phase.kind is wire.PhaseKind.TEST and node.ring is not None:
            if node.ring.round == phase.first_round:
                return  # it goes on
            if host.trained >= host.lan.rounds:
                self.decide(Phase(0, 0, wire.PhaseKind.FINISH))
                return
        elif phase is not None and phase.serving is not None and phase.sharing(view.live):
            if view.live.issuperset(phase.serving.servers):
                self._act()
            return  # or `_replace` goes on
        self._train()

    def _act(self) -> None:
        """Carry out the training program's word, once all have read what it is about."""
        host, node, (round_, what) = self._host, self._host.node, self._word
        phase = node.phase_in_force
        current = round_ == node.open_round - 1 and self._read_by_all >= round_
        if not (node.leads and current and phase is not None and phase.kind is TRAIN):
            return
        if round_ < phase.first_round or node.changing or node.ring is None or node.ring.frozen:
            return
        if what == "test":
            counted = node.view.live - node.learners
            self.decide(test_round(node.view, node.open_round + 1, counted))
        elif joiners := self._joiners():
            host.note(f"TAKES BACK {[one.name for one in joiners]}")
            host.do(node.rebuild(host.clock(), joiners))
        else:
            host.do(node.go_on(host.clock()))

    def _joiners(self) -> tuple[protocol.Joiner, ...]:
        view = self._host.node.view
        waiting = self._waiting.items()
        return tuple(one for mac, one in waiting if view.number_of(mac) not in view.live)

    def _replace(self) -> None:
        """Go on without a server that has left."""
        host, node = self._host, self._host.node
        phase = node.phase_in_force
        lost = phase is not None and phase.serving is not None
        if lost and node.leads and not node.changing and not host.finishing:
            self._train()

    def _train(self) -> None:
        """Decide on a training phase: who serves, who trains, and from whom a new server is filled."""
        host, node, lan = self._host, self._host.node, self._host.lan
        view, last = node.view, host.training
        servers = self._servers()
        workers = [k for k in view.order if k not in servers]
        if not servers or not workers:
            self.decide(stop("too few hosts are left for servers and workers"))
            return
        whole = sorted(host.whole & view.live - node.learners)
        source = max((k for k in whole if k in workers), key=self._rank, default=0)
        before = last.serving.servers if last is not None and last.serving is not None else ()
        new = servers != before or not node.learners.isdisjoint(servers)
        if host.trained and new and not source:
            self.decide(stop("nobody who is left has the parameters"))
            return
        shares = tuple(int(m.number in workers) for m in view.members)
        phase = Phase(
            0,
            0,
            TRAIN,
            first_round=node.open_round + 1,
            fragments=lan.fragments,
            last_fragments=lan.fragments,
            width=lan.plan.width,
            shares=shares,
            quorum=sum(shares),
            settings={"trained": host.trained, "whole": whole, "source": source},
            exchange=Exchange.SERVERS,
            serving=Serving(servers, lan.every, sets=lan.sets, channels=lan.channels),
        )
        self.decide(phase)

    def _rank(self, worker: int) -> tuple[int, int]:
        """The worker with the highest rank has read the newest commit; among equals it has the lowest number."""
        return self._reads.get(worker, 0), -worker

    def _servers(self) -> tuple[int, ...]:
        """The servers of the next phase. Those of the phase before stay. A spare member takes the place of a server
        that has left, as long as one worker remains; otherwise the other servers divide its part among them.
        """
        host, view, learners = self._host, self._host.node.view, self._host.node.learners
        if host.training is None or host.training.serving is None:
            return view.order[: min(host.lan.servers, len(view.order) - 1)]
        kept = host.training.serving.servers
        spare = [k for k in view.order if k not in kept]
        spare.sort(key=lambda k: (k in host.whole, k in learners, k))
        found = []
        for server in kept:
            if server in view.live:
                found.append(server)
            elif len(spare) > 1:
                found.append(spare.pop(0))
        return tuple(found)
