# SPDX-License-Identifier: Apache-2.0
"""`nicps bench silence`: a host falls silent; the time until the others go on. Ours, and Gloo in the same lab."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nicps.bench.arguments import duration, host_count, names, whole
from nicps.bench.barrier import median
from nicps.bench.watch import Metrics, example, until
from nicps.errors import JobFailed
from nicps.extras import require_extra
from nicps.lab import Lab, LabSettings, processes, signals
from nicps.lab.agents import AgentProcess, await_agents, joined, open_folder, start_agent
from nicps.lab.processes import Running

DESCRIPTION = """\
A host of a job that trains falls silent: killed (kill -9 of agent and training program), stopped (SIGSTOP of both), or
its cable pulled. Seconds from that instant until all survivors have committed a round without it; each time another
host, node 1 among them. The host comes back after each. Then the same with torch.distributed's Gloo, with its default
time-out and a short one: all-reduce steps, and what the survivors' next step does."""

SCENES = ("killed", "stopped", "unplugged")
_PARAMS = 4810  # of the digits job's model
_PORT = 29500
_GO_ON_S = 30.0
_BACK_S = 90.0
_SETTLED = 60  # rounds between two silences
_AFTERWARDS_S = 3.0
_STEP_MOST_S = 0.05  # a step that was under way may still end


@dataclass(frozen=True)
class Row:
    """The survivors' times: seconds until their next step, one for each silence; empty if they took none."""

    engine: str
    scene: str
    seconds: list[float]
    then: str
    back: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The line for users."""
        if not self.seconds:
            return "never"
        worst = f"{median(self.seconds):.2f} s, worst {max(self.seconds):.2f} s"
        return f"{worst} of {len(self.seconds)}"


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser("silence", help="a host falls silent", description=DESCRIPTION)
    parser.add_argument("--hosts", type=host_count(3), default=4)
    parser.add_argument("--repeat", type=whole(1), default=8, help="of each scene (%(default)s)")
    parser.add_argument(
        "--scenes", type=names(SCENES), default=SCENES, help=f"({','.join(SCENES)})"
    )
    parser.add_argument("--key", action="store_true", help="our network has a key")
    parser.add_argument(
        "--wait", type=duration, default=20.0, help="seconds that Gloo is watched (%(default)s)"
    )
    parser.add_argument(
        "--timeout",
        type=duration,
        default=5.0,
        help="Gloo's short time-out in seconds (%(default)s)",
    )
    parser.add_argument("--against", choices=("gloo", "none"), default="gloo")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    scenes = [scene for scene in SCENES if scene in args.scenes]
    if args.against == "gloo":
        require_extra("torch")
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        line = f"{row.engine:<16}{row.scene:<11}{row.text:<34}{row.then}"
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    head = f"{'engine':<16}{'silence':<11}{'survivors step on after':<34}then"
    print(head, file=sys.stderr if args.json else sys.stdout, flush=True)
    with (
        open_folder("nicps-bench-") as folder,
        Lab(LabSettings(f"silence-{os.getpid()}", args.hosts)) as lab,
    ):
        with _ours(lab, folder, args.key) as ours:
            for scene in scenes:
                show(ours.measure(scene, args.repeat))
        if args.against == "gloo":
            gloo = _Gloo(lab, folder, args.wait)
            for timeout_s in (None, args.timeout):
                for scene in scenes:
                    show(gloo.measure(scene, timeout_s))
    if args.json:
        print(orjson.dumps({"hosts": args.hosts, "results": [asdict(r) for r in rows]}).decode())
    return 0


def _fall_silent(lab: Lab, host: str, scene: str, chosen: Sequence[Running]) -> float:
    """The instant, on CLOCK_MONOTONIC."""
    if scene == "unplugged":
        now = time.monotonic()
        lab.link(host, "unplugged")
        return now
    number = signal.SIGKILL if scene == "killed" else signal.SIGSTOP
    now = time.monotonic()
    processes.send(chosen, number)
    return now


def _come_back(lab: Lab, host: str, scene: str, chosen: Sequence[Running]) -> None:
    """Undo the silence where possible; a killed host stays killed."""
    if scene == "unplugged":
        lab.link(host, "up")
    elif scene == "stopped":
        processes.send(chosen, signal.SIGCONT)


class _Ours:
    """A network that trains digits without an end, with the default settings."""

    def __init__(self, lab: Lab, agents: list[AgentProcess], arguments: list[str]) -> None:
        self._lab, self._arguments = lab, arguments
        self._agents = agents
        self._turn = len(agents)
        self._metrics = {agent.host: Metrics(agent) for agent in agents}

    def settle(self) -> None:
        """Wait until all hosts are counted, round after round."""
        everybody = len(self._agents)
        for metrics in self._metrics.values():
            full = 0

            def settled(row: dict[str, Any]) -> bool:
                nonlocal full
                full += len(row.get("counted", ())) == everybody
                return full >= _SETTLED

            metrics.until(settled, f"{_SETTLED} rounds with all {everybody} hosts", _BACK_S)

    def measure(self, scene: str, repeat: int) -> Row:
        """Silence another host every time."""
        seconds, back = [], []
        for _ in range(repeat):
            self.settle()
            self._turn = (self._turn - 1) % len(self._agents)
            after, later = self._once(scene, self._turn)
            seconds.append(after)
            back.append(later)
        worst = f"{median(back):.1f} s, worst {max(back):.1f} s"
        return Row(
            "nicps", scene, seconds, f"train on; the host is counted again after {worst}", back
        )

    def _once(self, scene: str, index: int) -> tuple[float, float]:
        """Seconds until the survivors' next round, and from the host's return until it is counted."""
        agent = self._agents[index]
        survivors = [m for host, m in self._metrics.items() if host != agent.host]
        status = agent.status()
        view, number = status["view"], str(status["number"])
        chosen = signals.choose(agent.host, self._lab.processes()[agent.host], "both")
        began = _fall_silent(self._lab, agent.host, scene, chosen)

        def without(row: dict[str, Any]) -> bool:
            return bool(row["view"] > view and number not in row.get("counted", (number,)))

        rows = [
            metrics.until(without, f"a round without {agent.host}", _GO_ON_S)
            for metrics in survivors
        ]
        after = max(row["t_commit"] for row in rows) - began
        returned = time.monotonic()
        _come_back(self._lab, agent.host, scene, chosen)
        if scene == "killed":
            self._agents[index] = start_agent(
                self._lab, agent.host, agent.folders, *self._arguments
            )
            await_agents([self._agents[index]])

        def counts(row: dict[str, Any]) -> bool:
            return number in row.get("counted", ())

        row = survivors[0].until(counts, f"a round with {agent.host} again", _BACK_S)
        return after, row["t_commit"] - returned


@contextlib.contextmanager
def _ours(lab: Lab, folder: Path, key: bool) -> Iterator[_Ours]:
    arguments: list[str] = []
    if key:
        from nicps.auth import write_key

        write_key(folder / "network.key")
        arguments = ["--key", str(folder / "network.key")]
    with joined(lab, lab.hosts, folder, *arguments) as agents:
        channel = agents[0].submit(example("digits"), settings={"epochs": 1e6})
        ours = _Ours(lab, agents, arguments)
        try:
            yield ours
        finally:
            channel.close()


class _Gloo:
    """Groups of ranks, one a host, that take steps."""

    def __init__(self, lab: Lab, folder: Path, wait_s: float) -> None:
        self._lab, self._folder, self._wait_s = lab, folder, wait_s
        self._groups = 0

    def measure(self, scene: str, timeout_s: float | None) -> Row:
        """One group: its last rank falls silent, and comes back."""
        engine = f"gloo, {timeout_s:g} s" if timeout_s else "gloo, default"
        lab, victim = self._lab, self._lab.hosts[-1].name
        with self._group(timeout_s) as (ranks, outs):
            survivors = outs[:-1]
            until(lambda: _under_way(ranks, outs) or None, "the first steps of Gloo", _BACK_S)
            chosen = [p for p in lab.processes()[victim] if p.pid == ranks[-1].pid]
            began = _fall_silent(lab, victim, scene, chosen)
            stuck_s = self._watch(began, survivors)
            waited = time.monotonic()
            failed = sum(bool(_errors(out)) for out in survivors)
            _come_back(lab, victim, scene, chosen)
            time.sleep(_AFTERWARDS_S)
            tries = sum(len(_errors(out)) for out in survivors)
            steps = any(_steps(out, waited) for out in survivors)
            alone = any(t < waited for out in survivors for t in _steps(out, began + _STEP_MOST_S))
        then = f"{failed} of {len(survivors)} fail"
        if stuck_s is None:
            then += f", the others still wait after {self._wait_s:g} s"
        else:
            then += f", the last after {stuck_s:.2f} s, and so do all {tries} tries"
        if scene != "killed":
            then += "; the host back: " + (
                "they go on" if steps else f"no step in {_AFTERWARDS_S:g} s"
            )
        return Row(engine, scene, [], then + (", SOME STEPS IN BETWEEN" if alone else ""))

    def _watch(self, began: float, survivors: Sequence[Path]) -> float | None:
        """Seconds until the last of them has failed; None if not all of them have."""
        while time.monotonic() < began + self._wait_s:
            firsts = [_errors(out)[:1] for out in survivors]
            if all(firsts):
                return max(first[0] for first in firsts) - began
            time.sleep(0.05)
        return None

    @contextlib.contextmanager
    def _group(
        self, timeout_s: float | None
    ) -> Iterator[tuple[list[subprocess.Popen[Any]], list[Path]]]:
        lab, ranks, outs = self._lab, list[subprocess.Popen[Any]](), list[Path]()
        self._groups += 1
        try:
            for rank, host in enumerate(lab.hosts):
                outs.append(self._folder / f"gloo-{self._groups}-{rank}.jsonl")
                command = [sys.executable, "-m", "nicps.bench.gloo_steps", "--rank", str(rank)]
                command += ["--hosts", str(len(lab.hosts)), "--params", str(_PARAMS)]
                command += ["--master", f"{lab.hosts[0].ip}:{_PORT + self._groups}"]
                command += ["--out", str(outs[-1])]
                command += ["--timeout", str(timeout_s)] if timeout_s else []
                ranks.append(
                    lab.run(host, command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                )
            yield ranks, outs
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


def _under_way(ranks: Sequence[subprocess.Popen[Any]], outs: Sequence[Path]) -> bool:
    """All take steps.

    Raises:
        JobFailed: one has ended.
    """
    ended = [str(n) for n, process in enumerate(ranks) if process.poll() is not None]
    if ended:
        raise JobFailed(f"Gloo's ranks {', '.join(ended)} ended before their first step")
    return all(map(_steps, outs))


def _lines(out: Path) -> list[dict[str, Any]]:
    try:
        return [
            orjson.loads(line)
            for line in out.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n")
        ]
    except FileNotFoundError:
        return []


def _steps(out: Path, since: float = 0.0) -> list[float]:
    """When the rank took a step."""
    return [line["t"] for line in _lines(out) if "error" not in line and line["t"] > since]


def _errors(out: Path) -> list[float]:
    """When one failed."""
    return [line["t"] for line in _lines(out) if "error" in line]
