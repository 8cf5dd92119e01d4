# SPDX-License-Identifier: Apache-2.0
"""Every benchmark of the network runs, in tiny sizes, and gives the figures that it promises. No time is judged here.

`bench switch` is in tests/p4/test_benchmarks.py, `bench kernel` and `sums` are in tests/xdp.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nicps.cli import build_parser
from nicps.errors import JobFailed
from nicps.lab import processes, state
from tests.netns.labs import until


def bench(checkout: Path, command: str, timeout_s: float = 300.0) -> dict[str, Any]:
    """`nicps bench ... --json`, and nothing of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nicps", "bench", *command.split(), "--json"],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, err
    kind = command.split()[0]
    name = {"allreduce": "bench", "switch": "bench"}.get(kind, kind)
    left = [path.stem for path in state.LABS_DIR.glob(f"{name}-{process.pid}*.json")]
    assert left == [] and processes.find(f"{name}-{process.pid}") == []
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def ends_well(checkout: Path, module: str, command: str, lab: str, least: int) -> None:
    """SIGTERM, once at least so many processes work in that lab: `{pid}` is the benchmark's."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *command.split()], cwd=checkout, stderr=subprocess.DEVNULL
    )
    lab = lab.format(pid=process.pid)
    try:
        until(lambda: len(processes.find(lab)) >= least, "agents and programs run", 60.0)
        process.terminate()
        assert process.wait(60.0) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not list(state.LABS_DIR.glob(f"{lab}*.json")) and not processes.find(lab)


def test_a_benchmark_that_is_ended_leaves_nothing(checkout: Path) -> None:
    command = "bench allreduce --hosts 2 --params 1000 --rounds 100000 --lane i8 --against none"
    ends_well(checkout, "nicps", command, "bench-{pid}-1", 4)


@pytest.mark.long
def test_one_that_is_no_command_leaves_nothing(checkout: Path) -> None:
    command = "--job text --hosts 2 --seeds 1 --lane i8 --set rounds=100000 --set batch=8"
    ends_well(checkout, "benchmarks.accuracy", command, "accuracy", 2)


@pytest.mark.long
def test_idle(checkout: Path) -> None:
    found = bench(checkout, "idle --seconds 1.5 --wakes 4 --silence 2")
    assert found["hosts"] == found["wakes"] == 4
    assert found["frames_per_second"] > 0


@pytest.mark.long
def test_allreduce_with_a_key_beside_one_without(checkout: Path) -> None:
    found = bench(checkout, "allreduce --hosts 2 --params 50000 --rounds 1 --lane i16 --key")
    assert [(row["engine"], row["lane"]) for row in found["results"]] == [
        ("nicps", "i16"),
        ("with key", "i16"),
    ]


@pytest.mark.long
def test_memory_is_what_the_formula_says(checkout: Path) -> None:
    """docs/architecture.md, "Memory of a host"."""
    params = 2_000_000
    command = f"memory --hosts 2 --params {params} --lane i8 --exchange broadcast,stripes,switch"
    found = bench(checkout, command)["results"]
    broadcast, stripes, switch = found
    assert [row["exchange"] for row in found] == ["broadcast", "stripes", "switch"]
    fragments = -(-params // 1440)
    assert broadcast["maps"] == pytest.approx(2 * (11520 + 192) * fragments, rel=0.02)
    assert broadcast["shared"] == pytest.approx(2 * 1441 * fragments, rel=0.02)
    due = 2 * (1448 + 1472) * fragments + 2 * (11520 + 384) * (fragments // 2 + 1)
    assert stripes["maps"] == pytest.approx(due, rel=0.02)
    assert switch["maps"] == pytest.approx(2 * (1448 + 1472) * fragments, rel=0.02)
    assert stripes["shared"] == switch["shared"] == 0
    # The residual, two of them in broadcast, and two vectors; and what a batch and the compiled loops need.
    for row, each in ((broadcast, 16), (stripes, 12), (switch, 12)):
        assert each * params - 1e6 <= row["program"] < each * params + 4e6
    assert switch["switch_maps"] == pytest.approx(2 * (48 + 1440 + 11520) * fragments, rel=0.02)
    assert switch["switch_process"] < 4e6
    assert broadcast["switch_maps"] == stripes["switch_maps"] == 0


@pytest.mark.long
@pytest.mark.short("1024")
@pytest.mark.parametrize("params", [1, 1024])
def test_allreduce_of_a_small_tensor(checkout: Path, params: int) -> None:
    """Its time on the line is microseconds, and no time is 0."""
    command = f"allreduce --hosts 3 --params {params} --rounds 1 --lane i8 --profile"
    found = bench(checkout, command)
    assert [row["engine"] for row in found["results"]] == ["nicps", "gloo", "gloo"]
    for row in found["results"]:
        assert 0 < row["wire_limit_seconds"] < row["seconds_min"] <= row["seconds_median"]
    for row in found["results"][1:]:
        assert row["profile"]["bpf_runs"] == row["profile"]["bpf_seconds"] == {}
    assert found["results"][0]["wire_limit_seconds"] == pytest.approx(
        4 / 3 * params * 8 / 1e9, 1e-3
    )


@pytest.mark.long
def test_allreduce_on_lines_without_a_limit(checkout: Path) -> None:
    command = (
        "allreduce --hosts 2 --params 1024 --rounds 1 --lane i8 --rate unshaped --against none"
    )
    found = bench(checkout, command)
    (row,) = found["results"]
    limits = row["wire_limit_seconds"], row["frame_limit_seconds"]
    assert (found["rate_bps"], row["rate_bps"], *limits) == (None,) * 4
    assert row["seconds_min"] > 0


@pytest.mark.long
def test_allreduce_of_exchanges_and_hosts_side_by_side(checkout: Path) -> None:
    command = (
        "allreduce --hosts 2,3 --params 50000 --rounds 2 --lane i8 --exchange broadcast,stripes"
    )
    found = bench(checkout, f"{command} --against none --profile")
    assert (found["hosts"], found["params"], found["rate_bps"]) == ([2, 3], 50_000, 10**9)
    assert [(row["hosts"], row["engine"], row["exchange"]) for row in found["results"]] == [
        (hosts, "nicps", exchange) for hosts in (2, 3) for exchange in ("broadcast", "stripes")
    ]
    fragments = 35
    for row in found["results"]:
        assert row["wire_limit_seconds"] < row["frame_limit_seconds"] < row["seconds_min"]
        assert row["bytes"] * 8 / 1e9 == pytest.approx(row["wire_limit_seconds"], 1e-3)
        assert row["cpu_seconds_programs"] > 0 and row["idle_processors"] < 1
        runs, seconds = row["profile"]["bpf_runs"], row["profile"]["bpf_seconds"]
        assert row["cpu_seconds_agents"] > 0
        # In stripes each host has all sums but those that it makes, and what goes into these.
        least = fragments * (1 if row["exchange"] == "stripes" else row["hosts"] - 1)
        assert runs["nicps_xdp"] > least and seconds["nicps_xdp"] > 0


@pytest.mark.long
def test_allreduce_by_a_switch_that_adds(checkout: Path) -> None:
    """Its lab is shaped in both directions, though XDP sends; its program's runs are counted."""
    command = (
        "allreduce --hosts 3 --params 1440000 --rounds 2 --lane i8 --exchange stripes,switch"
        " --rate 100mbit --against none --profile"
    )
    stripes, switch = bench(checkout, command)["results"]
    assert [row["exchange"] for row in (stripes, switch)] == ["stripes", "linux-switch"]
    assert switch["bytes"] == 1_440_000 and switch["wire_limit_seconds"] == pytest.approx(0.1152)
    # A bucket of 128 KB goes at once.
    assert switch["seconds_min"] > 0.85 * switch["frame_limit_seconds"]
    assert switch["frame_limit_seconds"] < 0.76 * stripes["frame_limit_seconds"]
    assert switch["cpu_seconds_agents"] > 0 and stripes["cpu_seconds_switch"] == 0
    runs = switch["profile"]["bpf_runs"]
    assert runs["nicps_switch"] >= 3000 and "nicps_switch" not in stripes["profile"]["bpf_runs"]


def test_a_job_that_fails_is_told_at_once() -> None:
    command = "bench allreduce --hosts 2 --rounds 1 --lane i8 --against none"
    args = build_parser("bench").parse_args(command.split())
    args.params = (-1,)  # values that the command itself refuses
    with pytest.raises(JobFailed, match="negative dimensions"):
        args.func(args)


@pytest.mark.long
def test_handout(checkout: Path) -> None:
    found = bench(checkout, "handout --hosts 2 --bytes 1e6 --loss 1%")
    assert found["bytes"] == 10**6


@pytest.mark.long
def test_silence(checkout: Path) -> None:
    command = "silence --hosts 3 --repeat 1 --scenes killed,stopped --wait 2 --timeout 1"
    rows = bench(checkout, command)["results"]
    assert [(row["engine"], row["scene"]) for row in rows] == [
        (engine, scene)
        for engine in ("nicps", "gloo, default", "gloo, 1 s")
        for scene in ("killed", "stopped")
    ]
    assert all(row["seconds"] and row["back"] for row in rows[:2]), "our survivors go on"
    assert not any(row["seconds"] for row in rows[2:])


@pytest.mark.long
def test_flood(checkout: Path) -> None:
    command = "flood --hosts 3 --frames 1500 --seconds 1 --cycles 1 --reference 50"
    found = bench(checkout, command)
    assert found["same_as_reference"] is True
    assert found["views_before"] == found["views_after"]
    assert found["result"]["weights_identical"] is True
    flood = {window["kind"]: window for window in found["windows"]}
    assert flood["flood"]["sent"] == 3000 and flood["quiet"]["sent"] == 0
    for host in ("h1", "h2", "h3"):
        refused = flood["flood"]["refused"][host]
        assert 3000 <= sum(refused.values()) < 3030, (
            "all are counted, and next to no frame of a member's"
        )
        assert refused["forged"] and refused["control_forged"] and refused["control_replayed"]
        assert flood["beside"]["refused"][host].get("forged", 0) == 0


@pytest.mark.long
def test_return(checkout: Path) -> None:
    (found,) = bench(checkout, "return --hosts 3 --repeat 1 --rounds 2")["results"]
    after = list(found["done"].values())
    assert len(after) == 8 and after == sorted(after)


def printed(checkout: Path, module: str, command: str) -> dict[str, Any]:
    """The last line of a benchmark that is no command of nicps."""
    done = subprocess.run(
        [sys.executable, "-m", module, *command.split(), "--json"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=250.0,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.long
def test_which_way_takes_how_long(checkout: Path) -> None:
    found = printed(checkout, "benchmarks.which", "--rate 1gbit --width 64 --steps 3 --repeat 1")
    ways = ["gloo", "plain", "i8", "rank-2", "local-8"]
    assert [row["way"] for row in found["results"]] == ways
    for row in found["results"]:
        assert (row["rate_bps"], row["params"]) == (10**9, 4 * 64 * 65)
        assert row["runs"][0]["step"] > row["runs"][0]["computing"] > 0


@pytest.mark.long
def test_low_rank_beside_powersgd(checkout: Path) -> None:
    command = "--ranks 1 --width 128 --steps 2 --repeat 1"
    found = printed(checkout, "benchmarks.low_rank", command)
    assert [(row["way"], row["rank"]) for row in found["medians"]] == [
        ("nicps", 1),
        ("powersgd", 1),
        ("powersgd-tuned", 1),
    ]
