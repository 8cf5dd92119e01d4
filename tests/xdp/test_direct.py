# SPDX-License-Identifier: Apache-2.0
"""Direct calls at the kernel (docs/direct.md): what a frame comes to at a desk, and what a program may send."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.maps import Maps
from nicps.layout import layout
from nicps.session.direct import Desk, DirectCall, DirectChannel, DirectMemory
from nicps.wire import FrameType as F
from tests.direct_scene import Kernel, Scene, agree
from tests.model import tag_of
from tests.xdp.kernel import MACS, NETWORK, VIEW

pytestmark = pytest.mark.xdp

MEMBERS, ALL = 3, 0b111
DROP, PASS, TX = 1, 2, 3
SHOT, REDIRECT = 2, 7
SEAL = bytes(range(2, 8))
MARKED, WITHDRAWN = 1, 2
BODIES: dict[F, Any] = {
    F.NUMBERS: wire.Numbers,
    F.MARKED: wire.Marked,
    F.WITHDRAWN: wire.Withdrawn,
    F.SETTLE: wire.Settle,
}


class Host:
    """Member 1 of three, with direct calls on channel 0."""

    def __init__(self) -> None:
        kinds: dict[str, loader.ProgramKind] = {"nicps_xdp": "xdp", "nicps_direct": "xdp"}
        self.loaded = loader.load("nicps.c", {**kinds, "nicps_confined": "sched_cls"})
        fds, programs = self.loaded.maps, self.loaded.programs
        bpf.map_update(
            fds["nicps_rooms"],
            layout().limits["ROOM_DIRECT"].to_bytes(4, "little"),
            programs["nicps_direct"].to_bytes(4, "little"),
        )
        self.maps = Maps(fds)
        self.written: list[bytes] = []
        self.round = 0  # a call of an earlier test may have been marked
        bells = [fds[f"call_bell_{channel}"] for channel in range(8)]
        copies = [os.dup(fd) for fd in (fds["desks"], fds["numbers"], *bells)]
        self.memory = DirectMemory([*copies[:2], -1, *copies[2:]])
        self.memory.send = self.take_written  # type: ignore[method-assign]
        self.channel = DirectChannel(self.memory, 0, 1)

    def reset(self, view: int = VIEW, members: int = MEMBERS, key: bytes | None = None) -> None:
        """Another view."""
        self.maps.enter_view(view, 1, MACS[:members], 2, key)
        config = self.maps.config
        config["network"], config["enabled"] = NETWORK, 1
        config["seal"] = np.frombuffer(SEAL, np.uint8)
        config["everybody"] = 255
        self.maps.stripes.areas.words["direct"] = 0
        self.maps.stripes.areas.words["direct"][0] = 1
        self.written.clear()

    def take(
        self,
        kind: F,
        sender: int = 2,
        *,
        number: int = 0,
        index: int = 0,
        fragments: int = 1,
        data: bytes = b"",
        flags: int = 0,
        view: int = 0,
        round_: int = 0,
        call: int = 5,
        sequence: int = 0,
        key: bytes = b"",
    ) -> bpf.Run:
        """A frame of another member; `view` of the call, by default the one in force."""
        now = int(self.maps.config["view"])
        header = wire.Header(
            network=NETWORK,
            view=now,
            round=self.round + round_,
            sender=sender,
            flags=flags,
            sequence=sequence,
        )
        body = BODIES[kind](call, number, len(data), index, fragments, view or now)
        room = 64 if len(data) <= 64 else 1440
        tail = data.ljust(room, b"\0") if kind is F.NUMBERS else b""
        whole = wire.pack(header, body, tail=tail)
        if key:
            whole = whole[:24] + tag_of(whole, len(whole), key).to_bytes(8, "big") + whole[32:]
        frame = wire.ethernet(MACS[sender - 1], whole)
        return bpf.prog_test_run(self.loaded.programs["nicps_xdp"], frame)

    def take_written(self, frame: bytes) -> bool:
        """In place of the interface."""
        self.written.append(frame)
        return True

    def call(self, number: int = 0) -> DirectCall:
        """Of this member."""
        now = int(self.maps.config["view"])
        return DirectCall(now, self.round, number, 5, frozenset(range(1, MEMBERS + 1)))

    def write(self, frame: bytes) -> bpf.Run:
        """The program writes it to its interface."""
        return bpf.prog_test_run(self.loaded.programs["nicps_confined"], frame)

    def give(self, number: int = 0, data: bytes = b"own") -> list[wire.Frame]:
        """This member's numbers go out."""
        runs = [self.write(frame) for frame in self.channel._numbers(self.call(number), data)]
        assert all(run.verdict == REDIRECT for run in runs)
        return [wire.unpack(run.frame[14:]) for run in runs]

    def desk(self, number: int = 0) -> Desk:
        """Of that call."""
        return self.memory.look(0, number)


@pytest.fixture(scope="module")
def loaded() -> Host:
    return Host()


@pytest.fixture
def host(loaded: Host) -> Host:
    view = int(loaded.maps.config["view"]) + 1
    loaded.reset(max(view, VIEW))
    loaded.round += 2
    return loaded


def kind_of(run: bpf.Run) -> F | None:
    """Of the frame that is sent."""
    return F(wire.unpack(run.frame[14:]).type) if run.verdict == TX else None


def test_the_last_numbers_are_answered_by_a_mark(host: Host) -> None:
    assert host.take(F.NUMBERS, 2, data=b"two").verdict == DROP
    (own,) = host.give()
    assert own.header.sender == 1 and not own.header.flags & wire.Flag.COMPLETE
    run = host.take(F.NUMBERS, 3, data=b"three")
    assert kind_of(run) is F.MARKED and run.frame[:6] == b"\xff" * 6
    assert len(run.frame) == 14 + wire.HEADER_BYTES + 16
    assert host.desk().verdict == MARKED and host.desk().marks == 0b001
    host.take(F.MARKED, 2)
    host.take(F.MARKED, 3)
    assert host.desk().marks == ALL
    assert [host.memory.read(0, 0, k)[1] for k in (2, 3)] == [b"two", b"three"]


def test_own_numbers_that_are_the_last_say_that_they_mark(host: Host) -> None:
    host.take(F.NUMBERS, 2)
    host.take(F.NUMBERS, 3)
    (own,) = host.give()
    assert own.header.flags & wire.Flag.COMPLETE
    assert host.desk().verdict == MARKED


def test_several_fragments(host: Host) -> None:
    data = bytes(range(256)) * 11
    host.give(data=data)
    for at in (1, 0):
        part = data[at * 1440 : (at + 1) * 1440]
        run = host.take(F.NUMBERS, 2, index=at, fragments=2, data=part.ljust(1440, b"\0"))
        assert run.verdict == DROP
    assert host.memory.look(0, 0).verdict == 0
    assert kind_of(host.take(F.NUMBERS, 3, data=b"x")) is F.MARKED


def test_numbers_that_differ_from_the_first_are_refused(host: Host) -> None:
    host.give()
    host.take(F.NUMBERS, 2, index=0, fragments=2, data=bytes(1440))
    before = int(host.maps.counters()["malformed"])
    assert host.take(F.NUMBERS, 2, index=0, fragments=1, data=b"x").verdict == DROP
    assert host.take(F.NUMBERS, 2, index=1, fragments=2, data=bytes(1440), call=6).verdict == DROP
    assert host.maps.counters()["malformed"] == before + 2


def test_a_repeat_is_answered_to_its_sender(host: Host) -> None:
    host.give()
    host.take(F.NUMBERS, 2)
    repeat = host.take(F.NUMBERS, 2, flags=wire.Flag.REPEAT)
    assert repeat.verdict == DROP  # nothing is decided yet
    host.take(F.NUMBERS, 3)
    repeat = host.take(F.NUMBERS, 2, flags=wire.Flag.REPEAT)
    assert kind_of(repeat) is F.MARKED and repeat.frame[:6] == MACS[1]


def test_who_has_withdrawn_never_marks(host: Host) -> None:
    host.give()
    host.take(F.NUMBERS, 2)
    run = host.write(host.channel._frame(F.WITHDRAWN, host.call()))
    assert run.verdict == REDIRECT and host.desk().verdict == WITHDRAWN
    run = host.take(F.NUMBERS, 3)
    assert kind_of(run) is F.WITHDRAWN
    assert host.desk().marks == 0


def test_a_withdrawal_is_not_answered(host: Host) -> None:
    """Two that have withdrawn would answer each other for ever."""
    host.give()
    assert host.write(host.channel._frame(F.WITHDRAWN, host.call())).verdict == REDIRECT
    for flags in (0, wire.Flag.ANSWER):
        assert host.take(F.WITHDRAWN, 2, flags=flags).verdict == DROP
    assert host.take(F.MARKED, 3).verdict == DROP
    assert kind_of(host.take(F.NUMBERS, 3)) is F.WITHDRAWN


def test_who_has_marked_cannot_withdraw(host: Host) -> None:
    host.give()
    host.take(F.NUMBERS, 2)
    host.take(F.NUMBERS, 3)
    run = host.write(host.channel._frame(F.WITHDRAWN, host.call()))
    assert run.verdict == SHOT and host.desk().verdict == MARKED


def test_a_call_that_another_has_withdrawn_is_not_marked(host: Host) -> None:
    host.take(F.NUMBERS, 2)
    host.take(F.NUMBERS, 3)
    host.take(F.WITHDRAWN, 3)
    (own,) = host.give()
    assert not own.header.flags & wire.Flag.COMPLETE
    assert host.desk().verdict == 0 and host.desk().gone == 0b100


def test_a_later_call_clears_the_desk_and_an_older_one_is_dropped(host: Host) -> None:
    host.take(F.NUMBERS, 2, number=1)
    host.take(F.NUMBERS, 2, number=3)
    assert host.desk(3).tag == host.call(3).tag
    before = int(host.maps.counters()["round"])
    host.take(F.NUMBERS, 2, number=1)
    assert host.maps.counters()["round"] == before + 1
    host.take(F.NUMBERS, 2, number=1, round_=1)
    assert host.desk(1).tag == host.call(1).tag + (1 << 32)


def test_a_question_about_an_earlier_view(host: Host) -> None:
    host.give()
    host.take(F.NUMBERS, 2)
    host.take(F.NUMBERS, 3)
    then = int(host.maps.config["view"])
    host.reset(then + 1)
    run = host.take(F.SETTLE, 2, view=then)
    assert kind_of(run) is F.MARKED and run.frame[:6] == MACS[1]
    assert wire.unpack(run.frame[14:]).body.view == then
    # Of a call that it has heard nothing of, or has not marked, it never will.
    assert kind_of(host.take(F.SETTLE, 2, view=then, number=1)) is F.WITHDRAWN
    # Another member's numbers in the later view do not take the call away that is not settled.
    host.take(F.NUMBERS, 3)
    assert host.desk().view == then and host.desk().verdict == MARKED
    host.take(F.WITHDRAWN, 3, view=then)
    assert kind_of(host.take(F.SETTLE, 2, view=then)) is F.WITHDRAWN


def test_a_question_ends_what_is_not_decided(host: Host) -> None:
    host.give()
    host.take(F.NUMBERS, 2)
    then = int(host.maps.config["view"])
    host.reset(then + 1)
    assert kind_of(host.take(F.SETTLE, 3, view=then)) is F.WITHDRAWN
    assert host.desk().verdict == WITHDRAWN


def test_answers_count_in_the_view_in_which_they_come(host: Host) -> None:
    host.give()
    host.take(F.NUMBERS, 2)
    host.take(F.NUMBERS, 3)
    then = int(host.maps.config["view"])
    host.reset(then + 1)
    host.take(F.MARKED, 2, view=then)
    assert (host.desk().agreed, host.desk().agreed_view) == (0b010, then + 1)
    host.reset(then + 2)
    host.take(F.MARKED, 3, view=then)
    assert (host.desk().agreed, host.desk().agreed_view) == (0b100, then + 2)


def test_a_program_sends_nothing_else(host: Host) -> None:
    (frame,) = host.channel._numbers(host.call(), b"x")
    header = 14
    bad = [
        frame[:12] + b"\x08\x00" + frame[14:],  # another protocol
        frame[: header + 1] + bytes([F.MARKED]) + frame[header + 2 :],
        frame[: header + 1] + bytes([F.TOKEN]) + frame[header + 2 :],
        frame[: header + 2] + struct.pack(">H", wire.channel_flags(1)) + frame[header + 4 :],
        frame[:-1],
        frame[:-4] + b"\0" * 8,
        frame[: header + 44] + struct.pack(">I", 1) + frame[header + 48 :],  # an older view
        frame[: header + 42] + b"\5\6" + frame[header + 44 :],  # six fragments
        frame[:20],
    ]
    for each in bad:
        assert host.write(each).verdict == SHOT, each.hex()
    forged = frame[: header + 16] + struct.pack(">H", 3) + frame[header + 18 :]
    sent = host.write(MACS[2] + MACS[2] + forged[12:])
    assert sent.verdict == REDIRECT
    assert wire.unpack(sent.frame[14:]).header.sender == 1
    assert sent.frame[:12] == b"\xff" * 6 + MACS[0]


def test_strangers_and_other_views(host: Host) -> None:
    counters = host.maps.counters()
    frame = wire.ethernet(
        MACS[9],
        wire.pack(
            wire.Header(network=NETWORK, view=int(host.maps.config["view"]), round=1, sender=2),
            wire.Numbers(5, 0, 0, 0, 1, int(host.maps.config["view"])),
            tail=bytes(64),
        ),
    )
    bpf.prog_test_run(host.loaded.programs["nicps_xdp"], frame)
    assert host.maps.counters()["stranger"] == counters["stranger"] + 1
    host.take(F.NUMBERS, 2, view=int(host.maps.config["view"]) - 1)
    host.take(F.SETTLE, 2)
    assert host.maps.counters()["view"] == counters["view"] + 2
    assert host.desk().tag != host.call().tag or host.desk().view != host.call().view


def test_a_keyed_network(host: Host) -> None:
    host.reset(int(host.maps.config["view"]) + 1, key=bytes(range(16)))
    before = host.maps.counters()["forged"]
    host.take(F.NUMBERS, 2)
    assert host.maps.counters()["forged"] == before + 1
    (own,) = host.give()
    assert own.header.tag and own.header.sequence == 1


def test_a_keyed_network_answers_a_frame_once_in_each_view(host: Host) -> None:
    """Frames are numbered anew in each view: what was answered in the one before does not count."""
    key, then = bytes(range(16)), int(host.maps.config["view"]) + 1
    host.reset(then, key=key)
    host.give()
    for sequence, sender in enumerate((2, 3), 1000):
        host.take(F.NUMBERS, sender, sequence=sequence, key=key)
    asks: dict[str, Any] = {"flags": wire.Flag.REPEAT, "sequence": 1002, "key": key}
    assert kind_of(host.take(F.NUMBERS, 2, **asks)) is F.MARKED
    assert kind_of(host.take(F.NUMBERS, 2, **asks)) is None
    key = bytes(range(1, 17))
    host.reset(then + 1, key=key)
    run = host.take(F.SETTLE, 2, view=then, sequence=1, key=key)
    assert kind_of(run) is F.MARKED
    assert kind_of(host.take(F.SETTLE, 2, view=then, sequence=1, key=key)) is None


#: An agent, as far as direct calls go: it makes an interface, hands it to a program, and is killed.
_AGENT = """
import os, signal, socket, sys
from nicps.dataplane.direct import DirectCalls
from tests.direct_scene import Kernel
kernel = Kernel()
calls = DirectCalls(kernel.loaded.maps, kernel.loaded.programs["nicps_confined"])
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [calls.shared.tap])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_program_is_confined_when_its_agent_is_gone() -> None:
    protocol = 0x88B6

    def outlive() -> list[bytes]:
        assert not ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET, of this thread
        ours, theirs = socket.socketpair()
        heard = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
        with ours, theirs, heard:
            command = [sys.executable, "-c", _AGENT, str(theirs.fileno())]
            code = subprocess.run(command, pass_fds=[theirs.fileno()], timeout=300).returncode
            assert code == -signal.SIGKILL
            _, (tap,), _, _ = socket.recv_fds(ours, 1, 1)
            time.sleep(0.2)  # the kernel frees what was the agent's
            os.write(tap, b"\xff" * 6 + MACS[0] + struct.pack(">H", protocol) + bytes(50))
            time.sleep(0.2)
            os.close(tap)
            heard.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return [heard.recv(2000)]
            return []

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(outlive).result() == []


def test_a_call_without_an_interface_takes_a_round(host: Host) -> None:
    """It was taken away, or down, at all hosts: nobody withdraws a call that nobody has heard of."""
    looks = iter(range(100))
    view = int(host.maps.config["view"])

    def look() -> tuple[int, frozenset[int]]:
        next(looks)
        return view, host.call().live

    host.memory.send = lambda frame: False  # type: ignore[method-assign]
    try:
        assert host.channel.gather(host.call(), b"own", look) is None
    finally:
        host.memory.send = host.take_written  # type: ignore[method-assign]


# ---- several members


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    return [Kernel() for _ in range(4)]


def schedule(kernels: list[Kernel], seeds: range, first_view: int) -> Counter[str]:
    """Run them; how the calls have come out."""
    outcomes: Counter[str] = Counter()
    for at, seed in enumerate(seeds):
        scene = Scene(kernels, seed, first_view + 8 * at, 1 + 64 * (first_view + at))
        made = scene.run()
        lost = {number for number, member in scene.members.items() if member.killed}
        agree(made, lost)
        outcomes.update(how for of in made.values() for how, _, _ in of)
    return outcomes


def test_schedules(kernels: list[Kernel]) -> None:
    outcomes = schedule(kernels, range(60), 1)
    assert outcomes["direct"] > 100 and outcomes["round"] > 20


@pytest.mark.long
def test_many_schedules(kernels: list[Kernel]) -> None:
    schedule(kernels, range(1000, 3000), 1000)
