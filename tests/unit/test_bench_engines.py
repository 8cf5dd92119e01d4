# SPDX-License-Identifier: Apache-2.0
"""What `nicps bench allreduce` takes as the limit of each engine, and which of them it runs at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from nicps.bench import allreduce
from nicps.bench.engines import Engine, Gloo, Nicps, Size
from nicps.bench.profile import processor_seconds, seconds_since

SIZE = Size(hosts=4, params=1_440_000, rate_bps=10**9)


@pytest.mark.parametrize(
    ("engine", "copies", "bytes_", "frame"),
    [
        (Nicps.of("broadcast", "i8", SIZE), 4, 5_760_000, 1502 / 1440),
        (Nicps.of("stripes", "i8", SIZE), 1.5, 2_160_000, 1510 / 1440),
        (Nicps.of("stripes", "i32", SIZE), 1.5, 8_640_000, 1510 / 1440),
        (Nicps.of("stripes", "i8", Size(2, 1000, 1)), 1, 1000, 1510 / 1440),
        (Nicps.of("switch", "i8", SIZE), 1, 1_440_000, 1510 / 1440),
        (Nicps.of("switch", "i32", SIZE), 1, 5_760_000, 1510 / 1440),
        (Gloo.of("float16", SIZE), 1.5, 4_320_000, 1514 / 1448),
    ],
    ids=lambda value: f"{value.exchange}-{value.lane}" if isinstance(value, Engine) else "",
)
def test_limits(engine: Engine, copies: float, bytes_: int, frame: float) -> None:
    assert (engine.copies, engine.bytes) == (copies, bytes_)
    assert engine.frame_share == pytest.approx(frame)


def test_a_job_that_names_no_exchange_has_the_one_that_it_takes() -> None:
    assert Nicps.of("auto", "i8", SIZE).exchange == "stripes"


def test_only_a_switch_that_adds_has_a_lab_of_its_own() -> None:
    switch = Nicps.of("switch", "i8", SIZE)
    assert (switch.exchange, switch.switch) == ("linux-switch", "xdp")
    assert SIZE.shape("name", switch.switch).adds
    assert Nicps.of("stripes", "i8", SIZE).switch == Gloo.of("float16", SIZE).switch == "bridge"
    assert switch.memory - 4 * SIZE.params * switch.held >= 2 * 8 * SIZE.params


def test_engines_that_fit_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Engine] = [
        Nicps.of(exchange, lane, SIZE)
        for lane in ("i32", "i16", "i8")
        for exchange in ("broadcast", "stripes")
    ]
    sizes = [engine.all_memory for engine in chosen]

    def groups(free: float) -> list[int]:
        monkeypatch.setattr(allreduce, "free_memory", lambda: free)
        found = list(allreduce._groups(chosen))
        assert [engine for group in found for engine in group] == chosen
        return [len(group) for group in found]

    assert groups(sum(sizes) * 2) == [6]
    assert groups(sum(sizes[:2]) / 0.79) == [2, 2, 2]
    assert groups(0) == [1] * 6, "whether one has room was asked before"


def test_processor_time_holds_that_of_threads_that_have_ended() -> None:
    def work() -> None:
        while time.thread_time() < 0.02:
            pass

    before = processor_seconds([os.getpid()])
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seconds_since(before) >= 0.02


def test_processor_time_of_others() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        deadline = time.monotonic() + 60
        while not (before := processor_seconds([child.pid])).get(child.pid):
            assert time.monotonic() < deadline
        child.communicate(b"\n")
    assert processor_seconds([child.pid]) == {} and seconds_since(before) == 0
