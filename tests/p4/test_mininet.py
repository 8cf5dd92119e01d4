# SPDX-License-Identifier: Apache-2.0
"""The Mininet lab's one command, as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.netns.labs import until
from tests.netns.members import tiny_job

pytestmark = pytest.mark.p4("simple_switch", "mininet")


def start(checkout: Path, places: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """The lab; all that it starts is known by where temporary files go."""
    command = [sys.executable, checkout / "vm-lab" / "mininet_lab.py", *arguments]
    return subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env={**os.environ, "TMPDIR": str(places)},
    )


def count(line: str, kind: str) -> int:
    """How many frames of a kind a switch's line says: `s1: switched 23, token 937, stranger 9`."""
    found = re.search(rf"\b{kind} (\d+)", line)
    return int(found[1]) if found else 0


def lab(checkout: Path, places: Path, *arguments: str | Path) -> tuple[int, str, str]:
    """The exit code, and what was said on stdout and stderr; nothing is left."""
    process = start(checkout, places, *arguments)
    try:
        out, err = process.communicate(timeout=360)
    finally:
        process.terminate()
        process.wait(60)
        left = end_all(places)
    assert not left and not list(places.iterdir())
    return process.returncode, out, err


def running(places: Path) -> dict[int, str]:
    """Processes of a lab, shells and switches of its namespaces among them: their command lines."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={places}".encode() in (place / "environ").read_bytes().split(b"\0"):
                command = (place / "cmdline").read_bytes()
                found[int(place.name)] = command.replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def end_all(places: Path) -> dict[int, str]:
    """Kill what a lab has left, if it has."""
    left = running(places)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


@contextlib.contextmanager
def held(pids: Iterable[int]) -> Iterator[set[str]]:
    """The network namespaces of these processes, kept: others that are made meanwhile get other numbers."""
    with contextlib.ExitStack() as stack:
        files = set()
        for pid in pids:
            with contextlib.suppress(OSError):
                fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                files.add(os.readlink(f"/proc/self/fd/{fd}"))
        yield files - {os.readlink("/proc/self/ns/net")}


def inhabited() -> set[str]:
    """Network namespaces that some process is in."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(str(place.readlink()))
    return found


@pytest.fixture
def places(open_path: Path) -> Path:
    """Where temporary files go."""
    path = open_path / "places"
    path.mkdir()
    return path


@pytest.mark.timeout(480)  # two BMv2 in line take a processor each
@pytest.mark.parametrize(
    "arguments",
    [
        ("--switch", "plain"),
        ("--switch", "bmv2", "--key"),
        # Of three rounds too many frames pass before both controllers have recorded the hosts.
        ("--switch", "bmv2", "--switches", "2", "--set", "rounds=20"),
        (
            *("--switch", "bmv2", "--mode", "switch", "--key"),
            *("--set", "save_gradients=true", "--set", "lane=i32"),
        ),
    ],
    ids=["plain", "bmv2", "two-in-line", "adding"],
)
def test_a_job_is_trained(
    checkout: Path, open_path: Path, places: Path, arguments: tuple[str, ...]
) -> None:
    job, runs = tiny_job(open_path), open_path / "runs"
    usual = ("--hosts", "3", "--runs", runs, "--silence", "5")
    code, out, err = lab(checkout, places, job, *usual, *arguments)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["weights_identical"] is True and result["hosts"] == 3
    switches = [line for line in err.splitlines() if line.startswith("s")]
    if "bmv2" in arguments:
        assert switches and all("fragment" in line for line in switches), err
        # A host is a stranger until the controller has recorded it.
        assert all(5 * count(line, "stranger") < count(line, "token") for line in switches), err
        assert ("--mode" in arguments) == any("summed" in line for line in switches), err
    if "--mode" in arguments:
        assert result["sums_by_xdp"]["gradients"] > 0
        assert result["sums_by_xdp"]["rounds"] == result["rounds"]


@pytest.mark.long
def test_the_digits_where_the_switch_adds(checkout: Path, open_path: Path, places: Path) -> None:
    """As good as in any other lab, and every sum is the one that hosts come to."""
    settings = ("--set", "lane=i32", "--set", "save_gradients=true")
    command = ("--mode", "switch", "--runs", open_path / "runs", *settings)
    code, out, err = lab(checkout, places, *command)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    print(f"\n{json.dumps(result)}")
    assert result["hosts"] == 4 and result["weights_identical"] is True
    assert result["test_accuracy"] > 0.94
    assert result["sums_by_xdp"]["gradients"] >= 4 * 300
    assert "summed" in err


def test_what_is_wrong_is_said_in_one_line(checkout: Path, open_path: Path, places: Path) -> None:
    broken = tiny_job(open_path, "\nraise ValueError('broken on purpose')\n", "broken")
    arguments = ("--hosts", "2", "--switch", "plain", "--runs", open_path / "runs")
    code, _, err = lab(checkout, places, broken, *arguments)
    assert code == 5
    assert "broken on purpose" in err
    code, _, err = lab(checkout, places, "--hosts", "1")
    assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["mininet:h1", " switch p4 ", " submit "])
def test_ended_in_the_middle(
    checkout: Path, open_path: Path, places: Path, moment: str, number: signal.Signals
) -> None:
    """While nodes are made, a switch starts, a job trains; and again while it is being taken down: nothing stays."""
    job = tiny_job(open_path, "\nsettings = Settings(batch=64, rounds=10**6, quorum=1.0)\n")
    process = start(checkout, places, job, "--hosts", "2", "--runs", open_path / "runs")

    def there() -> bool:
        assert process.poll() is None, process.stderr and process.stderr.read()
        return any(moment in command for command in running(places).values())

    try:
        until(there, moment, 90.0)
        many = running(places)
        with held(many) as inside:
            process.send_signal(number)
            until(lambda: process.poll() is not None or len(running(places)) < len(many), "it ends")
            process.send_signal(number)
            code = process.wait(60)
            assert code in (128 + number, -number)  # the second finds it almost ended
            assert inside and not inside & inhabited()
    finally:
        process.kill()
        left = end_all(places)
        process.communicate()
    assert not left and not list(places.iterdir())
