# SPDX-License-Identifier: Apache-2.0
"""What must hold of parameter servers: the invariants of docs/servers.md, "What the simulator drives", by number.

They are looked at where something changes: a home, a version, a store, a list, a commit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.protocol import Committed, Phase
from tests.simulator.served_places import Content, Home, Part, ServedFrame, Token

if TYPE_CHECKING:
    from tests.simulator.checks import Checks
    from tests.simulator.served_host import ServedHost

Push = tuple[int, int, int]  # a part's name, worker and number


class ServedChecks:
    """What has been pushed, listed and committed, as far as the invariants need it."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._tokens: dict[tuple[str, int, int], Token] = {}  # of a step: agent, its life, number
        self._weights: dict[tuple[int, Token], int] = {}  # by part
        self._added: defaultdict[tuple[int, Token], set[int]] = defaultdict(set)  # homes, by part
        self._whole: defaultdict[tuple[int, int], int] = defaultdict(int)  # part, round -> pushes
        self._raised: defaultdict[tuple[int, int], list[Token]] = defaultdict(list)
        self._offers: dict[tuple[int, int], Token] = {}  # round, member
        self._rounds: defaultdict[Token, set[int]] = defaultdict(set)
        self._counted: set[tuple[Token, int]] = set()  # known to be in committed lists
        self._commits: dict[int, frozenset[int]] = {}  # round -> the list
        self._closed: dict[tuple[int, int], int] = {}  # view, round -> the list
        self._states: dict[int, Any] = {}  # round -> what was read
        self._phases: dict[int, int] = {}  # round -> the first one of its phase

    def fail(self, what: str) -> None:
        """An invariant does not hold."""
        self._checks.fail(what)

    # ---- steps

    def offers(self, host: ServedHost, round_: int, token: Token) -> None:
        """A step is ready; it may become this member's contribution to that round."""
        self._offers[round_, host.node.number] = token
        self._rounds[token].add(round_)

    def sent(self, host: ServedHost, frame: ServedFrame) -> None:
        """One number is one step, however often it is sent."""
        key = host.name, host.life, frame.number
        if self._tokens.setdefault(key, frame.token) != frame.token:
            self.fail(f"{host.name} sends step {frame.number} with other lanes than before")

    def pushes(
        self, host: ServedHost, frame: ServedFrame, part: Part, home: Home, staleness: int
    ) -> None:
        """A home is about to take a fragment of a push."""
        token, who = frame.token, f"{host.name}, fragment {home.index}"
        if token in home.content:
            self.fail(f"1: {who} takes step {token} twice")
        key = part.name, token
        if self._weights.setdefault(key, staleness) != staleness:
            self.fail(f"4: {who} weighs step {token} by {staleness}, not {self._weights[key]}")
        whole = self._whole[part.name, frame.round]
        if not 1 <= staleness <= 1 + whole - frame.version:
            self.fail(
                f"4: {who}: staleness {staleness} of {token}, {frame.version} of {whole} pulled"
            )
        self._is_quiet(host, frame, who)
        added = self._added[key]
        added.add(home.index)
        if len(added) == len(part.homes):
            self._whole[part.name, frame.round] += 1

    def _is_quiet(self, host: ServedHost, frame: ServedFrame, who: str) -> None:
        """6: no push of a live worker once a list is closed, until all have read the round."""
        lan, view = self._checks.lan, host.node.view
        mac = view.members[frame.sender - 1].mac
        worker = next(one for one in lan.hosts if one.mac == mac)
        lives = not worker.dead and worker.node.view.number == view.number
        if lives and frame.sender in numbers_in(self._closed.get((frame.view, frame.round), 0)):
            self.fail(f"6: {who} takes a push of h{frame.sender}, which is on the closed list")
        first = frame.round <= self._phases.get(frame.round, frame.round)
        ring = host.node.ring
        for number in ring.phase.sharing(view.live) if ring is not None else ():
            one = next(h for h in lan.hosts if h.mac == view.members[number - 1].mac)
            there = not one.dead and one.node.view.number == view.number
            last = one.committed if first else frame.round - 1
            if there and one.last_read < last:
                self.fail(f"6: {who} takes a push, and {one.name} has not read {last}")

    def raised(self, host: ServedHost, frame: ServedFrame, part: Part, version: int) -> None:
        """A server counts a push as whole."""
        raised = self._raised[part.name, frame.round]
        raised.append(frame.token)
        if version > self._whole[part.name, frame.round] or len(raised) != version:
            self.fail(f"3: {host.name} has version {version}, more than is whole")
        if len(self._added[part.name, frame.token]) != len(part.homes):
            self.fail(f"3: {host.name} counts {frame.token}, which is not whole")

    def stepped(self, host: ServedHost, token: Token) -> None:
        """2: a worker holds its push for whole."""
        view = host.node.view
        ring = host.node.ring
        if ring is None or ring.phase.serving is None:
            return
        for number in ring.phase.serving.servers:
            mac = view.members[number - 1].mac
            server = next(one for one in self._checks.lan.hosts if one.mac == mac)
            part = server.servers.part
            same = server.node.view.number == view.number and number in view.live
            if server.dead or part is None or not same:
                continue
            if part.since > ring.phase.first_round:
                continue
            lacks = [i for i, home in part.homes.items() if token not in home.content]
            if lacks:
                self.fail(f"2: {host.name} holds {token} for whole, {server.name} lacks {lacks}")

    # ---- pulls

    def stores(self, host: ServedHost, frame: ServedFrame) -> None:
        """A worker stores parameters of a server."""
        view = host.node.view
        mac = view.members[frame.sender - 1].mac
        server = next(one for one in self._checks.lan.hosts if one.mac == mac)
        part = server.servers.part
        self._is_committed(host, frame.content)
        if server.dead or part is None or frame.staleness:
            return
        counted = self._raised[part.name, frame.round][: frame.version]
        lacks = [token for token in counted if token not in frame.content]
        if lacks:
            self.fail(f"5: {host.name} stores version {frame.version} without {lacks}")

    def _is_committed(self, host: ServedHost, content: Content) -> None:
        """7: contributions are in parameters only of committed lists."""
        for token, (kind, count) in content.items():
            if kind != "mean" or (token, count) in self._counted:
                continue
            rounds = self._rounds[token]
            if not any(r in self._commits and len(self._commits[r]) == count for r in rounds):
                self.fail(f"7: {host.name} has {token}, whose rounds {rounds} are not committed")
            self._counted.add((token, count))

    def gives(self, host: ServedHost, frame: ServedFrame, home: Home) -> None:
        """9: no home goes out in which the open round's contributions have begun."""
        if home.seen and home.tag == frame.view << 32 | frame.round:
            self.fail(f"9: {host.name} gives fragment {home.index}, to which contributions came")

    def fills(self, host: ServedHost, source: ServedHost) -> None:
        """10: what a new server is filled from is whole."""
        if lacks := [i for i, one in enumerate(source.servers.store) if not one.tag]:
            self.fail(f"10: {host.name} is filled from {source.name}, which lacks {lacks}")

    # ---- synchronisations

    def closed(self, host: ServedHost) -> None:
        """A host has done something: perhaps it knows a closed list."""
        ring = host.node.ring
        if ring is None or ring.token is None or ring.phase.serving is None:
            return
        token = ring.token
        if token.state == wire.TokenState.CLOSING:
            key = host.node.view.number, token.round
            if self._closed.setdefault(key, token.listed) != token.listed:
                self.fail(f"{host.name} knows another list of round {token.round}")

    def committed(self, host: ServedHost, commit: Committed, phase: Phase) -> None:
        """A round counts at a host."""
        counted = frozenset(commit.counted)
        self._phases[commit.round + 1] = self._phases.get(commit.round, phase.first_round)
        if self._commits.setdefault(commit.round, counted) != counted:
            self.fail(
                f"round {commit.round} was committed with {set(self._commits[commit.round])} and, "
                f"at {host.name}, with {set(counted)}"
            )

    def begins(self, phase: Phase) -> None:
        """A training phase is in force somewhere."""
        self._phases.setdefault(phase.first_round, phase.first_round)

    def settles(self, host: ServedHost, home: Home, part: Part) -> None:
        """7: a home's average is added: exactly the committed list, and once."""
        round_ = home.tag & 0xFFFFFFFF
        counted, who = self._commits.get(round_), f"{host.name}, fragment {home.index}"
        if counted is None:
            self.fail(f"7: {who} adds round {round_}, which is not committed")
            return
        expected = {self._offers[round_, k]: ("mean", len(counted)) for k in counted}
        if dict(home.sums) != expected:
            self.fail(f"7: {who} adds {dict(home.sums)} for round {round_}, not {expected}")
        if twice := home.sums.keys() & home.content.keys():
            self.fail(f"1: {who} has {twice} twice")

    # ---- states

    def read(self, host: ServedHost, round_: int, state: Any) -> None:
        """8: all workers that have read a round hold the same parameters."""
        known = self._states.setdefault(round_, state)
        if known != state:
            differ = [i for i, (a, b) in enumerate(zip(known, state, strict=True)) if a != b]
            self.fail(f"8: {host.name} has other parameters after round {round_}: {differ}")
        counted = self._commits.get(round_, frozenset())
        for index, content in enumerate(state):
            tokens = {token for token, _ in content}
            lacks = [k for k in counted if self._offers[round_, k] not in tokens]
            if lacks:
                self.fail(f"7: {host.name} reads round {round_} without {lacks}'s in {index}")

    def catches_up(self, host: ServedHost) -> None:
        """8: what it has pulled of the last commit, in the next phase, is what all others have that have read that."""
        assert host.process is not None
        for other in self._checks.lan.hosts:
            process, same = other.process, other.node.view.number == host.node.view.number
            if other.dead or process is None or not (same and other.works):
                continue
            reads = other.last_read >= other.committed == host.committed
            if reads and process.kept != host.process.kept:
                self.fail(f"8: {host.name} and {other.name} differ in the last commit")

    def has_last(self, host: ServedHost, state: Any) -> None:
        """8: a test, or the end, begins with the state of the last commit."""
        if self._states.get(host.committed) != state:
            self.fail(f"8: {host.name} tests other parameters than those after {host.committed}")

    def idle(self, host: ServedHost) -> None:
        """3: where no processor is in the program, a server's version is what is whole."""
        servers = host.servers
        if servers.running or servers.part is None or not servers.round or host.dead:
            return
        round_, version = servers.version
        whole = self._whole[servers.part.name, round_]
        if len(servers.part.homes) and version != whole:
            self.fail(f"3: {host.name} has version {version} of {round_}, and {whole} are whole")


def numbers_in(bits: int) -> frozenset[int]:
    """Of such a list."""
    return frozenset(k for k in range(1, bits.bit_length() + 1) if bits >> k - 1 & 1)
