# SPDX-License-Identifier: Apache-2.0
"""Calls of torch.distributed that hypothesis draws, against NumPy, while frames and a host are lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.collectives import TYPES, Drawn
from tests.netns.members import Network

pytest.importorskip("torch")
HOSTS = 3
CALLS = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "barrier")


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """One call."""
    kind = draw(st.sampled_from(TYPES))
    operations = ["sum", "product", "min", "max"]
    if kind == "complex64":
        operations = ["sum", "avg"]
    elif kind[0] in "iu":
        operations += ["band", "bor", "bxor"]
    elif kind != "bool":
        operations += ["avg"]
    what = draw(st.sampled_from(CALLS))
    length = draw(st.one_of(st.integers(0, 800), st.integers(0, 30_000)))
    return Drawn(
        what,
        kind,
        length * HOSTS if what == "reduce_scatter" else length,
        draw(st.sampled_from(operations)),
        draw(st.integers(0, HOSTS - 1)),
        HOSTS,
        (draw(st.integers(0, 1 << 30)),),
        draw(st.booleans()) and kind in ("float16", "bfloat16", "float32", "float64"),
    )


@pytest.fixture(scope="module")
def lossy() -> Iterator[Network]:
    """A hundredth of all frames is lost."""
    with Network(HOSTS, loss=0.01) as made:
        made.up()
        yield made


def run(network: Network, calls: list[Drawn], dies: str, at: int) -> None:
    """Make them; the agent of a host is killed when its program has come so far."""
    network.ready()
    path = network.folder / "calls.json"
    path.write_bytes(orjson.dumps([asdict(call) for call in calls]))
    program = [sys.executable, "-m", "tests.netns.drawn_program", str(path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    still = {dies: [str(at)]}
    started = {
        host: network.run(host, program + still.get(host, []), **pipes) for host in network.names
    }
    try:
        for line in started[dies].stdout or ():
            if orjson.loads(line).get("call") == at:
                network.end(dies, signal.SIGKILL)
        said = []
        for host, process in started.items():
            out, err = process.communicate(timeout=200)
            assert "Traceback" not in err, err
            if host != dies:
                assert process.returncode == 0, (out, err)
                said.append([orjson.loads(line) for line in out.splitlines()])
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    same = [[line for line in lines if "call" in line] for lines in said]
    assert all(each == same[0] for each in same) and len(same[0]) == len(calls)
    whole = [len(line["counted"]) for line in same[0] if "counted" in line]
    assert whole[0] == HOSTS and whole[-1] == HOSTS - 1


ANY: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.long
@settings(max_examples=1, derandomize=True, **ANY)
@given(data=st.data())
def test_forty_calls(lossy: Network, data: st.DataObject) -> None:
    calls = data.draw(st.lists(drawn(), min_size=40, max_size=40))
    run(lossy, [*calls, Drawn("barrier", "int8", 0, "sum", 0, HOSTS, (0,))], "h2", 20)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=10, **ANY)
@given(data=st.data())
def test_a_thousand_calls(lossy: Network, data: st.DataObject) -> None:
    calls = data.draw(st.lists(drawn(), min_size=100, max_size=100))
    dies = data.draw(st.sampled_from(lossy.names))
    end = Drawn("barrier", "int8", 0, "sum", 0, HOSTS, (0,))
    run(lossy, [*calls, end], dies, data.draw(st.integers(1, 90)))
