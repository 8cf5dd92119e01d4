# SPDX-License-Identifier: Apache-2.0
"""The Mininet lab's one command, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netns.members import tiny_job

pytestmark = pytest.mark.p4("simple_switch", "mininet")


def lab(checkout: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, checkout / "vm-lab" / "mininet_lab.py", *arguments]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=checkout,
    )


def namespaces() -> set[str]:
    """Network namespaces that some process is in."""
    places = Path("/proc").glob("[0-9]*/ns/net")
    found = set()
    for place in places:
        try:
            found.add(str(place.readlink()))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("--switch", "plain"),
        ("--switch", "bmv2", "--key"),
        ("--switch", "bmv2", "--switches", "2"),
        ("--switch", "bmv2", "--mode", "switch", "--key"),
    ],
    ids=["plain", "bmv2", "two-in-line", "adding"],
)
def test_a_job_is_trained(checkout: Path, open_path: Path, arguments: tuple[str, ...]) -> None:
    before = namespaces()
    done = lab(checkout, tiny_job(open_path), "--hosts", "3", "--runs", open_path, *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["weights_identical"] is True and result["hosts"] == 3
    switches = [line for line in done.stderr.splitlines() if line.startswith("s")]
    if "bmv2" in arguments:
        assert switches and all("fragment" in line for line in switches), done.stderr
        assert not any("stranger" in line for line in switches), done.stderr
        assert ("--mode" in arguments) == any("summed" in line for line in switches), done.stderr
    assert namespaces() <= before


def test_what_is_wrong_is_said_in_one_line(checkout: Path, open_path: Path) -> None:
    before = namespaces()
    broken = tiny_job(open_path, "\nraise ValueError('broken on purpose')\n", "broken")
    done = lab(checkout, broken, "--hosts", "2", "--switch", "plain", "--runs", open_path)
    assert done.returncode == 5
    assert "broken on purpose" in done.stderr
    assert namespaces() <= before
    done = lab(checkout, "--hosts", "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
