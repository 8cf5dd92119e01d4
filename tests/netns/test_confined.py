# SPDX-License-Identifier: Apache-2.0
"""The limits of a training program, and the rights that the agent needs: packaging/nicps@.service."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nicps.agent.process import Child, User, python
from nicps.errors import EnvironmentProblem, NicpsError
from tests.netns.labs import ROOT, until
from tests.netns.members import LIGHT, Network, tiny_job
from tests.netns.test_leaving import programs

UNIT = ROOT / "packaging" / "nicps@.service"

FACTS = """
import json, os, socket, sys
def facts():
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    with socket.socket(socket.AF_UNIX) as unix:
        reached = unix.connect_ex("\\0" + NAME)
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        talks = client.connect_ex(server.getsockname())
    return {"links": [name for _, name in socket.if_nameindex()], "reached": reached, "talks": talks,
            "caps": int(status["CapEff"], 16), "locked": int(status["NoNewPrivs"]), "uid": os.getuid()}
"""


@pytest.fixture
def listener() -> Iterator[str]:
    """The name of an abstract socket in our network namespace."""
    name = f"nicps-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        yield name


def facts_of(folder: Path, listener: str, user: str, network_access: bool) -> dict[str, Any]:
    """The result of a child of that user."""
    log = folder / "child.log"
    program = f"NAME = {listener!r}\n{FACTS}\nprint(json.dumps(facts()))"
    argv = [sys.executable, "-I", "-c", program]
    child = Child(argv, User.named(user), folder, log, {}, network_access=network_access)
    assert select.select([child], [], [], 30.0)[0]
    assert child.reap() == 0, log.read_text()
    found = json.loads(log.read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("user", ["nobody", "root"])
def test_a_child_has_no_network(open_path: Path, listener: str, user: str) -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    found = facts_of(open_path, listener, user, network_access=False)
    assert found["links"] == ["lo"]
    assert found["talks"] == 0  # to itself
    assert found["reached"] != 0
    assert found["locked"] == 1
    assert found["uid"] == User.named(user).uid
    assert (found["caps"] == 0) is (user != "root")
    assert os.readlink("/proc/thread-self/ns/net") == home


def test_unless_it_is_given_ours(open_path: Path, listener: str) -> None:
    found = facts_of(open_path, listener, "nobody", network_access=True)
    assert found["links"] == [name for _, name in socket.if_nameindex()]
    assert found["reached"] == 0
    assert found["locked"] == 1 and found["caps"] == 0


def test_a_program_that_is_not_there_leaves_us_at_home(open_path: Path) -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    child = Child(["/no/such/program"], User.named("nobody"), open_path, open_path / "log", {})
    assert select.select([child], [], [], 30.0)[0]
    assert child.reap() == EnvironmentProblem.exit_code
    assert child.last_line().startswith("user 'nobody' cannot run /no/such/program: ")
    assert child.reported_error() == child.last_line()
    assert os.readlink("/proc/thread-self/ns/net") == home


def test_modules_in_the_current_folder_are_not_ours(open_path: Path) -> None:
    """They run where training programs have left files."""
    (open_path / "colorsys.py").write_text("raise SystemExit(7)")
    child = Child(python("colorsys"), User.named("root"), open_path, open_path / "log", {})
    assert select.select([child], [], [], 30.0)[0]
    assert child.reap() == 0


# ---- in a job

TELL = f"""
{FACTS}
NAME = "nicps"
"""
WHEN_PREPARING = """
def data(path):
    raise ValueError(json.dumps(facts()))
"""
WHEN_TRAINING = """
def loss(model, batch):
    if "NICPS_SOCKET" in os.environ:
        raise ValueError(json.dumps(facts()))
    return cross_entropy(model(batch["x"]), batch["y"].long())
"""
HOOKS = """
from trainer.errors import JobError

def before_batch():
    raise JobError(json.dumps(facts()))
"""


def told(
    network: Network, folder: Path, function: str, *arguments: str, light: bool = False
) -> dict[str, Any]:
    """The result of a function of job.py, or of a hook of a `light` job, on the host on which it runs; it ends the
    job.
    """
    job = str(tiny_job(folder, TELL + function, hooks=TELL + HOOKS))
    text = network.command("h1", "submit", job, "--wait", *arguments, light=light).error(5)
    found = json.loads(re.findall(r"\{.*\}", text)[0])
    assert isinstance(found, dict)
    return found


def test_a_job_reaches_nothing_while_it_trains(network: Network, open_path: Path) -> None:
    found = told(network, open_path, WHEN_TRAINING)
    assert found["links"] == ["lo"] and found["talks"] == 0
    assert found["reached"] != 0  # the agent's own socket: it came with a connection


def test_a_job_that_asks_may_reach_the_network(network: Network, open_path: Path) -> None:
    found = told(network, open_path, "", "--set", "network_access=true", light=True)
    assert "eth1" in found["links"] and found["reached"] == 0


def test_data_may_be_fetched_when_a_job_is_prepared(network: Network, open_path: Path) -> None:
    assert "eth1" in told(network, open_path, WHEN_PREPARING, light=True)["links"]


# ---- the service


def unit_values(key: str) -> list[str]:
    """All words that the unit gives that key."""
    lines = re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return [word for line in lines for word in line.split()]


CAPABILITIES = unit_values("CapabilityBoundingSet")


def bounded(capabilities: Sequence[str]) -> list[str]:
    """A command that runs another one as systemd does with this bounding set, and NoNewPrivileges."""
    names = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities)
    return ["setpriv", "--bounding-set", f"-all,{names}", "--inh-caps", "-all", "--no-new-privs", "--"]  # fmt: skip


def join_bounded(network: Network, host: str, capabilities: Sequence[str]) -> int:
    """An agent with these capabilities that answers; its number."""
    network.user = "nobody"
    network.join(host, wrap=bounded(capabilities))
    network.answered(host)
    return network.agents[host].process.pid


def nice(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def works_as_a_whole(
    network: Network, host: str, folder: Path, capabilities: Sequence[str]
) -> None:
    """Join, train to the end, leave in the middle of a job; at the end nothing is left."""
    agent = join_bounded(network, host, capabilities)
    assert nice(agent) < 0
    assert network.train(tiny_job(folder), host=host).result["weights_identical"]
    network.work_is_clear(host)
    endless = "settings = Settings(batch=64, rounds=100000, quorum=1.0, test_every=1000000)\n"
    channel = network.submit(host, tiny_job(folder, endless, "endless"))
    network.in_training(host)
    assert len(programs(network, host)) == 1
    assert network.leave(host) == 0, network.log(host)
    channel.close()
    network.nothing_left(host)


@pytest.fixture
def alone() -> Iterator[Network]:
    with Network(1, program=LIGHT) as network:
        network.lab.up()
        yield network


@pytest.mark.long
def test_the_services_capabilities_are_enough(open_path: Path) -> None:
    with Network(2) as network:
        network.lab.up()
        for host in network.names:
            pid = join_bounded(network, host, CAPABILITIES)
            status = Path(f"/proc/{pid}/status").read_text()
            (effective,) = re.findall(r"^CapEff:\t(\w+)$", status, re.MULTILINE)
            assert int(effective, 16).bit_count() == len(set(CAPABILITIES)) == len(CAPABILITIES)
        run = network.train(tiny_job(open_path))
        assert run.members == ["h1", "h2"] and run.result["weights_identical"]
        for host in network.names:
            network.work_is_clear(host)
            assert network.leave(host) == 0
            network.nothing_left(host)
        network.program = LIGHT  # as below, where it fails for want of a capability
        works_as_a_whole(network, "h1", open_path, CAPABILITIES)


@pytest.mark.short("CAP_NET_ADMIN", "CAP_SETUID", "CAP_KILL")
@pytest.mark.parametrize("missing", CAPABILITIES)
def test_none_of_them_is_for_nothing(alone: Network, open_path: Path, missing: str) -> None:
    left = [name for name in CAPABILITIES if name != missing]
    with pytest.raises((AssertionError, NicpsError)):  # each shows in its own way
        works_as_a_whole(alone, "h1", open_path, left)
    alone.end("h1", signal.SIGKILL)
    until(lambda: not alone.lab.processes()["h1"], "no process on h1")
