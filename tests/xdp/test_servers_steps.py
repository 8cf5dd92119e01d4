# SPDX-License-Identifier: Apache-2.0
"""A server's and a worker's steps, one by one, with results worked out by hand or in whole numbers.

Each of these runs through the program, and through the model of `tests.servers`, which must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane.doorbell import Bell
from nicps.wire import Flag, Refusal
from tests.model import DROP, Outcome
from tests.servers import ANY, Home, Stored
from tests.stripes import LANES, MACS, PER_BLOCK
from tests.xdp.served import Target
from tests.xdp.served_host import (
    EXACT,
    ROUND,
    TAG,
    UNIT,
    Host,
    numbers,
    payload_of,
    reason,
    said,
    start,
)

KEY = bytes(range(16))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


# ---- pushes


def test_a_push_of_32_bits_comes_back_as_parameters(target: Target) -> None:
    host = Host(target)
    found = host.push(-7)
    assert found.counters == ("pushed",) and found.heard
    assert (host.parameters() == start() - 7).all()
    assert (numbers(found) == (start() - 7) * UNIT).all()
    answer = wire.unpack((found.out or b"")[wire.ETHERNET_BYTES :])
    assert answer.header.flags == Flag.ANSWER and answer.header.sender == 1
    assert (found.out or b"")[:12] == MACS[2] + MACS[0]
    assert answer.body == wire.Held(0, 1, 0, 2, 1, 32, -40)
    host.bells()


@pytest.mark.parametrize("width", [16, 8])
def test_narrower_lanes_are_acknowledged(target: Target, width: int) -> None:
    host = Host(target, width=width, room=8)
    found = host.push(-7, exponent=EXACT)
    assert found.counters == ("pushed",) and len(found.out or b"") == 70
    assert said(found) == wire.Taken(0, 1, 0, 8 * width // 32, 1, width, EXACT)
    assert (host.parameters() == start(width=width) - 7).all()
    host.bells()


def test_the_version_rises_with_whole_pushes(target: Target) -> None:
    """And a push's answers name the version before it."""
    host = Host(target)
    assert said(host.push(1, 0)).version == 0
    assert host.model.version == (ROUND, 0)
    assert said(host.push(1, 1)).version == 0
    assert host.model.version == (ROUND, 1)
    assert said(host.push(1, 0, number=2)).version == 1
    assert said(host.push(1, 1, sender=4)).version == 1
    assert said(host.push(1, 0, sender=4)).version == 1
    assert host.model.version == (ROUND, 2)
    host.bells()


@pytest.mark.parametrize(("weighs", "moved"), [(True, 1000), (False, 3000)])
def test_staleness(target: Target, weighs: bool, moved: int) -> None:
    """Two pushes have become whole since what this worker has pulled: its step counts a third."""
    host = Host(target, by_staleness=weighs, version=(ROUND, 2))
    found = host.push(3000)
    assert said(found).staleness == 3 and said(found).version == 2
    assert (host.parameters() == start() + moved).all()
    assert said(host.push(3000, 1, version=2)).staleness == 3, "it is fixed with the first fragment"
    assert (host.parameters(1) == start(1) + moved).all()
    assert said(host.push(3000, number=2, version=3)).staleness == 1
    host.bells()


def test_a_push_that_names_a_version_to_come(target: Target) -> None:
    host = Host(target, version=(ROUND, 2))
    assert host.push(1, version=3) == Outcome(DROP, ("malformed",))
    host.model.version = (ROUND - 1, 9)
    target.enter(host.model)
    assert host.push(1, version=1) == Outcome(DROP, ("malformed",)), "of another round is none"


def test_a_push_comes_twice(target: Target) -> None:
    """It is added once, and acknowledged as often as it comes, with what was fixed for it."""
    host = Host(target, version=(ROUND, 4))
    host.push(4000, version=1)
    found = host.again()
    assert found.counters == ("duplicate",) and len(found.out or b"") == 70
    assert said(found) == wire.Taken(4, 1, 0, 2, 4, 32, EXACT)
    host.push(4000, 1, version=1)
    assert said(host.again()).version == 4, "though the step is whole: its worker adds 1 for it"
    assert said(host.push(1, number=2, version=5)).staleness == 1
    found = host.push(4000, number=1, version=1)
    assert found.counters == ("duplicate",) and said(found).staleness == 0, (
        "another was fixed since"
    )
    assert (host.parameters() == start() + 1000 + 1).all()
    host.bells()


def test_an_older_step_where_it_has_not_been(target: Target) -> None:
    """Its worker has begun a newer one: whatever it was, it is not waited for."""
    host = Host(target)
    host.push(1, 0, number=2)
    assert host.push(1, 1, number=1) == Outcome(DROP, ("round",))
    assert (host.parameters(1) == start(1)).all()
    host.bells()


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 16},
        {"fragments": 3},
        {"fragments": 1},
        {"number": 0},
    ],
)
def test_a_push_that_cannot_be(target: Target, wrong: dict[str, int]) -> None:
    host = Host(target)
    body = replace(wire.Push(0, 1, 0, 2, 0, 32, EXACT), **wrong)
    assert host.give(host.frames.make(body)) == Outcome(DROP, ("malformed",))
    host.bells()


@pytest.mark.parametrize("width", [32, 16, 8])
def test_the_largest_exponent(target: Target, width: int) -> None:
    """No number of a step may reach 2**21."""
    host = Host(target, width=width, room=4)
    assert host.push(1, exponent=23 - width) == Outcome(DROP, ("shift",))
    assert host.push(-(1 << width - 1), exponent=22 - width).counters == ("pushed",)
    assert (host.parameters() == start(width=width) - (1 << 61)).all()
    assert host.push(1, exponent=127, number=2) == Outcome(DROP, ("shift",)), "what is not finite"


def test_another_servers_part(target: Target) -> None:
    host = Host(target, servers=(2, 1), room=5)
    assert [host.push(1, at).counters[0] for at in range(6)] == ["range"] * 2 + ["pushed"] * 3 + [
        "range"
    ]
    assert host.model.version == (ROUND, 1), "whole with its own part"


# ---- numbers


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("staleness", [1, 2, 3, 7, 64, 1000, 10**6])
def test_addends_in_whole_numbers(target: Target, width: int, staleness: int) -> None:
    """For every shift: exactly what integers of any size come to, half a unit rounded up."""
    most = 1 << width - 1
    rng = np.random.default_rng(width * staleness)
    lanes = rng.integers(-most, most, LANES[width])
    lanes[:5] = -most, most - 1, 0, 1, -1
    weight = (2 * 2**30 + staleness) // (2 * staleness)
    for number, down in enumerate(range(66), 1):
        host = Host(target, width=width, room=32 // width, version=(ROUND, staleness - 1))
        host.push(lanes, number=number, exponent=22 - width - down)
        by = min(down, 63)
        half = 2**by // 2
        top = 2 ** (32 - width)
        expected = [
            int(before) + (int(lane) * top * weight + half) // 2**by
            for before, lane in zip(start(width=width), lanes, strict=True)
        ]
        assert host.parameters().tolist() == expected, down


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("workers", [1, 2, 3, 63])
def test_averages_in_whole_numbers(target: Target, width: int, workers: int) -> None:
    """Each addend is rounded by itself, so that their order is of no matter."""
    senders = range(2, workers + 2)
    members = sum(1 << k - 1 for k in senders)
    rng = np.random.default_rng(width * workers)
    most, down = 1 << width - 1, 11
    sent = {k: rng.integers(-most, most, LANES[width]) for k in senders}
    weight = (2 * 2**30 + workers) // (2 * workers)
    host = Host(target, live=frozenset(range(1, 65)), width=width, room=32 // width)
    for k in rng.permutation(senders).tolist():
        body = wire.Contribution(members, 0, 1, 9, width, 22 - width - down, 0)
        found = host.give(host.frames.make(body, payload_of(sent[k], width), k))
    assert found.counters == ("summed",)
    assert (host.parameters() == start(width=width)).all(), "until it is committed"
    host.commit()
    host.pull()
    top, half = 2 ** (32 - width), 2**down // 2
    expected = [
        int(before) + sum((int(lane) * top * weight + half) // 2**down for lane in lanes)
        for before, *lanes in zip(start(width=width), *sent.values(), strict=True)
    ]
    assert host.parameters().tolist() == expected
    host.bells()


@pytest.mark.parametrize("largest", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**61 - 1, 2**62])
@pytest.mark.parametrize("sign", [1, -1])
def test_parameters_are_shown_as_32_bits(target: Target, largest: int, sign: int) -> None:
    """The nearest of as many lanes as fit; they themselves stay as they are."""
    values = np.array([sign * largest * k // 359 for k in range(360)], np.int64)
    host = Host(target, homes={0: Home(values, np.zeros(360, np.int64))}, room=1)
    found = host.pull()
    body = said(found)
    step = 2 ** (body.exponent + 40)
    assert body.exponent >= -40 and (step == 1 or largest >= step << 30)
    lanes = (numbers(found) / 2.0**body.exponent).astype(np.int64)
    for lane, value in zip(lanes.tolist(), values.tolist(), strict=True):
        assert lane == min((2 * value + step) // (2 * step), 2**31 - 1)
    assert (host.parameters() == values).all()


# ---- pulls


@pytest.mark.parametrize("width", [32, 16, 8])
def test_every_piece_can_be_pulled(target: Target, width: int) -> None:
    """Push fragments of narrower lanes have two or four of them, the last of the vector fewer."""
    per = 32 // width
    room = 3 * per - (per > 1)
    host = Host(target, width=width, room=room, servers=(2, 1), version=(ROUND, 6))
    part = host.model.part(1)
    for place in range(part.start * per, room):
        local, piece = divmod(place - part.start * per, per)
        found = host.pull(place, number=4)
        assert found.counters == ("pulled",) and found.heard
        assert said(found) == wire.Held(6, 4, place, room, 0, 32, -40)
        lanes = start(local, width)[piece * 360 : piece * 360 + 360]
        assert (numbers(found) == lanes * UNIT).all()
    assert host.pull(room) == Outcome(DROP, ("range",))
    host.bells()


@pytest.mark.parametrize("wrong", [{"width": 16}, {"fragments": 1}, {"number": 0}])
def test_a_pull_that_cannot_be(target: Target, wrong: dict[str, int]) -> None:
    host = Host(target)
    body = replace(wire.Pull(0, 1, 0, 2, 0, 32, 0), **wrong)
    assert host.give(host.frames.make(body)) == Outcome(DROP, ("malformed",))


def test_a_pull_is_answered_once(target: Target) -> None:
    """By the number of its frame, in a network with a key; each way out has numbers of its own."""
    host = Host(target, key=KEY)
    assert host.pull().counters == ("pulled",)
    assert host.again() == Outcome(DROP, ("replayed",))
    later = host.pull(flags=Flag.ANSWER, sequence=101)
    assert later.counters == ("pulled",), "the other way"
    assert host.again() == Outcome(DROP, ("replayed",))
    assert host.pull(sequence=60).counters == ("replayed",), "too far behind to be known"
    assert host.pull(sequence=99).counters == ("pulled",)
    host.bells()


@pytest.mark.parametrize("asks", ["push", "pull", "contribute"])
def test_a_round_that_is_not_open_yet(target: Target, asks: str) -> None:
    """The worker has committed before the server's agent, and asks again."""
    host = Host(target, key=KEY)
    header = {"round": ROUND + 1}
    if asks == "push":
        found = host.give(host.frames.make(wire.Push(0, 8, 1, 2, 0, 32, EXACT), **header))
    elif asks == "pull":
        found = host.pull(1, number=8, **header)
    else:
        found = host.contribute(1, 3, index=1, number=8, **header)
    assert found.counters == ("refused",) and reason(found) == Refusal.NOT_YET
    assert (said(found).number, said(found).index, said(found).staleness) == (8, 1, 0)
    assert host.pull(round=ROUND + 2) == Outcome(DROP, ("round",))
    assert host.pull(round=ROUND - 1) == Outcome(DROP, ("round",))
    host.bells()


# ---- synchronisations


def test_a_synchronisation(target: Target) -> None:
    """The parameters change with the commit, by the first program that claims them, and by the average."""
    host = Host(target, room=1)
    found = host.contribute(10, 3)
    assert found.counters == ("gathered",) and len(found.out or b"") == 70
    assert said(found) == wire.Taken(0, 9, 0, 1, 0, 32, EXACT)
    assert host.again().counters == ("duplicate",)
    assert reason(host.pull()) == Refusal.SYNCHRONISING
    assert reason(host.push(1, sender=5)) == Refusal.SYNCHRONISING
    found = host.contribute(21, 4)
    assert found.counters == ("summed",) and said(found).number == 9
    assert reason(host.pull()) == Refusal.SYNCHRONISING
    assert (host.parameters() == start()).all()
    assert host.bells() == [Bell(TAG, 0b1100, 0, 1, 0), Bell(TAG, 0, 1, 1, 0)]
    host.commit()
    assert (host.parameters() == start()).all()
    found = host.pull()
    assert (host.parameters() == start() + 5 + 11).all(), "5 and 10.5, each rounded"
    assert (numbers(found) == host.parameters() * UNIT).all()
    host.pull()
    assert (host.parameters() == start() + 16).all(), "once"
    assert host.push(1, sender=3).counters == ("pushed",)
    host.bells()


def test_a_push_settles_too(target: Target) -> None:
    host = Host(target, room=1)
    host.contribute(8, 3, 0b100)
    host.commit()
    host.push(1, sender=4)
    assert (host.parameters() == start() + 8 + 1).all()


def test_a_round_that_is_dropped(target: Target) -> None:
    """It runs again in another view, with another list: what there was is written over."""
    host = Host(target, room=1)
    host.contribute(100, 3, 0b100)
    host.enter_view()
    assert host.pull().counters == ("pulled",), "nothing of this view has come"
    host.contribute(8, 4, 0b11000)
    host.contribute(4, 5, 0b11000)
    host.commit()
    host.pull()
    assert (host.parameters() == start() + 6).all()
    host.bells()


def test_a_commit_without_a_list_adds_nothing(target: Target) -> None:
    """A barrier."""
    host = Host(target, room=1)
    host.contribute(100, 3, 0b100)
    host.commit(listed=False)
    host.pull()
    assert (host.parameters() == start()).all()


@pytest.mark.parametrize(
    ("values", "counter"),
    [
        ({"members": 0b1000}, "malformed"),
        ({"members": 0b100100}, "malformed"),
        ({"members": 0b11100}, "malformed"),
        ({"number": 0}, "malformed"),
        ({"index": 1}, "range"),
        ({"exponent": -9}, "shift"),
    ],
)
def test_contributions_that_are_refused(
    target: Target, values: dict[str, int], counter: str
) -> None:
    """A list without the sender, with a member that is not live, or unlike that of the others."""
    host = Host(target, room=1)
    host.contribute(1, 4)
    assert host.contribute(1, **{"sender": 3, **values}) == Outcome(DROP, (counter,))
    host.bells()


def test_no_room_for_synchronisations(target: Target) -> None:
    """A job that never has one saves half of the memory."""
    host = Host(target, room=1, averages=False)
    assert host.contribute(1, 3) == Outcome(DROP, ("range",))
    assert host.push(1).counters == ("pushed",)


def test_a_contribution_of_a_view_before(target: Target) -> None:
    host = Host(target, room=1)
    host.enter_view()
    host.contribute(1, 3)
    host.enter_view(-1)
    assert host.contribute(1, 4) == Outcome(DROP, ("round",))


# ---- full


@pytest.mark.parametrize("sign", [1, -1])
def test_a_parameter_near_the_limits(target: Target, sign: int) -> None:
    """Nothing wraps: the home takes no more steps, and the agent is told where it is."""
    near = np.full(360, sign * ((1 << 62) - 1), np.int64)
    homes = {k: Home(near.copy(), np.zeros(360, np.int64)) for k in range(2)}
    host = Host(target, homes=homes)
    most = -(1 << 31) if sign < 0 else (1 << 31) - 1
    assert host.push(most, 1, exponent=-10).counters == ("pushed",)
    grown = int(near[0]) + most * 2**30
    assert host.parameters(1).tolist() == [grown] * 360 and -(2**63) < grown < 2**63
    found = host.push(1, 1, number=2)
    assert found.counters == ("full",) and reason(found) == Refusal.FULL
    found = host.contribute(1, 4, index=1)
    assert found.counters == ("full",) and said(found).number == 9
    assert reason(found) == Refusal.FULL
    assert host.pull(1).counters == ("pulled",)
    assert host.bells() == [Bell(0, 0, 0, 2, 0)] and host.model.full == 2
    assert host.push(most, 0, exponent=-10).counters == ("pushed",)
    assert host.bells() == [] and host.model.full == 2, "the first is told"


@pytest.mark.parametrize("workers", [2, 5, 62])
def test_an_average_at_the_limits(target: Target, workers: int) -> None:
    """All workers' largest lanes, on the largest parameter that takes a step."""
    near = np.full(360, -(1 << 62), np.int64)
    host = Host(
        target,
        homes={0: Home(near, np.zeros(360, np.int64))},
        room=1,
        live=frozenset(range(1, 65)),
    )
    senders = range(2, workers + 2)
    members = sum(1 << k - 1 for k in senders)
    for k in senders:
        host.contribute(-(1 << 31), k, members, exponent=-10)
    host.commit()
    host.pull()
    expected = -(1 << 62) - workers * (1 << 31) * ((2**30 + workers // 2) // workers)
    assert host.parameters().tolist() == [expected] * 360 and expected > -(2**63)
    assert reason(host.push(1)) == Refusal.FULL
    host.bells()


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
    """Once in a tick of the clock; of a member that is asked nothing, not at all."""
    host = worker(target, passes=frozenset({5}))
    target.doorbell.take()
    target.ring["refused_ns"] = 0
    assert host.taken(0, 8, 3, reason=why) == Outcome(DROP, ("stranger",))
    assert target.doorbell.take() == []
    assert host.taken(0, 8, 5, reason=why) == Outcome(DROP, ("refused",), heard=True)
    assert host.taken(0, 8, 4, reason=why) == Outcome(DROP, ("refused",), heard=True)
    told = target.doorbell.take()
    assert 1 <= len(told) <= 2 and set(told) == {Bell(8, 0, 0, 0, 0)}
    assert host.model.taken[0] == 0


# ---- partners


def test_a_partner_passes_on_what_it_has_pulled(target: Target) -> None:
    """Of this round only; but a new server takes what there is."""
    host = worker(target)
    assert reason(host.pull(0, number=7)) == Refusal.ABSENT
    assert reason(host.pull(0, number=7, version=ANY)) == Refusal.ABSENT, "nothing was pulled"
    host.held(0, 3, version=9, lane=-6)
    found = host.pull(0, number=7)
    assert found.counters == ("passed_on",) and not found.heard
    assert said(found) == wire.Held(9, 7, 0, 6, 0, 32, -20)
    assert (numbers(found) == -6 * 2.0**-20).all()
    host.commit()
    assert reason(host.pull(0, number=8)) == Refusal.ABSENT
    found = host.pull(0, number=8, version=ANY)
    assert said(found).version == 9 and (numbers(found) == -6 * 2.0**-20).all()
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


# ---- blocks


@pytest.mark.parametrize("width", [32, 16, 8])
def test_a_part_is_at_its_place_in_the_blocks(target: Target, width: int) -> None:
    """Nothing is written beside it: neither to other homes, nor between parameters and accumulators."""
    room = 7 * 32 // width
    host = Host(target, width=width, room=room)
    before = {k: start(k, width) for k in range(7)}
    for index in (6, 2, 5):
        host.push(index + 1, index)
        before[index] = before[index] + index + 1
    host.contribute(50, 3, index=3)
    assert all((host.parameters(k) == values).all() for k, values in before.items())
    unused = target.blocks["lane"][-(-7 // PER_BLOCK[width]) :].view(np.int64)
    assert np.count_nonzero(unused) == LANES[width]
    host.bells()
