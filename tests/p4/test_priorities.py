# SPDX-License-Identifier: Apache-2.0
"""802.1p tags at a real `simple_switch` whose ports have a queue for each priority."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from nicps import wire
from nicps.bench.bmv2 import CONTROLLER, Bmv2, in_place_of_the_bridge
from nicps.lab.namespaces import switch_name
from nicps.switch import Switch
from nicps.switch.runtime import Member
from tests.netns.scenes import Stage
from tests.p4.bmv2 import Wires, bench, controller, pace
from tests.p4.frames import HOSTS, NETWORK, between_members, ethernet, fragment, mac, token
from tests.p4.test_training import FRAGMENTS, counted_in_training
from tests.vectors.encode import put_tag

BURST = 12


def set_up(bmv2: Bmv2) -> Iterator[Switch]:
    with bmv2.connect() as switch:
        switch.setup(NETWORK, HOSTS, CONTROLLER)
        switch.record({k: Member(k, mac(k), k) for k in HOSTS})
        yield switch


@pytest.fixture(scope="module")
def eight() -> Iterator[tuple[Bmv2, Wires]]:
    with bench(switch_name(f"test-{os.getpid()}-eight"), len(HOSTS), queues=8) as both:
        yield both


@pytest.fixture
def queued(eight: tuple[Bmv2, Wires]) -> Iterator[Switch]:
    yield from set_up(eight[0])


def burst(wires: Wires, switch: Switch, *frames: bytes) -> list[bytes]:
    """What comes out at port 2 where frames come in at port 1, quicker than that port sends."""
    wires.exchange(1, token(1, 1, owner=1))
    with pace(switch, 30):
        return wires.exchange(1, *frames, wait_s=0.5)[2]


def bulk() -> list[bytes]:
    return [fragment(1, index=index) for index in range(BURST)]


def behind(found: list[bytes], waiting: list[bytes], later: list[bytes]) -> list[bytes]:
    """Of frames that came later, those that have waited for all that were there; the others have overtaken them."""
    assert [frame for frame in found if frame not in later] == waiting
    last = found.index(waiting[-1])
    assert sorted([*found[:last], *found[last + 1 :]]) == sorted([*waiting[:-1], *later])
    return found[last + 1 :]


@pytest.mark.parametrize("priority", [None, 0, 1, 7])
def test_frames_wait_for_those_of_their_priority(
    queued: Switch, eight: tuple[Bmv2, Wires], priority: int | None
) -> None:
    """Without a tag a frame has priority 0. Each leaves with the tag that it came with."""
    waiting = bulk() if priority is None else [put_tag(frame, priority) for frame in bulk()]
    plain = fragment(1, index=BURST)
    later = [*(put_tag(plain, each) for each in range(8)), plain]
    found = behind(burst(eight[1], queued, *waiting, *later), waiting, later)
    assert found == ([put_tag(plain), plain] if not priority else [put_tag(plain, priority)])


def test_with_one_queue_nothing_overtakes(switch: Switch, wires: Wires) -> None:
    """Nor is a frame lost, whatever its priority."""
    later = [put_tag(fragment(1, index=BURST), priority) for priority in range(8)]
    assert behind(burst(wires, switch, *bulk(), *later), bulk(), later) == later


def test_fewer_queues_than_priorities() -> None:
    """The controller finds out how many there are. 1 is below 0."""
    later = [put_tag(fragment(1, index=BURST), priority) for priority in range(8)]
    with bench(switch_name(f"test-{os.getpid()}-three"), len(HOSTS), queues=3) as (bmv2, wires):
        for switch in set_up(bmv2):
            found = behind(burst(wires, switch, *bulk(), *later), bulk(), later)
            assert found == later[:3]


@pytest.mark.parametrize("kind", [wire.FrameType.CONTRIBUTION, wire.FrameType.PUSH])
def test_a_tag_of_a_virtual_network_is_none_of_ours(
    queued: Switch, eight: tuple[Bmv2, Wires], kind: wire.FrameType
) -> None:
    """Such a frame is switched; with VID 0, drop eligible or not, it is what it would be without its tag."""
    wires = eight[1]
    wires.exchange(1, token(1, 1, owner=1))
    frame = between_members(2, to=1, view=4, kind=kind)
    for network in (1, 0xFFF):
        tagged = put_tag(frame, 5, network)
        assert wires.exchange(2, tagged) == {1: [tagged]}
    for network in (0, 0x1000):
        assert wires.exchange(2, put_tag(frame, 5, network)) == {}
    twice = put_tag(put_tag(frame))
    other = ethernet(mac(2), struct.pack(">H", 0) + bytes(60), to=mac(1), kind=0x8100)
    for each in (twice, other):
        assert wires.exchange(2, each) == {1: [each]}
    counts = {name: count for name, count in queued.counters().items() if count}
    assert counts == {"token": 1, "switched": 4, "view": 2}


@pytest.fixture(scope="module")
def lab() -> Iterator[tuple[Stage, Bmv2]]:
    """Hosts with tags, behind a switch with a queue for each priority."""
    with (
        Stage(3, arguments=("--silence", "5", "--tags")) as stage,
        in_place_of_the_bridge(stage.lab, queues=8) as bmv2,
        controller(bmv2, stage.folder / "controller.log"),
    ):
        stage.ready()
        yield stage, bmv2


@pytest.mark.parametrize("exchange", ["stripes", "broadcast"])
def test_a_job_is_trained_with_tags(lab: tuple[Stage, Bmv2], exchange: str) -> None:
    stage, bmv2 = lab
    counters = counted_in_training(stage, bmv2, lane="i16", exchange=exchange)
    assert counters["stripe" if exchange == "stripes" else "fragment"] > 3 * FRAGMENTS["i16"]
    assert not counters["type"] + counters["malformed"] + counters["truncated"]
