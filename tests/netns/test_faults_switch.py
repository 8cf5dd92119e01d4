# SPDX-License-Identifier: Apache-2.0
"""A job whose gradients a Linux box adds, while something goes wrong (docs/faults.md, docs/linux-switch.md).

After every scene all train again, with the same state and exact sums in every round, those included that contain
remainders of the round before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial

import pytest

from nicps.lab import links
from nicps.lab.processes import send
from nicps.wire import FrameType
from tests.netns.scenes import Drill
from tests.netns.switched_stage import SwitchedStage
from tests.netns.test_faults_stripes import LARGE, SLOW, queues, tc

pytestmark = pytest.mark.xdp

SETTINGS = {"exchange": "switch", "lane": "i32"}


def make(hosts: int = 3, *, keyed: bool = True, **settings: object) -> Drill:
    stage = SwitchedStage(hosts, keyed=keyed)
    return Drill(stage, LARGE, SLOW, {**SETTINGS, **settings})


def stage_of(drill: Drill) -> SwitchedStage:
    assert isinstance(drill.stage, SwitchedStage)
    return drill.stage


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with make() as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Iterator[Drill]:
    """Three hosts that train, with a key; the switch adds."""
    stage_of(made).adding.serve()
    if made.channel is not None and made.under_way() and made.exchange() != "linux-switch":
        made.end()  # the switch was given up
        made.close()
    made.ready()
    made.await_exchange("linux-switch")
    yield made
    made.stage.lab.clear()
    made.stage.lab.heal()


def by_exchange(drill: Drill) -> dict[str, int]:
    """The number of rounds by exchange, in the records of h1."""
    found: dict[str, int] = {}
    for path in drill.stage.records("h1").glob("[0-9]*.sum.npz"):
        name = str(drill._load(path)["exchange"])
        found[name] = found.get(name, 0) + 1
    return found


def test_nothing_goes_wrong(drill: Drill) -> None:
    before = drill.views()
    drill.goes_on(*drill.stage.names, rounds=8)
    assert drill.views() == before
    assert drill.exact() > 8
    assert by_exchange(drill).keys() == {"linux-switch"}


@pytest.mark.long
def test_loss_duplicates_and_reordering(drill: Drill) -> None:
    """At every port and in each direction, over many rounds: the job takes longer, and nothing else changes."""
    before, counted = by_exchange(drill), stage_of(drill).adding.counters()
    drill.stage.lab.fault("all", loss=0.05, duplicate=0.02, corrupt=0.01, reorder=0.05)
    drill.goes_on(*drill.stage.names, rounds=8)
    now = stage_of(drill).adding.counters()
    assert all(now[what] > counted[what] for what in ("answered", "duplicate", "forged"))
    drill.stage.lab.clear()
    drill.all_train()
    drill.exact()
    assert drill.exchange() == "linux-switch" and before.keys() == by_exchange(drill).keys()


@pytest.mark.short("grants")
@pytest.mark.parametrize(
    ("kind", "count"),
    [(FrameType.CONTRIBUTION, 100), (FrameType.ASK, 20), (FrameType.SWITCH, 3)],
    ids=["contributions", "questions", "grants"],
)
def test_frames_are_lost(drill: Drill, kind: FrameType, count: int) -> None:
    """The next of that kind that each host sends; they are asked for and sent again."""
    lab, before = drill.stage.lab, drill.views()
    if kind is FrameType.ASK:  # a member must ask
        lab.fault("all", loss=0.05)
    lab.lose_next("all", kind, count)
    drill.until(
        lambda: not any(port.lose_left for port in lab.faults().values()), "all are lost", 40.0
    )
    drill.all_train()
    assert drill.views() == before and drill.exchange() == "linux-switch"
    drill.exact()


def test_sums_are_lost_at_one_port(drill: Drill) -> None:
    """Three of ten frames from and to one host are lost, each host in turn, until it has asked for sums. The switch has
    kept them.
    """
    lab, before = drill.stage.lab, drill.views()

    def asked(host: str) -> int:
        return int(drill.status(host)["activity"]["switch_asked"])

    def asks(host: str, before: int) -> bool:
        return asked(host) > before

    for host in drill.stage.names:
        lab.fault(host, loss=0)  # compiles what comes first
        questions, answers = asked(host), stage_of(drill).adding.counters()["answered"]
        lost = lab.counters()[host].to_host.dropped
        lab.fault(host, loss=0.3)
        try:
            drill.until(partial(asks, host, questions), f"{host} asks the switch")
        finally:
            lab.fault(host, loss=0)
        drill.goes_on(*drill.stage.names, rounds=1)
        assert lab.counters()[host].to_host.dropped > lost
        assert stage_of(drill).adding.counters()["answered"] > answers
    drill.all_train()
    assert drill.views() == before and drill.exchange() == "linux-switch"
    drill.exact()


def test_the_switchs_process_stands_still(drill: Drill) -> None:
    """The kernel goes on adding and answering."""
    drill.stage.lab.pause("switch")
    try:
        drill.goes_on(*drill.stage.names, rounds=5)
    finally:
        drill.stage.lab.resume("switch")
    drill.exact()
    assert drill.exchange() == "linux-switch"


def test_small_queues_in_the_cables(drill: Drill) -> None:
    """256 KB in front of a slower line, in both directions: the windows have room there, and frames wait."""
    stage, before = drill.stage, drill.views()
    words = ["root", "tbf", "rate", "50mbit", "burst", "16k", "limit", "256000"]
    ends = [
        name(host.number)
        for host in stage.lab.hosts
        for name in (links.port_name, links.far_port_name)
    ]
    for end in ends:
        tc(stage.lab.ports_netns, "replace", end, *words)
    try:
        drill.goes_on(*stage.names, rounds=5)
        assert all(of["overlimits"] > 100 for of in queues(drill)), "frames wait in all of them"
        assert drill.views() == before and drill.exchange() == "linux-switch"
    finally:
        for end in ends:
            tc(stage.lab.ports_netns, "del", end, "root")
    drill.exact()


def test_the_switch_is_killed_in_mid_round_and_started_again(drill: Drill) -> None:
    """It has lost all sums and remainders: a new view, in which the round is run again, by the switch again."""
    stage, host, view = stage_of(drill), drill.host(2), max(drill.views())
    boots = set(stage.boots().values())
    with drill.half_sent(host) as round_:
        stage.lab.kill("switch")
        stage.start_switch()
    drill.until(lambda: drill.last("h1") >= round_, "the round is committed")
    drill.goes_on(*stage.names)
    drill.await_exchange("linux-switch")
    assert min(drill.views()) > view
    assert set(stage.boots().values()) > boots
    drill.exact()


@pytest.mark.short("killed")
@pytest.mark.parametrize("how", ["cut", "killed"])
def test_the_switch_is_gone_in_mid_round(drill: Drill, how: str) -> None:
    """Sums do not come: the hosts add from then on, none is evicted, and the job reports this once."""
    stage, host = stage_of(drill), drill.host(2)
    said = {name: len(stage.log(name)) for name in stage.names}
    with drill.half_sent(host) as round_:
        if how == "killed":
            stage.lab.kill("switch")
        else:
            stage.lab.cut("switch")
    drill.until(lambda: drill.last("h1") >= round_, "the round is committed")
    drill.await_exchange("stripes")
    drill.goes_on(*stage.names)
    for name in stage.names:
        assert "was not heard" not in stage.log(name)[said[name] :]
    drill.exact()


@pytest.mark.long
def test_a_port_of_the_switch_is_gone(drill: Drill) -> None:
    """The host behind it is evicted, the others go on with the switch; with the port it comes back."""
    stage, host = stage_of(drill), drill.host(3)
    with drill.half_sent(host) as round_:
        stage.lab.link(host, "unplugged")
        drill.goes_on(*drill.others(host))
    assert drill.committed(round_) == {*drill.others(host)}
    assert f"port eth{host.removeprefix('h')} has no carrier" in stage.said()
    stage.lab.link(host, "up")
    drill.all_train(90.0)
    drill.exact()


@pytest.mark.long
def test_a_member_is_killed_in_mid_round(drill: Drill) -> None:
    """The round is run again without it; the remainders of the round before are still at the switch."""
    stage, host = stage_of(drill), drill.others(drill.lead())[-1]
    with drill.half_sent(host) as round_:
        stage.lab.kill(host)
        drill.goes_on(*drill.others(host))
    assert drill.committed(round_) == {*drill.others(host)}
    stage.end(host, signal.SIGKILL)
    stage.join(host)
    drill.all_train()
    drill.exact()


@pytest.mark.long
def test_the_lead_is_killed_in_mid_round(drill: Drill) -> None:
    stage, host = stage_of(drill), drill.lead()
    with drill.half_sent(host) as round_:
        stage.lab.kill(host)
        drill.goes_on(*drill.others(host))
    assert drill.committed(round_) == {*drill.others(host)}
    stage.end(host, signal.SIGKILL)
    stage.join(host)
    drill.all_train()
    drill.exact()


def test_the_job_ends_well_after_all_this(drill: Drill) -> None:
    drill.end()


@pytest.mark.long
def test_without_a_key_the_switch_is_started_again() -> None:
    with make(keyed=False) as drill:
        stage = stage_of(drill)
        drill.begin()
        drill.await_exchange("linux-switch")
        with drill.half_sent(drill.host(2)):
            assert stage.switch is not None
            running = [p for p in stage.lab.processes()["switch"] if p.pid == stage.switch.pid]
            send(running, signal.SIGTERM)
            stage.switch.wait(20)
            stage.start_switch()
        drill.goes_on(*stage.names)
        drill.await_exchange("linux-switch")
        assert drill.exact() > 3
        drill.end()


@pytest.mark.long
@pytest.mark.parametrize("lane", ["i8", "i16"])
def test_narrow_lanes_lose_nothing_to_rounding(lane: str) -> None:
    """Most of a sum that a lane cannot hold stays at the switch, and is in a later sum, whatever is lost meanwhile."""
    with make(keyed=False, lane=lane) as drill:
        drill.begin()
        drill.await_exchange("linux-switch")
        drill.stage.lab.fault("all", loss=0.05, duplicate=0.02, reorder=0.05)
        drill.goes_on(*drill.stage.names, rounds=10)
        drill.stage.lab.clear()
        assert drill.exact() > 10
        drill.end()
        assert by_exchange(drill)["linux-switch"] > 8


def test_a_host_that_does_not_believe() -> None:
    """The job trains without the switch, and reports whose grant is missing."""
    stage = SwitchedStage(3, keyed=True, doubters={"h3"})
    with Drill(stage, LARGE, SLOW, SETTINGS) as drill:
        drill.begin()
        drill.goes_on(*stage.names)
        assert by_exchange(drill).keys() == {"stripes"}
        assert "no grant of h3" in stage.log("h1")
        drill.exact()
        drill.end()


@pytest.mark.long
def test_too_little_memory() -> None:
    """The switch reports what it lacks, and the hosts add."""
    stage = SwitchedStage(3, keyed=True, told=("--memory", "1M"))
    with Drill(stage, LARGE, SLOW, SETTINGS) as drill:
        drill.begin()
        drill.goes_on(*stage.names)
        assert by_exchange(drill).keys() == {"stripes"}
        assert "and --memory allows 1 MB: the hosts train without this switch" in stage.said()
        assert "room for" in stage.log("h1")
        drill.exact()
        drill.end()
