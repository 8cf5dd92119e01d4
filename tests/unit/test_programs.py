# SPDX-License-Identifier: Apache-2.0
"""The programs that are called: found in PATH and beside the interpreter, and named with their packages."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nicps.bench.bmv2 import in_place_of_the_bridge, require_bmv2
from nicps.errors import EnvironmentProblem
from nicps.lab import Lab, LabSettings
from nicps.programs import (
    PACKAGES,
    find_program,
    missing_programs,
    require_programs,
    search_path,
)

ROOT = Path(__file__).resolve().parents[2]
#: Those that a new machine lacks, whatever is installed here.
NOWHERE = "no/such/folder"


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an interpreter beside which there is nothing else; PATH is empty."""
    python = executable(tmp_path / "venv/bin/python")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", NOWHERE)
    return python.parent


def test_a_program_beside_the_interpreter_is_found(beside: Path) -> None:
    assert find_program("vng") is None
    vng = executable(beside / "vng")
    assert find_program("vng") == str(vng)
    assert require_programs("vng", purpose="a guest") == [str(vng)]


def test_path_comes_first(beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(beside / "vng")
    chosen = executable(tmp_path / "chosen/vng")
    monkeypatch.setenv("PATH", str(chosen.parent))
    assert find_program("vng") == str(chosen)


def test_what_a_program_calls_is_found_beside_the_interpreter_too(beside: Path) -> None:
    """vng calls virtme-run by its name alone."""
    executable(beside / "virtme-run")
    assert shutil.which("virtme-run", path=search_path()) == str(beside / "virtme-run")


def test_all_that_is_missing_is_named_with_its_package(beside: Path) -> None:
    executable(beside / "busybox")
    with pytest.raises(EnvironmentProblem) as raised:
        require_programs("qemu-system-x86_64", "busybox", "depmod", purpose="a guest")
    assert str(raised.value) == (
        "a guest needs qemu-system-x86_64 (Debian package qemu-system-x86), depmod (Debian package kmod):"
        f" not in PATH, nor beside {sys.executable}"
    )
    assert missing_programs("busybox") == []


def test_without_bmv2_no_lab_is_built(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(LabSettings("test-no-bmv2", 2))
    monkeypatch.setattr(lab, "up", lambda: pytest.fail("the lab was built"))
    with pytest.raises(EnvironmentProblem, match=r"simple_switch \(.*p4lang-bmv2"):
        in_place_of_the_bridge(lab).__enter__()
    executable(beside / "simple_switch")
    monkeypatch.setattr("nicps.switch.runtime._NEEDED", ("no_such_module",))
    with pytest.raises(EnvironmentProblem, match="the Python module no_such_module is missing"):
        require_bmv2()


# ---- the commands of vm-lab, by an interpreter beside which there is nothing, without a PATH


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An interpreter that has our packages, and no programs beside it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare/bin/python"


def run(python: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": NOWHERE, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [python, ROOT / "vm-lab" / script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="they want root first")
@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("vm_lab.py", "--kernel", "k.deb"), ["vng", "virtme-run", "qemu-system-x86_64"]),
        (("guest.py", "--kernel", "k.deb", "--", "true"), ["vng", "virtme-run", "busybox"]),
        (("mininet_lab.py",), ["mnexec", "ip", "ifconfig"]),
    ],
    ids=lambda value: value[0],
)
def test_a_lab_says_what_it_lacks(bare: Path, command: tuple[str, ...], named: list[str]) -> None:
    done = run(bare, *command)
    assert done.returncode == 3 and not done.stdout, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("nicps: error: a ")
    packages = {name: PACKAGES[name].replace(sys.executable, str(bare)) for name in named}
    assert [name for name in named if f"{name} ({packages[name]})" not in line] == []


# ---- no call goes round the table

#: Functions that start a program, whose first argument is a command or a program's name.
STARTS = re.compile(
    r"subprocess\.(run|call|check_call|check_output)|(subprocess\.)?Popen|.+\.spawn|os\.exec\w+"
)


def bare_word(command: ast.expr) -> bool:
    """Whether the command begins with a program's name, as a literal, and not with its path."""
    while isinstance(command, ast.BinOp):
        command = command.left
    if isinstance(command, ast.List | ast.Tuple) and command.elts:
        command = command.elts[0]
    return (
        isinstance(command, ast.Constant)
        and isinstance(command.value, str)
        and "/" not in command.value
    )


def round_the_table(source: str) -> list[int]:
    """The lines with calls that begin with a program's bare name, or that look for programs."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func), call) for call in calls]
    return [
        call.lineno
        for function, call in named
        if function == "shutil.which"
        or (STARTS.fullmatch(function) and call.args and bare_word(call.args[0]))
    ]


def test_every_program_that_is_called_is_in_the_table() -> None:
    """No call begins with a program's bare name, and nobody else looks for programs."""
    folders = [ROOT / "nicps", ROOT / "trainer", ROOT / "vm-lab", ROOT / ".ci"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if path != ROOT / "nicps/programs.py"
        for line in round_the_table(path.read_text())
    ]
    assert len(files) > 100 and found == []


@pytest.mark.parametrize(
    "call",
    [
        "subprocess.run(['ip', 'link'], check=True)",
        "subprocess.Popen(('ip', *words))",
        "Popen(['ip'] + words)",
        "self._children.spawn(['ip', 'link'], folder, log, done)",
        "os.execvp('ip', words)",
        "os.execv('ip', words)",
        "shutil.which('ip')",
    ],
)
def test_a_call_that_goes_round_the_table_is_found(call: str) -> None:
    assert round_the_table(f"import os\n{call}\n") == [2]
    path = call.replace("'ip'", "'/bin/ip'")
    assert "which" in call or round_the_table(path) == []
