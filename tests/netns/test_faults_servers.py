# SPDX-License-Identifier: Apache-2.0
"""A job with parameter servers trains while a host goes away for a while, or an attacker sends (docs/faults.md)."""

from __future__ import annotations

import contextlib
import functools
import random
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from nicps import wire
from nicps.session.channel import Channel
from nicps.wire import FrameType
from tests.netns.labs import port_socket, raw_socket, until
from tests.netns.members import LIGHT, Network, Run, tiny_job
from tests.netns.stage import Stage
from tests.netns.test_servers import SYSTEM, WIDER, Counters, checked
from tests.netns.traffic import mac_bytes

#: It trains until there is a file.
ENDLESS = """
def done(state):
    return os.path.exists({place!r} + "/end")
"""
ENDLESS_SETTINGS = {"rounds": 10**6, "test_every": 10**9, "microbatch_seconds": 0.002}


class Endless:
    """A job of four hosts, of which h2 serves, that trains until it is told to end."""

    def __init__(self, network: Network, **settings: Any) -> None:
        self.network = network
        self._end = network.folder / "end"
        self._end.unlink(missing_ok=True)
        hooks = ENDLESS.format(place=str(network.folder))
        job = tiny_job(network.folder, WIDER, "endless", hooks)
        asked = {**SYSTEM, **ENDLESS_SETTINGS, "servers": "h2", "sync_every": 6, **settings}
        self.channel: Channel = network.submit("h1", job, **asked)
        network.in_training(timeout_s=30.0)

    def goes_on(self, *hosts: str) -> None:
        """Wait until exactly these are in the view, train, and have synchronised twice more."""
        what = f"{hosts} are in the view"
        until(lambda: self.network.live("h1") == set(hosts), what, 60.0)
        for host in hosts:
            self.network.in_training(host)

    def end(self) -> Run:
        """Tell it to end; it ends well."""
        self._end.touch()
        return self.network.finished(self.channel)

    def close(self) -> None:
        """Leave it to itself."""
        self._end.touch()
        self.channel.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Network]:
    with Network(4, program=LIGHT, adds=False) as made:
        made.up()
        yield made


@pytest.fixture
def job(four: Network) -> Iterator[Endless]:
    four.ready()
    job = Endless(four)
    yield job
    job.close()
    four.lab.link("all", "up")


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "how"),
    [("h3", "stopped"), ("h3", "unplugged"), ("h2", "stopped"), ("h2", "unplugged")],
    ids=["worker stopped", "worker unplugged", "server stopped", "server unplugged"],
)
def test_a_host_goes_away_and_comes_back(job: Endless, host: str, how: str) -> None:
    """The others go on without it, where it served with another server; it takes the state of a commit."""
    network = job.network
    others = [name for name in network.names if name != host]
    job.goes_on(*network.names)
    if how == "stopped":
        network.lab.pause(host)
    else:
        network.lab.link(host, "unplugged")
    job.goes_on(*others)
    said = f"{host} served parameters, and left: "
    assert any(said in network.log(name) for name in others) is (host == "h2")
    if how == "stopped":
        network.lab.resume(host)
    else:
        network.lab.link(host, "up")
    job.goes_on(*network.names)
    checked(job.end())


@pytest.mark.long
def test_agents_stop_briefly(job: Endless) -> None:
    """The server's kernel goes on adding and answering; nobody is missed."""
    network = job.network
    views = {host: (network.status(host) or {})["view"] for host in network.names}
    counters = Counters(network)
    for host in ("h2", "h3", "h2", "h1", "h2"):
        network.lab.pause(host, "agent")
        time.sleep(0.1)
        network.lab.resume(host, "agent")
        time.sleep(0.05)
    job.goes_on(*network.names)
    assert {host: (network.status(host) or {})["view"] for host in network.names} == views
    assert list(counters.of("pushed")) == ["h2"]
    checked(job.end())


# ---- an attacker that has the network's cables, and not its key


#: For the weights of the attacked job to be those of another one: with one worker everything is in one order.
ONE_WORKER = {"servers": "h1", "sync_every": 16, "lane": "i16"}
#: What workers send, and what servers send.
ASKED = (FrameType.PUSH, FrameType.PULL, FrameType.CONTRIBUTION)
ANSWERED = (FrameType.HELD, FrameType.TAKEN)
#: Reasons for frames without effect. A number that is not old is a duplicate where the frame was used before. A step
#: that comes as its round is committed names a version that there is no more. A question that comes too early is
#: `refused` with a short answer each time, and so is one that is recorded then.
REFUSED = ("replayed", "forged", "round", "duplicate", "malformed", "refused")
_ETHERTYPE = struct.pack(">H", wire.ETHERTYPE)
_ALL = 3  # ETH_P_ALL: a bridge's port shows its frames to no other socket
_HEADER, _PUSH = wire.Layout.of(wire.Header), wire.Layout.of(wire.Push)
_TYPE_AT, _ROUND_AT, _SEQUENCE_AT = (
    wire.ETHERNET_BYTES + _HEADER.offsets[_HEADER.names.index(name)]
    for name in ("type", "round", "sequence")
)
_NUMBER_AT = wire.ETHERNET_BYTES + wire.HEADER_BYTES + _PUSH.offsets[_PUSH.names.index("number")]
_AHEAD = 1 << 12  # so that a number is not refused for its age
_KEPT = 64  # frames of each kind
_BATCH = 500


class Attacker:
    """Records what a host sends, and sends it from there again: as it was, or as the next step with a made-up tag."""

    def __init__(self, network: Network, name: str, kinds: tuple[FrameType, ...]) -> None:
        host = network.lab.host(name)
        self.sent = dict.fromkeys(kinds, 0)  # replayed frames of each kind
        self._round = bytes(4)
        self._random, self._mac = random.Random(name), mac_bytes(host.mac)
        self._kept = {kind: deque[bytes](maxlen=_KEPT) for kind in kinds}
        self._heard, self._out = port_socket(network.lab, host, _ALL), raw_socket(host, 0)

    def record(self) -> None:
        """What the host sends in a moment, until there is something of each kind."""
        self._heard.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # those are this attacker's own
            while True:
                self._heard.recv(2048)
        self._heard.settimeout(5.0)
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline or not all(self._kept.values()):
            frame = self._heard.recv(2048)
            kind = frame[_TYPE_AT]
            if frame[6:12] == self._mac and frame[12:14] == _ETHERTYPE and kind in self._kept:
                self._kept[FrameType(kind)].append(frame)
                self._round = frame[_ROUND_AT : _ROUND_AT + 4]

    def send(self, count: int, *, forge: bool) -> None:
        """So many replayed frames, and as many forged ones if asked."""
        kinds = list(self._kept)
        for turn in range(count):
            kind = self._random.choice(kinds)
            frame = bytearray(self._random.choice(self._kept[kind]))
            self._out.send(frame)
            self.sent[kind] += 1
            if not forge:
                continue
            number, sequence = (
                struct.unpack_from(">I", frame, at)[0] for at in (_NUMBER_AT, _SEQUENCE_AT)
            )
            tag = self._random.getrandbits(64)
            struct.pack_into(">IQ", frame, _SEQUENCE_AT, sequence + _AHEAD + turn, tag)
            struct.pack_into(">I", frame, _NUMBER_AT, number + 1)
            frame[_ROUND_AT : _ROUND_AT + 4] = self._round
            self._out.send(frame)

    def close(self) -> None:
        """Close the sockets."""
        self._out.close()
        self._heard.close()


@contextlib.contextmanager
def two(*, keyed: bool) -> Iterator[Stage]:
    with Stage(2, keyed=keyed, program=LIGHT, adds=False) as made:
        made.up()
        made.ready()
        yield made


def hashes(job: Endless) -> dict[int, str]:
    """Of the weights by round, once it has ended."""
    try:
        return checked(job.end())
    finally:
        job.close()


def quiet_hashes(network: Stage, rounds: int) -> dict[int, str]:
    """The same of so many rounds without an attacker.

    However slow the machine is, a job that takes more than 60 s for a round stands still.
    """
    quiet, ahead = Endless(network, **ONE_WORKER), 0
    while ahead <= rounds:
        ahead += 1
        reached = functools.partial(_is_at, network, ahead)
        ahead = until(reached, f"{ahead} of {rounds} rounds", 60.0)
    return hashes(quiet)


def _is_at(network: Stage, least: int) -> int:
    """The round of its first host, 0 before `least`."""
    now = (network.status("h1") or {}).get("round", 0)
    return now if now >= least else 0


@contextlib.contextmanager
def attacked(network: Stage, count: int, *, forge: bool) -> Iterator[tuple[Attacker, Attacker]]:
    """A job trains while attackers at the worker's cable and the server's send, of each kind of the worker's at least
    so many frames. Afterwards the weights of every round are those of a job that nobody attacks.
    """
    job = Endless(network, **ONE_WORKER)
    with contextlib.ExitStack() as stack:
        worker, server = Attacker(network, "h2", ASKED), Attacker(network, "h1", ANSWERED)
        for attacker in (worker, server):
            stack.callback(attacker.close)
            attacker.record()
        while min(worker.sent.values()) < count:
            for attacker in (worker, server):
                attacker.record()
                attacker.send(_BATCH, forge=forge)
        yield worker, server
    found = hashes(job)
    same = quiet_hashes(network, max(found))
    assert len(found) >= 3 and {round_: same[round_] for round_ in found} == found


@pytest.mark.short("2000")
@pytest.mark.parametrize("count", [2_000, 100_000])
def test_replayed_and_forged_frames_change_nothing(count: int) -> None:
    """With a key. All that was sent is counted.

    A step that is sent again draws a short answer, which the worker has no use for either.
    """
    with two(keyed=True) as network:
        counters = Counters(network)
        with attacked(network, count, forge=True) as (worker, server):
            sent = {"h1": 2 * sum(worker.sent.values()), "h2": 2 * sum(server.sent.values())}
            of = {why: counters.of(why) for why in REFUSED}
    assert sum(of["forged"].values()) >= len(ASKED) * count
    assert of["replayed"]["h1"] and of["round"]["h1"]
    drawn = {"h1": 0, "h2": of["duplicate"].get("h1", 0)}
    for host, frames in sent.items():
        refused = sum(of[why].get(host, 0) for why in REFUSED)
        assert frames <= refused <= 1.02 * frames + drawn[host], (host, frames, of)


@pytest.mark.short("2000")
@pytest.mark.parametrize("count", [2_000, 100_000])
def test_replayed_frames_change_nothing_without_a_key(count: int) -> None:
    """A step is counted once, by its number; what is forged has an effect there, as any member's frame."""
    with two(keyed=False) as network:
        counters = Counters(network)
        with attacked(network, count, forge=False) as (worker, _):
            refused = sum(counters.of(why).get("h1", 0) for why in ("round", "duplicate"))
    assert refused >= worker.sent[FrameType.PUSH]
