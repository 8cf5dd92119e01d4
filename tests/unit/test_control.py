# SPDX-License-Identifier: Apache-2.0
"""The agent's socket, and people who mean no good: whatever they send, the loop goes on and the memory stays small."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from nicps.agent import closing, control, peer
from nicps.agent.control import Access, ControlSocket
from nicps.errors import EnvironmentProblem
from nicps.protocol import View
from nicps.session.channel import Channel
from tests.parts import MEMBERS
from tests.rooms import Rooms

STRANGER = 54321
LINGER_S = 3
AT_ONCE_S = (
    1.0  # on a machine that has other things to do; a loop that waits for a linger takes LINGER_S
)
EMPTY = struct.pack(">I", 2) + b"{}"


class Host:
    """The loop of an agent that stands by, with its socket. `uid` is whose new connections are; `longest_s` a pass."""

    def __init__(self, tmp_path: Path) -> None:
        self.uid = os.geteuid()
        self.address = f"@nicps-test-{os.getpid()}"
        self.rooms = Rooms(tmp_path)
        self.loop = self.rooms.loop
        self.longest_s = 0.0
        self.handled = 0
        self.most = 0  # messages in one pass
        self.control = self._listen()

    def _listen(self) -> ControlSocket:
        access = Access(trainer=STRANGER + 1)
        control = ControlSocket(self.address, access, self.loop.watch, self.loop.unwatch)
        commands = self.rooms.commands(control)

        def take_message(peer: peer.Peer, message: dict[str, Any]) -> None:
            self.handled += 1
            commands.take_message(peer, message)

        control.serve(take_message, commands.forget)
        return control

    def restart(self) -> None:
        self.control.close()
        self.control = self._listen()

    def step(self) -> None:
        """One pass, as the agent makes it."""
        events = self.loop.wait(0.01)
        began, before = time.monotonic(), self.handled
        self.loop.handle(events)
        self.control.flush()
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.most = max(self.most, self.handled - before)

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            self.step()

    def connect(self) -> Channel:
        return Channel.connect(self.address)

    def gone(self, channel: Channel) -> bool:
        """The agent has closed it; answers are read and forgotten."""
        with contextlib.suppress(BlockingIOError):
            try:
                return not channel.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                return True
        return False

    def close(self) -> None:
        self.control.close()
        self.rooms.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(tmp_path)
    monkeypatch.setattr(control, "_credentials", lambda _: (made.uid, {made.uid}))
    yield made
    made.close()


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot refuse descriptors."""
    monkeypatch.setattr(peer, "_SO_PASSRIGHTS", 1 << 14)


@pytest.fixture
def lingering() -> Iterator[Callable[[], socket.socket]]:
    """Makes TCP connections whose last close takes LINGER_S, since nobody reads what is in them."""
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def make() -> socket.socket:
            ours = socket.create_connection(listener.getsockname())
            ends.append(listener.accept()[0])
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.send(bytes(1 << 16))
            return ours

        yield make
    for end in ends:
        end.close()


def throw(host: Host, data: bytes, descriptor: socket.socket) -> Channel:
    """A connection by which the descriptor, of which no other is left, has been sent behind the data."""
    channel = host.connect()
    if data:
        channel.socket.sendall(data)
    with descriptor:
        try:
            socket.send_fds(channel.socket, [EMPTY], [descriptor.fileno()])
        except PermissionError:  # a kernel that refuses it: this close is the last
            descriptor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    return channel


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def answers(host: Host, channel: Channel, count: int) -> list[dict[str, Any]]:
    """The next answers of the agent."""
    found: list[dict[str, Any]] = []

    def more() -> bool:
        while len(found) < count and channel.wait(0.0):
            found.append(channel.recv(1.0)[0])
        return len(found) == count

    host.until(more)
    return found


# ---- descriptors: whoever made one may hold up who closes it


def test_the_test(lingering: Callable[[], socket.socket]) -> None:
    """Such a connection holds up who closes it."""
    descriptor = lingering()
    began = time.monotonic()
    descriptor.close()
    assert time.monotonic() > began + AT_ONCE_S


@pytest.mark.parametrize(
    ("uid", "data"),
    [
        (STRANGER, b""),
        (STRANGER, EMPTY),  # it goes after the refusal, and what it has sent behind it goes unread
        (STRANGER + 1, b""),
        (STRANGER + 1, framed(b"[")),
        (os.geteuid(), b""),
        (os.geteuid(), EMPTY * 100),
    ],
    ids=["stranger", "refused", "trainer", "no JSON", "user", "behind messages"],
)
@pytest.mark.parametrize("kernel", ["old", "this"])
def test_a_descriptor_that_takes_long_to_close(
    host: Host,
    lingering: Callable[[], socket.socket],
    request: pytest.FixtureRequest,
    kernel: str,
    uid: int,
    data: bytes,
) -> None:
    if kernel == "old":
        request.getfixturevalue("old")
        host.restart()
    host.uid = uid
    channel = throw(host, data, lingering())
    began = time.monotonic()
    while time.monotonic() < began + 0.2:
        host.step()
    channel.close()
    host.until(lambda: not host.control.peers)
    assert host.longest_s < AT_ONCE_S
    host.uid = os.geteuid()
    other = say(host, EMPTY)
    assert answers(host, other, 1)[0]["op"] == "error", "it serves others as before"
    other.close()


@pytest.mark.usefixtures("old")
def test_it_comes_with_one_connection_too_many(
    host: Host, lingering: Callable[[], socket.socket]
) -> None:
    host.restart()
    host.uid = STRANGER
    crowd = [host.connect() for _ in range(8)]
    host.until(lambda: len(host.control.peers) == 8)
    channel = throw(host, b"", lingering())
    host.until(lambda: host.gone(channel))
    assert host.longest_s < AT_ONCE_S
    for one in (*crowd, channel):
        one.close()


@pytest.mark.usefixtures("old")
def test_the_agent_leaves_all_the_same(
    host: Host, lingering: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection that it knows, and one that it has not accepted."""
    host.restart()
    monkeypatch.setattr(control, "_CLOSING_S", 0.1)
    known = host.connect()
    host.until(lambda: host.control.peers)
    socket.send_fds(known.socket, [EMPTY], [(descriptor := lingering()).fileno()])
    descriptor.close()
    unknown = throw(host, b"", lingering())
    began = time.monotonic()
    host.control.close()
    assert time.monotonic() < began + AT_ONCE_S
    for one in (known, unknown):
        one.close()


@pytest.mark.usefixtures("old")
def test_no_more_are_closed_at_once_than_so_many(
    host: Host, lingering: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody is let in until one of them is closed, and everything else goes on."""
    host.restart()
    monkeypatch.setattr(closing, "_MOST_AT_ONCE", 2)
    known = say(host, EMPTY)
    answers(host, known, 1)
    bad = [throw(host, b"", lingering()) for _ in range(2)]
    host.until(lambda: all(host.gone(one) for one in bad))
    late = say(host, EMPTY)
    known.send({})
    answers(host, known, 1)
    assert len(host.control.peers) == 1
    answers(host, late, 1)
    assert host.longest_s < AT_ONCE_S
    for one in (*bad, known, late):
        one.close()


def test_a_kernel_that_can_refuses_it(host: Host) -> None:
    """From Linux 6.16 on, at the socket and at the end of a pair that a training program has."""
    ours, theirs = socket.socketpair()
    program = Channel(theirs)
    try:
        ours.setsockopt(socket.SOL_SOCKET, peer._SO_PASSRIGHTS, 1)
    except OSError:
        can = contextlib.nullcontext()
    else:
        can = pytest.raises(PermissionError)  # type: ignore[assignment]
    host.control.adopt(ours, STRANGER + 1)
    for channel in (host.connect(), program):
        with can:
            socket.send_fds(channel.socket, [EMPTY], [0])
        channel.close()
    host.until(lambda: not host.control.peers)


def test_nobody_keeps_what_was_sent(host: Host) -> None:
    """As many descriptors as one message can have: none is ever among ours."""
    before = set(os.listdir("/proc/self/fd"))
    channel = host.connect()
    with contextlib.suppress(PermissionError):
        socket.send_fds(channel.socket, [EMPTY], [0] * 253)
        host.until(lambda: host.gone(channel))
    channel.close()
    host.until(lambda: not host.control.peers)
    host.control._closing.wait(5.0)
    assert set(os.listdir("/proc/self/fd")) <= before


# ---- messages without end


def say(host: Host, data: bytes) -> Channel:
    channel = host.connect()
    channel.socket.sendall(data)
    return channel


def test_a_stranger_is_refused_once(host: Host) -> None:
    for uid in (STRANGER, STRANGER + 1):
        host.uid = uid
        before = host.handled
        channel = say(host, EMPTY * 1000)
        (answer,) = answers(host, channel, 1)
        assert answer["op"] == "error" and answer["exit_code"] == 2
        host.until(lambda c=channel: host.gone(c))  # type: ignore[misc]
        assert host.handled == before + 1
        channel.close()


def test_who_sends_without_end_and_reads_nothing(host: Host) -> None:
    channel = host.connect()
    host.until(lambda: host.control.peers)
    (known,) = host.control.peers
    channel.socket.setblocking(False)
    most = sent = 0

    def floods() -> bool:
        nonlocal most, sent
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            sent += channel.socket.send((EMPTY * 30_000)[sent % len(EMPTY) :])
        most = max(most, known.channel.backlog)
        return not host.control.peers

    host.until(floods)
    assert 1 << 20 < most < 2 << 20
    assert host.most <= 32
    assert host.longest_s < AT_ONCE_S
    channel.close()


def test_a_message_without_end_is_read_no_further(host: Host) -> None:
    channel = say(host, struct.pack(">I", (1 << 20) + 1) + bytes(1000))
    host.until(lambda: host.gone(channel))
    channel.close()


def test_what_is_nested_too_deep_to_be_shown_is_refused(host: Host) -> None:
    channel = say(host, framed(b'{"op": ' + b"[" * 1000 + b"]" * 1000 + b"}"))
    (answer,) = answers(host, channel, 1)
    assert answer["message"].startswith('the message\'s "op" is a list, not a text')
    channel.send({"op": "x"})
    assert "knows no 'x'" in answers(host, channel, 1)[0]["message"]
    channel.close()


def test_many_at_once_are_all_answered(host: Host) -> None:
    """More than one pass works off, and nothing comes behind them that would wake the loop."""
    channel = say(host, EMPTY * 300)
    assert len(answers(host, channel, 300)) == 300
    assert host.most <= 32
    message = framed(orjson.dumps({"op": "x", "more": "y" * 5000}))
    for byte in range(0, len(message), 700):
        assert not channel.wait(0.0)
        channel.socket.sendall(message[byte : byte + 700])
        host.step()
    (answer,) = answers(host, channel, 1)
    assert "knows no 'x'" in answer["message"]
    channel.close()


def test_the_last_words_are_heard(host: Host) -> None:
    """Of who says something and goes."""
    say(host, EMPTY * 40).close()
    host.until(lambda: host.handled == 40)
    host.until(lambda: not host.control.peers)


def test_what_comes_behind_attach_is_for_who_is_given_the_connection(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[socket.socket] = []
    host.rooms.life.node._host.view = View(1, MEMBERS, frozenset({1}), 1)
    host.rooms.life.roles.begin_part(0.0, "job")
    give = lambda fd: given.append(socket.socket(fileno=os.dup(fd)))  # noqa: E731
    monkeypatch.setattr(host.rooms.program, "start_gateway", give)
    host.uid = STRANGER + 1
    channel = say(host, framed(b'{"op":"attach","form":"json"}') + framed(b'{"op":"next"}'))
    host.until(lambda: given)
    assert not host.control.peers
    gateway = Channel(given[0])
    assert gateway.recv(5.0)[0] == {"op": "next"}
    gateway.send({"op": "phase"})
    assert channel.recv(5.0)[0] == {"op": "phase"}
    gateway.close()
    channel.close()


# ---- odd submissions


@pytest.mark.parametrize(
    ("submission", "said"),
    [
        (b'{"op":"submit"}', 'submit: "job" is missing; it must be a path'),
        (b'{"op":"submit","job":"/a\\u0000b"}', r"""submit: "job" is '/a\x00b', not a path"""),
        (
            b'{"op":"submit","job":"/a","settings":' + b'{"a":' * 600 + b"1" + b"}" * 601,
            "no job can be made of what was submitted: ",
        ),
    ],
    ids=["no job", "a path that is none", "settings too deep"],
)
def test_an_odd_submission(host: Host, tmp_path: Path, submission: bytes, said: str) -> None:
    """It is refused, and the host answers calls as before."""
    channel = say(host, framed(submission))
    (answer,) = answers(host, channel, 1)
    assert answer["op"] == "error" and answer["exit_code"] == 2
    assert said in answer["message"]
    assert "\n" not in answer["message"]
    assert not host.rooms.life.node.busy and not host.rooms.life.busy_with
    host.until(lambda: not list((tmp_path / "work").iterdir()))
    channel.send({"op": "x"})
    assert "knows no 'x'" in answers(host, channel, 1)[0]["message"]
    channel.close()


def test_a_training_user_leaves_the_others_their_places(host: Host) -> None:
    """However many connections it makes: `nicps status`, `cancel` and `leave` are answered."""
    host.uid = STRANGER + 1
    idle = []
    for _ in range(70):
        idle.append(host.connect())
        host.step()
    host.uid = os.geteuid()
    channel = say(host, EMPTY)
    assert answers(host, channel, 1)[0]["op"] == "error", "it is served"
    for one in (*idle, channel):
        one.close()


def test_only_a_socket_is_taken_for_a_stale_one(tmp_path: Path) -> None:
    """A slip in `--socket` costs nobody a file."""
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(EnvironmentProblem, match="cannot listen"):
        ControlSocket(str(path), Access(trainer=STRANGER), lambda *_: None, lambda *_: None)
    assert path.read_text() == "mine"
