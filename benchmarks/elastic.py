# SPDX-License-Identifier: Apache-2.0
"""How long a DDP script waits for a lost host, and how long that takes to come back: three hosts in a lab, as root.

    .venv/bin/python -m benchmarks.elastic

The script (tests/netns/elastic_program.py) has two linear layers and syncs its State before every step, each of which
sleeps 0.05 s. A line for each case: the survivors' longest step from the loss on; from the moment at which the host is
well again, or its script has built its model, to its first step with the others; and the same from the script's start.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import orjson

from tests.netns.members import Network
from tests.netns.scripts import Script, Scripts

AWAY_S = 10.0
CASES = ("host stopped", "host unplugged", "host killed", "program killed")


def lose(network: Network, script: Script, case: str) -> None:
    """Let it happen."""
    agent = network.agents[script.host].process
    if case == "host unplugged":
        network.lab.host(script.host).set_link(False)
    elif case == "host stopped":
        for process in (agent, script.process):
            process.send_signal(signal.SIGSTOP)
    else:
        if case == "host killed":
            network.end(script.host, signal.SIGKILL)
        script.kill()


def bring_back(network: Network, scripts: Scripts, script: Script, case: str) -> Script:
    """The script that comes back."""
    if case == "host unplugged":
        network.lab.host(script.host).set_link(True)
    elif case == "host stopped":
        for process in (network.agents[script.host].process, script.process):
            process.send_signal(signal.SIGCONT)
    else:
        if case == "host killed":
            network.join(script.host)
            network.answered(script.host)
        return scripts.start(script.host)[0]
    return script


def measure(network: Network, case: str) -> dict[str, Any]:
    """One case."""
    scripts = Scripts(network, "tests.netns.elastic_program", pace_s=0.05, returns=True)
    try:
        started = scripts.start(*network.names)
        for script in started:
            script.until(10)
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
        after = [line for s in rest for line in s.steps.values() if at < line["at"] < begun]
        scripts.agree()
        return {
            "case": case,
            "survivors_s": max(line["seconds"] for line in after),
            "back_s": round(first["at"] - max(built, begun), 2),
            "from_start_s": round(first["at"] - begun, 2),
        }
    finally:
        scripts.close()


def main() -> None:
    """All cases."""
    with Network(3) as network:
        network.up()
        for case in CASES:
            print(orjson.dumps(measure(network, case)).decode(), flush=True)


if __name__ == "__main__":
    main()
