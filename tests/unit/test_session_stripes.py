# SPDX-License-Identifier: Apache-2.0
"""The training program's end of the agent's socket where the exchange is `stripes` (docs/stripes.md)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from nicps import gradient_json
from nicps.client import LeftOut, Session
from nicps.errors import JobFailed, NonFinite
from nicps.gateway import Gateway
from nicps.session.arena import Arena
from nicps.session.channel import Channel
from nicps.session.shared_form import Member, Welcome
from tests import striped_reference as reference
from tests.striped_memory import Host, Mapped, exchange, places_for
from tests.unit.test_trainer_session import VIEW

LANES = 5 * 1440 + 7
FRAGMENTS = 6
WIDTH = 8
F32 = reference.F32


class Agent:
    """The agent's end for member 2 of three, and all that the kernel's programs of the three have."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        members = tuple(Member(n, f"h{n}") for n in (1, 2, 3))
        welcome = Welcome(2, members, "h2", 1, {"lane": "i8"}, "/nowhere", VIEW)
        self.session = Session(Channel(theirs), welcome)
        self.arena, self._doorbell = Arena.create(FRAGMENTS), os.eventfd(0)
        message = {"op": "arena", "fragments": FRAGMENTS}
        self.channel.send(message, (self.arena.fd, self._doorbell))
        self.hosts = {n: Host(FRAGMENTS, FRAGMENTS) for n in (1, 2, 3)}
        self.others = {n: reference.Member(WIDTH, np.zeros(LANES, np.float32)) for n in (1, 3)}
        self.mine = reference.Member(WIDTH, np.zeros(LANES, np.float32))
        self.added = [Mapped(np.int64, (2, 1440)), Mapped(np.uint8, (4096,))]
        self.pieces: dict[int, list[reference.Piece]] = {}
        self.live, self.view_number, self._numbers = (1, 2, 3), VIEW, 0

    def ready(self) -> None:
        self.session.ready(LANES, "d")
        assert self.take()["op"] == "ready"

    def take(self) -> dict[str, Any]:
        return self.channel.recv(10.0)[0]

    def phase(self, kind: str, first: int, exchange: str = "stripes", **more: Any) -> None:
        self._numbers += 1
        message = {"op": "phase", "kind": kind, "first_round": first, "number": self._numbers}
        message |= {"unit": -30, "exchange": exchange, "view": self.view_number}
        message |= {"live": self.live, "lead": 1, "shares": (4, 4, 4), **more}
        fds: list[int] = []
        if self._numbers == 1:
            host = self.hosts[2]
            message |= {"blocks": 1, "room": host.room, "places": host.places}
            fds = [mapped.fd for mapped in (*self.added, host.own)]
            fds += [host.sums.reading_fd, host.blocks.reading_fd]
        self.channel.send(message, fds)
        for fd in fds:
            os.close(fd)

    def enter(self, kind: str, first: int, exchange: str = "stripes", **more: Any) -> None:
        """A phase that the session takes."""
        self.phase(kind, first, exchange, **more)
        assert self.session.next_phase().kind == kind
        assert self.take() == {"op": "prepared", "number": self._numbers}

    def change_view(self, *live: int) -> None:
        """With new places."""
        self.live, self.view_number = live, self.view_number + 1
        places = places_for(FRAGMENTS, len(live), WIDTH)
        for number in live:
            self.hosts[number].renew_places(places)
        message = {"op": "view", "view": self.view_number, "live": live, "lead": 1, "round": 7}
        fd = self.hosts[2].blocks.reading_fd
        self.channel.send(message | {"places": places}, [fd])
        os.close(fd)

    def offered(self, round_: int, vector: F32) -> dict[str, Any]:
        """What the session has said of a contribution; its records are those of the reference."""
        said = self.take()
        assert said["op"] == "offer" and not said["skip"] and said["conversion"] > 0
        bank = self.hosts[2].own.array[round_ & 1]
        assert (bank["conversion"][:FRAGMENTS] == said["conversion"]).all()
        self.hosts[2].offered[round_ & 1] = said["conversion"]
        self.pieces[2] = self.mine.convert(vector)
        found = [int(x) for x in bank["exponent"].view(np.int8)]
        assert found == [piece.exponent for piece in self.pieces[2]]
        assert max((x for x in found if x != 127), default=-120) <= said["unit"]
        self._unit_asked = said["unit"]
        return said

    def others_offer(self, round_: int, vectors: dict[int, F32]) -> None:
        """The other members' lanes."""
        for number, vector in vectors.items():
            self.pieces[number] = pieces = self.others[number].convert(vector)
            own = self.hosts[number].own.array[round_ & 1]
            for record, piece in zip(own, pieces, strict=True):
                lanes = np.zeros(1440, np.int8)
                lanes[: len(piece.lanes)] = piece.lanes
                record["lane"] = lanes.view(np.uint8)
                record["exponent"] = piece.exponent & 0xFF
                record["conversion"] = 1
            self.hosts[number].offered[round_ & 1] = 1

    def settle(self, round_: int, listed: tuple[int, ...], commit: bool = True) -> F32:
        """The round's sums are made and committed; what they are by the reference."""
        exponents = [
            piece.exponent
            for number in listed
            for piece in self.pieces[number]
            if piece.exponent != 127
        ]
        unit = reference.unit_of([*exponents, *([self._unit_asked] if 2 in listed else [])], WIDTH)
        self.unit = unit
        hosts = {number: self.hosts[number] for number in self.live}
        about = (WIDTH, unit, FRAGMENTS)
        exchange(hosts, round_, self.view_number, self.live, listed, *about)
        if commit:
            self.commit(round_, listed, unit)
        pieces = [
            reference.add([self.pieces[number][index] for number in listed], WIDTH, unit)
            for index in range(FRAGMENTS)
        ]
        for number in listed:
            (self.mine if number == 2 else self.others[number]).counted(pieces)
        rank, n = self.live.index(2), len(self.live)
        for index in range(FRAGMENTS * rank // n, FRAGMENTS * (rank + 1) // n):
            self.mine.add_rest(index, pieces[index], unit)
        return np.concatenate([piece.values() for piece in pieces])

    def commit(
        self, round_: int, listed: tuple[int, ...], unit: int, kind: str = "stripes"
    ) -> None:
        message = {"op": "committed", "round": round_, "counted": dict.fromkeys(listed, 4)}
        message |= {"unit": unit, "next_unit": unit + 9, "exchange": kind, "seconds_waited": 0.5}
        if kind == "stripes":
            message |= {"view": self.view_number, "aggregators": self.live}
        elif kind == "linux-switch":
            message |= {"view": self.view_number, "aggregators": (0,)}
        self.channel.send(message)

    def same_residual(self) -> None:
        assert self.session._residual is not None
        kept = self.session._residual.residual.kept[:LANES]
        assert (kept.view(np.uint32) == self.mine.residual.view(np.uint32)).all()

    def close(self) -> None:
        self.session.close()
        self.channel.close()
        self.arena.close()
        os.close(self._doorbell)
        for closing in (*self.hosts.values(), *self.added):
            closing.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    agent.ready()
    agent.enter("train", 7)
    yield agent
    agent.close()


def gradient(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(LANES).astype(np.float32)


def others(seed: int) -> dict[int, F32]:
    return {1: gradient(1000 + seed), 3: gradient(2000 + seed)}


def same(total: F32, expected: F32) -> bool:
    return bool((total.view(np.uint32) == expected.view(np.uint32)).all())


@pytest.mark.parametrize("early", [False, True])
def test_rounds(agent: Agent, early: bool) -> None:
    """Vectors of very different sizes: none is too large, whatever the unit was."""
    session, out = agent.session, np.full(LANES, 7, np.float32)
    for round_, size in ((7, 1.0), (8, 1e30), (9, 1e-25), (10, 1.0)):
        vector = gradient(round_) * np.float32(size)
        session.contribute(round_, vector, 4)
        agent.offered(round_, vector)
        agent.others_offer(round_, others(round_))
        expected = agent.settle(round_, (1, 2, 3))
        commit = session.wait_commit(round_, out if early else None)
        assert commit is not None and not commit.left_out and commit.members == 0
        assert (commit.view, commit.aggregators) == (VIEW, (1, 2, 3))
        assert commit.seconds_waited == 0.5
        assert same(session.sum(commit, out if early else None), expected)
        session.applied(commit, "d")
        assert agent.take() == {"op": "read", "round": round_, "digest": "d"}
        agent.same_residual()
    assert session.saturated == 0


@pytest.mark.parametrize("early", [False, True])
def test_a_switch_keeps_what_its_sums_leave_over(
    agent: Agent, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual is that of the own conversion alone, which goes through the vector in order."""
    monkeypatch.setattr(agent.mine, "add_rest", lambda *_: None)
    agent.enter("train", 7, "linux-switch")
    session, out, order = agent.session, np.full(LANES, 7, np.float32), list[int]()
    whole = session._shared().reducer.vector
    write = whole.write

    def watched(first: int, *what: Any) -> None:
        order.append(first)
        write(first, *what)

    monkeypatch.setattr(whole, "write", watched)
    for round_ in (7, 8):
        vector = gradient(round_)
        session.contribute(round_, vector, 4)
        agent.offered(round_, vector)
        agent.others_offer(round_, others(round_))
        expected = agent.settle(round_, (1, 2, 3), commit=False)
        agent.commit(round_, (1, 2, 3), agent.unit, "linux-switch")
        commit = session.wait_commit(round_, out if early else None)
        assert commit is not None and commit.aggregators == (0,)
        assert same(session.sum(commit, out if early else None), expected)
        session.applied(commit, "d")
        assert agent.take()["op"] == "read"
        agent.same_residual()
    assert order == sorted(order[: len(order) // 2]) * 2


def test_sums_are_read_while_the_commit_is_waited_for(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, out = agent.session, np.full(LANES, 7, np.float32)
    session.contribute(7, gradient(1), 4)
    agent.offered(7, gradient(1))
    agent.others_offer(7, others(1))
    expected = agent.settle(7, (1, 2, 3), commit=False)
    ahead = session._shared().reducer.ahead

    def then(stop: Any) -> None:
        ahead(stop)
        assert same(out, expected)
        agent.hosts[2].sums.array["lane"] = 1  # they were read already
        agent.commit(7, (1, 2, 3), -40)

    monkeypatch.setattr(session._shared().reducer, "ahead", then)
    commit = session.wait_commit(7, out)
    assert commit is not None
    assert same(session.sum(commit, out), expected)


def test_a_view_changes_while_the_commit_is_waited_for(agent: Agent) -> None:
    """The round is run again from the lanes that are there, in the places that come with the view."""
    session, vector = agent.session, gradient(1)
    session.contribute(7, vector, 4)
    agent.offered(7, vector)
    agent.others_offer(7, others(1))
    agent.change_view(1, 2)
    expected = agent.settle(7, (1, 2))
    commit = session.wait_commit(7, np.empty(LANES, np.float32))
    assert commit is not None and (commit.view, commit.aggregators) == (VIEW + 1, (1, 2))
    assert same(session.sum(commit), expected)
    session.applied(commit)
    assert agent.take()["op"] == "read"
    agent.same_residual()
    session.contribute(8, vector, 4)
    agent.offered(8, vector)


def test_a_round_is_committed_in_the_view_before(agent: Agent) -> None:
    """Its remainders are in the places that were there before the view's."""
    session = agent.session
    session.contribute(7, gradient(1), 4)
    agent.offered(7, gradient(1))
    agent.others_offer(7, others(1))
    expected = agent.settle(7, (1, 2, 3), commit=False)
    agent.change_view(1, 2)
    agent.live, agent.view_number = (1, 2, 3), VIEW
    agent.commit(7, (1, 2, 3), agent.unit)
    commit = session.wait_commit(7)
    assert commit is not None and session.live == {1, 2}
    assert same(session.sum(commit), expected)
    session.applied(commit)
    assert agent.take()["op"] == "read"
    agent.same_residual()


def test_all_reduce(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is sent, and is NaN in that fragment at all; numbers of any size leave nobody out."""
    reducer, expected = agent.session._shared().reducer, np.empty(0)
    expect, total = reducer.expect, np.empty(LANES, np.float32)
    vector = np.empty(0, np.float32)

    def commit_first(round_: int, out: F32) -> bool:
        """The vector is offered, and converted: the program is about to wait."""
        nonlocal expected
        agent.offered(round_, vector)
        expected = agent.settle(round_, (1, 2, 3))
        return expect(round_, out)

    monkeypatch.setattr(reducer, "expect", commit_first)
    for round_, size in ((7, 1.0), (8, 1e35)):
        vector = gradient(1) * np.float32(size)
        vector[[0, -1]] = np.nan, np.inf
        agent.others_offer(round_, others(round_))
        assert agent.session.all_reduce(round_, vector, total) is total
        assert same(total, expected)
        assert np.isnan(total[:1440]).all() and np.isnan(total[-7:]).all()
        assert np.isfinite(total[1440:-7]).all()
        assert agent.take()["op"] == "read"
        agent.same_residual()


def test_no_sum_is_read_over_the_vector(agent: Agent) -> None:
    """What rounding left over of the vector is computed from it once the sum is there."""
    vector = gradient(1)
    with pytest.raises(JobFailed, match="round 7: the sum cannot be read over the vector"):
        agent.session.all_reduce(7, vector, vector)
    assert not agent.channel.wait(0.0), "nothing was offered"
    agent.others_offer(7, others(1))
    agent.session.contribute(7, vector, 4)
    agent.offered(7, vector)
    expected = agent.settle(7, (1, 2, 3))
    with pytest.raises(JobFailed, match="memory of its own"):
        agent.session.wait_commit(7, vector)
    commit = agent.session.wait_commit(7)
    assert commit is not None
    with pytest.raises(JobFailed, match="memory of its own"):
        agent.session.sum(commit, vector[:])
    assert same(agent.session.sum(commit), expected)
    agent.session.applied(commit)
    agent.same_residual()


def test_what_is_not_finite_is_offered_again(agent: Agent) -> None:
    """The phase has ended before the round was committed, and the next one begins with that round."""
    vector = gradient(1)
    vector[0] = np.nan
    agent.phase("train", 7)
    agent.phase("train", 8)
    with pytest.raises(LeftOut, match="round 7 is not run again"):
        agent.session.all_reduce(7, vector)
    assert [agent.take()["op"] for _ in range(4)] == ["offer", "prepared", "offer", "prepared"]


def test_too_late_for_the_quorum(agent: Agent) -> None:
    """It is left out alone; what is left over of its stripe's sums is kept all the same."""
    agent.others_offer(7, others(1))
    expected = agent.settle(7, (1, 3))
    with pytest.raises(LeftOut, match="round 7 closed without us: offer it again in round 8"):
        agent.session.all_reduce(7, gradient(1))
    assert [agent.take()["op"] for _ in range(2)] == ["offer", "read"]
    agent.same_residual()
    assert agent.mine.residual.any() and expected.any()


def test_a_gradient_must_be_finite(agent: Agent) -> None:
    vector = gradient(1)
    vector[11] = np.nan
    with pytest.raises(NonFinite) as error:
        agent.session.contribute(7, vector, 4)
    assert error.value.index == 11
    assert not agent.channel.wait(0.0), "nothing was offered"
    agent.session.contribute(7, vector, 4, finite=False)
    agent.offered(7, vector)


def test_alone(agent: Agent) -> None:
    """The only member left reads its own lanes."""
    agent.change_view(2)
    agent.session.contribute(7, gradient(1), 4)
    agent.offered(7, gradient(1))
    expected = agent.settle(7, (2,))
    commit = agent.session.wait_commit(7, np.empty(LANES, np.float32))
    assert commit is not None
    assert same(agent.session.sum(commit), expected)
    agent.session.applied(commit)
    agent.same_residual()


def test_a_round_of_nobody(agent: Agent) -> None:
    agent.hosts[2].sums.array["lane"] = 1
    agent.commit(7, (), -40)
    commit = agent.session.wait_commit(7)
    assert commit is not None and not agent.session.sum(commit).any()
    agent.session.applied(commit)
    assert agent.take()["op"] == "read"


def test_a_test_round_is_broadcast(agent: Agent) -> None:
    agent.enter("test", 8, "broadcast", shares=(1, 1, 1))
    agent.added[0].array[0, :2] = 7, 2
    agent.commit(8, (1, 2, 3), 0, "broadcast")
    assert agent.session.tally(8, 5, 1) == (12, 3)
    assert agent.take() == {"op": "offer", "round": 8, "samples": 1, "unit": None, "skip": False}
    assert agent.arena.lanes[0, 0].view(">i4")[:2].tolist() == [5, 1]
    assert agent.take()["op"] == "read"
    agent.enter("train", 9)
    agent.session.contribute(9, gradient(1), 4)
    agent.offered(9, gradient(1))


def test_what_is_left_over_survives_a_change_of_the_exchange(agent: Agent) -> None:
    """And is forgotten with the state that it belongs to."""
    session = agent.session
    session.contribute(7, gradient(1), 4)
    agent.offered(7, gradient(1))
    agent.others_offer(7, others(1))
    agent.settle(7, (1, 2, 3))
    commit = session.wait_commit(7)
    assert commit is not None
    session.applied(commit)
    assert agent.take()["op"] == "read" and agent.mine.residual.any()
    agent.enter("train", 8, "broadcast", unit=-12)
    session.contribute(8, np.zeros(LANES, np.float32), 4)
    assert agent.take()["op"] == "offer"
    sent = agent.arena.lanes[0].view(np.int8).reshape(-1)[:LANES].astype(np.float32)
    steps = 2.0 ** (agent.arena.shifts[0].astype(np.float64) - 12).repeat(1440)[:LANES]
    assert (np.abs(sent * steps - agent.mine.residual) <= steps / 2).all() and sent.any()
    agent.enter("load", 9, "broadcast", shares=())
    session.loaded(agent._numbers, "d")
    assert agent.take()["op"] == "loaded"
    agent.mine.residual[:] = 0
    agent.same_residual()


def as_text(document: Any) -> Any:
    """As a program reads or writes it."""
    return orjson.loads(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))


def test_the_form_json() -> None:
    """A program that speaks JSON hears the same of a round of stripes as of any other."""
    agent = Agent()
    gateway = Gateway(Channel(socket.socketpair()[0]), agent.session, None)
    parameters = [{"name": "w", "shape": [LANES]}]
    gateway.answer({"op": "ready", "parameters": parameters, "digest": "d"})
    assert agent.take()["op"] == "ready"
    agent.phase("train", 7)
    gateway.answer({"op": "next"})
    assert agent.take()["op"] == "prepared"
    vector = gradient(1)
    document = as_text(gradient_json.document({"w": vector}, 4))
    gateway.answer({"op": "contribute", "round": 7, "gradient": document})
    agent.offered(7, vector)
    agent.others_offer(7, others(1))
    expected = agent.settle(7, (1, 2, 3))
    answer: Any = gateway.answer({"op": "wait", "round": 7})
    assert answer.counted == {1: 4, 2: 4, 3: 4}
    read, samples = gradient_json.read(as_text(answer.gradient), {"w": (LANES,)})
    assert samples == 12 and same(read["w"], expected)
    gateway.answer({"op": "applied", "round": 7, "digest": "d"})
    assert agent.take()["op"] == "read"
    agent.same_residual()
    agent.close()
