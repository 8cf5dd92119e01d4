# SPDX-License-Identifier: Apache-2.0
"""A job that trains in stripes while something goes wrong; with a key (docs/faults.md).

After every scene all train again, in one view, with the same state and exact sums in every round, also of the rounding
errors in each life of each member.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from nicps.lab.links import port_name
from nicps.lab.namespaces import switch_name
from nicps.wire import FrameType
from tests.netns.scenes import Drill, Stage

#: 51,204 numbers, 143 fragments of 32 bits: a stripe of four is longer than the window of 28.
LARGE = """
def model():
    return nn.Sequential(nn.Linear(16, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 4))
"""
#: An agent that stands still.
STOPPED_S = 10.0
#: All that a round leaves behind is looked at again: so there are some 5 a second at most.
SLOW = """
def before_batch():
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    settings = {"exchange": "stripes", "lane": "i32"}
    with Drill(Stage(4, keyed=True, adds=False), LARGE, SLOW, settings) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Iterator[Drill]:
    """Four hosts that train."""
    made.ready()
    yield made
    made.stage.lab.clear()
    made.stage.lab.heal()


def test_nothing_goes_wrong(drill: Drill) -> None:
    drill.all_train()
    assert drill.exact() > 3


@pytest.mark.parametrize("who", ["lead", pytest.param("another", marks=pytest.mark.long)])
def test_an_aggregator_is_killed_in_mid_round(drill: Drill, who: str) -> None:
    """Half of what it had to send is out, and some of its sums: the round is run again without it."""
    stage, lead = drill.stage, drill.lead()
    host = lead if who == "lead" else drill.others(lead)[-1]
    with drill.half_sent(host) as round_:
        stage.lab.kill(host)
        drill.goes_on(*drill.others(host))
    assert drill.committed(round_) == {*drill.others(host)}
    stage.end(host, signal.SIGKILL)
    stage.join(host)
    drill.all_train()
    drill.exact()


@pytest.mark.short("cut", "trainer")
@pytest.mark.parametrize("how", ["cut", "stopped", "trainer"])
def test_an_aggregator_goes_away_in_mid_round(drill: Drill, how: str) -> None:
    """The same, and it comes back: cut off, its agent stopped for 10 s, or its program killed."""
    lab = drill.stage.lab
    host = drill.host(3)
    said = len(drill.stage.log(host))
    with drill.half_sent(host) as round_:
        begun = time.monotonic()
        if how == "cut":
            lab.cut(host)
        elif how == "stopped":
            lab.pause(host, "agent")
        else:
            lab.kill(host, "trainer")
        drill.goes_on(*drill.others(host), rounds=1 if how == "trainer" else 3)
        if how == "stopped":
            time.sleep(max(0.0, begun + STOPPED_S - time.monotonic()))  # the scene needs this pause
    assert drill.committed(round_) == {*drill.others(host)}
    lab.heal()
    if how == "stopped":
        lab.resume(host, "agent")
    drill.all_train()
    if how == "stopped":
        away = "standing by: it was not heard, and the others have gone on"
        assert away in drill.stage.log(host)[said:]
    drill.exact()


@pytest.mark.long
def test_an_aggregator_stops_briefly(drill: Drill) -> None:
    """Its kernel goes on adding and answering; no host is missed."""
    lab, before = drill.stage.lab, drill.views()
    for number in (1, 2, 3, 4) * 3:
        host = drill.host(number)
        lab.pause(host, "agent")
        time.sleep(0.1)
        lab.resume(host, "agent")
        time.sleep(0.05)
    drill.all_train()
    assert drill.views() == before
    drill.exact()


@pytest.mark.short("questions")
@pytest.mark.parametrize(
    ("kind", "count"),
    [(FrameType.SUM, 60), (FrameType.CONTRIBUTION, 100), (FrameType.ASK, 20)],
    ids=["sums", "contributions", "questions"],
)
def test_frames_are_lost(drill: Drill, kind: FrameType, count: int) -> None:
    """The next of that kind that each host sends, the last of a round among them; they are asked for and sent again."""
    lab, before = drill.stage.lab, drill.views()
    if kind is FrameType.ASK:  # a member must ask
        lab.fault("all", loss=0.05)
    lab.lose_next("all", kind, count)
    drill.until(
        lambda: not any(port.lose_left for port in lab.faults().values()), "all are lost", 40.0
    )
    drill.all_train()
    assert drill.views() == before
    drill.exact()


def test_loss_duplicates_and_reordering(drill: Drill) -> None:
    """At every port and in each direction, over many rounds: the job takes longer, and nothing else changes."""
    drill.stage.lab.fault("all", loss=0.05, duplicate=0.02, corrupt=0.01, reorder=0.05)
    drill.goes_on(*drill.stage.names, rounds=8)
    counted = [drill.status(host)["counters"] for host in drill.stage.names]
    assert all(of["answered"] and of["duplicate"] and of["forged"] for of in counted)
    drill.stage.lab.clear()
    drill.all_train()
    drill.exact()


@pytest.mark.long
def test_the_end_of_a_round_is_lost(drill: Drill) -> None:
    """From the middle of a round on, one port loses every other frame; each port in turn."""
    lab, names = drill.stage.lab, drill.stage.names
    lab.fault("all", loss=0)  # compiles what comes first

    def lost(host: str) -> int:
        return lab.counters()[host].to_host.dropped

    def lose(host: str, least: int) -> bool:
        return lost(host) >= least

    def applied(host: str, round_: int) -> bool:
        return drill.last(host) >= round_

    def answered() -> int:
        return sum(drill.status(host)["counters"]["answered"] for host in names)

    for host in names:
        last = drill.host(drill.number(host) % len(names) + 1)
        before, answers = lost(host), answered()
        with drill.half_sent(last) as round_:
            lab.fault(host, loss=0.5)
        try:
            drill.until(partial(lose, host, before + 20), "the end of the round is lost")
        finally:
            lab.fault(host, loss=0)
        drill.until(partial(applied, host, round_), "the round is applied there")
        assert drill.committed(round_) == {*names}
        assert answered() > answers
    drill.all_train()
    drill.exact()


def shape(drill: Drill, host: str, rate: str, limit: int) -> None:
    """The switch's port for that host has a queue of so many bytes, in front of a slower line."""
    where, port = switch_name(drill.stage.lab.name), port_name(int(host.removeprefix("h")))
    words = ["root", "tbf", "rate", rate, "burst", "16k", "limit", str(limit)]
    tc(where, "replace", port, *words)


def tc(where: str, what: str, port: str, *words: str) -> None:
    command = ["tc", "-n", where, "qdisc", what, "dev", port, *words]
    subprocess.run(command, check=True, timeout=20.0)


@pytest.mark.parametrize("slow", [pytest.param("one", marks=pytest.mark.long), "all"])
def test_a_switch_with_small_queues(drill: Drill, slow: str) -> None:
    """256 KB in each port, as a cheap switch has; the line of one host is a tenth as fast as those of the others. All
    windows together have room there. `test_a_switch_with_very_small_queues` has queues in which they have not.
    """
    stage, before = drill.stage, drill.views()
    for host in stage.names:
        shape(drill, host, "10mbit" if slow == "one" and host == "h2" else "100mbit", 256_000)
    try:
        drill.goes_on(*stage.names, rounds=8)
        assert all(of["overlimits"] > 100 for of in queues(drill)), "frames wait in all of them"
        assert drill.views() == before
    finally:
        for number in range(1, 5):
            tc(switch_name(stage.lab.name), "del", port_name(number), "root")
    drill.all_train()
    drill.exact()


def queues(drill: Drill) -> list[dict[str, Any]]:
    """What `tc` says of the queues of slower lines in the lab."""
    command = ["tc", "-n", drill.stage.lab.ports_netns, "-s", "-j", "qdisc"]
    found = json.loads(
        subprocess.run(command, check=True, timeout=20.0, capture_output=True).stdout
    )
    return [of for of in found if of["kind"] == "tbf"]


def dropped(drill: Drill) -> int:
    """Frames that these had no room for."""
    return sum(of["drops"] for of in queues(drill))


def test_a_switch_forgets_where_hosts_are(drill: Drill) -> None:
    """It sends everything to all: members drop frames for another, and nothing else changes."""
    stage, before = drill.stage, drill.views()
    where = switch_name(stage.lab.name)

    def learning(how: str) -> None:
        for number in range(1, 5):
            command = ["bridge", "-n", where, "link", "set", "dev", port_name(number), "learning"]
            subprocess.run([*command, how], check=True, timeout=20.0)

    def astray() -> list[int]:
        return [drill.status(host)["counters"]["astray"] for host in stage.names]

    found = astray()
    learning("off")
    flush = ["ip", "-n", where, "link", "set", "br0", "type", "bridge", "fdb_flush"]
    subprocess.run(flush, check=True, timeout=20.0)
    try:
        drill.all_train()
        assert all(now - then > 100 for now, then in zip(astray(), found, strict=True))
    finally:
        learning("on")
    assert drill.views() == before
    drill.exact()


@pytest.mark.long
def test_a_slow_processor(drill: Drill) -> None:
    """An agent that has a third of its time; the others see that they wait for it."""
    host, stop = drill.host(2), threading.Event()

    def starve() -> None:
        while not stop.is_set():
            drill.stage.lab.pause(host, "agent")
            stop.wait(0.1)
            drill.stage.lab.resume(host, "agent")
            stop.wait(0.05)

    def names_it(other: str) -> bool:
        slow = drill.status(other)["activity"].get("slow", ())
        return [of["number"] for of in slow] == [drill.number(host)]

    thread = threading.Thread(target=starve)
    thread.start()
    try:
        drill.goes_on(*drill.stage.names, rounds=5)
        drill.until(lambda: all(map(names_it, drill.others(host))), f"all others name {host}")
    finally:
        stop.set()
        thread.join()
    drill.all_train()
    drill.exact()


@pytest.mark.long
def test_a_port_that_passes_no_full_frames(drill: Drill) -> None:
    """Tokens pass, and no contributions or sums. That host is evicted, and is back once the port is mended."""
    host = drill.host(2)
    where, port = switch_name(drill.stage.lab.name), port_name(int(host.removeprefix("h")))

    def set_mtu(mtu: int) -> None:
        command = ["ip", "-n", where, "link", "set", port, "mtu", str(mtu)]
        subprocess.run(command, check=True, timeout=20.0)

    set_mtu(1400)
    try:
        drill.goes_on(*drill.others(host))
        drill.stands_by(host, saying="the others have gone on without it")
    finally:
        set_mtu(1500)
    drill.all_train(90.0)
    drill.exact()


def test_the_job_ends_well_after_all_this(drill: Drill) -> None:
    drill.end()


@pytest.mark.long
def test_a_switch_with_very_small_queues() -> None:
    """64 KB in each port hold half of the windows. At first 20 to 40 frames of a round are lost there, and none once
    the windows have followed. Some forty rounds are judged together.
    """
    with Drill(
        Stage(4, keyed=True, adds=False), LARGE, SLOW, {"exchange": "stripes", "lane": "i32"}
    ) as drill:
        for host in drill.stage.names:
            shape(drill, host, "100mbit", 64_000)
        drill.ready()
        before = drill.views()

        def lose_little() -> bool:
            lost = dropped(drill)
            drill.goes_on(*drill.stage.names, rounds=10)
            return dropped(drill) < lost + 10

        drill.until(lambda: dropped(drill) > 50, "windows are too large", 120.0)
        drill.until(lose_little, "windows are small", 240.0)
        drill.goes_on(*drill.stage.names, rounds=20)  # windows may have been small early
        assert drill.views() == before
        assert drill.exact() > 40


#: No member waits for one that has a slow round.
UNEVEN = """
import random

def before_batch():
    time.sleep(random.choice((0.005, 0.01, 0.05)))
"""


@pytest.mark.long
@pytest.mark.parametrize("least", [1, 2])
def test_rounds_of_few_contributors(least: int) -> None:
    """A part is enough: of one contributor all take its own lanes, and of two all take their sum."""
    settings = {"exchange": "stripes", "lane": "i32", "quorum": 0.3 * least}
    with Drill(Stage(3, keyed=True, adds=False), LARGE, UNEVEN, settings) as drill:
        stage = drill.stage
        drill.submit()

        def rounds_of_few(more: int) -> bool:
            last = drill.last("h1")
            found = [len(drill.counted("h1", round_)) for round_ in range(1, last + 1)]
            return found.count(least) >= more

        drill.until(lambda: rounds_of_few(10), "rounds of few", 60.0)
        stage.lab.fault("all", loss=0.05, duplicate=0.02, reorder=0.05)
        drill.until(lambda: rounds_of_few(25), "rounds of few under loss", 60.0)
        stage.lab.clear()
        assert drill.exact() >= 25
