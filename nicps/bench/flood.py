# SPDX-License-Identifier: Apache-2.0
"""`nicps bench flood`: a stranger floods the LAN with forged and replayed frames while a network with a key trains."""

from __future__ import annotations

import argparse
import bisect
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from nicps import wire
from nicps.auth import write_key
from nicps.bench.arguments import duration, host_count, whole
from nicps.bench.watch import Metrics, example
from nicps.errors import JobFailed
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import AgentProcess, joined, open_folder
from nicps.session.channel import Channel
from nicps.session.commands import await_result

DESCRIPTION = """\
Hosts with a key train digits; a stranger on the same LAN, without one, sends --frames forged frames (fragments, tokens
and control frames of every kind, with a member's number and MAC address) and as many overheard ones again, in windows
of --seconds. Between these are windows in which nothing is sent, and windows with the same frames under another
EtherType, which cost the machine as much and nicps nothing. The same job without a flood is the reference for the
weights. Every frame that arrived is looked for in the counters of `nicps status`."""

_OTHER_ETHERTYPE = 0x88B6  # the second local experimental one
_TIMEOUT_S = 180.0
_KINDS = ("flood", "quiet", "beside")
_WARM_ROUNDS = 20
_SETTLE_S = 0.1
#: Counters of frames that are used; all others are reasons for frames without effect.
_USED = ("added", "bounced", "raised", "heard", "control")


@dataclass(frozen=True)
class Window:
    """A part of the run: the frames sent in it, and their outcome at each host."""

    kind: str
    seconds: float
    rounds: int
    sent: int
    processor_s: float
    refused: dict[str, dict[str, int]]  # by host and reason; control_REASON: by the agent


@dataclass(frozen=True)
class Flood:
    """The whole run."""

    hosts: int
    forged: int
    replayed: int
    windows: list[Window]
    views_before: list[int]
    views_after: list[int]
    same_as_reference: bool
    reference_rounds: int
    result: Mapping[str, Any]

    def rate(self, kind: str) -> float:
        """Rounds a second in windows of that kind together."""
        chosen = [w for w in self.windows if w.kind == kind]
        return sum(w.rounds for w in chosen) / sum(w.seconds for w in chosen)

    def slower(self, than: str) -> float:
        """The slowdown of training by the flood, compared with the neighbour window: the median over the run."""
        floods = [w.rounds / w.seconds for w in self.windows if w.kind == "flood"]
        others = [w.rounds / w.seconds for w in self.windows if w.kind == than]
        return 1 - statistics.median(f / o for f, o in zip(floods, others, strict=True) if o)

    def refused(self, host: str, kind: str = "flood") -> Counter[str]:
        """Frames without effect at a host in windows of that kind, by reason."""
        total: Counter[str] = Counter()
        for window in self.windows:
            if window.kind == kind:
                total.update(window.refused[host])
        return total


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser(
        "flood", help="a stranger floods the LAN", description=DESCRIPTION
    )
    parser.add_argument("--hosts", type=host_count(besides=1), default=4)
    parser.add_argument(
        "--frames", type=whole(1), default=100_000, help="of each kind, in all (%(default)s)"
    )
    parser.add_argument("--seconds", type=duration, default=10.0, help="of a window (%(default)s)")
    parser.add_argument(
        "--cycles", type=whole(1), default=7, help="windows of each kind (%(default)s)"
    )
    parser.add_argument(
        "--reference",
        type=whole(2),
        default=1000,
        help="rounds whose weights are compared (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    flood = measure(args.hosts, args.frames, args.seconds, args.cycles, args.reference)
    _show(flood, sys.stderr if args.json else sys.stdout)
    if args.json:
        print(orjson.dumps(asdict(flood)).decode())
    return 0


def _show(flood: Flood, out: Any) -> None:
    hosts = sorted(flood.windows[0].refused)
    sent = sum(w.sent for w in flood.windows if w.kind == "flood")
    lasted = sum(w.seconds for w in flood.windows if w.kind == "flood")
    used = sum(w.processor_s for w in flood.windows if w.kind == "flood") / lasted
    print(
        f"{flood.forged} forged and {flood.replayed} replayed frames in {lasted:.0f} s"
        f" (the stranger took {used:.0%} of a core, the frames' way to all hosts included)",
        file=out,
    )
    for kind in _KINDS:
        print(f"{kind:<8}{flood.rate(kind):>8.1f} rounds/s", file=out)
    print(
        f"the flood slows training by {flood.slower('quiet'):.1%} against nothing sent, by"
        f" {flood.slower('beside'):.1%} against the same frames under another EtherType",
        file=out,
    )
    refused = {host: flood.refused(host) for host in hosts}
    quiet = {host: flood.refused(host, "quiet").total() for host in hosts}
    reasons = sorted({reason for counter in refused.values() for reason in +counter})
    table: list[tuple[str, list[Any]]] = [("without effect", hosts)]
    table += [(reason, [refused[host][reason] for host in hosts]) for reason in reasons]
    table += [("together", [refused[host].total() for host in hosts])]
    table += [("when nothing is sent", list(quiet.values())), ("sent", [sent] * len(hosts))]
    for name, values in table:
        print(f"{name:<24}" + "".join(f"{value:>10}" for value in values), file=out)
    result = flood.result
    print(
        f"views before {flood.views_before}, after {flood.views_after}; weights identical on all hosts:"
        f" {result['weights_identical']}; after {flood.reference_rounds} rounds equal to a run without a flood:"
        f" {flood.same_as_reference}; {result['fragments_added']} fragments added, as counted",
        file=out,
    )


def measure(hosts: int, frames: int, seconds: float, cycles: int, reference: int) -> Flood:
    """Run it in a lab of its own, with the stranger as its last host."""
    per_window = -(-frames // cycles)
    with (
        open_folder("nicps-bench-") as folder,
        Lab(LabSettings(f"flood-{os.getpid()}", hosts + 1)) as lab,
    ):
        write_key(folder / "network.key")
        members = lab.hosts[:hosts]
        with joined(lab, members, folder, "--key", str(folder / "network.key")) as agents:
            weights, rate = _reference(agents, reference)
            rounds = int(rate * (3 * cycles * seconds) * 1.3) + reference
            metrics = Metrics(agents[0])
            channel = _submit(agents, rounds)
            stranger = _Stranger(lab, folder)
            try:
                metrics.until(
                    lambda row: row["trained_rounds"] >= _WARM_ROUNDS, "training", _TIMEOUT_S
                )
                before = [agent.status()["view"] for agent in agents]
                spans = []
                for cycle in range(cycles):
                    turn = cycle % len(_KINDS)
                    for kind in _KINDS[turn:] + _KINDS[:turn]:
                        spans.append(_window(agents, stranger, kind, seconds, per_window))
                status = [agent.status() for agent in agents]
            finally:
                stranger.close()
            if any(one["phase"] != "train" for one in status):
                raise JobFailed(
                    "the job was over before the flood: fewer --cycles, or more rounds a second than at first"
                )
            result, _ = await_result(channel, _TIMEOUT_S + rounds / rate)
            channel.close()
            rows = _rows(agents[0].folders.runs / result["job_id"] / agents[0].host)
    times = [row["t_commit"] for row in rows]
    windows = [
        Window(kind, end - start, bisect.bisect(times, end) - bisect.bisect(times, start), *rest)
        for kind, start, end, *rest in spans
    ]
    for kind in _KINDS:
        if not any(window.rounds for window in windows if window.kind == kind):
            raise JobFailed(f"no round fell into the windows of kind {kind}: give more --seconds")
    same = next(r for r in rows if r["trained_rounds"] == reference)["weights_sha256"] == weights
    sent = per_window * cycles
    views = [one["view"] for one in status]
    return Flood(hosts, sent, sent, windows, before, views, same, reference, result)


def _submit(agents: Sequence[AgentProcess], rounds: int) -> Channel:
    settings = {"rounds": rounds, "epochs": None, "quorum": 1.0, "test_every": 1 << 30}
    return agents[0].submit(example("digits"), settings=settings)


def _reference(agents: Sequence[AgentProcess], rounds: int) -> tuple[str, float]:
    """Weights after so many rounds, and rounds a second."""
    result, _ = await_result(_submit(agents, rounds), _TIMEOUT_S)
    rows = _rows(agents[0].folders.runs / result["job_id"] / agents[0].host)
    return rows[-1]["weights_sha256"], (len(rows) - 1) / (
        rows[-1]["t_commit"] - rows[0]["t_commit"]
    )


def _rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    return [row for line in lines if (row := orjson.loads(line))["phase"] == "train"]


def _window(
    agents: Sequence[AgentProcess], stranger: _Stranger, kind: str, seconds: float, count: int
) -> tuple[Any, ...]:
    before = _counters(agents)
    start = time.monotonic()
    done = stranger.order(kind, seconds, count)
    end = time.monotonic()
    time.sleep(_SETTLE_S)  # frames in the agents' queues still count
    after = _counters(agents)
    refused = {
        host: {r: n - before[host][r] for r, n in counted.items() if r not in _USED}
        for host, counted in after.items()
    }
    return kind, start, end, int(done["sent"]), float(done["processor_s"]), refused


def _counters(agents: Sequence[AgentProcess]) -> dict[str, Counter[str]]:
    """Counts by host; those that the agent has refused itself as `control_REASON`."""
    found = {}
    for agent in agents:
        status = agent.status()
        refused = {f"control_{k}": n for k, n in status["control_refused"].items()}
        found[agent.host] = Counter({**status["counters"], **refused})
    return found


class _Stranger:
    """The flooder's process on the lab's last host."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        path = folder / "stranger.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(_TIMEOUT_S)
            command = [sys.executable, "-m", "nicps.bench.flooder", "--barrier", str(path)]
            self._process: subprocess.Popen[Any] = lab.run(
                lab.hosts[-1], command, stdin=subprocess.DEVNULL
            )
            connection, _ = listener.accept()
        connection.setblocking(True)
        self._channel = Channel(connection)

    def order(self, kind: str, seconds: float, count: int) -> dict[str, float]:
        """Let it send for so long; return the frames that it has sent, and its processor time."""
        if kind == "quiet":
            time.sleep(seconds)
            return {"sent": 0, "processor_s": 0.0}
        ethertype = wire.ETHERTYPE if kind == "flood" else _OTHER_ETHERTYPE
        self._channel.send({"seconds": seconds, "count": count, "ethertype": ethertype})
        done, _ = self._channel.recv(seconds * 10 + _TIMEOUT_S)
        return {**done, "sent": done["forged"] + done["replayed"]}

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
