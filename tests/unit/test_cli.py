# SPDX-License-Identifier: Apache-2.0
"""The `nicps` command: one line an error, its exit code, and no import that is not needed."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nicps import __version__, cli
from nicps.errors import (
    EnvironmentProblem,
    JobFailed,
    NetworkProblem,
    NicpsError,
    UsageProblem,
)

Install = Callable[[Callable[[argparse.Namespace], int]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a function in the place of the `doctor` command."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        def add_parser(subparsers: Any) -> None:
            subparsers.add_parser("doctor").set_defaults(func=run)

        module = ModuleType("doctor")
        module.add_parser = add_parser  # type: ignore[attr-defined]
        monkeypatch.setattr(importlib, "import_module", lambda name: module)

    return install


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"nicps {__version__}\n"


def test_a_scripts_arguments_in_front_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--epochs", "3", "train.py"])
    assert capsys.readouterr().err == (
        "nicps: error: unrecognized arguments: --epochs: a script's arguments go after the script"
        " (see `nicps run --help`)\n"
    )


@pytest.mark.parametrize(
    ("line", "said", "prog"),
    [
        (
            "run --dataa X it.py --epochs 3",
            "unrecognized arguments: --dataa: did you mean --data?"
            " A script's arguments go after the script",
            "nicps run",
        ),
        (
            "run --socket=/x --jsn --dataa it.py --data",
            "unrecognized arguments: --jsn --dataa: did you mean --json, --data?"
            " A script's arguments go after the script",
            "nicps run",
        ),
        (
            "run --jsn",
            "unrecognized arguments: --jsn: did you mean --json?"
            " A script's arguments go after the script",
            "nicps run",
        ),
        (
            "lab run --host 3 folder",
            "unrecognized arguments: --host: did you mean --hosts?",
            "nicps lab run",
        ),
        (
            "lab run --script it.py --queu 3 -- --host 3",
            "unrecognized arguments: --queu: did you mean --queue?"
            " A script's arguments go after --",
            "nicps lab run",
        ),
        ("lab run --xyz folder", "unrecognized arguments: --xyz", "nicps lab run"),
        ("lab exec -it h1 -- ls -l", "unrecognized arguments: -it", "nicps lab exec"),
        ("lab --lab x status", "unrecognized arguments: --lab", "nicps lab"),
        (
            "--verbos run it.py",
            "unrecognized arguments: --verbos: did you mean --verbose?",
            "nicps",
        ),
        ("status again", "unrecognized arguments: again", "nicps status"),
        ("stats", "argument COMMAND: invalid choice: 'stats': did you mean 'status'?", "nicps"),
        (
            "lab kil h1",
            "argument COMMAND: invalid choice: 'kil': did you mean 'kill'?",
            "nicps lab",
        ),
        (
            "lab link h1 dwn",
            "argument state: invalid choice: 'dwn': did you mean 'down'?",
            "nicps lab link",
        ),
        (
            "lab link h1 sideways",
            "argument state: invalid choice: 'sideways' (choose from 'up', 'down', 'unplugged')",
            "nicps lab link",
        ),
    ],
)
def test_what_is_unknown_is_named_and_what_it_is_like(
    line: str, said: str, prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the parser of the sub-command, whose help lists what there is."""
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"nicps: error: {said} (see `{prog} --help`)\n"


@pytest.mark.parametrize("line", ["run --data {} it.py --jsn 3", "run --data={} it.py --jsn -- 3"])
def test_a_scripts_own_options_are_not_looked_at(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a folder's name has a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    words = [word.format(folder) for word in line.split()]
    options = cli.build_parser("run").parse_args(words)
    assert options.script == Path("it.py") and options.arguments[0] == "--jsn"
    with pytest.raises(SystemExit):
        cli.main([*words[:-4], "--result"])
    assert "unrecognized" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_wrong_use_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("nicps: error: ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NicpsError("a\nb"), 1),
        (UsageProblem("a\nb"), 2),
        (EnvironmentProblem("a\nb"), 3),
        (NetworkProblem("a\nb"), 4),
        (JobFailed("a\nb"), 5),
    ],
)
def test_errors_are_one_line(
    install: Install, capsys: pytest.CaptureFixture[str], error: NicpsError, code: int
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    install(run)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == "nicps: error: a b\n"
    assert cli.main(["doctor", "--verbose"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_unexpected_errors_are_one_line_too(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError("of course")

    install(run)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "ZeroDivisionError: of course" in text


def test_interrupt(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    install(run)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"nicps {name}" in capsys.readouterr().out


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from nicps import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pyroute2', 'bcc', 'sklearn', 'orjson'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
