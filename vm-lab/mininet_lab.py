#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Mininet of hosts that each run `nicps join`, and one job on them: up, train, show, down.

    .venv/bin/python vm-lab/mininet_lab.py                   four hosts, one BMv2 in ring mode
    .venv/bin/python vm-lab/mininet_lab.py --mode switch     the BMv2 adds
    .venv/bin/python vm-lab/mininet_lab.py --switches 2      two in line
    .venv/bin/python vm-lab/mininet_lab.py --switch plain    a Linux bridge

h1 --+                +-- h3        every host and every switch is a namespace of its own; a BMv2
     s1 ------------- s2            has its controller, `nicps switch p4 run`, beside it
h2 --+                +-- h4

Needs root, Mininet (Debian: mininet iproute2), and for bmv2 the p4lang project's BMv2. The last line on stdout is the
result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nicps.bench import bmv2  # noqa: E402
from nicps.bench.watch import until  # noqa: E402
from nicps.cli.submit import parse_settings  # noqa: E402
from nicps.errors import (  # noqa: E402
    EnvironmentProblem,
    JobFailed,
    NetworkProblem,
    NicpsError,
    UsageProblem,
)
from nicps.lab import LabSettings, links, namespaces, port  # noqa: E402
from nicps.lab.agents import (  # noqa: E402
    AgentProcess,
    Folders,
    await_agents,
    environment,
    join_command,
    nicps_command,
)
from nicps.lab.jobs import RunSettings, choose_user, submission  # noqa: E402
from nicps.lab.shield import orderly, shielded  # noqa: E402
from nicps.programs import require_programs  # noqa: E402

#: What Mininet calls.
PROGRAMS = ("mnexec", "ip", "ifconfig")
NICPS = nicps_command()
ENVIRONMENT = environment()
READY_S, POLL_S, END_S = 60.0, 0.2, 15.0


def main() -> int:
    """Everything, and its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", type=Path, default=ROOT / "trainer" / "jobs" / "digits")
    parser.add_argument("--hosts", type=int, default=4, help="2 to 16 (%(default)s)")
    parser.add_argument("--switch", choices=("bmv2", "plain"), default="bmv2")
    parser.add_argument(
        "--mode", choices=("ring", "switch"), default="ring", help="who adds: hosts, or the switch"
    )
    parser.add_argument("--switches", type=int, choices=(1, 2), default=1, help="in line")
    parser.add_argument("--data", type=Path, default=os.environ.get("NICPS_DATA"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--key", action="store_true", help="with a network key")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where results go")
    parser.add_argument("--silence", metavar="SECONDS", help="of a host, handed to `nicps join`")
    args = parser.parse_args()
    try:
        with orderly():
            return run(args)
    except NicpsError as error:
        print(f"nicps: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """Up, train, show, down."""
    if not 2 <= args.hosts <= 16:
        raise UsageProblem(f"--hosts takes 2 to 16, not {args.hosts}")
    if os.geteuid() != 0:
        raise EnvironmentProblem("Mininet makes network namespaces: run it as root")
    require_programs(*PROGRAMS, purpose="a Mininet")
    if importlib.util.find_spec("mininet") is None:
        raise EnvironmentProblem(
            "the Python module mininet is missing: sudo apt-get install --no-install-recommends mininet"
            " (the virtual environment needs --system-site-packages, as `make setup` makes it)"
        )
    if args.switch == "bmv2":
        bmv2.require_bmv2()
    if args.mode == "switch" and (args.switch != "bmv2" or args.switches != 1):
        raise UsageProblem("--mode switch takes one BMv2 that all hosts are at")
    job = RunSettings(args.job, LabSettings(), args.data, parse_settings(args.set))
    user = choose_user(job)
    stack = contextlib.ExitStack()
    try:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nicps-mininet-")))
        folder.chmod(0o755)
        lab = MininetLab(args, job, folder, user)
        stack.callback(lab.down)
        lab.up()
        result = lab.train()
        result |= lab.sums(result)
        for name, counters in lab.counters().items():
            told = ", ".join(f"{reason} {count}" for reason, count in counters.items() if count)
            print(f"{name}: {told}", file=sys.stderr)
    finally:
        with shielded():  # Ctrl-C twice must leave nothing either
            stack.close()
    print(json.dumps(result), flush=True)
    if not result["weights_identical"]:
        raise JobFailed("the hosts' weights differ: see metrics.jsonl of each host")
    return 0


@dataclass(frozen=True)
class Program:
    """One that runs on a node, and the file that holds what it says."""

    what: str
    process: subprocess.Popen[Any]
    log: Path

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait for it.

        Raises:
            EnvironmentProblem: it has ended, or takes too long; with the last that it said.
        """

        def look() -> bool | None:
            if self.process.poll() is not None:
                raise EnvironmentProblem(f"{self.what} has ended: {self._last_words()}")
            return ready() or None

        try:
            until(look, f"{self.what} is ready", READY_S, POLL_S)
        except NetworkProblem as error:
            raise EnvironmentProblem(f"{error}; it said: {self._last_words()}") from None

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-300:]


class MininetLab:
    """The network, what runs in it, and how it ends."""

    def __init__(self, args: argparse.Namespace, job: RunSettings, folder: Path, user: str) -> None:
        self.args, self.job, self.folder, self.user = args, job, folder, user
        self.key: list[str] = []
        self.net: Any = None
        self.processes: list[subprocess.Popen[Any]] = []

    def up(self) -> None:
        """Hosts, switches and cables; then switches' programs, then agents.

        Raises:
            EnvironmentProblem: something does not start.
        """
        from mininet.log import setLogLevel
        from mininet.net import Mininet
        from mininet.node import Switch

        setLogLevel("error")

        class Namespace(Switch):  # type: ignore[misc]
            """A namespace with ports; what switches in it is started below."""

            def start(self, controllers: Sequence[Any]) -> None:
                pass

        if self.args.key:
            key = self.folder / "key"
            subprocess.run(
                [*NICPS, "key", "new", str(key)], check=True, capture_output=True, env=ENVIRONMENT
            )
            self.key = ["--key", str(key)]
        with shielded():  # a node that Mininet does not know yet is not taken down by it
            self.net = net = Mininet(controller=None, autoSetMacs=True)
            switches = [
                net.addSwitch(f"s{n}", cls=Namespace, inNamespace=True)
                for n in range(1, self.args.switches + 1)
            ]
            for number in range(1, self.args.hosts + 1):
                place = (number - 1) * len(switches) // self.args.hosts
                net.addLink(net.addHost(f"h{number}"), switches[place])
            if len(switches) == 2:
                net.addLink(*switches)
            net.start()
        with port.pass_program() as program:
            for switch in switches:
                names = [str(intf.name) for intf in switch.intfList() if intf.name != "lo"]
                inside(switch, functools.partial(quieten, names))
                inside(switch, functools.partial(attach, names, program))
                self._switch(switch, names)
        for host in net.hosts:
            name = str(host.defaultIntf().name)
            inside(host, functools.partial(bmv2.quieten, name))
        await_agents([self._join(host) for host in net.hosts])

    def _join(self, host: Any) -> AgentProcess:
        """Start the agent of a host."""
        folders = Folders.below(self.folder / host.name)
        if host.name == "h1":
            folders = replace(folders, runs=self.args.runs.resolve())
        command = join_command(str(host.defaultIntf().name), host.name, self.user, folders)
        trust = ["--trust-switch"] if self.key and self.args.mode == "switch" else []
        silence = ["--silence", self.args.silence] if self.args.silence else []
        command += ["--mode", self.args.mode, *self.key, *trust, *silence]
        with folders.log.open("wb") as file:
            process = self._popen(host, command, stdout=file, stderr=file)
        return AgentProcess(host.name, netns_of(host), process, folders)

    def _switch(self, switch: Any, names: list[str]) -> None:
        """Start what switches there."""
        self._execute(switch, "ip link set lo up")
        if self.args.switch == "plain":
            self._execute(switch, "ip link add br0 type bridge mcast_snooping 0 forward_delay 0")
            self._execute(switch, "ip link set br0 up")
            self._execute(switch, *(f"ip link set {name} master br0" for name in names))
            return
        inside(switch, bmv2.add_controller_cable)
        ports = dict(enumerate(names, 1))
        command = bmv2.switch_command({**ports, bmv2.CONTROLLER: bmv2.NEAR_CPU})
        p4 = self._start(switch, command, f"{switch.name}'s BMv2")
        p4.until(lambda: self._succeeds(switch, *NICPS, "switch", "p4", "connect"))
        command = [*NICPS, *bmv2.controller_arguments(ports), *self.key]
        controller = self._start(switch, command, f"{switch.name}'s controller")
        controller.until(lambda: "recording" in controller.log.read_text())

    def _start(self, node: Any, command: Sequence[str], what: str) -> Program:
        """Start a program on a node."""
        log = self.folder / f"{what}.log"
        with log.open("wb") as file:
            process = self._popen(node, command, stdout=file, stderr=file)
        return Program(what, process, log)

    def _popen(self, node: Any, command: Sequence[str], **streams: Any) -> subprocess.Popen[Any]:
        """What is started here is ended by `down`."""
        with shielded():
            process: subprocess.Popen[Any] = node.popen(
                list(command), stdin=subprocess.DEVNULL, env=ENVIRONMENT, **streams
            )
            self.processes.append(process)
        return process

    def _succeeds(self, node: Any, *command: str) -> bool:
        """Run a command on a node."""
        process = self._popen(node, command)
        process.communicate()
        return not process.returncode

    def _execute(self, node: Any, *commands: str) -> None:
        """Run commands on a node that must not fail."""
        for command in commands:
            process = self._popen(node, command.split())
            _, said = process.communicate()
            if process.returncode:
                raise EnvironmentProblem(f"{node.name}: {command}: {said.decode().strip()}")

    def train(self) -> dict[str, Any]:
        """Submit the job on h1; its result.

        Raises:
            JobFailed: it has failed, and why.
        """
        process = self._popen(self.net.get("h1"), submission(self.job), stderr=None)
        out, _ = process.communicate()
        if process.returncode:
            raise JobFailed(f"`nicps submit` ended with {process.returncode}")
        result: dict[str, Any] = json.loads(out)
        return result

    def sums(self, result: dict[str, Any]) -> dict[str, Any]:
        """Once more by the XDP program, if the job has kept its gradients (--set save_gradients=true).

        Raises:
            JobFailed: a sum is not what hosts would have come to.
        """
        if not result["settings"].get("save_gradients"):
            return {}
        from nicps.bench import sums

        places = {host.name: self.folder / host.name / "runs" for host in self.net.hosts}
        places["h1"] = self.args.runs.resolve()
        folders = [place / result["job_id"] / name for name, place in places.items()]
        width = int(str(result["settings"]["lane"]).removeprefix("i"))
        return {"sums_by_xdp": sums.compare(sums.read(folders), width)}

    def counters(self) -> dict[str, dict[str, int]]:
        """Of every BMv2: frames by what became of them."""
        if self.args.switch != "bmv2":
            return {}
        found = {}
        for switch in self.net.switches:
            command = [*NICPS, "switch", "p4", "counters", "--json"]
            out, _ = self._popen(switch, command).communicate()
            found[switch.name] = json.loads(out)
        return found

    def down(self) -> None:
        """End all that was started, and take everything away."""
        try:
            for process in reversed(self.processes):
                process.terminate()
            for process in self.processes:
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(END_S)
        finally:
            if self.net is not None:
                self.net.stop()


def netns_of(node: Any) -> str:
    """The path of a node's network namespace."""
    return f"/proc/{node.pid}/ns/net"


def inside(node: Any, work: Callable[[], Any]) -> Any:
    """Do something in a node's network namespace."""
    return namespaces.inside(netns_of(node), work)


def quieten(names: Sequence[str]) -> None:
    """Let frames through these as they are, and no other than those that hosts send."""
    for name in names:
        bmv2.quieten(name)


def attach(names: Sequence[str], program: int) -> None:
    """Put an XDP program that lets everything pass onto these: or what XDP sends out at the other end is lost."""
    from pyroute2 import IPRoute

    with IPRoute() as ipr:
        for name in names:
            links.attach(ipr, links.index_of(ipr, name), program)


if __name__ == "__main__":
    sys.exit(main())
