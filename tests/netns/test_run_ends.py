# SPDX-License-Identifier: Apache-2.0
"""How a run of `nicps run` ends if a script, or the command itself, fails (docs/run.md), with real agents."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.netns.labs import until
from tests.netns.members import Network

GROUP = """
import os, sys
import numpy as np
from nicps.collective import Group

rank, how, whose = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
with Group.form(int(os.environ["WORLD_SIZE"]), rank=rank, timeout_s=60) as group:
    print("sum", group.all_reduce(np.full(1000, rank + 1.0, np.float32)).result()[0])
    if how == "killed" and rank == whose:
        os.kill(os.getpid(), 9)
    if how == "raises" and rank == whose:
        raise ValueError("on purpose")
    print("again", group.all_reduce(np.ones(1000, np.float32)).result()[0], group.lost)
"""


WAITS = """
import subprocess, sys, time
print("here")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def folder(three: Network) -> Path:
    made = three.folder / "ends"
    made.mkdir(exist_ok=True)
    made.chmod(0o755)
    return made


def script(folder: Path, text: str) -> str:
    path = folder / "it.py"
    path.write_text(text)
    return str(path)


def outcome(three: Network, *arguments: str) -> tuple[int, dict[str, Any], list[str]]:
    """The outcome of `nicps run --json` on h1: its exit code, its result, and the lines of stderr."""
    ended = three.command("h1", "run", "--json", *arguments)
    return ended.code, json.loads(ended.out), ended.err.splitlines()


def nothing_runs(three: Network) -> None:
    three.all_stand_by()
    for host in three.names:
        until(
            lambda host=host: all(" join " in p.command for p in three.processes(host)),
            f"nothing but the agent on {host}",
        )
        three.work_is_clear(host)


@pytest.mark.short("killed-expected0-2")
@pytest.mark.parametrize("whose", [0, 2])
@pytest.mark.parametrize(("how", "expected"), [("killed", (137, -9)), ("raises", (1,))])
def test_the_others_go_on_without_a_script_that_fails(
    three: Network, folder: Path, how: str, expected: tuple[int, ...], whose: int
) -> None:
    """Also where it is the script on the command's own host."""
    code, result, lines = outcome(three, script(folder, GROUP), how, str(whose))
    codes = list(result["exit_codes"].values())
    assert codes.pop(whose) in expected and codes == [0, 0], lines
    assert code != 0
    assert sum(f"again 2.0 ({whose},)" in line for line in lines) == 2
    nothing_runs(three)


def test_a_command_that_is_killed_leaves_nothing(three: Network, folder: Path) -> None:
    """Nor do processes that the script has detached from itself."""
    child = three.start("h1", "run", script(folder, WAITS))
    assert child.stdout is not None
    assert {child.stdout.readline() for _ in three.names} == {
        f"{host}: here\n" for host in three.names
    }
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    nothing_runs(three)


@pytest.mark.long
def test_much_output(three: Network, folder: Path) -> None:
    """1 MB a host: all of it is shown, and in order."""
    text = "print('\\n'.join(f'line {k}' for k in range(100_000)))\n"
    ended = three.command("h1", "run", script(folder, text))
    assert ended.code == 0, ended.err
    for host in three.names:
        own = [line for line in ended.out.splitlines() if line.startswith(f"{host}: ")]
        assert own == [f"{host}: line {k}" for k in range(100_000)]
    nothing_runs(three)


def test_a_script_that_the_training_user_cannot_read(three: Network, folder: Path) -> None:
    if three.user == "root":
        return  # root can read everything
    path = Path(script(folder, WAITS))
    path.chmod(0o600)
    ended = three.command("h1", "run", str(path))
    path.chmod(0o644)
    assert ended.code != 0 and "Permission denied" in ended.err
    (line,) = [each for each in ended.err.splitlines() if "error: " in each]
    assert str(path) in line
    nothing_runs(three)
