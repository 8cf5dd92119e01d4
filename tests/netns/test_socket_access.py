# SPDX-License-Identifier: Apache-2.0
"""The rights at the agent's socket: of root, the training user, members of the group, and all other users."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.lab import namespaces
from nicps.session.channel import Channel
from tests.netns.labs import ROOT, until
from tests.netns.members import LIGHT, Ended, Network, tiny_job

GROUP, USER, TRAINER = "games", "daemon", "nobody"

# Open a hundred connections, say how many of them stay, and keep them until stdin ends.
CROWD = """
import select, socket, sys
crowd = [socket.socket(socket.AF_UNIX) for _ in range(100)]
for one in crowd:
    one.connect("\\0nicps")
    one.settimeout(10)
stay = [one for one in crowd if not select.select([one], [], [], 0.05)[0]]
print(len(stay), flush=True)
sys.stdin.read()
"""

# Send a message, print the answer.
ASK = """
import json, sys
from nicps.session.channel import Channel
channel = Channel.connect("@nicps")
channel.send(json.loads(sys.argv[1]))
print(json.dumps(channel.recv(30.0)[0]))
"""


@pytest.fixture(scope="module")
def made() -> Iterator[Network]:
    """One host, whose agents the tests start themselves."""
    with Network(1, program=LIGHT) as network:
        network.user = TRAINER
        network.lab.up()
        yield network


@pytest.fixture
def host(made: Network) -> Iterator[Network]:
    yield made
    made.leave("h1")


def start(
    host: Network, user: str, argv: list[str], group: str = "", **pipes: int
) -> subprocess.Popen[str]:
    """Start a program as another user, which is in its own group and at most in one more."""
    entry = pwd.getpwnam(user)
    groups = ["--groups", str(grp.getgrnam(group).gr_gid)] if group else ["--clear-groups"]
    become = ["setpriv", "--reuid", str(entry.pw_uid), "--regid", str(entry.pw_gid), *groups, "--"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    return host.lab.run("h1", [*become, *argv], text=True, **pipes)


def act(host: Network, user: str, *arguments: str, group: str = "") -> Ended:
    """A `nicps` command of another user."""
    return host.finish(start(host, user, host.nicps(*arguments), group))


def joined(host: Network, *arguments: str, socket: str = "@nicps") -> None:
    """An agent that answers root there."""
    host.join("h1", "--socket", socket, *arguments)
    agent, netns = host.agents["h1"].process, host.agents["h1"].netns

    def listens() -> bool:
        assert agent.poll() is None, host.log("h1")
        with contextlib.suppress(OSError):
            namespaces.inside(netns, lambda: Channel.connect(socket)).close()
            return True
        return False

    until(listens, "h1 listens", 60.0)
    assert act(host, "root", "status", "--socket", socket).code == 0


def test_without_a_group_only_root_commands(host: Network, open_path: Path) -> None:
    joined(host)
    job = str(tiny_job(open_path))
    for user in (USER, TRAINER):
        uid = pwd.getpwnam(user).pw_uid
        for command in (["status"], ["status", "--watch"], ["submit", job], ["leave"]):
            text = act(host, user, *command, group=GROUP).only_error(2)
            assert text.startswith(f"user {uid} may not give this agent commands: run it as root")
    assert act(host, "root", "status").code == 0
    told = json.loads(act(host, "root", "status", "--json").out)
    table = (ROOT / "docs" / "socket.md").read_text().split("## Status\n")[1].split("\n## ")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert sorted(told) == sorted(re.findall(r"`(\w+)`", " ".join(first)))


def test_members_of_the_group_command(host: Network, open_path: Path) -> None:
    joined(host, "--group", GROUP)
    job = str(tiny_job(open_path))
    assert act(host, USER, "status", group=GROUP).code == 0
    assert act(host, GROUP, "status").code == 0  # the user of that name: it is its first group
    assert "may not" in act(host, USER, "status").only_error(2)
    assert "may not" in act(host, USER, "status", group="lp").only_error(2)
    assert "may not" in act(host, TRAINER, "status").only_error(2)
    done = act(host, USER, "submit", job, "--wait", group=GROUP)
    assert done.code == 0, done.err
    assert act(host, USER, "leave", group=GROUP).code == 0
    assert host.agents.pop("h1").process.wait(20.0) == 0


def test_who_may_submit_names_the_module_that_trains(host: Network, open_path: Path) -> None:
    """It never runs as any other user than the training user."""
    joined(host, "--group", GROUP)
    message = {"op": "submit", "job": str(tiny_job(open_path)), "entry": "trainer"}
    ended = host.finish(start(host, USER, [sys.executable, "-c", ASK, json.dumps(message)], GROUP))
    assert json.loads(ended.out)["op"] == "event"


def test_a_path_is_the_owners(host: Network, open_path: Path) -> None:
    path = str(open_path / "socket")
    joined(host, socket=path)
    assert os.stat(path).st_mode & 0o7777 == 0o600
    text = act(host, USER, "status", "--socket", path, group=GROUP).only_error(4)
    assert text.startswith(f"the agent's socket {path} may not be opened")


def test_a_path_is_the_groups(host: Network, open_path: Path) -> None:
    path = str(open_path / "socket")
    joined(host, "--group", GROUP, socket=path)
    status = os.stat(path)
    assert status.st_mode & 0o7777 == 0o660 and stat.S_ISSOCK(status.st_mode)
    assert (status.st_uid, status.st_gid) == (0, grp.getgrnam(GROUP).gr_gid)
    assert act(host, USER, "status", "--socket", path, group=GROUP).code == 0
    act(host, USER, "status", "--socket", path).only_error(4)
    run = act(host, "root", "submit", str(tiny_job(open_path)), "--wait", "--socket", path)
    assert run.code == 0, run.err  # the training user cannot open it, and need not
    host.leave("h1")
    assert not os.path.exists(path)


def test_attaching_is_for_the_training_user(host: Network) -> None:
    joined(host, "--group", GROUP)
    attach = [sys.executable, "-c", "from nicps.client import Session; Session.attach()"]
    for user, said in ((TRAINER, "no job is under way"), (USER, "may not train here")):
        ended = host.finish(start(host, user, attach, GROUP))
        assert ended.code == 1 and said in ended.err


def test_strangers_do_not_take_the_places_of_others(host: Network) -> None:
    joined(host)
    crowd = start(host, USER, [sys.executable, "-c", CROWD], stdin=subprocess.PIPE)
    try:
        assert crowd.stdout is not None
        assert int(crowd.stdout.readline()) == 8
        assert act(host, "root", "status").code == 0
    finally:
        crowd.communicate()


def test_no_such_group(host: Network) -> None:
    host.join("h1", "--group", "no-such-group")
    agent = host.agents.pop("h1").process
    assert agent.wait(60.0) == 3
    last = host.log("h1").splitlines()[-1]
    assert last.startswith("nicps: error: there is no group 'no-such-group' to admit: ")
