# SPDX-License-Identifier: Apache-2.0
"""Results of jobs as people see them."""

from __future__ import annotations

import pytest

from nicps.cli.submit import finish, label_of, readable


def test_settings_are_read_as_they_are_given() -> None:
    settings = {"batch": 30, "rank": None, "redeal": True, "servers": "h1,h2", "slow.h2": 1.5}
    assert readable(settings) == "batch=30 redeal=True servers=h1,h2 slow.h2=1.5"
    assert readable(["h2", "h1"]) == "h2 h1"
    assert readable([{"name": "h1", "round": 3}]) == "name=h1 round=3"
    assert (readable(None), readable(0.5), readable([])) == ("-", "0.5", "-")


@pytest.mark.parametrize(("system", "label"), [("S", "synchronisations"), ("R", "rounds")])
def test_rounds_of_the_network_are_synchronisations_of_servers(
    system: str, label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = dict.fromkeys(("hosts", "test_accuracy", "weights_identical", "seconds", "report"), 1)
    finish({**result, "rounds": 11, "system": system}, as_json=False)
    assert f"{label:<18} 11" in capsys.readouterr().out.splitlines()
    of = {"rounds": 11, "trained_rounds": 11, "system": system}
    assert [label_of(key, of) for key in of] == [label, f"trained_{label}", "system"]
