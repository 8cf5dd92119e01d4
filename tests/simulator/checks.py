# SPDX-License-Identifier: Apache-2.0
"""The invariants, looked at after every step of a simulation.

- All members of a view that have applied a round hold the same weights.
- A committed sum holds every counted gradient exactly once, and nothing else; a round is committed in one way only.
- No two members own the same token.
- One successor a view: no two views of one number, so no two that both commit.
- A switch keeps a sum until all members have it.
- What a host acknowledges it has: the model that training begins with is the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.protocol import Committed, Differs, Failed, Installed, NodeState, Phase, View
from nicps.protocol.phase import ROUND_KINDS
from nicps.protocol.view import Successor
from tests.simulator import endings
from tests.simulator.lan import INSTALL, kind_of
from tests.simulator.program import SWITCH_UNITS, State
from tests.simulator.sums import SumChecks
from tests.simulator.switch import Of

if TYPE_CHECKING:
    from tests.simulator.host import Host
    from tests.simulator.lan import Lan
    from tests.simulator.program import Program
    from tests.simulator.served_checks import ServedChecks


Branch = bytes


class Violation(AssertionError):
    """An invariant does not hold."""


class Checks:
    """What has happened, as far as the invariants need it.

    Where one of two may go on alone both may: then everything holds within a view only.
    """

    def __init__(self, lan: Lan) -> None:
        self.lan = lan
        self.commits: dict[tuple[Branch, int], tuple[Any, ...]] = {}  # round -> what was counted
        self.units: dict[tuple[Branch, int, int], int] = {}  # round, member -> of its gradient
        self.weights: dict[tuple[Branch, int], str] = {}  # round -> weights after it
        self.views: dict[tuple[Branch, int], tuple[Any, ...]] = {}
        self.owners: dict[tuple[Branch, int, int, int], int] = {}  # view, generation, hop -> host
        self.knows: defaultdict[bytes, set[tuple[int, int]]] = defaultdict(set)  # `known`
        self.newest: View | None = None  # of all that are known to have been agreed on anywhere
        self.states: dict[str, State] = {}  # by the digest that programs tell
        self.sums = SumChecks(self)
        self.served: ServedChecks  # where the job has parameter servers
        self.trained = 0  # rounds of training that somebody has applied
        self.tampered: set[int] = set()  # the hosts whose weights a test has changed, by index
        self.moved: list[Host] = []  # their nodes have done something since `step`
        self._roomy: dict[Host, tuple[object, ...]] = {}  # with this they had room

    def branch(self, host: Host) -> Branch:
        """What must be the same for two hosts to be held against each other."""
        return host.node.view.seed if self.lan.timings.alone else b""

    def fail(self, what: str) -> None:
        """Stop the simulation."""
        self.lan.note(f"VIOLATION {what}")
        raise Violation(what)

    # ---- what goes out and comes in

    def value(self, sender: int, round_: int, index: int) -> int:
        """What a member's fragment adds: distinct by member, round and fragment."""
        return 1 << (sender * 3) | (round_ * 7919 + index) % 5

    def fragments(self, taker: Host, view: int, round_: int) -> int:
        """Fragments in a contribution of that round, as the frame would say."""
        for host in (taker, *self.lan.hosts):
            ring = host.node.ring
            if ring is not None and host.node.view.number == view:
                return ring.phase.fragments_in(round_)
        return -1

    def sent(self, host: Host, frame: wire.Frame) -> None:
        """A frame leaves a host: a token that it hands on was its own."""
        header, body = frame.header, frame.body
        if isinstance(body, wire.View) and body.step == wire.ViewStep.INSTALL:
            self.known(host, _listed(frame))
        if isinstance(body, wire.Token) and not header.flags & wire.Flag.REPEAT:
            self.owned(host, header.view, body)

    def owned(self, host: Host, view: int, token: wire.Token) -> None:
        """A host, or its kernel, makes this token: only one may."""
        key = (self.branch(host), view, token.generation, token.hop)
        owner = self.owners.setdefault(key, host.index)
        if owner != host.index:
            self.fail(f"token {key} was made by h{owner + 1} and by h{host.index + 1}")

    # ---- views

    def installed(self, host: Host, action: Installed) -> None:
        """A view is in force at a host."""
        view, branch = action.view, self.branch(host)
        if action.phase is not None and action.phase.kind is wire.PhaseKind.TRAIN:
            self.unit_of(action.phase)
        self.known(host, view)
        what = (view.members, view.live, view.lead, view.seed, host.node.open_round)
        if self.views.setdefault((branch, view.number), what) != what:
            before = self.views[branch, view.number]
            self.fail(f"view {view.number} is {before} and, at {host.node.name}, {what}")

    def known(self, host: Host, view: View) -> None:
        """A host has learnt that this view was agreed on, whether it is in it or not; by the view's seed."""
        self.knows[view.seed].add((host.index, host.life))
        if self.newest is None or view.number >= self.newest.number:
            self.newest = view

    def told(self, host: Host, data: bytes) -> None:
        """A list in force has come to a host: it counts for whom it is for, by its nonce."""
        if kind_of(data) == INSTALL:
            frame = wire.unpack(data)
            assert isinstance(frame.body, wire.View)
            if frame.body.nonce == host.node.membership.fresh:
                self.known(host, _listed(frame))

    def before(self, view: View) -> View | None:
        """The view that this one was agreed on in, if it was in force anywhere."""
        found = self.views.get((b"", view.number - 1))
        if found is None:
            return None
        members, live, lead, seed, _ = found
        return View(view.number - 1, members, live, lead, 0, seed)

    def failed(self, host: Host, action: Failed) -> None:
        """Who departs ends the job only where nobody else is there."""
        departs = ("was killed", "has left", "not moved", "once more")
        departs = any(why in action.reason for why in departs)
        if departs and len(host.node.view.live) > 1:
            self.fail(f"{host.node.name} ends the job: {action.reason}")

    # ---- rounds

    def unit_of(self, phase: Phase) -> None:
        """Where hosts add they begin with a unit of theirs: a switch's is as coarse as the gradients are large."""
        exchange = phase.exchange
        if not (exchange.shared_step or exchange.absolute) and phase.unit >= SWITCH_UNITS[0]:
            self.fail(f"phase {phase.number} begins with a switch's unit, {phase.unit}")

    def in_time(self, host: Host, commit: Committed, prepared: Phase | None) -> None:
        """Training programs drop a commit of a phase that they have left."""
        if prepared is None or prepared.number <= commit.phase.number:
            return
        if prepared.kind in ROUND_KINDS:
            self.fail(
                f"round {commit.round} of {commit.phase.kind.name} is committed at {host.node.name}, "
                f"which has prepared {prepared.kind.name} {prepared.number}"
            )

    def decided_before(self, host: Host, commit: Committed) -> None:
        """R14: the lead lets no round be committed before its program has judged the one before."""
        node, phase, round_ = host.node, commit.phase, commit.round
        before, view = host.last_commit, node.view.number
        host.last_commit = view, phase.number, round_, node.leads
        led = {(v, phase.number, round_ - 1, True) for v in (view - 1, view)}  # all the time
        trains = node.leads and phase.kind is wire.PhaseKind.TRAIN
        if trains and before in led and host.judged < round_ - 1:
            self.fail(f"round {round_} is committed, {round_ - 1} not decided on")

    def last_trained(self, host: Host, commit: Committed) -> int:
        """The last round that the state of a host must have after that commit."""
        return commit.round

    def saved(self, host: Host, program: Program) -> None:
        """A lead has its state saved: no round has counted that is not in it."""
        if program.state.last < host.committed:
            self.fail(
                f"{host.node.name} saves the state after round {program.state.last}, and round "
                f"{host.committed} has counted"
            )

    def can_read(self, host: Host, is_open: bool) -> None:
        """What a host hands out is open."""
        if not is_open:
            self.fail(f"{host.node.name} hands out what it has closed")

    def has_room(self, host: Host, blocks: int) -> None:
        """The kernel can take all fragments of the phase in force, or of the one that is prepared."""
        node, part = host.node, host.part
        ring = node.rings.coming or node.rings.current
        if ring is None:
            return
        stripes = host.kernel.stripes
        makes = part is not None and not part.accumulators.memory.places
        what = ring, blocks, stripes.records, stripes.places, makes
        if what == self._roomy.get(host):
            return
        if node.changing or node.phase is None:
            return
        phase = ring.phase
        if phase.exchange.absolute and part is not None and part.accumulators.refused:
            return  # another phase is on its way
        there, needed = [blocks], [1 if phase.exchange.absolute else phase.blocks]
        if n := len(phase.aggregators(node.view.live)):
            places = stripes.places.blocks * stripes.places.per_block
            there = [stripes.records.room, places]
            needed = [phase.fragments, -(-phase.fragments // n)]
            if phase.exchange.central:
                needed[1] = 0
            if makes:
                needed[1] = 0  # they are being made
        if all(have >= need for have, need in zip(there, needed, strict=True)):
            self._roomy[host] = what
            return
        dropped = node.phase.number > phase.number  # another phase is being prepared
        if not dropped:
            self.fail(
                f"{node.name} has {there} blocks for {phase.kind.name} {phase.number}, not {needed}"
            )

    def offered(self, host: Host, round_: int, unit: int) -> None:
        """A gradient of a training phase is ready, in multiples of 2 to the `unit`."""
        self.units[self.branch(host), round_, host.node.number] = unit

    def replaced(self, before: Of, by: Of) -> None:
        """A switch gives the slot of a sum to another one: no member may lack it, unless its round has been dropped."""
        if before[:2] != by[:2]:
            return
        view, round_, index = before
        for host in self.lan.hosts:
            node = host.node
            if host.dead or (node.view.number, node.open_round) != (view, round_):
                continue
            if node.number in node.view.live and index not in host.kernel.taken.get(
                (view, round_, 0), ()
            ):
                self.fail(f"{node.name} lacks sum {index} of round {round_}, whose slot is taken")

    def left_in_a_step(self, host: Host, phase: Any) -> None:
        """A program is called away between two rounds of a step: only where its host is out of the view."""
        if host.node.number not in host.node.learners:
            self.fail(f"{host.node.name} is sent into {phase.kind} in the middle of a step")

    def total(self, round_: int, counted: Mapping[int, int]) -> int:
        """The whole sum, as far as it goes into the weights."""
        text = repr((round_, sorted(counted.items())))
        return int(hashlib.sha1(text.encode()).hexdigest()[:8], 16)

    def committed(self, host: Host, commit: Committed, phase: Phase) -> None:
        """A round counts at a host."""
        self.lan.digest.add_commit(host.index, self.lan.now, commit)
        what = (tuple(sorted(commit.counted.items())), commit.unit, phase.kind)
        key = self.branch(host), commit.round
        if self.commits.setdefault(key, what) != what:
            self.fail(
                f"round {commit.round} was committed as {self.commits[key]} and, at "
                f"{host.node.name}, as {what}"
            )
        if commit.exchange.absolute:
            self.sums.committed(host, commit, commit.fragments)
            return
        for k in commit.counted:
            unit = self.units.get((self.branch(host), commit.round, k), commit.unit)
            if phase.kind is wire.PhaseKind.TRAIN and unit != commit.unit:
                self.fail(
                    f"round {commit.round}: member {k} has gradients of unit {unit}, not {commit.unit}"
                )
        number = host.node.number
        others = [k for k in commit.counted if commit.exchange.includes_own or k != number]
        sums = [got for (v, r), got in host.kernel.sums.items() if r == commit.round]
        for index in range(phase.fragments_in(commit.round)):
            expected = sum(self.value(k, commit.round, index) for k in others)
            found = sums[-1].get(index, 0) if sums else 0
            if found != expected:
                self.fail(
                    f"{host.node.name}: fragment {index} of round {commit.round} is {found}, "
                    f"not {expected}: {dict(commit.counted)} counted"
                )

    def applied(self, host: Host, round_: int, program: Program) -> None:
        """Weights have changed."""
        state = program.state
        self.trained = max(self.trained, state.trained)
        self.hold(state.digest, state)
        if tainted(state.weights):
            return
        known = self.weights.setdefault((self.branch(host), round_), state.weights)
        if known != state.weights:
            self.fail(f"{host.node.name} has {state.weights} after round {round_}, not {known}")

    def hold(self, digest: str, state: State) -> None:
        """A program tells of its state by this digest."""
        self.states[digest] = state

    def same_model(self, host: Host, program: Program, number: int) -> None:
        """A host's program goes into a training phase: with the lead's weights."""
        phase = host.part.phase if host.part is not None else None
        if phase is None or phase.number != number or "model" not in phase.settings:
            return  # a later one is decided on already
        ours, leads = program.state, self.states[phase.settings["model"]]
        if ours.last != leads.last:
            return  # one of the two lags; `applied` has looked at either
        same = ours.weights == leads.weights
        if not same and not tainted(ours.weights) and not tainted(leads.weights):
            self.fail(
                f"{host.node.name} would train on {ours.weights}, the lead on {leads.weights}"
            )

    def differs(self, host: Host, action: Differs) -> None:
        """Only where a test has tampered; and nobody is named only where no half is left as it was."""
        phase = host.node.ring.phase if host.node.ring is not None else None
        counted = [m.mac for m in host.node.view.members if phase and phase.shares[m.number - 1]]
        programs = [h.process for h in self.lan.hosts if h.mac in counted]
        there = [p for p in programs if p is not None and not p.blank]
        whole = [p for p in there if not tainted(p.state.weights)]
        if not self.tampered or (not action.numbers and 2 * len(whole) > len(counted)):
            self.fail(f"{host.node.name} finds other weights: {action}")

    def stops(self, host: Host, phase: Phase) -> None:
        """A lead ends the job: for a reason that is true as it says so, if not well."""
        wrong = "" if phase.settings["ok"] else endings.why_not(host, phase.settings["message"])
        if wrong:
            self.fail(f"{host.node.name} stops the job, {phase.settings['message']}: {wrong}")

    # ---- after every step

    def step(self) -> None:
        """No two hosts hold the same token. Of two that do, one has come to it since the last step."""
        moved, self.moved = self.moved, []
        for host in moved:
            key = self.held(host)
            if key is None:
                continue
            if any(self.held(other) == key for other in self.lan.hosts if other is not host):
                self.fail(f"token {key} is held by two")

    def held(self, host: Host) -> tuple[Branch, int, int, int] | None:
        """The token that a host holds: view, generation and hop."""
        node, ring = host.node, host.node.rings.current
        if ring is None or not ring.holding or ring.token is None:
            return None
        if host.dead or node.state is not NodeState.MEMBER or node.changing:
            return None
        return (self.branch(host), node.view.number, *ring.token.key)


def _listed(frame: wire.Frame) -> View:
    body, successor = frame.body, Successor.of(frame)
    assert isinstance(body, wire.View) and successor is not None
    return successor.view(body.number, body.ballot)


def tainted(weights: str) -> bool:
    """They have been tampered with, or come from such."""
    return weights.startswith("T")
