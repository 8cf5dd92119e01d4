# SPDX-License-Identifier: Apache-2.0
"""`down` leaves nothing behind, and ends nothing that is not the lab's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nicps.cli import main
from nicps.lab import (
    Lab,
    LabNotFound,
    LabSettings,
    down,
    links,
    namespaces,
    processes,
    state,
)
from tests.netns.labs import ROOT, in_lab_unmarked, leftovers, nicps, own_links, until
from tests.reaper import fresh_name

# Stops in the middle of `up`, at the n-th call of the named function, and reports that.
HALF_WAY = """
import importlib, sys
from nicps.lab import Lab, LabSettings
name, where, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
module, function = where.rsplit(".", 1)
module = importlib.import_module("nicps.lab." + module)
original = getattr(module, function)
def stop(*args, **options):
    global calls
    calls -= 1
    if calls == 0:
        print("here", flush=True)
        sys.stdin.readline()
    return original(*args, **options)
setattr(module, function, stop)
Lab(LabSettings(name, hosts=3)).up()
"""


@pytest.fixture
def name() -> Iterator[str]:
    """A lab's name; no part of that lab may be left after the test."""
    links_before = own_links()
    chosen = fresh_name()
    yield chosen
    assert leftovers(chosen) == {}
    assert own_links() <= links_before


def half_made(name: str, where: str, calls: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HALF_WAY, name, where, str(calls)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    return child


@pytest.mark.short("enter.unshare-3", "links._add_cable-2", "state.write-2")
@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("state.write", 1),
        ("enter.unshare", 1),  # a bare file stands where the namespace's name should be
        ("enter.unshare", 3),
        ("links.build", 1),
        ("links._add_cable", 2),
        ("links.attach", 3),
        ("state.write", 2),
    ],
)
def test_down_after_up_was_killed(name: str, where: str, calls: int) -> None:
    with half_made(name, where, calls) as child:
        child.kill()
    with pytest.raises(LabNotFound):
        Lab.open(name)
    assert nicps("lab", "down", "--lab", name).returncode == 0
    assert leftovers(name) == {}
    with Lab(LabSettings(name, hosts=3)):
        pass


@pytest.mark.parametrize("where", ["enter.unshare", "links._add_cable"])
def test_ctrl_c_during_up_cleans_up(name: str, where: str) -> None:
    with half_made(name, where, 2) as child:
        child.send_signal(signal.SIGINT)
        # Twice: the second may not disturb the cleaning. Then the step goes on to its end.
        child.send_signal(signal.SIGINT)
        child.communicate("\n", timeout=20)
    assert child.returncode != 0
    assert leftovers(name) == {}


def test_an_up_that_fails_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(links, "attach", fail)
    with pytest.raises(Exception, match="cannot be made: No space left on device"):
        Lab(LabSettings(name, hosts=2)).up()


def test_down_twice_is_no_error(name: str) -> None:
    with Lab(LabSettings(name, hosts=2)):
        assert len(down(name).namespaces) == 3
        assert down(name).namespaces == ()
        assert nicps("lab", "down", "--lab", name).returncode == 0


def test_down_without_a_state_file(name: str) -> None:
    lab = Lab(LabSettings(name, hosts=2))
    lab.up()
    child = lab.run("h1", ["sleep", "1000"])
    state.path_of(name).unlink()
    down(name)
    assert child.wait(timeout=10) != 0


def test_a_lab_whose_namespaces_somebody_has_removed(name: str) -> None:
    """It is named, with the command that removes it; a command for all labs still sees the others."""
    with Lab(LabSettings(name, hosts=2)), Lab(LabSettings(fresh_name(), hosts=1)) as other:
        namespaces.remove([f"nicps-{name}-h2", f"nicps-{name}-switch"])
        says = (
            f"lab {name} has lost nicps-{name}-h2, nicps-{name}-switch: "
            f"run `nicps lab down --lab {name}`"
        )
        every = nicps("lab", "status")
        assert every.returncode == 0 and says in every.stdout.splitlines()
        assert f"lab {other.name}: " in every.stdout
        for command in (["status", "--lab", name], ["exec", "--lab", name, "h1", "--", "true"]):
            one = nicps("lab", *command)
            assert one.returncode == 2 and one.stderr == f"nicps: error: {says}\n"
        assert nicps("lab", "down", "--lab", name).returncode == 0


@pytest.mark.long
def test_status_while_a_lab_comes_and_goes(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It is whole, or it is not there."""
    ended = threading.Event()

    def come_and_go() -> None:
        try:
            for _ in range(10):
                Lab(LabSettings(name, hosts=2)).up()
                down(name)
        finally:
            ended.set()

    with ThreadPoolExecutor() as pool:
        other = pool.submit(come_and_go)
        codes = []
        while not ended.is_set():
            codes.append(main(["lab", "status"]))
        other.result()
    told = capfd.readouterr()
    assert not any(codes) and f"lab {name} " not in told.out, told
    assert f"lab {name}: " in told.out, "it was seen at least once"


def test_a_lab_that_has_lost_a_port(name: str) -> None:
    with Lab(LabSettings(name, hosts=2)) as lab:
        namespaces.inside(
            lab.switch_netns, lambda: subprocess.check_call(["ip", "link", "del", "p2"])
        )
        asked = nicps("lab", "status", "--lab", name)
        says = f"lab {name} has lost its switch port p2: run `nicps lab down --lab {name}`"
        assert asked.returncode == 3 and asked.stderr == f"nicps: error: {says}\n"


def test_down_with_a_damaged_state_file(name: str) -> None:
    Lab(LabSettings(name, hosts=2)).up()
    state.path_of(name).write_text("{ nothing of ours")
    assert nicps("lab", "down", "--lab", name).returncode == 0


def test_detached_processes_end(name: str) -> None:
    with Lab(LabSettings(name, hosts=2)) as lab:
        script = "setsid sleep 1000 & (sleep 1001 &) ; env -i sh -c 'sleep 1002; :' & wait"
        child = lab.run("h1", ["sh", "-c", script])

        def all_there() -> bool:
            commands = {process.command for process in lab.processes()["h1"]}
            return {"sleep 1000", "sleep 1001", "sleep 1002"} <= commands

        until(all_there, "three sleeps in h1")
        ended = {process.command for process in down(name).ended}
        assert {"sleep 1000", "sleep 1001", "sleep 1002"} <= ended
        assert child.wait(timeout=10) == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(LabSettings(name, hosts=1)) as lab:
        deaf = lab.run(
            "h1",
            ["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1000; done"],
            stdout=subprocess.PIPE,
        )
        stopped = lab.run("h1", ["sleep", "1000"])
        assert deaf.stdout is not None
        assert deaf.stdout.readline() == b"deaf\n"
        os.kill(stopped.pid, signal.SIGSTOP)
        found = state.read(name)
        assert found is not None
        processes.end(name, found.processes, term_grace_s=0.3)
        assert deaf.wait(timeout=10) == -signal.SIGKILL
        assert stopped.wait(timeout=10) == -signal.SIGTERM
        deaf.stdout.close()


def test_strangers_are_spared(name: str) -> None:
    lab = Lab(LabSettings(name, hosts=1))
    lab.up()
    stranger = in_lab_unmarked(lab.hosts[0].netns, "sleep", "1000")
    try:
        until(lambda: processes.strangers([lab.hosts[0].netns], ()), "the stranger is inside")
        removed = down(name)
        assert [process.pid for process in removed.strangers] == [stranger.pid]
        assert removed.ended == ()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_recycled_process_number_is_spared(name: str) -> None:
    innocent = subprocess.Popen(["sleep", "1000"])
    try:
        with Lab(LabSettings(name, hosts=1)):
            found = state.read(name)
            start = processes.start_time(innocent.pid)
            assert found is not None
            assert start is not None
            record = state.ProcessRecord(innocent.pid, start - 1, "h1", ("sleep", "1"))
            state.write(replace(found, processes=(record,)))
            assert down(name).ended == ()
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_commands(name: str) -> None:
    made = nicps("lab", "up", "--lab", name, "--hosts", "2", "--rate", "1gbit", "--json")
    assert made.returncode == 0, made.stderr
    try:
        again = nicps("lab", "up", "--lab", name)
        assert again.returncode == 2
        assert again.stderr.startswith("nicps: error: ")
        assert again.stderr.count("\n") == 1
        script = "cat; echo to stderr >&2; exit 7"
        run = nicps("lab", "exec", "--lab", name, "h2", "--", "sh", "-c", script, input="stdin")
        assert (run.returncode, run.stdout, run.stderr) == (7, "stdin", "to stderr\n")
        absent = nicps("lab", "exec", "--lab", name, "h2", "--", "no-such-command")
        assert absent.returncode == 127
        assert absent.stderr == "nicps: error: no-such-command: no such command\n"
        assert nicps("lab", "exec", "--lab", name, "h3", "--", "true").returncode == 2
        sleeping = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nicps",
                "lab",
                "exec",
                "--lab",
                name,
                "h1",
                "--",
                "sleep",
                "1000",
            ],
            cwd=ROOT,
        )
        lab = Lab.open(name)
        until(
            lambda: [p.pid for p in lab.processes()["h1"] if p.command == "sleep 1000"],
            "the command took the place of `nicps lab exec`",
        )
        told = nicps("lab", "status", "--lab", name, "--json")
        (shown,) = json.loads(told.stdout)["labs"]
        assert (shown["name"], shown["rate_bps"], len(shown["hosts"])) == (name, 10**9, 2)
        assert shown["hosts"][0]["processes"] == [
            {"pid": sleeping.pid, "command": "sleep 1000", "stopped": False}
        ]
        text = nicps("lab", "status", "--lab", name).stdout
        assert "10.77.0.2" in text
        assert "sleep 1000" in text
    finally:
        gone = nicps("lab", "down", "--lab", name, "--json")
    assert sleeping.wait(timeout=10) == -signal.SIGTERM
    (ended,) = json.loads(gone.stdout)["labs"][name]["ended"]
    assert ended["command"] == "sleep 1000"


def test_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Another user could not even read a checkout in root's home.
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert main(["lab", "up", "--lab", fresh_name()]) == 3
    err = capsys.readouterr().err
    assert err.startswith("nicps: error: the lab makes network namespaces")
    assert err.count("\n") == 1
