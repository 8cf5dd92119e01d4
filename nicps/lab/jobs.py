# SPDX-License-Identifier: Apache-2.0
"""`nicps lab run`: a lab, an agent on each host, one job, and everything taken down again.

It uses the commands that a user would use on real hosts (`nicps join`, `nicps submit`), and relies only on their
output.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nicps import wire
from nicps.errors import EnvironmentProblem, JobFailed, UsageProblem
from nicps.lab import adding
from nicps.lab.adding import Keys
from nicps.lab.agents import (
    AgentProcess,
    Folders,
    await_agents,
    environment,
    nicps_command,
    open_folder,
    start_agent,
)
from nicps.lab.lab import Host, Lab
from nicps.lab.settings import LabSettings
from nicps.lab.teardown import require_root

UNPRIVILEGED = "nobody"
_END_S = 10.0  # for a submission that is ended, and for files that are moved aside
_CHECK_S = 300.0  # for a job's code when it is read
_POLL_S = 0.02

_TRAINER = (sys.executable, "-P", "-m", "trainer")
_SAYS = "trainer: error: "
_CHECK = """
import importlib.util, os, sys
for name in ("nicps", "trainer", "torch"):
    try:
        found = importlib.util.find_spec(name)
    except OSError:
        found = None
    if found is None:
        sys.exit("import " + name)
for path in sys.argv[1:]:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).close()
    except OSError:
        sys.exit("read " + path)
"""


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run. `settings` go over the job's own; `user` None lets the lab choose. `switch` has
    further arguments of `nicps switch xdp run`, if the switch adds; `keyed`: there are keys. With `script` it is no
    job, but `nicps run` of that script with these `arguments`, and `job` is the script's folder. `as_json`: stdout
    is for the result alone.
    """

    job: Path
    shape: LabSettings
    data: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    user: str | None = None
    runs: Path = Path("runs")
    switch: tuple[str, ...] = ()
    keyed: bool = False
    script: Path | None = None
    arguments: tuple[str, ...] = ()
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.shape.mtu < wire.LEAST_MTU:
            raise UsageProblem(
                f"agents need an MTU of {wire.LEAST_MTU} at least, not {self.shape.mtu}"
            )


@dataclass(frozen=True)
class Outcome:
    """The end of a submission: its exit code, and its result if there is one."""

    exit_code: int
    result: dict[str, Any] | None


def run_job(settings: RunSettings) -> Outcome:
    """Make the lab, run the job, take the lab down; progress goes to stderr.

    Agents' logs are moved beside the host's results or, when the job fails, stay in a folder that a line on stderr
    names.

    Raises:
        UsageProblem: job, script or a setting is wrong, as far as that can be checked without a lab.
        AgentFailed: an agent ended before it answered, with that agent's own error.
        NetworkProblem: an agent does not answer in time.
        JobFailed: the submission ended without a result.
    """
    require_root()
    if not settings.job.is_dir():
        raise UsageProblem(f"{settings.job} is not a job's folder")
    user = settings.user or choose_user(settings)
    check(settings, user)
    work = settings.runs.resolve() / f"lab-{settings.shape.name}"
    try:
        work.mkdir(parents=True)
    except FileExistsError:
        raise UsageProblem(f"{work} is in the way: remove it, or choose another --runs") from None
    agents: list[AgentProcess] = []
    try:
        # Files that killed agents leave in this folder go away with the lab.
        with open_folder("nicps-lab-") as scratch:
            lab = Lab(settings.shape, scratch)
            try:
                lab.up()
                more: list[str] = []
                if settings.shape.adds:
                    keys = Keys.make(scratch) if settings.keyed else None
                    more = adding.trusting(keys)
                    arguments = [*adding.key_arguments(keys), *settings.switch]
                    adding.start(lab, *arguments, log=work / "switch.log")
                for host in lab.hosts:
                    folders = _folders(settings, host, work, scratch)
                    agents.append(start_agent(lab, host, folders, *more, user=user))
                await_agents(agents)
                modes = {host.read_link().xdp_mode for host in lab.hosts}
                outcome = _submit(lab, settings, work)
                put_aside(scratch, len((outcome.result or {}).get("not_kept", ())))
                early = [agent for agent in agents if agent.process.poll() is not None]
            finally:
                lab.close()
        if outcome.result is not None:
            known = {"hosts": settings.shape.hosts, "xdp_mode": _mode(modes)}
            outcome = Outcome(outcome.exit_code, {**outcome.result, **known})
        for agent in early:
            code = agent.process.returncode
            words = agent.last_words()
            _print_line(f"the agent on {agent.host} ended early (exit code {code}): {words}")
        if outcome.result is None and outcome.exit_code == 0:
            raise JobFailed(f"`nicps {submission(settings, work)[4]}` ended without a result")
    except BaseException as error:
        if agents and isinstance(error, Exception):
            _print_line(f"the agents' logs and files are in {work}")
        else:
            if settings.script is not None:
                for folder in _gather(work, settings.runs.resolve()):
                    _print_line(f"what each host has kept is in {folder}")
            shutil.rmtree(work, ignore_errors=True)
        raise
    results = _folder(outcome.result or {})
    if outcome.exit_code == UsageProblem.exit_code and outcome.result is None:
        shutil.rmtree(work, ignore_errors=True)  # it was refused, so there are no results
    elif outcome.exit_code and (settings.script is None or results is None):
        _print_line(f"the agents' logs and files are in {work}")
    else:
        _keep_logs(work, results, parts=settings.script is not None)
    return outcome


def choose_user(settings: RunSettings) -> str:
    """`nobody` if that user can run the interpreter and read packages, job and data; else root."""
    paths = [settings.job.resolve(), settings.job.resolve() / "job.py"]
    data = settings.data or os.environ.get("NICPS_DATA")
    if data and Path(data).exists():
        paths.append(Path(data).resolve())
    problem = _barrier([str(path) for path in paths if path.exists()])
    if problem is None:
        return UNPRIVILEGED
    _print_line(
        f"WARNING: training runs as root, because the user {UNPRIVILEGED} {problem}; "
        "--user names another"
    )
    return "root"


def check(settings: RunSettings, user: str) -> None:
    """Refuse a job or script with errors before anything is made, as the user that will run its code.

    Raises:
        UsageProblem, EnvironmentProblem, JobFailed: with the trainer's line.
    """
    if settings.settings.get("exchange") == "switch" and not settings.shape.adds:
        raise UsageProblem(
            "setting exchange is 'switch', and this lab has no switch that adds: --switch xdp makes one"
        )
    what = ["--script", settings.script.name] if settings.script is not None else []
    asked = ["--job", str(settings.job.resolve()), *what]
    command = [*_TRAINER, "check", *asked, "--settings", json.dumps(dict(settings.settings))]
    try:
        done = _run_as(user, command)
    except subprocess.TimeoutExpired:
        raise JobFailed(
            f"{settings.job}: the job's code takes more than {_CHECK_S:.0f} s"
        ) from None
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines() or ["the check of the job has failed"]
    said = [line for line in lines if line.startswith(_SAYS)] or lines
    known = {error.exit_code: error for error in (UsageProblem, EnvironmentProblem)}
    raise known.get(done.returncode, JobFailed)(said[-1].removeprefix(_SAYS))


def _run_as(user: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run as a user that starts training programs, without input.

    Raises:
        KeyError: there is no such user.
        subprocess.TimeoutExpired: it took longer than a job's code may.
    """
    entry = pwd.getpwnam(user)
    return subprocess.run(
        command,
        user=entry.pw_uid,
        group=entry.pw_gid,
        extra_groups=[],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_CHECK_S,
    )


def _barrier(paths: list[str]) -> str | None:
    try:
        done = _run_as(UNPRIVILEGED, [sys.executable, "-P", "-c", _CHECK, *paths])
    except KeyError:
        return "does not exist"
    except PermissionError:
        return f"cannot run {sys.executable}"
    if done.returncode == 0:
        return None
    said = (done.stderr.strip().splitlines() or ["start python"])[-1]
    return f"cannot {said}"


def submission(settings: RunSettings, result: Path | None = None) -> list[str]:
    """The command that submits the job, waits, and prints its result as the last line.

    Args:
        result: the file that the result of a script goes to.
    """
    data = ["--data", str(settings.data.resolve())] if settings.data is not None else []
    if settings.script is not None:
        script = str(settings.script.resolve())
        kept = ["--result", str(result)] if result is not None else []
        return nicps_command("run", *kept, *data, script, *settings.arguments)
    command = nicps_command("submit", str(settings.job.resolve()), "--wait", "--json", *data)
    for key, value in settings.settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return command


def _folders(settings: RunSettings, host: Host, work: Path, scratch: Path) -> Folders:
    """The results folder of a host. Real hosts have disks of their own, so only h1, the user's host, gets the real
    folder.

    The training user can enter `scratch`, and need not be able to enter the others.
    """
    own = work / host.name
    own.mkdir()
    runs = settings.runs.resolve() if host.number == 1 else own / "runs"
    runs.mkdir(exist_ok=True)
    return Folders(own / "agent.log", runs, scratch)


def _submit(lab: Lab, settings: RunSettings, work: Path) -> Outcome:
    result = work / "result.json"
    printed: Any = subprocess.PIPE
    if settings.script is not None:  # the script's output is for the user
        printed = sys.stderr if settings.as_json else None
    process = lab.run(
        "h1",
        submission(settings, result),
        stdin=subprocess.DEVNULL,
        stdout=printed,
        env=environment(),
    )
    try:
        out = process.communicate()[0]
    except BaseException:
        process.terminate()  # end it before its agent, whose end it would report
        with contextlib.suppress(subprocess.TimeoutExpired):  # the lab ends it
            process.wait(_END_S)
        raise
    if out is None:
        out = result.read_bytes() if result.exists() else b""
    code = process.returncode
    found = _last_object(out.decode(errors="replace"))
    return Outcome(code if code >= 0 else 128 - code, found)


def _last_object(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def put_aside(scratch: Path, count: int) -> None:
    """Move the files of scripts that their agents could not keep out of the lab's `scratch`, so that they outlive the
    lab.

    The agents put them there a moment after the run has ended.
    """
    deadline = time.monotonic() + _END_S
    while len(found := sorted(scratch.glob("nicps-left-*"))) < count:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for left in found:
        aside = left.rename(scratch.parent / left.name)
        _print_line(f"what could not be kept is in {aside}")


def _mode(modes: set[str | None]) -> str:
    """The XDP mode of all hosts: native only if every host's is."""
    if None in modes:
        return "none"
    return "native" if modes == {"native"} else "generic"


def _folder(result: Mapping[str, Any]) -> Path | None:
    """Where the results are on h1; None: there are none."""
    report, left = result.get("report"), result.get("folder")
    found = Path(report).parent if isinstance(report, str) else Path(str(left))
    return found if (report or left) and found.is_dir() else None


def _keep_logs(work: Path, folder: Path | None, *, parts: bool) -> None:
    """Move the agents' logs to the results, and what else the hosts have there, if each has a part of its own."""
    if folder is not None:
        if (said := work / "switch.log").exists():
            shutil.move(said, folder / said.name)
        if parts:
            _gather(work, folder.parent, folder.name)
        for log in work.glob("*/agent.log"):
            target = folder / log.parent.name
            target.mkdir(exist_ok=True)
            shutil.move(log, target / log.name)
    shutil.rmtree(work, ignore_errors=True)


def _gather(work: Path, runs: Path, name: str = "*") -> list[Path]:
    """Move what the other hosts have kept of runs with such a name to h1's folders of results; these, if any."""
    parts = sorted(work.glob(f"*/runs/{name}/*"))
    folders = {part: runs / part.parent.name for part in parts}
    for part, folder in folders.items():
        folder.mkdir(exist_ok=True)  # h1 may have kept nothing
        shutil.move(part, folder / part.name)
    return sorted(set(folders.values()))


def _print_line(text: str) -> None:
    print(f"nicps: {text}", file=sys.stderr, flush=True)
