# SPDX-License-Identifier: Apache-2.0
"""`nicps bench kernel` measures additions: every run is a fragment that was added."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nicps.bench.kernel import kernel
from nicps.bench.kernel_servers import serving_kernel
from nicps.bench.kernel_stripes import striping_kernel
from nicps.errors import NicpsError

Costs = dict[tuple[str, bool, str], float]


def run(checkout: Path, *options: str) -> Costs:
    """Nanoseconds by lane, key and case."""
    command = f"nicps bench kernel --params 36000 --passes 1 --json {' '.join(options)}"
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["params"] == 36000
    return {(row["lane"], row["key"], row["case"]): row["ns_median"] for row in result["results"]}


def measured(checkout: Path) -> Costs:
    """All rows."""
    cost = run(checkout)
    assert list(cost) == [
        (f"i{width}", key, case)
        for key in (False, True)
        for width in (32, 16, 8)
        for case in ("warm", "cold", "first", "repeat", *(["sign"] if key else []))
    ]
    return cost


def plausible(cost: Costs) -> bool:
    """A duplicate is not added, but found only after its tag is checked."""
    repeat, keyed = cost["i32", False, "repeat"], cost["i32", True, "repeat"]
    warm = cost["i32", False, "warm"]
    return all(0 < ns < 100_000 for ns in cost.values()) and repeat < min(warm, keyed - 100)


@pytest.mark.long
def test_rows(checkout: Path) -> None:
    """Another program may have had the processor in the middle of one pass, but not of three."""
    tries: list[Costs] = []
    while not tries or not plausible(tries[-1]):
        assert len(tries) < 3, tries
        tries.append(measured(checkout))


def test_a_fragment_that_is_not_added_spoils_the_measurement() -> None:
    with kernel() as bench:
        bench.maps.allocate(8)
        bench.distinct(32, 32, 1, 2, 32)
        with pytest.raises(NicpsError, match="0 of 32 fragments were added"):
            bench.distinct(32, 32, 1, 2, 32)


@pytest.mark.long
def test_rows_of_servers(checkout: Path) -> None:
    """A key costs more than nothing, and a pull less than a push; as above another program may be in the way."""
    for _ in range(3):
        cost = run(checkout, "--servers")
        assert list(cost) == [
            (lane, key, f"{kind} {case}")
            for key in (False, True)
            for lane, kinds in (("i32", ("push", "pull")), ("i16", ("push",)), ("i8", ("push",)))
            for case in ("warm", "cold")
            for kind in kinds
        ]
        push, pull = cost["i32", False, "push warm"], cost["i32", False, "pull warm"]
        if 0 < pull < push < cost["i32", True, "push warm"] and max(cost.values()) < 100_000:
            return
    raise AssertionError(cost)


@pytest.mark.parametrize("width", [32, 16, 8])
def test_pushes_of_the_measurement_are_all_added(width: int) -> None:
    """Each fragment of each step; and one that is not spoils the measurement."""
    with serving_kernel() as bench:
        bench.serve(4, width)
        before = bench.servers.parameters()
        bench.distinct("push", 8)
        assert bench.servers.version == (1, 2)
        assert bench.servers.homes["last"][:, 1].tolist() == [2] * 4
        assert (
            bench.servers.parameters()[0] != before[0]
        ).any()  # a short answer cuts off the lanes
        bench.distinct("pull", 12)
        bench.maps.config["enabled"] = 0
        with pytest.raises(NicpsError, match="0 of 8 were pushed"):
            bench.distinct("push", 8)


@pytest.mark.long
def test_rows_of_stripes(checkout: Path) -> None:
    """A sum costs more than a contribution, and a key more than nothing; as above another program may be in the way."""
    cases = ("contribution", "sum", "store")
    for _ in range(3):
        cost = run(checkout, "--stripes")
        assert list(cost) == [
            (lane, key, case)
            for key in (False, True)
            for lane in ("i32", "i16", "i8")
            for case in (*(f"{c} warm" for c in cases), *(f"{c} cold" for c in cases), "clock cold")
        ]
        one, made = cost["i8", False, "contribution warm"], cost["i8", False, "sum warm"]
        if 0 < one < made < cost["i8", True, "sum warm"] and max(cost.values()) < 100_000:
            return
    raise AssertionError(cost)


@pytest.mark.parametrize("case", ["contribution", "sum", "store", "clock"])
def test_frames_of_stripes_of_the_measurement_all_count(case: str) -> None:
    """Each once; and one that does not spoils the measurement."""
    with striping_kernel() as bench:
        bench.begin(9, 16)
        for runs in (8, 8):
            bench.distinct(case, 9, runs)
        assert len(set(bench.maps.stripes.sums["tag"].ravel().tolist()) - {0}) == 2 * (
            case != "contribution"
        )
        bench.maps.config["enabled"] = 0
        with pytest.raises(NicpsError, match=r"0 of 8 were \w+ed"):
            bench.distinct(case, 9, 8)
