# SPDX-License-Identifier: Apache-2.0
"""How long a DDP script waits for a lost host, and how long that takes to come back: three hosts in a lab, as root.

    .venv/bin/python -m benchmarks.elastic [--torchft 0.5 --torchft 5]

The script (tests/netns/elastic_program.py) has two linear layers and syncs its State before every step, each of which
sleeps 0.05 s. A line for each case: the survivors' longest step from the loss on; from the moment at which the host is
well again, or its script has built its model, to its first step with the others; the same from the script's start; and
the survivors' longest step while it came. `--torchft` adds the same scenes with torchft on Gloo and that time-out in
seconds (benchmarks/elastic_torchft.py), with one more host for its lighthouse. A host that is killed is cut off first:
none of its processes says goodbye.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import orjson

from benchmarks import elastic_torchft
from benchmarks.command import finish
from nicps.bench.arguments import duration, names
from tests.netns.members import Network
from tests.netns.scripts import Script, Scripts

AWAY_S = 10.0
CASES = ("host stopped", "host unplugged", "host killed", "program killed")
_HOSTS = 3


def processes(network: Network, script: Script) -> Iterator[Any]:
    """Those of its host: an agent, if there is one, and the script."""
    if agent := network.agents.get(script.host):
        yield agent.process
    yield script.process


def lose(network: Network, script: Script, case: str) -> None:
    """Let it happen."""
    if case in ("host unplugged", "host killed"):
        network.lab.host(script.host).set_link(False)
    if case == "host stopped":
        for process in processes(network, script):
            process.send_signal(signal.SIGSTOP)
    if case == "host killed":
        network.end(script.host, signal.SIGKILL)
    if case in ("host killed", "program killed"):
        script.kill()


def bring_back(network: Network, scripts: Scripts, script: Script, case: str) -> Script:
    """The script that comes back."""
    if case in ("host unplugged", "host killed"):
        network.lab.host(script.host).set_link(True)
    if case == "host stopped":
        for process in processes(network, script):
            process.send_signal(signal.SIGCONT)
    if case == "host killed" and network.agents:
        network.join(script.host)
        network.answered(script.host)
    return scripts.start(script.host)[0] if "killed" in case else script


def measure(network: Network, scripts: Scripts, case: str) -> dict[str, Any]:
    """One case."""
    try:
        started = scripts.start(*network.names[:_HOSTS])
        for script in started:
            while len(script.until(10)["here"]) < _HOSTS:
                pass
        lost, rest = started[2], started[:2]
        at = time.time()
        lose(network, lost, case)
        time.sleep(AWAY_S)
        begun = time.time()
        back = bring_back(network, scripts, lost, case)
        for script in {*rest, back}:
            script.ended()
        first = next(line for line in back.lines if line.get("came") and line["at"] > begun)
        built = max(line["at"] for line in back.lines if "built" in line)
        steps = [line for s in rest for line in s.steps.values() if line["at"] > at]
        scripts.agree()
        return {
            "case": case,
            "survivors_s": max(s["seconds"] for s in steps if s["at"] - s["seconds"] < begun),
            "back_s": round(first["at"] - max(built, begun), 2),
            "from_start_s": round(first["at"] - begun, 2),
            "pause_s": max(s["seconds"] for s in steps if begun < s["at"] <= first["at"] + 0.5),
        }
    finally:
        scripts.close()


def ours(cases: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A DDP script with a State."""
    with Network(_HOSTS) as network:
        network.up()
        for case in cases:
            scripts = Scripts(network, "tests.netns.elastic_program", pace_s=0.05, returns=True)
            yield {"with": "nicps", **measure(network, scripts, case)}


def torchft(cases: tuple[str, ...], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The same with torchft."""
    with elastic_torchft.Hosts(_HOSTS + 1, timeout_s=timeout_s) as network:
        network.up()
        for case in cases:
            scripts = Scripts(network, elastic_torchft.PROGRAM, pace_s=0.05, **network.settings())
            yield {"with": f"torchft, {timeout_s:g} s", **measure(network, scripts, case)}


def compare(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.torchft:
        elastic_torchft.require()
    sides = [] if args.only_torchft else [ours(args.cases)]
    sides += [torchft(args.cases, timeout_s) for timeout_s in args.torchft]
    for side in sides:
        for row in side:
            print(orjson.dumps(row).decode(), flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("--cases", type=names(CASES), default=CASES, help=f"of {','.join(CASES)}")
    parser.add_argument("--torchft", type=duration, action="append", default=[], metavar="SECONDS")
    parser.add_argument("--only-torchft", action="store_true", help="without nicps")
    return finish("elastic", compare, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
