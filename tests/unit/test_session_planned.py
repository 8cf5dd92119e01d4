# SPDX-License-Identifier: Apache-2.0
"""The training program's end of the agent's socket where steps have a plan: commits overtake nothing they need."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from nicps import wire
from nicps.client import Phase, Session
from nicps.exchange import Exchange
from nicps.flows import Flows, Part
from nicps.session import shared_form as says
from nicps.session.arena import Arena
from nicps.session.channel import Channel
from nicps.session.fields import encode
from tests.striped_memory import Host, Mapped
from tests.stripes import bound

FRAGMENTS, WIDTH, UNIT = 12, 8, -40
ROUND = 5
OLD, NEW = 1, 2  # views
STALE, LEFT_OVER = 1 << 20, 3  # units, in the places of the old view, and of the new one
WAIT_S = 20.0


class Agent:
    """The agent's end for member 1, whose step is one round. Of `before` members only `after` are left in a new view.

    As many blocks are in a bank of places as there are fragments in the longest stripe, so each view has places of its
    own. Sums and remainders of a round are written as the kernel would leave them.
    """

    def __init__(self, before: int, after: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.live = {OLD: tuple(range(1, before + 1)), NEW: tuple(range(1, after + 1))}
        members = tuple(says.Member(k, f"h{k}") for k in self.live[OLD])
        settings = {"priorities": 1, "lane": "i8"}
        welcome = says.Welcome(1, members, "h1", 2, settings, "/nowhere", OLD)
        self.session = Session(Channel(theirs), welcome)
        self.session.on_keep = lambda: None
        numbers = FRAGMENTS * wire.BLOCK_LANES
        self.vector, self.residual = np.ones(numbers, np.float32), np.zeros(numbers, np.float32)
        self.arena, self._doorbell = Arena.create(FRAGMENTS), os.eventfd(0)
        self.say(says.Arena(FRAGMENTS), self.arena.fd, self._doorbell)
        plan = (says.ChannelPlan(0, (FRAGMENTS,)),)
        self.session.ready(numbers, "d", residual=self.residual, plan=plan)
        self.host = Host(FRAGMENTS, FRAGMENTS // before + 1)
        self.host.blocks.array[:] = STALE
        self.new = Mapped(np.int64, (2, FRAGMENTS // after + 1, wire.BLOCK_LANES))
        self.flows = Flows(self.session, [[Part(self.vector, self.residual)]], WIDTH)

    def say(self, message: says.FromAgent, *fds: int) -> None:
        self.channel.send(encode(message), fds)

    def say_phase(self, view: int, *, memory: bool = False) -> None:
        room, places = (FRAGMENTS, self.host.places) if memory else (0, 0)
        shares, channels = (4,) * len(self.live[OLD]), (says.PhaseChannel(0, (FRAGMENTS,), ROUND),)
        of = "train", ROUND, 3, UNIT, shares, Exchange.STRIPES, view, self.live[view], 2
        message = says.Phase(*of, 0, room, places, channels, (places,) if memory else ())
        host = self.host
        fds = (host.own.fd, host.sums.reading_fd, host.blocks.reading_fd) if memory else ()
        self.say(message, *fds)

    def say_view(self, *, places: bool) -> None:
        """The new one, with its places or without."""
        count = self.new.array.shape[1] if places else 0
        message = says.View(NEW, self.live[NEW], 2, ROUND, count, (count,) if count else ())
        self.say(message, *((self.new.reading_fd,) if places else ()))

    def commit(self, round_: int = ROUND, *, without: int = 0) -> None:
        """The round, in the new view; its list is without that member."""
        tag, bank, members = NEW << 32 | round_, round_ & 1, self.live[NEW]
        self.new.array[bank] = LEFT_OVER
        sums = self.host.sums.array[bank]
        sums["tag"], sums["lane"], sums["exponent"] = tag, 2, 0
        sums["rest"][: bound(FRAGMENTS, 1, len(members))] = tag
        counted = {member: 4 for member in members if member != without}
        of = round_, counted, UNIT, UNIT, Exchange.STRIPES, 0.0, NEW, members
        self.say(says.Committed(*of))

    def offer(self, phase: Phase) -> Future[None]:
        """The step's only part goes out, in the channel's thread; the thread that computes goes on."""
        self.flows.begin(phase, [phase.channels[0].open])
        offered = self.flows.offer(0, 4)
        while self.channel.recv(WAIT_S)[0]["op"] != "offer":
            pass
        return offered

    def heard(self) -> list[str]:
        """What the session has said since."""
        found = []
        while self.channel.wait(0.0):
            found.append(self.channel.recv(WAIT_S)[0]["op"])
        return found

    def check(self) -> None:
        """The residual has the remainders of the new view's stripe, and nothing else."""
        found = self.residual.reshape(FRAGMENTS, -1) / np.float32(2.0**UNIT)
        mine = bound(FRAGMENTS, 1, len(self.live[NEW]))
        assert np.unique(found[:mine]).tolist() == [LEFT_OVER] and not found[mine:].any()

    def close(self) -> None:
        self.flows.close()
        self.session.close()
        self.channel.close()
        self.host.close()
        self.new.close()


#: The first's new stripe is longer than the old one's places, the second's is not.
MEMBERS = pytest.mark.parametrize("members", [(3, 2), (5, 4)], ids=str)


@pytest.fixture
def agent(members: tuple[int, int]) -> Iterator[Agent]:
    made = Agent(*members)
    yield made
    made.close()


@MEMBERS
def test_places_of_a_view_are_used_though_the_program_is_still_to_save(agent: Agent) -> None:
    """The majority was lost, and has come back without a host, while the program computes."""
    agent.say_phase(OLD, memory=True)
    offered = agent.offer(agent.session.next_phase())
    agent.say(says.Keep())
    agent.say_view(places=True)
    agent.commit()
    offered.result(WAIT_S)
    agent.check()


@MEMBERS
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_places_that_come_behind_a_phase_are_used_in_it(agent: Agent, late: bool) -> None:
    """This host was preparing for another phase as a host was lost. Its program computes meanwhile.

    Args:
        late: the places come after the program is in the phase.
    """
    agent.say_phase(OLD, memory=True)
    agent.session.next_phase()
    agent.say_view(places=False)
    agent.say_phase(NEW)
    if not late:
        agent.say_view(places=True)
    agent.session.progress(ROUND, 1)
    phase = agent.session.next_phase()
    if late:
        agent.say_view(places=True)
    offered = agent.offer(phase)
    agent.commit()
    offered.result(WAIT_S)
    agent.check()


@MEMBERS
def test_a_round_of_the_phase_may_be_committed_before_the_program_is_in_it(agent: Agent) -> None:
    """A quorum closes its list without this member, whose program takes the phase after the micro-batch."""
    agent.say_phase(OLD, memory=True)
    agent.session.next_phase()
    agent.say_view(places=False)
    agent.say_phase(NEW)
    agent.say_view(places=True)
    agent.commit(without=1)
    agent.session.progress(ROUND, 1)
    phase = agent.session.next_phase()
    agent.flows.begin(phase, [ROUND])
    agent.flows.offer(0, 0).result(WAIT_S)
    agent.check()


@pytest.mark.parametrize("members", [(3, 2)], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_the_word_of_a_lead_on_a_step_that_others_have_gone_on_from_stays_here(
    agent: Agent, late: bool
) -> None:
    """A quorum was enough for the next step, whose first round the lost lead had let through. This member leads now.

    Args:
        late: that was so; otherwise its word counts.
    """
    agent.say_phase(OLD, memory=True)
    agent.session.next_phase()
    agent.say_view(places=True)
    offered = agent.offer(agent.session._phase)
    agent.commit()
    offered.result(WAIT_S)
    agent.flows.finish()
    if late:
        agent.commit(ROUND + 1, without=1)
    agent.say(says.View(NEW + 1, agent.live[NEW], 1, ROUND + 1 + late))
    agent.session.channels.attend(lambda: agent.session.lead)
    agent.heard()
    assert agent.session.decide(ROUND, "test") is not late
    assert agent.heard() == ([] if late else ["decide"])
    if late:
        agent.flows.begin(agent.session._phase, [ROUND + 1])
        agent.flows.offer(0, 0).result(WAIT_S)
        agent.flows.finish()
        assert agent.session.decide(ROUND + 1, "test"), (
            "the step that has been under way is its own"
        )
