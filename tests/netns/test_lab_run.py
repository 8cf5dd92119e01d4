# SPDX-License-Identifier: Apache-2.0
"""`nicps lab run` against stand-ins for `nicps join` and `nicps submit`: what it does around them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps.errors import NicpsError, UsageProblem
from nicps.lab import AgentFailed, LabSettings, agents, jobs
from tests.netns.labs import ROOT, leftovers, nicps, until
from tests.reaper import fresh_name

# A word in the stand-in's environment decides what it does.
STAND_IN = """
import json, os, signal, socket, subprocess, sys, time
command, how = sys.argv[1], os.environ.get("STAND_IN", "")
if command == "join":
    host = sys.argv[sys.argv.index("--name") + 1]
    runs = sys.argv[sys.argv.index("--runs") + 1]
    print("arguments", sys.argv[1:], flush=True)
    assert sys.argv[sys.argv.index("--iface") + 1] == "eth1" and os.path.isdir(runs)
    work = sys.argv[sys.argv.index("--work") + 1]
    assert os.stat(work).st_mode & 0o777 == 0o755
    open(os.path.join(work, "left by " + host), "w").close()
    assert sorted(os.listdir("/sys/class/net")) == ["eth1", "lo"]
    if how == "agent fails" and host == "h2":
        print("nicps: error: eth1 is not to be had", file=sys.stderr)
        sys.exit(3)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0nicps")
    listener.listen()
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    signal.pause()
else:
    print("round 1", file=sys.stderr, flush=True)
    socket.socket(socket.AF_UNIX).connect("\\0nicps")
    if how == "hang":
        signal.pause()
    if how in ("submit fails", "submit refuses"):
        print("nicps: error: the job raised", file=sys.stderr)
        sys.exit(5 if how == "submit fails" else 2)
    if command == "run":
        print("printed", flush=True)
        result = {"exit_codes": {"h1": 0}, "arguments": sys.argv[4:], "not_kept": {}}
        if how == "not kept":
            result["not_kept"] = {"h2": "a full disk"}
            (scratch,) = os.listdir(os.environ["SCRATCH"])
            late = "mkdir " + os.path.join(os.environ["SCRATCH"], scratch, "nicps-left-run-h2")
            subprocess.Popen(["sh", "-c", "sleep 0.5; " + late])
        with open(sys.argv[sys.argv.index("--result") + 1], "w") as file:
            json.dump(result, file)
        sys.exit(8 if result["not_kept"] else 0)
    report = os.path.join(os.environ["RUNS"], "the-run", "report.html")
    os.makedirs(os.path.dirname(report))
    print("something before")
    print(json.dumps({"rounds": 3, "weights_identical": how != "differ", "report": report,
                      "arguments": sys.argv[1:]}))
"""

# A job that has only the files that are checked before it runs.
MINE = """
from dataclasses import dataclass
from trainer import Settings

@dataclass(frozen=True, kw_only=True)
class Mine(Settings):
    mine: int = 1

settings = Mine(rounds=1)
model = loss = data = optimizer = success = print
"""

# The real command line, with the stand-in in the place of its `nicps join` and `nicps submit`.
DRIVER = """
import os, sys
from nicps.lab import agents, jobs
stand_in = sys.argv.pop(1)
agents.SCRATCH = os.environ["SCRATCH"]
agents.nicps_command = jobs.nicps_command = lambda *arguments: [sys.executable, stand_in, *arguments]
from nicps.cli import main
sys.exit(main())
"""


class Driver:
    """Runs `nicps lab run` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.name = fresh_name()
        self.runs = folder / "runs"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.job = folder / "job"
        self.job.mkdir()
        (self.job / "job.py").write_text("")
        self.stand_in = folder / "stand_in.py"
        self.stand_in.write_text(STAND_IN)

    @contextlib.contextmanager
    def running(self, how: str, *options: str) -> Iterator[subprocess.Popen[str]]:
        """The process, which must have ended by the end of the block, also after a test that fails."""
        child = self._start(how, *options)
        try:
            yield child
        finally:
            late = child.poll() is None
            child.kill()
            child.wait(10)
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
            if late:
                nicps("lab", "down", "--lab", self.name)

    def _start(self, how: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DRIVER, str(self.stand_in), "lab", "run"]
        command += ["--lab", self.name, "--hosts", "3", "--runs", str(self.runs)]
        command += options if "--script" in options else [str(self.job), *options]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "STAND_IN": how,
                "RUNS": str(self.runs),
                "SCRATCH": str(self.scratch),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, how: str, *options: str) -> tuple[int, str, str]:
        with self.running(how, *options) as child:
            out, err = child.communicate(timeout=60)
        return child.returncode, out, err


@pytest.fixture
def driver(open_path: Path) -> Iterator[Driver]:
    """A driver; no part of its lab may be left after the test."""
    made = Driver(open_path)
    yield made
    assert leftovers(made.name) == {}


def test_the_last_line_is_the_result(driver: Driver) -> None:
    data = driver.job / "data"
    data.mkdir()
    options = ["--set", "seed=7", "--set", "slow.h2=4", "--data", str(data)]
    code, out, err = driver.finish("", *options)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["hosts"], result["xdp_mode"], result["rounds"]) == (3, "none", 3)
    assert result["arguments"] == [
        *("submit", str(driver.job), "--wait", "--json", "--data", str(data)),
        *("--set", "seed=7", "--set", "slow.h2=4"),
    ]
    assert "round 1" in err
    assert list(driver.scratch.iterdir()) == []
    # The working folder is gone, and the logs are beside the results.
    assert [path.name for path in driver.runs.iterdir()] == ["the-run"]
    log = (driver.runs / "the-run" / "h2" / "agent.log").read_text()
    assert "'--user', 'nobody'" in log or "training runs as root" in err


def test_with_json_there_is_nothing_but_the_line(driver: Driver) -> None:
    code, out, _ = driver.finish("", "--json")
    assert code == 0
    assert json.loads(out)["weights_identical"] is True


@pytest.mark.parametrize("as_json", [False, True])
def test_what_scripts_print_is_on_stdout_but_with_json(driver: Driver, as_json: bool) -> None:
    script = driver.job / "it.py"
    script.write_text("")
    json_option = ["--json"] * as_json
    code, out, err = driver.finish("", *json_option, "--script", str(script), "--", "--lr", "0.1")
    assert code == 0, err
    lines = out.splitlines()
    result = json.loads(lines[-1])
    assert result["arguments"][-3:] == [str(script), "--lr", "0.1"]
    assert result["hosts"] == 3
    assert (len(lines) == 1, "printed" in err) == (as_json, as_json)
    assert as_json or lines[0] == "printed"


@pytest.mark.parametrize(
    ("options", "text", "expected", "said"),
    [
        pytest.param(
            *(["--set", "lane=i9"], MINE, 2, "setting lane is 'i9'; it must be i32 or i16 or i8"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(
                ["--set", "sed=1"],
                MINE,
                2,
                "unknown setting 'sed'; did you mean seed? known are admit, alarm_below",
            ),
            marks=pytest.mark.long,
        ),
        (["--set", "micro_batches=2"], MINE, 2, "setting micro_batches is 2; it must be at least"),
        (["--set", "exchange=switch"], "", 2, "no switch that adds: --switch xdp makes one"),
        ([], "a = = 1", 5, "SyntaxError: invalid syntax (job.py:1)"),
    ],
)
def test_mistakes_of_the_job_are_found_without_a_lab(
    driver: Driver, options: list[str], text: str, expected: int, said: str
) -> None:
    (driver.job / "job.py").write_text(text)
    code, out, err = driver.finish("", *options)
    assert (code, out) == (expected, "")
    (line,) = [line for line in err.splitlines() if not line.startswith("nicps: WARNING: training")]
    assert line.startswith("nicps: error: ") and said in line
    assert not driver.runs.exists()


def test_mistakes_of_the_script_are_found_without_a_lab(driver: Driver) -> None:
    script = driver.job / "it.py"
    script.write_text("import sys\nprint(\n")
    code, _, err = driver.finish("", "--script", str(script))
    assert code == 5 and "SyntaxError: '(' was never closed (it.py:2)\n" in err
    script.write_text("")
    (driver.job / "link").symlink_to("it.py")
    code, _, err = driver.finish("", "--script", str(script))
    assert code == 2 and "link is not a plain file: a script's folder is sent as it is" in err
    assert not driver.runs.exists()


def test_settings_of_the_jobs_own(driver: Driver) -> None:
    """`quorum` is 1 in the job, and so fewer micro-batches are right."""
    (driver.job / "job.py").write_text(MINE.replace("rounds=1", "rounds=1, quorum=1.0"))
    code, _, err = driver.finish("", "--set", "micro_batches=2", "--set", "mine=3")
    assert code == 0, err


def test_a_job_that_is_refused_leaves_nothing(driver: Driver) -> None:
    code, out, err = driver.finish("submit refuses")
    assert (code, out) == (2, "")
    assert "agents' logs" not in err
    assert list(driver.runs.iterdir()) == []


def test_what_could_not_be_kept_outlives_the_lab(driver: Driver) -> None:
    """Its agent puts it aside after the run has ended, in a folder that goes with the lab."""
    script = driver.job / "it.py"
    script.write_text("")
    code, _, err = driver.finish("not kept", "--script", str(script))
    left = driver.scratch / "nicps-left-run-h2"
    assert code == 8 and f"nicps: what could not be kept is in {left}\n" in err
    assert [*driver.scratch.iterdir()] == [left]


def test_weights_that_differ_fail_the_command(driver: Driver) -> None:
    code, out, err = driver.finish("differ", "--json")
    assert code == 5
    assert json.loads(out)["weights_identical"] is False
    assert "weights differ" in err


def test_an_agent_that_fails_is_quoted(driver: Driver) -> None:
    code, out, err = driver.finish("agent fails")
    assert code == 3
    assert out == ""
    assert "nicps: error: the agent on h2 ended: eth1 is not to be had\n" in err
    assert f"files are in {driver.runs / ('lab-' + driver.name)}" in err


def test_a_submission_that_fails_passes_its_code_on(driver: Driver) -> None:
    code, out, err = driver.finish("submit fails")
    assert (code, out) == (5, "")
    assert err.count("error:") == 1
    assert (driver.runs / f"lab-{driver.name}" / "h1" / "agent.log").is_file()


@pytest.mark.short("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_takes_the_lab_down(driver: Driver, number: signal.Signals) -> None:
    with driver.running("hang", "--user", "root") as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "round 1\n"
        child.send_signal(number)
        child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert leftovers(driver.name) == {}
    assert list(driver.runs.iterdir()) == []
    assert list(driver.scratch.iterdir()) == []


def test_a_test_that_fails_leaves_nothing(driver: Driver) -> None:
    """Its command does not end by itself; neither do the agents that the command has started."""
    children = []

    def fails() -> None:
        with driver.running("hang", "--user", "root") as child:
            children.append(child)
            assert child.stderr is not None
            assert child.stderr.readline() == "round 1\n"
            pytest.fail("as a test does")

    with pytest.raises(pytest.fail.Exception):
        fails()
    (child,) = children
    assert child.returncode == -signal.SIGKILL
    assert leftovers(driver.name) == {}


def test_down_after_run_was_killed(driver: Driver) -> None:
    with driver.running("hang", "--user", "root") as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "round 1\n"
        child.kill()
        child.wait(10)
    until(lambda: "processes" in leftovers(driver.name), "the agents outlive it")
    assert f"lab {driver.name}: 3 hosts" in nicps("lab", "status", "--lab", driver.name).stdout
    assert list(driver.scratch.iterdir()) != []
    assert nicps("lab", "down", "--lab", driver.name).returncode == 0
    assert list(driver.scratch.iterdir()) == []


def test_no_such_job(driver: Driver) -> None:
    (driver.job / "job.py").unlink()
    driver.job.rmdir()
    code, out, err = driver.finish("")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize("user", ["no-such-user", ""])
def test_no_such_user(driver: Driver, user: str) -> None:
    """Refused before anything is made: no folder with the agents' logs is left."""
    code, out, err = driver.finish("", "--user", user)
    assert (code, out) == (3, "")
    assert f"there is no user {user!r}" in err and err.count("\n") == 1
    assert not driver.runs.exists()


def test_an_agent_that_does_not_answer(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(*arguments: str) -> list[str]:
        return ["sh", "-c", "echo compiling; exec sleep 1000", *arguments]

    monkeypatch.setattr(agents, "nicps_command", stand_in)
    monkeypatch.setattr(agents, "READY_S", 1.0)
    shape = LabSettings(driver.name, hosts=2)
    with pytest.raises(NicpsError, match="from the agent on h1, h2: compiling") as caught:
        jobs.run_job(jobs.RunSettings(driver.job, shape, runs=driver.runs, user="root"))
    assert caught.value.exit_code == 4


def test_results_that_cannot_be_left(driver: Driver) -> None:
    code, _, err = driver.finish("", "--runs", "/dev/null/x")
    assert (code, err.count("\n")) == (3, 1)
    assert err.startswith("nicps: error: results cannot be left in /dev/null/x: ")


def test_a_folder_in_the_way(driver: Driver) -> None:
    (driver.runs / f"lab-{driver.name}").mkdir(parents=True)
    with pytest.raises(UsageProblem, match="is in the way"):
        jobs.run_job(jobs.RunSettings(driver.job, LabSettings(driver.name), runs=driver.runs))


def test_the_user_who_trains(driver: Driver, capfd: pytest.CaptureFixture[str]) -> None:
    settings = jobs.RunSettings(driver.job, LabSettings(driver.name))
    readable = jobs.choose_user(settings)
    said = capfd.readouterr().err
    # Depends on where this checkout lies; if it runs as root, the reason is printed.
    assert readable == "nobody" or "WARNING: training runs as root" in said
    if readable == "nobody":
        driver.job.chmod(0o700)
        assert jobs.choose_user(settings) == "root"
        assert f"cannot read {driver.job}" in capfd.readouterr().err


def test_exit_code_of_a_failed_agent() -> None:
    def code(of: int) -> Any:
        return AgentFailed("it ended", of).exit_code

    assert [code(3), code(0), code(-9), code(130)] == [3, 4, 4, 4]
