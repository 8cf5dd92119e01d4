# SPDX-License-Identifier: Apache-2.0
"""What an agent notes of its own gradient while it goes out: how long that took, and what had to go again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.job import LocalJob
from nicps.protocol import Committed, SendFragments
from nicps.protocol.phase import Phase

ROUND = 7


class Agent:
    """As much of one as a job needs to have a gradient sent; `said` is what it warns of."""

    def __init__(self, work: Path) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.settings = SimpleNamespace(work=work, adding=True)
        self.user = SimpleNamespace(uid=os.getuid(), gid=os.getgid())
        self.frames = SimpleNamespace(turns=0, sender=SimpleNamespace(again=0, waits=False))
        self.dataplane = SimpleNamespace(config={"view": 1}, count=lambda *_: 0)
        self.node = SimpleNamespace(number=1, offer=lambda *_: [], ring=object(), changing=False)
        self.node.view = SimpleNamespace(live={1, 2, 3})

    def act(self, actions: list[Any]) -> None:
        assert not actions

    def warn(self, text: str) -> None:
        self.said.append(text)

    log = warn


class Program:
    """The training program, which keeps what it is told."""

    def __init__(self) -> None:
        self.trained, self.spoke = 0, 0.0
        self.has_ended = False
        self.told: list[dict[str, Any]] = []
        self.post = self.told.append


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
        self.sent(SendFragments(1, 1, ROUND, 4, ((first, count),), again, True), started, ended)

    def repairs(self, round_: int, *counts: int, add: bool = True) -> None:
        ranges = tuple((300 * k, count) for k, count in enumerate(counts))
        self.sent(SendFragments(1, 1, round_, 4, ranges, True, add), 0.0, 0.0)

    def waited(self, now: float) -> float:
        """Commit, and what the program is told of its waiting."""
        self.host.now = now
        self.committed(Committed(ROUND, {1: 4, 2: 4, 3: 4}, -20, -20, True))
        return float(self.told.told[-1]["seconds_waited"])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.records.close()


def test_all_parts_of_a_gradient_are_its_sending(job: Job) -> None:
    """A switch gets it in quanta; each of them is a sending of its own."""
    job.offers(10.0)
    job.sends(10.0, 11.0)
    job.sends(12.0, 13.5, 256)
    job.sends(14.0, 14.25, 512, 88)
    assert job.waited(15.0) == pytest.approx(5.0 - 2.75)


def test_what_is_sent_again_is_sending_too(job: Job) -> None:
    job.offers(10.0)
    job.sends(10.0, 11.0)
    job.sends(12.0, 12.5, again=True)
    assert job.waited(14.0) == pytest.approx(4.0 - 1.5)


def test_each_gradient_has_its_own_time(job: Job) -> None:
    job.offers(1.0, ROUND - 1)
    job.sends(1.0, 9.0)
    job.offers(10.0)
    job.sends(10.0, 11.0)
    assert job.waited(12.0) == pytest.approx(1.0)


def test_sums_that_do_not_come_are_told_once(job: Job) -> None:
    """One line an incident, which ends with the first round that needs nothing again; all fragments are counted."""
    job.offers(1.0)
    job.sends(1.0, 2.0)
    assert not job.host.said and job.finish.asked_again == 0
    for round_ in (7, 7, 8, 9, 11):
        job.repairs(round_, 3, 4)
    assert [text.split(":")[0] for text in job.host.said] == ["round 7", "round 11"]
    assert "sums of the switch have not come" in job.host.said[0]
    assert job.finish.asked_again == 5 * 7


def test_repairs_among_hosts_are_everyday(job: Job) -> None:
    job.repairs(ROUND, 3, add=False)
    assert not job.host.said and job.finish.asked_again == 0


def test_who_waits_for_a_majority_does_not_stand_still(job: Job) -> None:
    """A cut can last for hours; the program holds the state all that time, and a while after it, too."""
    job.host.node.changing = True
    for now in (1.0, 100.0, 10_000.0):
        job.look(now)
    job.host.node.changing = False
    job.look(10_001.0)
    assert job.program is job.told
