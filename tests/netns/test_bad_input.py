# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear line, the documented exit code, and everything goes on."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.session.events import Warned
from tests.netns.labs import until
from tests.netns.members import DIGITS, LIGHT, MNIST, Network, tiny_job

JOIN = ["join", "--iface", "eth1"]

# Gives up root after everything is imported: the checkout may be one that only root can read.
AS_NOBODY = """
import os, sys
import nicps.agent, nicps.cli.join
from nicps.cli import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def bare() -> Iterator[Network]:
    """Two hosts without agents."""
    with Network(2, program=LIGHT) as made:
        made.lab.up()
        yield made


# ---- joining


def test_no_such_interface(bare: Network) -> None:
    text = bare.command("h1", "join", "--iface", "eth7").only_error(3)
    assert text == "there is no interface eth7; there are: eth1, lo"


def test_an_interface_that_is_no_lan(bare: Network) -> None:
    text = bare.command("h1", "join", "--iface", "lo").only_error(3)
    assert text == "lo is not an Ethernet interface"


def test_not_root(bare: Network) -> None:
    command = [sys.executable, "-c", AS_NOBODY, *JOIN]
    done = bare.finish(bare.run("h1", command, text=True, stderr=subprocess.PIPE))
    assert re.search(r"needs root; run it with sudo", done.only_error(3))


def test_interface_down(bare: Network) -> None:
    host = bare.lab.host("h1")
    host.set_link(False)
    try:
        text = bare.command("h1", *JOIN).only_error(3)
    finally:
        host.set_link(True)
    assert text == "interface eth1 is down; run: ip link set eth1 up"


def test_kernel_headers_missing(bare: Network) -> None:
    environment = {**os.environ, "BCC_KERNEL_SOURCE": "/nonexistent"}
    text = bare.command("h1", *JOIN, env=environment).only_error(3)
    assert "BCC_KERNEL_SOURCE=/nonexistent holds no kernel headers" in text
    assert bare.lab.host("h1").read_link().xdp_mode is None


def test_no_such_user(bare: Network) -> None:
    text = bare.command("h1", *JOIN, "--user", "nonesuch").only_error(3)
    assert text == "there is no user 'nonesuch' to run training code: name another with --user"
    assert bare.lab.host("h1").read_link().xdp_mode is None


# ---- commands without an agent, and wrong arguments


@pytest.mark.parametrize("command", [["submit", str(DIGITS)], ["status"], ["leave"]])
def test_nobody_there(bare: Network, command: list[str]) -> None:
    text = bare.command("h1", *command).only_error(4)
    assert text == "no agent listens on @nicps: run `nicps join --iface IFACE` first"


def test_a_folder_that_is_no_job(network: Network, open_path: Path) -> None:
    text = network.command("h1", "submit", str(open_path)).only_error(2)
    assert text == f"{open_path} holds no job.py (docs/jobs.md says what a job is)"


def test_set_without_a_value(network: Network) -> None:
    text = network.command("h1", "submit", str(DIGITS), "--set", "quorum").only_error(2)
    assert text == "--set takes KEY=VALUE, not 'quorum'"


def test_data_that_is_not_there(network: Network) -> None:
    text = network.command("h1", "submit", str(MNIST), "--data", "/nonexistent").only_error(2)
    assert "'/nonexistent': No such file or directory" in text


# ---- jobs that are wrong before any other host hears of them

DATA = {
    "train-images-idx3-ubyte": struct.pack(">4I", 0x803, 100, 28, 28) + bytes(100 * 784),
    "train-labels-idx1-ubyte": struct.pack(">2I", 0x801, 100) + bytes(100),
    "t10k-images-idx3-ubyte": struct.pack(">4I", 0x803, 10, 28, 28) + bytes(10 * 784),
    "t10k-labels-idx1-ubyte": struct.pack(">2I", 0x801, 10) + bytes(10),
}


def refused(
    network: Network, job: Path, *arguments: str, code: int = 5, light: bool = False
) -> str:
    """The error of a job that does not get as far as training; nothing of it may be left."""
    command = ["submit", str(job), "--wait", *arguments]
    text = network.command("h1", *command, light=light).error(code)
    network.all_stand_by()
    network.work_is_clear("h1")
    return text


@pytest.mark.parametrize("what", ["images", "labels", "gz"])
def test_data_that_is_cut_off(network: Network, open_path: Path, what: str) -> None:
    for name, content in DATA.items():
        (open_path / name).write_bytes(content)
    if what == "gz":
        path = open_path / "train-images-idx3-ubyte.gz"
        (open_path / "train-images-idx3-ubyte").unlink()
        path.write_bytes(gzip.compress(os.urandom(5000))[:-100])
    else:
        (path,) = open_path.glob(f"train-{what}-*")
        path.write_bytes(path.read_bytes()[:-1])
    text = refused(network, MNIST, "--data", str(open_path))
    assert f"{path} is cut off" in text


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "quorom=0.5",
            "unknown setting 'quorom'; did you mean quorum? known are admit, alarm_below, average_all_buffers, ",
        ),
        ("quorum=1.5", "setting quorum is 1.5; it must be over 0 and at most 1"),
        ("batch=many", "setting batch is 'many'; it must be int"),
        ("lane=i64", "setting lane is 'i64'; it must be i32 or i16 or i8"),
    ],
)
def test_a_setting_that_makes_no_sense(
    network: Network, open_path: Path, setting: str, said: str
) -> None:
    job = tiny_job(open_path)
    assert said in refused(network, job, "--set", setting, code=2, light=True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("def model(:", "SyntaxError: invalid syntax (job.py:"),
        (
            "def loss(model, batch):\n    raise ValueError('no\\nsuch thing')",
            "ValueError: no such thing (job.py:32, in loss())",
        ),
        ("del optimizer", "no function optimizer"),
        ("raise SystemExit(0)", "SystemExit: 0 (job.py:31)"),
    ],
)
def test_a_job_that_is_wrong(network: Network, open_path: Path, more: str, said: str) -> None:
    assert said in refused(network, tiny_job(open_path, more))


def test_a_job_that_needs_what_is_not_installed(network: Network, open_path: Path) -> None:
    more = "import sys\nsys.modules['sklearn'] = None\nimport sklearn"
    ended = network.command("h1", "submit", str(tiny_job(open_path, more)), "--wait")
    assert "sklearn is not installed" in (text := ended.error(3)), text
    assert text.endswith("-m pip install 'nicps[train]'")
    network.all_stand_by()


# ---- jobs that go wrong at one of the hosts


def fails(network: Network, job: Path, *arguments: str) -> str:
    """The error of a job that fails on the way; afterwards nothing may be left of it on any host."""
    text = network.command("h1", "submit", str(job), "--wait", *arguments).error(5)
    network.all_stand_by()
    for host in network.names:
        network.work_is_clear(host)
        commands = [process.command for process in network.processes(host)]
        assert len(commands) == 1 and " join " in commands[0], commands
        status = network.status(host)
        assert status is not None and network.lab.host(host).read_link().xdp_mode == "native"
    return text


def test_one_raises_in_forward(network: Network, open_path: Path) -> None:
    more = """
def loss(model, batch):
    if model.training and host() == "h3" and len(batch["x"]) == 1:
        raise ValueError("no such thing")
    return cross_entropy(model(batch["x"]), batch["y"].long())
"""
    text = fails(network, tiny_job(open_path, more))
    assert (
        text.partition("; its log: ")[0] == "h3: ValueError: no such thing (job.py:34, in loss())"
    )


@pytest.mark.long
def test_the_starter_raises_in_forward(network: Network, open_path: Path) -> None:
    more = """
def loss(model, batch):
    if model.training and host() == "h1" and len(batch["x"]) == 1:
        raise ValueError("no such thing")
    return cross_entropy(model(batch["x"]), batch["y"].long())
"""
    text = fails(network, tiny_job(open_path, more))
    said, _, path = text.removeprefix("h1: ").partition("; its log: ")
    assert said == "ValueError: no such thing (job.py:34, in loss())"
    assert "in loss\n" in Path(path).read_text()


def test_a_model_that_differs(network: Network, open_path: Path) -> None:
    more = """
def model():
    hidden = 9 if host() == "h2" else 8
    return nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))
"""
    text = fails(network, tiny_job(open_path, more))
    assert re.match(r"h2: the model differs from the one handed out: '0.weight'", text), text


def test_a_gradient_that_is_not_a_number(network: Network, open_path: Path) -> None:
    more = """
calls = 0

def loss(model, batch):
    global calls
    calls += 1
    value = cross_entropy(model(batch["x"]), batch["y"].long())
    if host() == "h4" and calls > 12:
        value = value + model[2].bias.sum() * float("nan")
    return value
"""
    text = fails(network, tiny_job(open_path, more))
    assert re.match(
        r"h4: round \d+: the gradient of parameter '2\.bias' is not finite \(nan\)", text
    ), text


# ---- the network


def test_the_others_are_on_another_network(bare: Network, open_path: Path) -> None:
    bare.join("h1")
    bare.join("h2", "--network", "another")
    try:
        bare.answered("h1"), bare.answered("h2")
        run = bare.train(tiny_job(open_path))
        assert run.members == ["h1"]
        warnings = [event.message for event in run.events if isinstance(event, Warned)]
        assert warnings == ["no other host is there: this one trains alone"]
        other = bare.status("h2")
        assert other is not None and other["counters"]["network"] > 0
    finally:
        for host in ("h1", "h2"):
            bare.leave(host)


# ---- disks


FULL = 'mount -t tmpfs -o size=512k none "$1" && mount -t tmpfs -o size=512k none "$2" && shift 2 && exec "$@"'


class FullDisks:
    """Two agents whose working and results folders are small disks of their own (which go with them)."""

    def __init__(self, network: Network) -> None:
        self.network = network
        for host in network.names:
            places = [str(network.place(host, what)) for what in ("work", "runs")]
            network.join(host, wrap=["unshare", "--mount", "sh", "-c", FULL, "sh", *places])
        for host in network.names:
            network.answered(host)

    def path(self, host: str, what: str) -> Path:
        """The folder as the agent there sees it."""
        root = Path(f"/proc/{self.network.agents[host].process.pid}/root")
        return root / self.network.place(host, what).relative_to("/")

    def fill(self, host: str, what: str) -> Path:
        """Fill a disk to the last byte."""
        path = self.path(host, what) / "filler"
        with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(path).f_bavail == 0
        return path


@pytest.fixture(scope="module")
def disks(bare: Network) -> Iterator[FullDisks]:
    try:
        yield FullDisks(bare)
    finally:
        for host in bare.names:
            bare.leave(host)


@pytest.mark.short("h1-work", "h2-runs")
@pytest.mark.parametrize("what", ["work", "runs"])
@pytest.mark.parametrize("host", ["h1", "h2"])
def test_a_full_disk(disks: FullDisks, open_path: Path, host: str, what: str) -> None:
    network = disks.network
    filler = disks.fill(host, what)
    job = tiny_job(open_path)
    try:
        text = network.command("h1", "submit", str(job), "--wait").error(5)
    finally:
        filler.unlink()
    assert "No space left on device" in text
    assert host == "h1" or text.startswith("h2: ")
    network.all_stand_by()
    for name in network.names:
        work = disks.path(name, "work")
        until(lambda work=work: not list(work.iterdir()), f"nothing in {work}")


def test_after_the_disks_were_full(disks: FullDisks, open_path: Path) -> None:
    done = disks.network.command("h1", "submit", str(tiny_job(open_path)), "--wait", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["members"] == ["h1", "h2"]
