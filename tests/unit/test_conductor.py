# SPDX-License-Identifier: Apache-2.0
"""The lead's side of a job, while its training program saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.checkpoints import STATE
from nicps.agent.conductor import Conductor
from nicps.job.plan import Found, Plan
from nicps.protocol import View
from nicps.protocol.phase import Member, Phase


class Lead:
    """As much of an agent as its conductor needs; `decided` are the phases that it decides on."""

    def __init__(self, folder: Path) -> None:
        (folder / STATE).write_text("weights")
        self.now = 0.0
        self.submission: Any = None
        self.log: Callable[[str], None]
        self.tell: Callable[..., None]
        self.decided: list[Phase] = []
        self.handed: list[Any] = []
        self.then: Callable[[str], None] = lambda error: None  # once the program has saved
        members = tuple(Member(k, bytes([k] * 6), f"h{k}") for k in (1, 2))
        self.node = SimpleNamespace(
            number=1,
            leads=True,
            open_round=8,
            learners=frozenset({2}),
            view=View(3, members, frozenset({1, 2}), 1),
            decide=self._decide,
        )
        self.job = SimpleNamespace(
            program=SimpleNamespace(ready=False, saved=42),
            folder=folder,
            save=self._save,
            handout=SimpleNamespace(offer=self.handed.append),
            checkpoints=SimpleNamespace(
                keep=lambda name, then: then(""), place=lambda rounds: f"saved after {rounds}"
            ),
        )
        found = Found(able=True, trained=True, finishing=False)
        self.conductor: Conductor | None = Conductor(
            self,  # type: ignore[arg-type]
            "job",
            Plan("job", 8, 16),
            None,
            found,
        )

    def _decide(self, now: float, phase: Phase) -> list[Any]:
        assert self.node.leads
        self.decided.append(phase)
        return []

    def _save(self, then: Callable[[str], None]) -> None:
        self.then = then

    def act(self, actions: list[Any]) -> None:
        pass

    def struck(self) -> None:
        self.node.leads, self.conductor = False, None


@pytest.fixture
def lead(tmp_path: Path) -> Lead:
    return Lead(tmp_path)


def for_a_learner(lead: Lead) -> None:
    assert lead.conductor is not None
    lead.conductor.stream("state")


def for_the_alarm(lead: Lead) -> None:
    assert lead.conductor is not None
    lead.conductor.course.raise_alarm("h2 left")
    lead.conductor.save()


def test_the_state_is_handed_out_once_it_is_saved(lead: Lead) -> None:
    for_a_learner(lead)
    assert not lead.decided
    lead.then("")
    assert [phase.kind for phase in lead.decided] == [wire.PhaseKind.HANDOUT]


def test_a_setting_for_a_host_that_is_not_there(lead: Lead) -> None:
    assert lead.conductor is not None
    said: list[str] = []
    lead.submission = SimpleNamespace(
        prepared={"settings": {"seed": 1, "slow.h2": 2, "slow.h9": 3, "slow.x\n": 3}}
    )
    lead.log = said.append
    lead.tell = lambda event, job, message: said.append(event)
    lead.conductor._look_for_slow_hosts()
    assert said == ["nobody is slowed down by slow.h9, slow.x : the hosts are h1, h2", "warning"]


def test_the_alarm_stops_the_job_once_it_is_saved(lead: Lead) -> None:
    for_the_alarm(lead)
    lead.then("")
    assert [phase.kind for phase in lead.decided] == [wire.PhaseKind.STOP]
    assert lead.conductor is not None and lead.conductor.saved == "saved after 42"


@pytest.mark.parametrize("saves", [for_a_learner, for_the_alarm])
@pytest.mark.parametrize("error", ["", "the disk is full"])
def test_what_is_saved_too_late_is_for_nothing(
    lead: Lead, saves: Callable[[Lead], None], error: str
) -> None:
    """It was struck off, or another leads: deciding is not its part any more."""
    saves(lead)
    lead.struck()
    lead.then(error)
    assert not lead.decided and not lead.handed
