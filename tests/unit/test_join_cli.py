# SPDX-License-Identifier: Apache-2.0
"""`nicps join`: what it refuses before it touches anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from nicps import cli
from nicps.agent import AgentSettings
from nicps.errors import EnvironmentProblem, UsageProblem
from nicps.exchange import Exchange

KEY = Path("/no/such/key")
SHARES = ("0", "-0.5", "1.1", "nan")
JOIN = ["join", "--iface", "no-such-interface", "--mode", "switch", "--key", str(KEY)]


def test_a_switch_is_not_trusted_beside_a_key() -> None:
    """The switch's sums carry no tag: who has a key must say that they are believed all the same."""
    with pytest.raises(UsageProblem, match="--trust-switch"):
        AgentSettings(iface="eth1", exchange=Exchange.SWITCH, key=KEY)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"key": KEY, "trust_switch": True}, "give --switch-key FILE in place of --trust-switch"),
        ({"switch_key": KEY}, "a network with a key"),
        ({"switch_key": KEY, "trust_switch": True, "key": KEY}, "leave --trust-switch out"),
    ],
)
def test_a_linux_switch_is_believed_as_the_network_has_it(
    settings: dict[str, object], why: str
) -> None:
    with pytest.raises(UsageProblem, match=why):
        AgentSettings(iface="eth1", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "believes"),
    [
        ({}, False),
        ({"trust_switch": True}, True),
        ({"key": KEY, "switch_key": KEY}, True),
        ({"exchange": Exchange.SWITCH, "key": KEY, "trust_switch": True}, False),
        ({"exchange": Exchange.SWITCH, "key": KEY, "trust_switch": True, "switch_key": KEY}, True),
    ],
)
def test_who_believes_a_linux_switch(settings: dict[str, object], believes: bool) -> None:
    """With --mode switch, --trust-switch is of a P4 switch."""
    assert AgentSettings(iface="eth1", **settings).believes_switch is believes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"key": KEY},
        {"exchange": Exchange.SWITCH},
        {"exchange": Exchange.SWITCH, "key": KEY, "trust_switch": True},
    ],
)
def test_what_is_accepted(settings: dict[str, object]) -> None:
    AgentSettings(iface="eth1", **settings)  # type: ignore[arg-type]


def test_the_command_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(JOIN) == 2
    text = capsys.readouterr().err
    assert text.startswith("nicps: error: a switch has no key") and "--trust-switch" in text
    assert text.count("\n") == 1


def test_the_command_goes_on_where_the_switch_is_trusted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As far as to the next thing that is wrong: there is no such key."""
    assert cli.main([*JOIN, "--trust-switch"]) not in (0, 2)
    assert "--trust-switch" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--work", "--runs"])
def test_folders_that_cannot_be_used(
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, and not when a job needs them."""
    monkeypatch.setattr("nicps.agent.agent.need_root", lambda: None)
    good = {"--work": str(tmp_path), "--runs": str(tmp_path / "runs"), "--user": "root"}
    words = [word for pair in {**good, option: "/dev/null/x"}.items() for word in pair]
    code = cli.main(["join", "--iface", "no-such-interface", *words])
    text = capsys.readouterr().err
    assert code == EnvironmentProblem.exit_code
    assert "/dev/null/x: " in text and option in text and text.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", SHARES)
def test_a_share_is_a_part_of_the_time(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["join", "--iface", "no-such-interface", f"--urgent-share={share}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nicps: error: --urgent-share is above 0 and at most 1, not")
