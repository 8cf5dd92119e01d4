# SPDX-License-Identifier: Apache-2.0
"""A server's steps, one by one, with results worked out by hand or in whole numbers.

Each of these runs through the program, and through the model of `tests.servers_model`, which must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane.doorbell import Bell
from nicps.wire import Flag, Refusal
from tests.model import DROP, Outcome
from tests.servers import Home
from tests.stripes import LANES, MACS, PER_BLOCK
from tests.xdp.served import Target
from tests.xdp.served_host import (
    EXACT,
    ROUND,
    TAG,
    UNIT,
    Host,
    numbers,
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
