# SPDX-License-Identifier: Apache-2.0
"""`nicps run`: a script on all hosts (docs/run.md), with real agents."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.lab.agents import nicps_command
from tests.netns.labs import ROOT, until
from tests.netns.members import Network

PRINTS = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
print("\\u00e9" * 50_000)
print("data", os.environ.get("NICPS_DATA"), file=sys.stderr)
open("out/kept.txt", "w").write(os.environ["RANK"])
import helper
sys.exit(helper.CODE if os.environ["RANK"] == "1" else 0)
"""
SUMS = """
import numpy as np, os, sys, time
from nicps.collective import Group
with Group.form(int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"])) as group:
    print("sum", int(group.all_reduce(np.array([group.rank + 1])).result()[0]))
"""
SLEEPS = """
import time
print("begun")
time.sleep(600)
"""
FAILS = """
import os, sys
from nicps.collective import Group
if os.environ["RANK"] == sys.argv[1]:
    sys.exit("no data here")
Group.form(int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
"""
INTERFACES = """
import socket
print(*sorted(name for _, name in socket.if_nameindex()))
"""
#: What goes through Gloo.
GLOO = """
import torch, torch.distributed as dist
import nicps.torch
dist.init_process_group("nicps")
rank, size = dist.get_rank(), dist.get_world_size()
got, some = torch.zeros(1), dist.new_group(backend="gloo")
sent = dist.isend(torch.full((1,), float(rank)), (rank + 1) % size)
dist.recv(got, (rank - 1) % size)
sent.wait()
total = torch.ones(1)
dist.all_reduce(total, group=some)
print("got", int(got), "total", int(total), flush=True)
dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> str:
    folder.chmod(0o755)
    (folder / "helper.py").write_text("CODE = 7\n")
    path = folder / "it.py"
    path.write_text(text)
    return str(path)


@pytest.fixture
def folder(three: Network) -> Path:
    made = three.folder / "script"
    made.mkdir(exist_ok=True)
    return made


def lines_of(out: str) -> dict[str, list[str]]:
    """The output, by host."""
    found: dict[str, list[str]] = {}
    for line in out.splitlines():
        host, _, text = line.partition(": ")
        found.setdefault(host, []).append(text)
    return found


def no_run(network: Network) -> None:
    network.all_stand_by()
    for host in network.names:
        network.work_is_clear(host)


def test_output_exit_codes_and_files_of_all_hosts(three: Network, folder: Path) -> None:
    path = script(folder, PRINTS)
    ended = three.command("h2", "run", "--data", str(folder), path, "--lr", "0.1")
    found, errors = lines_of(ended.out), lines_of(ended.err)
    ranks = {int(lines[0].split()[1]): host for host, lines in found.items()}
    assert sorted(ranks) == [0, 1, 2] and set(found) == {"h1", "h2", "h3"}
    for rank, host in ranks.items():
        assert found[host] == [f"rank {rank} of 3 --lr 0.1", "é" * 50_000]
        assert errors[host] == [f"data {folder}"]
        (run,) = [p for p in three.place(host, "runs").iterdir() if p.name.split("-")[2] == "it"]
        assert (run / host / "out" / "kept.txt").read_text() == str(rank)
        kept = (run / host / "output.log").read_text().splitlines()
        assert sorted(kept) == sorted([*found[host], *errors[host]])
    assert ended.code == 7 and f"{ranks[1]} ended with exit code 7" in ended.err
    assert "data None" not in ended.err
    no_run(three)


def test_a_group_of_the_scripts(three: Network, folder: Path) -> None:
    ended = three.command("h1", "run", "--json", script(folder, SUMS))
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["exit_codes"] == {"h1": 0, "h2": 0, "h3": 0} and result["hosts"] == 3
    assert result["weights_identical"] is None and result["lost"] == []
    assert sorted(line for line in ended.err.splitlines() if "sum" in line) == [
        f"h{k}: sum 6" for k in (1, 2, 3)
    ]
    no_run(three)


def test_the_hosts_network_on_request(three: Network, folder: Path) -> None:
    for options, expected in (((), "lo"), (("--network",), "eth1 lo")):
        ended = three.command("h1", "run", *options, script(folder, INTERFACES))
        assert ended.code == 0, ended.err
        assert lines_of(ended.out) == {host: [expected] for host in three.names}
    no_run(three)


@pytest.mark.long
def test_gloo_over_the_hosts_network(three: Network, folder: Path) -> None:
    pytest.importorskip("torch")
    ended = three.command("h1", "run", "--network", script(folder, GLOO), timeout_s=100)
    assert ended.code == 0, ended.err
    said = sorted(line for lines in lines_of(ended.out).values() for line in lines)
    assert said == [f"got {rank} total 3" for rank in range(3)]
    no_run(three)


def begun(three: Network, child: subprocess.Popen[str], *hosts: str) -> None:
    names = hosts or three.names
    until(lambda: all((three.status(h) or {}).get("job") for h in names), "the run", 30)
    assert child.stdout is not None
    assert {child.stdout.readline().strip() for _ in names} == {f"{host}: begun" for host in names}


def test_a_host_that_comes_later_begins_nothing_beside_it(three: Network, folder: Path) -> None:
    """It has no script, and hosts that have one stand by."""
    three.leave("h3")
    child = three.start("h1", "run", script(folder, SLEEPS.replace("600", "20")))
    begun(three, child, "h1", "h2")
    three.join("h3")
    three.answered("h3")
    refused = three.command("h3", "run", str(folder / "it.py")).error(4)
    assert "is under way on this network, without this host: wait for its end" in refused
    ended = three.finish(child, 40)
    assert ended.code == 0, ended.err
    no_run(three)


def test_ctrl_c_ends_it_everywhere(three: Network, folder: Path) -> None:
    child = three.start("h1", "run", script(folder, SLEEPS))
    begun(three, child)
    refused = three.command("h2", "run", script(folder, SLEEPS))
    assert "is under way: wait for its end" in refused.error(4)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) in (130, -signal.SIGINT)
    said = child.communicate()[1]
    assert f"what each of them has kept is in {three.place('h1', 'runs')}/" in said
    no_run(three)


def test_cancelled_on_another_host(three: Network, folder: Path) -> None:
    child = three.start("h1", "run", script(folder, SLEEPS))
    begun(three, child)
    cancelled = three.command("h3", "cancel")
    assert cancelled.code == 0 and "was cancelled; what its scripts have left" in cancelled.out
    assert "are ended on all hosts" in cancelled.err
    assert "cancelled" in three.finish(child, 20).error(7)
    no_run(three)


def test_a_host_that_is_lost(three: Network, folder: Path) -> None:
    child = three.start("h1", "run", script(folder, SLEEPS.replace("600", "8")))
    begun(three, child)
    three.end("h3", signal.SIGKILL)
    ended = three.finish(child, 40)
    assert ended.code == 5 and "nicps: h3 was lost" in ended.err
    assert "h3: nicps: h3 was lost" in ended.err


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_script_that_fails_before_the_group_has_formed(
    three: Network, folder: Path, rank: str
) -> None:
    """Also the one of the host that has started the run, at which no command waits then. The exit code is its own."""
    ended = three.command("h1", "run", script(folder, FAILS), rank, timeout_s=60)
    assert "ended with exit code 1 before all had joined the group" in ended.error(1)
    assert "no data here" in ended.err and "no data here" not in ended.out
    no_run(three)


def test_what_cannot_be_run(three: Network, folder: Path) -> None:
    missing = three.command("h1", "run", str(folder / "nothing.py")).only_error(2)
    assert "nothing.py is not a file: name a Python script" in missing
    path = script(folder, SLEEPS)
    (folder / "large.bin").write_bytes(bytes(65 << 20))
    text = three.command("h1", "run", path).only_error(2)
    assert f"folder {folder} holds more than 64 MiB" in text
    (folder / "large.bin").unlink()
    (folder / "link").symlink_to("it.py")
    assert f"{folder}/link is not a plain file" in three.command("h1", "run", path).only_error(2)
    (folder / "link").unlink()
    no_run(three)


@pytest.mark.short("the same")
@pytest.mark.parametrize(
    ("differing", "identical", "code"),
    [("0.0", True, 0), ("0.5", False, 5)],
    ids=["the same", "differing"],
)
def test_a_ddp_script_in_a_lab(tmp_path: Path, differing: str, identical: bool, code: int) -> None:
    """`weights_identical` comes from the backend, as the process group is destroyed. The script is of a tutorial: what
    it says of an address must not count.
    """
    pytest.importorskip("torch")
    tmp_path.chmod(0o755)
    text = """
import os, sys, torch, torch.distributed as dist
import nicps.torch
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
dist.init_process_group("nicps", init_method="env://")
for name in ("out/rank", "lost.txt"):
    open(name, "w").write(str(dist.get_rank()))
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
model(torch.randn(5, 8)).sum().backward()
with torch.no_grad():
    for p in model.parameters():
        p -= 0.1 * p.grad
        p += dist.get_rank() * float(sys.argv[1])
dist.destroy_process_group()
"""
    (tmp_path / "ddp.py").write_text(text)
    command = nicps_command(
        *("lab", "run", "--script", str(tmp_path / "ddp.py"), "--hosts", "2", "--json"),
        *("--runs", str(tmp_path / "runs"), "--", differing),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["weights_identical"] is identical and result["hosts"] == 2
    assert {each["first"][0] for each in result["removed"].values()} == {"lost.txt"}
    ranks = ", ".join(result["exit_codes"])  # hosts by rank
    lost = f"2 files that scripts wrote outside of out/ went with the folder on {ranks}: lost.txt;"
    assert lost in done.stderr
    left = Path(result["folder"]).glob("h*/out/rank")
    assert {path.read_text() for path in left} == {"0", "1"}, "of all hosts"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [result["job_id"]]


def test_what_is_left_in_a_lab_after_ctrl_c(tmp_path: Path) -> None:
    """Of all hosts, in one folder, which the last line names."""
    tmp_path.chmod(0o755)
    (tmp_path / "waits.py").write_text(
        "import os, time\n"
        "open('out/rank', 'w').write(os.environ['RANK'])\n"
        "print('written', flush=True)\n"
        "time.sleep(100)\n"
    )
    command = nicps_command(
        *("lab", "run", "--script", str(tmp_path / "waits.py"), "--hosts", "2"),
        *("--runs", str(tmp_path / "runs")),
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().endswith("written\n")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.read_text() for path in folder.glob("h*/out/rank")} == {"0", "1"}
    assert err.splitlines()[-1] == f"nicps: what each host has kept is in {folder}"


def write_images(folder: Path) -> None:
    """Files of the form of MNIST's."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    for part, count in (("train", 1536), ("t10k", 200)):
        images = random.integers(0, 256, (count, 28, 28), np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", images[:, 14, 14] % 10)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (folder / f"{part}-{name}-ubyte").write_bytes(head + array.tobytes())


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("mnist", ()),
        ("mnist_elastic", ("--sync-every", "3")),
        ("overlap", ()),
        ("local_sgd", ("--warmup", "3", "--period", "4")),
    ],
    ids=["mnist", "mnist_elastic", "overlap", "local_sgd"],
)
def test_an_example_in_a_lab(tmp_path: Path, example: str, arguments: tuple[str, ...]) -> None:
    """docs/examples/ddp, on files of the form of MNIST's."""
    pytest.importorskip("torch")
    tmp_path.chmod(0o755)
    data = tmp_path / "data" / "mnist"
    write_images(data)
    command = nicps_command(
        *("lab", "run", "--script", f"docs/examples/ddp/{example}.py", "--hosts", "3", "--json"),
        *("--data", str(data.parent), "--runs", str(tmp_path / "runs"), "--", "--epochs", "2"),
        *arguments,
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["weights_identical"] is True
    said = re.findall(r"^h\d: rank (\d) of 3: .*%, weights (\w{16})$", done.stderr, re.MULTILINE)
    assert {rank for rank, _ in said} == {"0", "1", "2"} and len(
        {digest for _, digest in said}
    ) == 1


def test_arguments_in_the_wrong_place(tmp_path: Path) -> None:
    """Refused before a lab is made."""
    (tmp_path / "it.py").write_text("")
    command = nicps_command("lab", "run", "--script", str(tmp_path / "it.py"))
    for arguments, said in (
        (["--epochs", "3"], "unrecognized arguments: --epochs: a script's arguments go after --"),
        (["--set", "rank=2"], "--set is for a job: a script takes arguments, after --"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and said in done.stderr
