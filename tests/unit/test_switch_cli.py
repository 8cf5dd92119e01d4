# SPDX-License-Identifier: Apache-2.0
"""`nicps switch p4` where there is no switch, and with words that it cannot take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nicps import wire
from nicps.cli import main
from nicps.errors import EnvironmentProblem, NetworkProblem
from nicps.switch import program
from nicps.switch.runtime import missing_modules


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("nicps: error: ")
    return err


@pytest.mark.parametrize(
    "words", [("connect",), ("counters",), ("load",), ("reset",), ("members",)]
)
def test_no_switch(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Without BMv2's modules that is what is missing; with them, the switch."""
    code = main(["switch", "p4", *words, "--thrift", "127.0.0.1:1"])
    if not missing_modules():
        assert code == NetworkProblem.exit_code
        assert "no switch listens on 127.0.0.1:1" in said(capsys)
    else:
        assert code == EnvironmentProblem.exit_code
        assert "comes with BMv2" in said(capsys)


@pytest.mark.parametrize("kind", ["site-packages", "dist-packages"])
def test_a_bmv2_with_a_prefix_of_its_own(kind: str, checkout: Path, tmp_path: Path) -> None:
    """Its modules are found beside it, behind a link on PATH too; of two Pythons' folders both are looked into."""
    for folder in ("opt/bin", "bin", f"opt/lib/python3.98/{kind}", "opt/lib/python3.99"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    switch = tmp_path / "opt/bin/simple_switch"
    switch.write_text("#!/bin/sh\n")
    switch.chmod(0o755)
    (tmp_path / "bin/simple_switch").symlink_to(switch)
    for name in ("thrift", "bm_runtime", "sswitch_runtime"):
        module = tmp_path / f"opt/lib/python3.98/{kind}" / name / "__init__.py"
        module.parent.mkdir()
        module.write_text(f"PLACE = {name!r}\n")
    text = (
        "from nicps.switch import runtime\nassert not runtime.missing_modules()\n"
        "assert runtime._module('sswitch_runtime').PLACE == 'sswitch_runtime'\n"
    )
    # -S: a BMv2 that is installed on this machine would be found before it.
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("connect", "--thrift", "9090"), "HOST:PORT"),
        (("connect", "--thrift", "host:0"), "HOST:PORT"),
        (("connect", "--thrift", "host:70000"), "HOST:PORT"),
        (("members", "1=02:00:00:00:00:01"), "N=MAC@PORT"),
        (("members", "0=02:00:00:00:00:01@1"), "N=MAC@PORT"),
        (("members", "65=02:00:00:00:00:01@1"), "N=MAC@PORT"),
        (("members", "1=02:00:00:00:01@1"), "N=MAC@PORT"),
        (("members", "1=02:00:00:00:00:01@511"), "N=MAC@PORT"),
    ],
)
def test_words_that_it_cannot_take(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["switch", "p4", *words]) == 2
    assert text in said(capsys)


@pytest.mark.parametrize(
    "words", [("load", "--ports", "1,x"), ("load", "--ports", "1,511"), ("run",)]
)
def test_arguments_that_it_cannot_take(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["switch", "p4", *words])
    assert ended.value.code == 2
    said(capsys)


def test_the_reasons_are_those_of_the_program() -> None:
    """As many as the counter has places, each with a name of its own."""
    reasons = program.reasons()
    assert len(set(reasons)) == program.numbers()["COUNTERS"]
    assert {"switched", "control", "token", "fragment", "stranger", "holder"} <= set(reasons)


def test_a_switch_has_room_for_two_turns() -> None:
    """One holder's sums, and those of the next, which not all have yet; a slot is the index's low bits."""
    slots = program.numbers()["SLOTS"]
    assert slots >= 2 * wire.QUANTUM and slots & (slots - 1) == 0


def test_the_compiled_program_is_the_one_that_is_described() -> None:
    """Without the compiler: its counter has a place for every reason, its tables and registers are there."""
    text = program.compiled().read_text()
    for name in ("members.members", "networks", "verdict.frames", "token.token_owner"):
        assert f'"NicpsIngress.{name}"' in text
