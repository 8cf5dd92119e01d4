# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.elastic --torchft SECONDS` without torchft, which nothing else needs."""

from __future__ import annotations

import pytest

from benchmarks import elastic, elastic_torchft

pytestmark = pytest.mark.unit


def test_torchft_is_optional(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic_torchft, "find_spec", lambda name: None)
    assert elastic.main(["--torchft", "0.5"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "elastic: error: torchft is not installed: pip install torchft"


def test_heartbeats() -> None:
    """Several in a time-out."""
    assert elastic_torchft.heartbeat(0.25) == 0.05
    assert elastic_torchft.heartbeat(5.0) == 0.1
