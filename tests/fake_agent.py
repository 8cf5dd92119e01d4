# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job with neither network nor training program: both keep what they are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nicps import wire
from nicps.agent.job import LocalJob
from nicps.dataplane.maps import Accumulators
from nicps.exchange import Exchange
from nicps.protocol import Committed, Installed, SendFragments
from nicps.protocol.phase import Phase
from nicps.protocol.view import View
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.fields import Message

ROUND = 7


class Agent:
    """As much of one as a job needs to have a gradient sent; `said` is what it warns of."""

    def __init__(self, work: Path) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.settings = SimpleNamespace(work=work, exchange=Exchange.SWITCH)
        self.user = SimpleNamespace(uid=os.getuid(), gid=os.getgid())
        self.frames = SimpleNamespace(turns=0, sender=SimpleNamespace(again=0, waits=False))
        self.dataplane = SimpleNamespace(config={"view": 1}, count=lambda *_: 0)
        self.node = SimpleNamespace(number=1, offer=lambda *_: [], ring=object(), changing=False)
        self.node.view = SimpleNamespace(live={1, 2, 3})
        self.node.name, self.node.leads = "h1", False

    def act(self, actions: list[Any]) -> None:
        assert not actions

    def warn(self, text: str) -> None:
        self.said.append(text)

    log = warn

    def program_ready(self) -> None:
        pass


class Program:
    """The training program, which keeps what it is told."""

    arena: Arena | None = None

    def __init__(self) -> None:
        self.trained = 0
        self.has_ended = False
        self.told: list[Message] = []
        self.post = self.told.append

    def owes(self, duty: str) -> None:
        pass


class Job(LocalJob):
    """In a training phase of three."""

    def __init__(self, work: Path) -> None:
        self.host = Agent(work)
        super().__init__(self.host, "job")  # type: ignore[arg-type]
        self.told = Program()
        self.program = self.told  # type: ignore[assignment]
        self._phase = Phase(1, 1, wire.PhaseKind.TRAIN, ROUND, fragments=600, shares=(4, 4, 4))

    def offers(self, now: float, round_: int = ROUND) -> None:
        self.host.now = now
        self.offered(round_, 4, None, False)

    def sends(
        self, started: float, ended: float, first: int = 0, count: int = 256, again: bool = False
    ) -> None:
        self.sent(
            SendFragments(1, 1, ROUND, 4, ((first, count),), again, Exchange.SWITCH), started, ended
        )

    def repairs(self, round_: int, *counts: int, exchange: Exchange = Exchange.SWITCH) -> None:
        ranges = tuple((300 * k, count) for k, count in enumerate(counts))
        self.sent(SendFragments(1, 1, round_, 4, ranges, True, exchange), 0.0, 0.0)

    def waited(self, now: float) -> float:
        """Commit, and what the program is told of its waiting."""
        self.host.now = now
        assert self._phase is not None
        self.committed(Committed(self._phase, ROUND, {1: 4, 2: 4, 3: 4}, -20, -20, Exchange.SWITCH))
        last = self.told.told[-1]
        assert isinstance(last, shared_form.Committed)
        return last.seconds_waited


class Told(Program):
    """A training program that has built the model; `entered` are the phases that it is sent into."""

    ready = True

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[wire.PhaseKind] = []

    def enter(self, phase: Phase, first_round: int, blocks: int) -> None:
        self.entered.append(phase.kind)

    def view(self) -> None:
        pass

    forget_blocks = view


class Changes:
    """A host whose views change; what it does in the background is done when `works` is called.

    `answers` are its acknowledgements: a decision's number, and what it answers. `blocks` are those of the accumulators
    in use, which are the `used`-th.
    """

    def __init__(self, job: Job, runs: Path) -> None:
        self.job, self.host = job, job.host
        self.program = job.told = job.program = Told()  # type: ignore[assignment]
        self.answers: list[tuple[int, bytes]] = []
        self.waits: list[tuple[Callable[[], None], Callable[[], None]]] = []
        node = self.host.node
        node.name, node.mac, node.learners, node.open_round = "h1", bytes(6), frozenset(), ROUND
        self.host.loop = SimpleNamespace(background=lambda *work: self.waits.append(work))
        self.host.run_folder = lambda name: runs / name
        self.leaves('{"round": 7, "weights_sha256": ""}\n')
        self.host.prepared = lambda number, answer=b"": self.answers.append((number, answer))
        plane = self.host.dataplane
        plane.mode, plane.counters = "native", dict
        plane.reserve = lambda blocks: Accumulators(blocks, -1, -1)
        self.blocks = self.used = 0
        plane.use = self._use

    def leaves(self, metrics: str) -> None:
        """What the training program writes down."""
        (self.job.folder / "out" / "metrics.jsonl").write_text(metrics)

    def _use(self, accumulators: Accumulators) -> None:
        self.blocks = accumulators.blocks
        self.used += 1

    def learns(self) -> None:
        """This host has come back, and waits for the state."""
        self.host.node.learners = frozenset({1})
        self.host.node.members = [SimpleNamespace(name=f"h{k}") for k in (1, 2, 3)]

    def hand_out(self, number: int, fragments: int) -> None:
        """The state comes from the second host."""
        settings = {"purpose": "state", "source": 2, "bytes": 1440 * fragments, "index_bytes": 9}
        size = {"fragments": fragments, "last_fragments": fragments}
        self.decided(
            number, wire.PhaseKind.HANDOUT, shares=(0, 1, 0), **size, width=0, settings=settings
        )

    def decided(self, number: int, kind: wire.PhaseKind, **settings: Any) -> None:
        phase = Phase(number, number, kind, **settings)
        self.host.node.phase = phase
        self.job.prepare(phase)

    def back_to(self, number: int, kind: wire.PhaseKind, **settings: Any) -> None:
        """Another view is in force, in which that phase goes on."""
        phase = Phase(number, 1, kind, **{"shares": (4, 4, 4)} | settings)
        self.host.node.phase = phase
        self.job.installed(Installed(View(), 1, phase, True))

    def works(self) -> None:
        while self.waits:
            work, then = self.waits.pop(0)
            work()
            then()


def ends(job: Job, code: int, said: str) -> list[str]:
    """What the node is told, of a program that ends before it has trained a round."""
    told: list[str] = []
    node = job.host.node
    node.leave = lambda now, reason: told.append(f"leaves: {reason}") or []
    node.fail = lambda now, reason: told.append(f"fails: {reason}") or []
    job.host.views = SimpleNamespace(depart=lambda reason: node.leave(0.0, reason))
    job.host.frames.drop_fragments = lambda: None
    assert job.program is not None
    job.program_ended(job.program, code, said)
    return told
