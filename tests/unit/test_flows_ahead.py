# SPDX-License-Identifier: Apache-2.0
"""Parts that are converted while the round before them is on its way: each in the bank of a round that is read."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from nicps import wire
from nicps.client import Session
from nicps.exchange import Exchange
from nicps.flows import Flows, Part
from nicps.session import shared_form as says
from nicps.session.arena import Arena
from nicps.session.channel import Channel
from nicps.session.fields import encode
from tests.striped_memory import Host

pytestmark = pytest.mark.unit

FRAGMENTS, WIDTH, UNIT = 5, 8, -40
ROUND, PARTS, MEMBERS = 5, 4, (1, 2)
WAIT_S = 20.0
NUMBERS = FRAGMENTS * wire.BLOCK_LANES


class Agent:
    """The agent's end for member 1, whose step is four rounds of one channel.

    Attributes: `vector` and `residual`, (4, numbers), by part.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        members = tuple(says.Member(k, f"h{k}") for k in MEMBERS)
        settings = {"priorities": 1, "lane": "i8"}
        welcome = says.Welcome(1, members, "h1", 2, settings, "/nowhere", 1)
        self.session = Session(Channel(theirs), welcome)
        rng = np.random.default_rng(3)
        self.vector = rng.standard_normal((PARTS, NUMBERS), np.float32)
        self.residual = rng.standard_normal((PARTS, NUMBERS), np.float32) / np.float32(100)
        self.say(says.Arena(FRAGMENTS), Arena.create(FRAGMENTS).fd, os.eventfd(0))
        plan = (says.ChannelPlan(0, (FRAGMENTS,) * PARTS),)
        whole = self.residual.reshape(-1)
        self.session.ready(NUMBERS, "d", residual=whole, plan=plan)
        self.host = Host(FRAGMENTS, FRAGMENTS)
        parts = [Part(*each) for each in zip(self.vector, self.residual, strict=True)]
        self.flows = Flows(self.session, [parts], WIDTH)

    def say(self, message: says.FromAgent, *fds: int) -> None:
        self.channel.send(encode(message), fds)

    def begin(self) -> None:
        """A phase, and its first step."""
        host, channel = self.host, says.PhaseChannel(0, (FRAGMENTS,) * PARTS, ROUND)
        of = "train", ROUND, 3, UNIT, (4, 4), Exchange.STRIPES, 1, MEMBERS, 2
        memory = 0, FRAGMENTS, host.places, (channel,), (host.places,)
        fds = host.own.fd, host.sums.reading_fd, host.blocks.reading_fd
        self.say(says.Phase(*of, *memory), *fds)
        self.flows.begin(self.session.next_phase(), [ROUND])

    def offered(self, round_: int) -> np.ndarray:
        """That round's offer, once all of it is converted: what its lanes stand for, (numbers,)."""
        while (message := self.channel.recv(WAIT_S)[0])["op"] != "offer":
            pass
        assert message["round"] == round_
        own, until = self.host.own.array[round_ & 1], time.monotonic() + WAIT_S
        while not (own["conversion"] == message["conversion"]).all():
            assert time.monotonic() < until, f"round {round_} is not converted"
        lanes = own["lane"].copy().view(np.int8).astype(np.float32)
        scales = np.exp2(own["exponent"].copy().view(np.int8).astype(np.float32))
        found: np.ndarray = (lanes * scales[:, None]).reshape(-1)
        return found

    def commit(self, round_: int) -> None:
        """Every number of the sum is the round's; nothing is left over of the own stripe."""
        sums = self.host.sums.array[round_ & 1]
        sums["tag"], sums["lane"], sums["exponent"] = 1 << 32 | round_, round_, 0
        counted = dict.fromkeys(MEMBERS, 4)
        of = round_, counted, UNIT, UNIT, Exchange.STRIPES, 0.0, 1, MEMBERS
        self.say(says.Committed(*of))

    def close(self) -> None:
        self.flows.close()
        self.session.close()
        self.channel.close()
        self.host.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def test_means_and_residuals_are_those_of_one_round_after_the_other(agent: Agent) -> None:
    """The third part would write over the lanes that the first one's residual is made of."""
    agent.begin()
    wanted = agent.vector + agent.residual
    means = [agent.flows.offer(0, 4) for _ in range(PARTS)]
    sent = [agent.offered(ROUND), agent.offered(ROUND + 1)]
    for place, mean in enumerate(means):
        round_ = ROUND + place
        agent.commit(round_)
        mean.result(WAIT_S)
        assert (agent.vector[place] == np.float32(round_) / 8).all()
        assert np.array_equal(agent.residual[place], wanted[place] - sent[place])
        if place + 2 < PARTS:
            sent.append(agent.offered(round_ + 2))
    assert agent.flows.finish().round == ROUND + PARTS - 1


def test_a_phase_that_ends_drops_what_was_offered_ahead(agent: Agent) -> None:
    agent.begin()
    before = agent.vector.copy(), agent.residual.copy()
    means = [agent.flows.offer(0, 4) for _ in range(PARTS)]
    for round_ in (ROUND, ROUND + 1):
        agent.offered(round_)
    agent.commit(ROUND)
    means[0].result(WAIT_S)
    agent.offered(ROUND + 2)
    agent.say(says.Phase("test", 9, 4, 0, (4, 4), Exchange.BROADCAST, 1, MEMBERS, 2))
    assert all(mean.exception(WAIT_S) is not None for mean in means[1:])
    for now, then in zip((agent.vector, agent.residual), before, strict=True):
        assert np.array_equal(now[1:], then[1:]), "as they were"
