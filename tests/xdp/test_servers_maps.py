# SPDX-License-Identifier: Apache-2.0
"""The maps of the room for servers as the agent makes and reads them: frozen ones, new ones, phases, readings."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.agent.served import ServedPart, WeightsFile
from nicps.dataplane import bpf, servers
from nicps.dataplane.servers import Servers
from nicps.errors import EnvironmentProblem, JobFailed, TooLarge
from nicps.job.serving import Room
from nicps.session.served_form import NearLimit
from nicps.wire import Refusal
from tests import served_reference as reference
from tests.stripes import LANES
from tests.xdp.served_maps import PART, PUSHES, ROOM, ROUND, WIDTH, Host, filled, start

_LOOKUP = 1  # BPF_MAP_LOOKUP_ELEM


@pytest.fixture(scope="module")
def loaded() -> Iterator[Host]:
    host = Host()
    yield host
    host.maps.close()
    host.beside.close()
    host.loaded.close()


@pytest.fixture
def host(loaded: Host) -> Host:
    """With nothing but its part."""
    loaded.begin()
    return loaded


# ---- maps


def test_a_part_is_filled_and_nobody_but_programs_writes_it(host: Host) -> None:
    part = host.servers.part
    assert part is not None
    with pytest.raises(PermissionError):
        bpf.map_memory(part.parameters_fd)
    with pytest.raises(PermissionError):
        bpf.map_update(part.parameters_fd, bytes(4), bytes(8 * wire.BLOCK_LANES))
    assert (host.servers.parameters().reshape(-1) == start()).all()
    host.push(1, 5)
    assert (host.servers.parameters()[1] == start().reshape(PART, -1)[1] + 5).all()
    store = host.servers.store
    assert store is not None
    for fd in (store.sums_fd, store.taken_fd):
        with pytest.raises(PermissionError):
            bpf.map_memory(fd)


def test_half_a_vector_is_followed_by_zeros(host: Host) -> None:
    host.use_part(start()[:1000])
    found = host.servers.parameters().reshape(-1)
    assert (found[:1000] == start()[:1000]).all() and not found[1000:].any()


def test_new_maps_take_the_place_of_old_ones(host: Host) -> None:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    host.hold(8, 1)
    old = host.servers.sums
    assert host.servers.pulled(1) == 1
    host.servers.use_store(host.servers.reserve_store(ROOM + 5, PUSHES + 2))
    assert host.maps.config["room"] == ROOM + 5 and host.servers.pulled(1) == 0
    assert (len(host.servers.sums), len(host.servers.own)) == (ROOM + 5, PUSHES + 2)
    assert old["tag"][8] == 1, "who has the old ones mapped keeps them"
    host.use_part(start() + 1)
    assert (host.servers.parameters().reshape(-1) == start() + 1).all()
    assert host.maps.config["enabled"] == 1
    del old
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_too_much_memory(host: Host) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentProblem, match=r"cannot allocate \d+ MB of parameters"):
        host.servers.reserve_part(500_000_000, 8, filled(start()), averages=True)
    with pytest.raises(EnvironmentProblem, match=r"cannot allocate \d+ MB of own lanes and pulled"):
        host.servers.reserve_store(1_000_000_000, 1)
    host.servers.reserve_store(3, 3).close()
    host.servers.reserve_part(3, 8, filled(start()[:9]), averages=False).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert host.push(0).verdict == bpf.XDP_TX


def test_released_maps_are_given_back(host: Host) -> None:
    servers = host.servers
    assert servers.part is not None and servers.store is not None
    fds = (servers.part.homes_fd, servers.part.parameters_fd, servers.store.sums_fd)
    numbers = [bpf.map_info(fd).id for fd in (*fds, servers.store.own_fd, servers.store.taken_fd)]
    servers.release()
    assert servers.part is not None, "the program uses them"
    servers.retire()
    assert host.push(0).verdict == bpf.XDP_DROP
    servers.release()
    gc.collect()
    for number in numbers:
        with pytest.raises(FileNotFoundError):
            os.close(bpf.map_by_id(number))
    assert servers.parameters().size == 0
    servers.release()  # a second time nothing happens


# ---- phases and rounds


def has_inner(host: Host, outer: str) -> bool:
    key, value = ctypes.create_string_buffer(bytes(4), 4), ctypes.create_string_buffer(4)
    places = ctypes.addressof(key), ctypes.addressof(value)
    try:
        bpf._bpf(_LOOKUP, "map lookup", bpf._attr("I4xQQQ", host.loaded.maps[outer], *places, 0))
    except FileNotFoundError:
        return False
    return True


def test_the_job_before_gives_its_maps_back_as_the_next_one_gets_its_own(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had stripes: two maps are of both. Their release, in a thread, waits for what is going on."""
    stripes, given = host.maps.stripes, servers.inner.put
    host.servers.retire()
    stripes.use(stripes.reserve(ROOM))
    stripes.retire()
    thread = threading.Thread(target=stripes.release)

    def put(outer: int, inner: int) -> None:
        given(outer, inner)
        if not thread.ident:
            thread.start()
            thread.join(0.3)

    monkeypatch.setattr(servers.inner, "put", put)
    host.servers.use_store(host.servers.reserve_store(ROOM, PUSHES))
    thread.join(5.0)
    assert has_inner(host, "own") and has_inner(host, "sums")


def test_accumulators_for_a_phase_that_does_not_come_lose_no_push(host: Host) -> None:
    """A server prepares for a hand-out, and the view changes: the phase with servers goes on."""
    host.push(0)
    host.maps.allocate(1)
    for index in (1, 2):
        host.push(index)
    assert host.servers.version == (ROUND, 1)


def test_rounds(host: Host) -> None:
    """The version begins at 0 in each; what a round with a list has come to is in the parameters then."""
    servers = host.servers
    for index in range(PART):
        host.push(index)
    assert servers.version == (ROUND, 1)
    before = servers.parameters()
    for sender in (2, 3):
        host.contribute(10 * sender, sender)
    assert (servers.parameters() == before).all(), "it is not committed"
    assert host.pull(0, ROUND + 1).reason == Refusal.NOT_YET
    servers.open_round(ROUND + 1, settled=True)
    assert servers.version == (ROUND + 1, 0)
    assert (servers.parameters() == before + 25).all(), "as it will be"
    for index in range(5):
        assert isinstance(host.pull(index, ROUND + 1), wire.Held)
    assert (servers.homes["due"] == 0).all() and (servers.parameters() == before + 25).all()


@pytest.mark.parametrize(("staleness", "added"), [(True, 4), (False, 8)])
def test_a_phase_says_whether_staleness_counts(host: Host, staleness: bool, added: int) -> None:
    """S3: the second of two pushes, which was computed from the same parameters."""
    host.servers.begin_phase(staleness=staleness)
    host.servers.open_round(ROUND, settled=False)
    for sender in (2, 3):
        for index in range(PART):
            body = wire.Push(0, 1, index, PUSHES, 0, WIDTH, -40)
            host.give(body, sender, lane=8 * (sender == 3))
    assert (host.servers.parameters().reshape(-1) == start() + added).all()


def test_another_phase_forgets_steps_and_what_was_dropped(host: Host) -> None:
    servers = host.servers
    host.push(0, number=8)
    for sender in (2, 3):
        host.contribute(10 * sender, sender)
    before = servers.parameters()
    servers.begin_phase()
    assert host.pull(0).reason == Refusal.NOT_YET, "no round is open"
    servers.open_round(ROUND, settled=False)
    assert not servers.homes["due"].any() and not servers.homes["last"].any()
    servers.open_round(ROUND + 1, settled=True)
    body = wire.Push(0, 1, 0, PUSHES, 0, WIDTH, -40)
    assert host.give(body, lane=3, round_=ROUND + 1).verdict == bpf.XDP_TX, "the numbers begin anew"
    before[0] += 3
    assert (servers.parameters() == before).all()


def test_what_a_job_has_settled_is_nothing_to_the_next_one(host: Host) -> None:
    """Rounds begin at low numbers again: what such a round has come to counts with its own commit, as ever."""
    servers = host.servers
    host.maps.config["settled"] = ROUND + 500
    host.begin()
    before = servers.parameters()
    for _ in range(2):  # the second ones are duplicates, and touch the homes
        for sender in (2, 3):
            host.contribute(10 * sender, sender)
    assert servers.homes["due"].all() and (servers.parameters() == before).all()
    servers.begin_phase()
    servers.open_round(ROUND + 1, settled=False)
    assert (servers.parameters() == before).all(), "it was dropped"


def test_a_phase_keeps_what_was_committed(host: Host) -> None:
    """Some fragments may not have been asked for since."""
    servers = host.servers
    for sender in (2, 3):
        host.contribute(10 * sender, sender)
    before = servers.parameters()
    servers.open_round(ROUND + 1, settled=True)
    servers.begin_phase()
    servers.open_round(ROUND + 1, settled=False)
    assert (servers.parameters() == before + 25).all()


@pytest.mark.parametrize("moment", [1, 2])
def test_a_pull_comes_while_the_part_is_read(
    host: Host, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It settles its home: what is due there is counted once, whichever of the two adds it."""
    for sender in (2, 3):
        host.contribute(8, sender)
    host.servers.open_round(ROUND + 1, settled=True)
    calls = 0

    def barrier() -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            host.pull(0, ROUND + 1)

    monkeypatch.setattr(servers, "barrier", barrier)
    assert (host.servers.parameters().reshape(-1) == start() + 8).all()
    assert calls > moment


def test_a_claim_that_stays_while_the_part_is_read(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_CLAIMED_S", 0.01)
    host.servers.homes["claim"][1] = 1
    with pytest.raises(JobFailed, match="push fragment 1 of this server's part stays claimed"):
        host.servers.parameters()


def test_full(host: Host) -> None:
    servers = host.servers
    assert servers.full is None
    host.use_part(np.full(PART * LANES[WIDTH], (1 << 62) - 1, np.int64))
    host.push(2)
    assert servers.full == 2
    host.use_part(start())
    assert servers.full is None, "of new homes none is"


# ---- readings


def test_what_has_been_pulled(host: Host) -> None:
    servers = host.servers
    for place, version in ((7, 5), (8, 4), (10, 6)):
        host.hold(place, 3, version)
    assert (servers.pulled(3), servers.pulled(2), servers.pulled(4)) == (3, 0, 0)
    assert servers.missing_parameters(3, 6, 11, 4) == [(6, 1), (9, 1)]
    assert servers.missing_parameters(3, 6, 11, 1) == [(6, 1)]
    assert servers.pulled_to(3, 7, 11) == (9, 11) and servers.pulled_to(4, 7, 11) == (7, 7)
    assert servers.least_version(7, 9) == (ROUND, 4)
    host.hold(7, 4, 9)
    assert servers.pulled(4) == 1 and servers.missing_parameters(4, 6, 8, 4) == [(6, 1)]


def test_what_is_acknowledged(host: Host) -> None:
    servers = host.servers
    for index, version, staleness in ((3, 5, 2), (5, 4, 2)):
        host.give(wire.Taken(version, 6, index, PUSHES, staleness, WIDTH, -40, 0), 2)
    assert (servers.acknowledged(6), servers.acknowledged(5)) == (2, 0)
    assert servers.missing_acknowledgements(6, 3, 6, 4) == [(4, 1)]
    assert servers.acknowledged_to(6, 3, 6) == (4, 6) and servers.acknowledged_to(7, 3, 6) == (3, 3)
    assert servers.answered(2) == (6, 2, ROUND, 5)
    assert servers.answered(3) == (0, 0, 0, 0)


def test_before_there_is_anything(loaded: Host) -> None:
    maps = loaded.maps
    parts = maps._config, maps._ring, maps._progress, maps.quiesce, maps._swapping
    servers = Servers({**loaded.loaded.maps, **loaded.beside.maps}, *parts)
    assert servers.parameters().size == 0 and servers.part is servers.store is None
    assert (
        servers.missing_parameters(1, 0, 0, 4) == servers.missing_acknowledgements(1, 0, 0, 4) == []
    )
    servers.begin_phase()
    servers.close()


# ---- the own part, filled and read without a frame


#: Parameters in the vector, which ends within the last push fragment of the own part; the part begins at its start.
VECTOR = PART * LANES[WIDTH] - 7
OWN = Room(0, 0, PART, ROOM, PUSHES, True)


def own(host: Host) -> ServedPart:
    return ServedPart(host.servers, OWN, WIDTH, VECTOR)


def told(host: Host, round_: int = ROUND) -> np.ndarray[Any, Any]:
    """What whoever pulls the own part reads, frame by frame."""
    parts = []
    for index in range(PART * 2):
        run = host.give(wire.Pull(0, 1, index, ROOM, 0, 32, 0), round_=round_)
        frame = wire.unpack(run.frame[wire.ETHERNET_BYTES :])
        assert isinstance(frame.body, wire.Held)
        lanes = np.frombuffer(frame.tail, ">i4").tolist()
        parts.append(reference.read(frame.body.exponent, lanes))
    return np.concatenate(parts)[:VECTOR]


def weights(seed: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    found = random.standard_normal(VECTOR) * np.exp2(random.integers(-40, 18, VECTOR))
    return found.astype(np.float32)


def same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())


def test_a_part_is_filled_with_weights_from_a_file(host: Host) -> None:
    file, values = WeightsFile(VECTOR), weights(1)
    again = np.frombuffer(mmap.mmap(file.fd, 4 * VECTOR), np.float32)
    again[:] = values  # as the training program does
    host.servers.use_part(own(host).fill(file))
    file.close()
    units = np.rint(values.astype(np.float64) * 2.0**40).astype(np.int64)
    found = host.servers.parameters().reshape(-1)
    assert (found[:VECTOR] == units).all() and not found[VECTOR:].any()
    parts = np.append(units, [0] * 7).reshape(-1, 360).tolist()
    expected = np.concatenate([reference.read(*reference.held(part)) for part in parts])
    assert same(told(host), expected[:VECTOR])


def test_weights_that_are_no_parameters_leave_nothing(host: Host) -> None:
    file = WeightsFile(VECTOR)
    file.values[720] = np.nan
    before = host.servers.parameters()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TooLarge, match="a weight is nan at index 720"):
        own(host).fill(file)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (host.servers.parameters() == before).all()
    file.close()


def test_a_part_is_read_as_it_is_told(host: Host) -> None:
    """With pushes, with what is due, and after it has been added."""
    servers = host.servers
    file = WeightsFile(VECTOR)
    file.values[:] = weights(2) * 2.0**-34  # so small that a step is seen
    servers.use_part(own(host).fill(file))
    file.close()
    for index in range(PART):
        host.push(index, 77)
    found = own(host).read()
    assert same(found.values, told(host)) and len(found.values) == VECTOR
    found.close()
    for sender in (2, 3):
        host.contribute(1000 * sender, sender)
    servers.open_round(ROUND + 1, settled=True)
    assert servers.homes["due"].all()
    due = own(host).read()
    assert not same(due.values, found.values)
    assert same(due.values, told(host, ROUND + 1)) and not servers.homes["due"].any()
    after = own(host).read()
    assert same(after.values, due.values)
    due.close()
    after.close()


def test_the_parameter_that_is_near_the_limit(host: Host) -> None:
    assert own(host).find_full() is None
    units = np.zeros(PART * LANES[WIDTH], np.int64)
    units[1000:1002] = 1 - (1 << 62), (1 << 61) + 5
    host.use_part(units)
    host.push(1, -5)
    assert own(host).find_full() == NearLimit(1000, -(2.0**22))
