# SPDX-License-Identifier: Apache-2.0
"""Broken frames of our EtherType, from strangers and with members' addresses, while a job trains.

Each is counted by its reason and has no effect. A second `nicps join` on the interface has none either.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nicps import wire
from nicps.dataplane import xdp
from nicps.lab import namespaces
from nicps.protocol import Phase
from tests import reference
from tests.netns.labs import raw_socket
from tests.netns.members import Ended, Network, Run, tiny_job

STRANGER = bytes.fromhex("02000a4d0099")
ROUNDS = 30
PAYLOAD = bytes(range(240)) * 6
RANDOM = 100  # frames of random bytes, from either source


@dataclass(frozen=True)
class Disturbed:
    """A job during which all of it was sent; h1's counters before and after, as `nicps status --json` prints them."""

    run: Run
    before: dict[str, int]
    after: dict[str, int]
    join: Ended
    program: tuple[int | None, int | None]
    log: str

    def more(self, reason: str) -> int:
        """Frames that were counted for that reason."""
        return self.after[reason] - self.before[reason]


class Sender:
    """Sends from the cable of h2, with any source address."""

    def __init__(self, network: Network, status: dict[str, Any]) -> None:
        self._socket = raw_socket(network.lab.host("h2"), 0x88B6)
        self.macs = {m["name"]: bytes.fromhex(m["mac"].replace(":", "")) for m in status["members"]}
        self.numbers = {member["name"]: member["number"] for member in status["members"]}
        self.network = wire.network_id("nicps")
        self.view, self.round = status["view"], status["round"]

    def header(self, host: str = "h2", **fields: int) -> wire.Header:
        """A header as that member would send it, but for `fields`."""
        header = wire.Header(
            network=self.network, view=self.view, round=self.round, sender=self.numbers[host]
        )
        return replace(header, **fields)

    def send(self, frame: bytes, source: bytes | None = None) -> None:
        """Broadcast `frame`; from h2's own address by default."""
        self._socket.send(wire.ethernet(source or self.macs["h2"], frame))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def fragment(sender: Sender, /, index: int = 0, shift: int = 0, **fields: int) -> bytes:
    """A fragment that would be taken, except for the given fields."""
    body = wire.Fragment(index, 1 << 20, 720, 16, shift, 16)
    return wire.pack(sender.header(**fields), body, tail=PAYLOAD)


def token(sender: Sender, generation: int = 0, members: int = 4) -> bytes:
    """A token long gone, unless a generation is given."""
    body = wire.Token(generation, 1, 1, 0, members, 0, 0, 0, 0, 0)
    return wire.pack(sender.header(), body, [wire.Entry()] * members)


def send_everything(sender: Sender) -> None:
    """Every kind of broken frame."""
    chance = random.Random(7)
    good, far = fragment(sender, round=1 << 30), 1 << 30
    for source in (STRANGER, sender.macs["h2"]):
        for _ in range(RANDOM):
            sender.send(chance.randbytes(chance.randint(1, 1400)), source)
        for frame in (good, token(sender)):
            for end in (1, 16, 31, 33, 47, len(frame) - 1):
                sender.send(frame[:end], source)
            sender.send(b"\x09" + frame[1:], source)
            sender.send(frame[:1] + b"\x4d" + frame[2:], source)
    for source in (STRANGER, sender.macs["h2"]):
        sender.send(fragment(sender, network=sender.network ^ 1), source)
        sender.send(fragment(sender, view=sender.view + 1), source)
        sender.send(fragment(sender, sender=65535), source)
        sender.send(fragment(sender, sender=0), source)
    sender.send(fragment(sender), STRANGER)
    sender.send(token(sender, generation=far), STRANGER)
    sender.send(fragment(sender, sender=sender.numbers["h3"]))
    sender.send(token(sender, generation=far, members=3))
    sender.send(token(sender))
    sender.send(good)
    for round_ in range(sender.round, sender.round + 4):  # one of them is open
        sender.send(fragment(sender, index=1 << 21, round=round_))
        sender.send(fragment(sender, index=1 << 19, round=round_))
        sender.send(fragment(sender, shift=43, round=round_))
    send_control(sender, chance)


def send_control(sender: Sender, chance: random.Random) -> None:
    """Control frames, which go up to the agent."""
    header = sender.header()
    for kind in (*wire.FrameType, 77):
        bare = replace(header, type=int(kind), length=wire.HEADER_BYTES)
        sender.send(wire.pack_one(bare))
        sender.send(wire.pack_one(bare), STRANGER)
    # Frames that only node 1 may send, with its address, but malformed.
    boss = sender.header(host="h1")
    phase = Phase(0, 0, wire.PhaseKind.TRAIN, shares=(1, 1, 1, 1)).pack()
    wrong = ((b"[1,1,1,1]", b'[1,1,1,"a"]'), (b'"unit":0', b'"unit":"b"'), (b"{}", b"[]"))
    broken = [b"", b"\xff\xfe", b"{}", b"[]", b"null", chance.randbytes(400)]
    broken += [phase.replace(right, bad) for right, bad in wrong]
    assert phase not in broken
    for tail in broken:
        body = wire.Decision(1 << 30, 1 << 30, 2)
        sender.send(wire.pack(boss, body, tail=tail), sender.macs["h1"])
    sender.send(wire.pack(boss, wire.Decision(1 << 30, 1, 77), tail=b"{}"), sender.macs["h1"])
    sender.send(wire.pack(header, wire.Decision(1 << 30, 1, 5), tail=b"{}"))
    sender.send(wire.pack(header, wire.Decision(1 << 30, 1, 5), tail=b"{}"), STRANGER)
    sender.send(wire.pack(header, wire.Fail(), tail=b"I say so"), STRANGER)
    sender.send(wire.pack(header, wire.Ack(1 << 30, 1), tail=b"\xff"))
    numbers = {"live": 1, "nonce": 1, "ballot": 9, "addressee": 2, "members": 0, "values": 0}
    listed = wire.View(number=sender.view + 9, base=sender.view, step=3, **numbers)
    sender.send(wire.pack(replace(boss, view=0), listed), STRANGER)
    sender.send(wire.pack(replace(header, view=0, sender=0), wire.Call(5), tail=b"\xff"), STRANGER)
    sender.send(wire.pack(replace(header, view=0, sender=0), wire.Answer(5, 7)), STRANGER)


def counters(network: Network) -> dict[str, int]:
    """h1's status, as a user sees it."""
    done = network.command("h1", "status", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["counters"]
    assert isinstance(found, dict)
    return found


def program_id(network: Network) -> int | None:
    """Of the XDP program on h1's interface."""
    host = network.lab.host("h1")
    attached = namespaces.inside(host.netns, lambda: xdp.attached(host.read_link().index))
    return attached.id if attached else None


@pytest.fixture(scope="module")
def disturbed(session_network: Network, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    network = session_network
    network.ready()
    job = tiny_job(network.folder, name="disturbed")
    said = len(network.log("h1"))
    settings = {"rounds": ROUNDS, "microbatch_seconds": 0.02, "save_gradients": True}
    channel = network.submit("h1", job, light=True, **settings)
    try:
        network.in_training()
        before, program = counters(network), program_id(network)
        status = network.status("h1")
        assert status is not None
        sender = Sender(network, status)
        try:
            send_everything(sender)
        finally:
            sender.close()
        join = network.command("h1", "join", "--iface", "eth1", "--socket", "@another")
        after = counters(network)
        programs = (program, program_id(network))
        status = network.status("h1")
        assert status is not None and status["phase"] == "train"
        run = network.finished(channel)
    finally:
        channel.close()
    return Disturbed(run, before, after, join, programs, network.log("h1")[said:])


def test_training_goes_on_as_if_nothing_had_been(disturbed: Disturbed) -> None:
    run = disturbed.run
    assert run.result["weights_identical"] is True
    assert run.result["rounds"] == ROUNDS
    assert reference.check(16, run.gradients()) == 4 * ROUNDS
    for host in run.members:
        assert all(row["samples"] == 64 for row in run.training(host))


@pytest.mark.parametrize(
    ("reason", "least"),
    [
        ("truncated", 2 * 2 * 6),
        ("version", 2 * 2 + 2 * RANDOM * 9 // 10),
        ("type", 2 * 2 + 2),
        ("network", 2),
        ("view", 2),
        ("stranger", 2 * 2 + 3),
        ("stale", 1),
        ("round", 1),
        ("malformed", 1 + 1),
        ("range", 1),
        ("shift", 1),
        ("control", 20),
    ],
)
def test_every_broken_frame_is_counted(disturbed: Disturbed, reason: str, least: int) -> None:
    assert disturbed.more(reason) >= least


def test_the_agent_says_little_about_them(disturbed: Disturbed) -> None:
    assert "Traceback" not in disturbed.log
    assert 0 < disturbed.log.count("malformed frame") <= 3


def test_a_second_join_is_refused_and_disturbs_nobody(disturbed: Disturbed) -> None:
    text = disturbed.join.only_error(3)
    assert text.startswith("nicps runs on interface eth1 already (XDP program id ")
    assert disturbed.program[0] == disturbed.program[1] is not None
