# SPDX-License-Identifier: Apache-2.0
"""A worker's steps, one by one, as `test_servers_steps` has those of a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nicps import wire
from nicps.dataplane.doorbell import Bell
from nicps.wire import Flag, Refusal
from tests.model import DROP, Outcome
from tests.servers import Stored
from tests.xdp.served import Target
from tests.xdp.served_host import ROUND, Host, numbers, payload_of, reason, said

KEY = bytes(range(16))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


# ---- at a worker


def worker(target: Target, **values: Any) -> Host:
    """Member 1 of a job whose servers are 2 and 4."""
    usual: dict[str, Any] = {"servers": (2, 4), "room": 6, "clock": 2}
    usual |= values
    room, width = usual["room"], usual.get("width", 32)
    usual["store"] = {place: Stored() for place in range(room)}
    usual["taken"] = dict.fromkeys(range(-(-room * width // 32)), 0)
    return Host(target, **usual)


def test_parameters_are_stored(target: Target) -> None:
    """Each once for a pull, from the server that has it; the agent hears of some, and of the last."""
    host = worker(target)
    for place in range(6):
        server = 2 if place < 3 else 4
        assert host.held(place, 3, 6 - server) == Outcome(DROP, ("stranger",))
        assert host.held(place, 3, server, version=place) == Outcome(DROP, ("stored",), heard=True)
        assert host.again() == Outcome(DROP, ("duplicate",))
    stored = host.model.store[4]
    assert stored == Stored(3, ROUND << 32 | 4, -20, payload_of(5, 32))
    assert [bell.count for bell in host.bells()] == [2, 4, 6]
    assert host.held(0, 2) == Outcome(DROP, ("duplicate",)), "of an earlier pull"
    assert host.held(0, 4).counters == ("stored",)
    assert host.held(1, 3) == Outcome(DROP, ("duplicate",))
    host.bells()


def test_an_earlier_pull_does_not_count_in_a_later_one(target: Target) -> None:
    host = worker(target)
    host.held(0, 4)
    assert host.held(1, 3) == Outcome(DROP, ("round",))
    host.bells()


def test_parameters_of_a_partner(target: Target) -> None:
    host = worker(target, passes=frozenset({5}))
    assert host.held(0, 1, 5).counters == ("stored",)
    assert host.held(1, 1, 3) == Outcome(DROP, ("stranger",))
    host.bells()


@pytest.mark.parametrize("header", [{"round": ROUND + 1}, {"round": ROUND - 1}])
def test_parameters_of_another_round(target: Target, header: dict[str, int]) -> None:
    host = worker(target)
    assert host.held(0, 1, **header) == Outcome(DROP, ("round",))
    assert host.taken(0, 1, **header) == Outcome(DROP, ("round",))


def test_a_step_is_acknowledged(target: Target) -> None:
    """Each fragment once, by the server that has it; what the server said of it is kept."""
    host = worker(target, width=16, room=5)
    for index in range(3):
        server = 2 if index < 1 else 4
        assert host.taken(index, 3, 6 - server) == Outcome(DROP, ("stranger",))
        found = host.taken(index, 3, server, version=7 + index, staleness=index + 1)
        assert found == Outcome(DROP, ("acknowledged",), heard=True)
        assert host.again().counters == ("duplicate",)
    assert host.model.taken == {0: 3, 1: 3, 2: 3}
    assert host.model.answered == {
        2: (3 << 32 | 1, ROUND << 32 | 7),
        4: (3 << 32 | 3, ROUND << 32 | 9),
    }
    assert [(bell.tag, bell.count) for bell in host.bells()] == [(3, 2), (3, 3)]
    assert host.taken(0, 2).counters == ("duplicate",)
    host.bells()


def test_what_comes_back_of_a_push_acknowledges_it(target: Target) -> None:
    """A pull with the same number does not: no server has acknowledged the step."""
    host = worker(target)
    assert host.held(0, 3).counters == ("stored",)
    assert host.held(1, 3, staleness=2).counters == ("stored", "acknowledged")
    assert host.model.taken == {0: 0, 1: 3, 2: 0, 3: 0, 4: 0, 5: 0}
    assert [host.model.store[index].rest - (ROUND << 32) for index in (0, 1)] == [0, 1], (
        "the step itself counts, too"
    )
    assert host.held(0, 3, staleness=2) == Outcome(DROP, ("duplicate",))
    assert host.taken(0, 3, staleness=2).counters == ("acknowledged",), "it is sent again"
    host.bells()


@pytest.mark.parametrize("why", [r for r in Refusal if r])
def test_refusals_are_told(target: Target, why: Refusal) -> None:
    """Once in a tick of the clock, with the member that refuses; of one that is asked nothing, not at all."""
    host = worker(target, passes=frozenset({5}))
    target.doorbell.take()
    target.ring["refused_ns"] = 0
    assert host.taken(0, 8, 3, reason=why) == Outcome(DROP, ("stranger",))
    assert target.doorbell.take() == []
    assert host.taken(0, 8, 5, reason=why) == Outcome(DROP, ("refused",), heard=True)
    assert host.taken(0, 8, 4, reason=why) == Outcome(DROP, ("refused",), heard=True)
    told = target.doorbell.take()
    assert told[0] == Bell(8, 0, 0, 0, 5) and told[1:] in ([], [Bell(8, 0, 0, 0, 4)])
    assert host.model.taken[0] == 0


# ---- partners


def test_a_partner_passes_on_what_it_has_pulled(target: Target) -> None:
    """Of this round only."""
    host = worker(target)
    assert reason(host.pull(0, number=7)) == Refusal.ABSENT
    host.held(0, 3, version=9, lane=-6)
    found = host.pull(0, number=7)
    assert found.counters == ("passed_on",) and not found.heard
    assert said(found) == wire.Held(9, 7, 0, 6, 0, 32, -20)
    assert (numbers(found) == -6 * 2.0**-20).all()
    host.commit()
    assert reason(host.pull(0, number=8)) == Refusal.ABSENT
    host.bells()


def test_a_host_without_a_store_passes_nothing_on(target: Target) -> None:
    host = Host(target, servers=(2, 1), room=4)
    assert host.pull(0) == Outcome(DROP, ("range",))
    assert host.held(0) == Outcome(DROP, ("range",))
    assert host.taken(0) == Outcome(DROP, ("range",), heard=True)


def test_a_partner_answers_a_frame_once(target: Target) -> None:
    host = worker(target, key=KEY)
    host.held(0, 3, flags=Flag.ANSWER)
    assert host.pull(0).counters == ("passed_on",)
    assert host.again() == Outcome(DROP, ("replayed",))
    host.bells()
