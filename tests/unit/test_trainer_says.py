# SPDX-License-Identifier: Apache-2.0
"""What an agent makes of a training program's reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nicps.agent.agent import Agent
from nicps.session.shared_form import Report

pytestmark = pytest.mark.unit


def test_a_warning_is_no_progress() -> None:
    """What was reported before still stands."""
    told: list[tuple[Any, ...]] = []
    agent: Any = SimpleNamespace(
        job=SimpleNamespace(id="a-job"),
        settings=SimpleNamespace(name="h2"),
        conductor=SimpleNamespace(job_id="a-job"),
        frames=SimpleNamespace(turns=9),
        _turns_before=2,
        tell=lambda event, job, **values: told.append((event, job, values)),
    )
    Agent.trainer_says(agent, Report({"round": 3}))
    Agent.trainer_says(agent, Report({"warning": "it is\nslow"}))
    assert told == [
        ("progress", "a-job", {"values": {"round": 3}, "token_turns": 7}),
        ("warning", "a-job", {"message": "h2: it is slow"}),
    ]
    assert agent.progress == {"round": 3}
