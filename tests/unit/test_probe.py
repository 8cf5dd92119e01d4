# SPDX-License-Identifier: Apache-2.0
"""Who measures the LAN, and who answers, where a stranger sends old questions again (SECURITY.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nicps import wire
from nicps.agent import probe
from nicps.agent.probe import Prober
from nicps.errors import NicpsError
from nicps.job import Life, LifeSettings
from nicps.session.messages import Train
from tests.rooms import NoKernel

NETWORK = wire.network_id("nicps")
MAC, OTHER, THIRD = (bytes([2, 0, 0, 0, 0, k]) for k in (1, 2, 3))
OLD = 77  # a nonce of yesterday


class Asker:
    """Who wants to know; `told` is what it got."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.post = self.refuse = self.told.append


class Clock:
    """Of the measurement."""

    def __init__(self, host: Host) -> None:
        self.monotonic = lambda: host.now
        self.monotonic_ns = host.now_ns


class Plane(NoKernel):
    """Counts the frames of a train."""

    def __init__(self) -> None:
        super().__init__()
        self.train = {"nonce": 0, "first_ns": 0, "last_ns": 0, "count": 0, "tagged": 0}

    def expect(self, nonce: int) -> dict[str, int]:
        if self.train["nonce"] != nonce:
            self.train.update(nonce=nonce, first_ns=0, last_ns=0, count=0, tagged=0)
        return self.train


class Host:
    """A host that stands by; `sent` are its PROBE and ECHO frames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[wire.Frame] = []
        self.now = 100.0
        monkeypatch.setattr(probe, "time", Clock(self))
        plane: Any = Plane()
        self.train = plane.train
        life = Life(MAC, LifeSettings("h1", "nicps"), plane, lambda: 1)
        self.prober = Prober(life, plane, wire.BROADCAST, self._send)
        self.asker = Asker()

    def _send(self, frame: bytes) -> None:
        self.sent.append(wire.unpack(frame))

    def now_ns(self) -> int:
        return int(self.now * 1e9)

    def measure(self) -> wire.Probe:
        """Begin; the first question."""
        self.prober.start(self.asker, 1.0)  # type: ignore[arg-type]
        self.prober.tick()
        body = self.sent.pop().body
        assert isinstance(body, wire.Probe)
        return body

    def hears(self, source: bytes, body: wire.Probe | wire.Echo, tail: bytes = b"") -> None:
        frame = wire.pack(wire.Header(network=NETWORK), body, tail=tail)
        self.prober.take_frame(source, frame)

    def asked(self, source: bytes, nonce: int, number: int = 1) -> list[wire.Echo]:
        """A question; the answers."""
        self.sent.clear()
        self.hears(source, wire.Probe(nonce, number, wire.ProbeStep.ASK))
        return [frame.body for frame in self.sent if isinstance(frame.body, wire.Echo)]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_an_old_question_ends_no_measurement(host: Host) -> None:
    host.measure()
    (answer,) = host.asked(OTHER, OLD)
    assert answer.busy == 1, "who asks now learns that another measures"
    assert host.prober.running and not host.asker.told
    host.now += 0.5
    host.prober.tick()
    (error,) = host.asker.told
    assert "no other host answers" in str(error)


def test_who_measures_now_ends_it(host: Host) -> None:
    question = host.measure()
    old = wire.Echo(OLD, 0, 0, 0, question.number, 1)
    host.hears(OTHER, old, b"h2")
    assert host.prober.running
    host.hears(THIRD, wire.Echo(question.nonce, 0, 0, 0, question.number, 0), b"h3")
    assert host.prober.running
    host.hears(OTHER, wire.Echo(question.nonce, 0, 0, 0, question.number, 1), b"h2")
    (error,) = host.asker.told
    assert isinstance(error, NicpsError)
    assert "h2 measures at the same moment, or has a job under way" in str(error)
    assert not host.prober.running


def test_an_answer_may_take_a_tenth_of_a_second(host: Host) -> None:
    """Also the last of those that tell round trips."""
    question = host.measure()
    host.hears(OTHER, wire.Echo(question.nonce, 0, 0, 0, question.number, 0), b"h2")
    host.now += 0.3
    for _ in range(20):
        host.prober.tick()
        (body,) = (frame.body for frame in host.sent)
        host.sent.clear()
        host.now += 0.01
    assert isinstance(body, wire.Probe)
    host.prober.tick()
    host.now += 0.09
    host.prober.tick()
    assert not host.sent
    host.hears(OTHER, wire.Echo(body.nonce, 0, 0, 0, body.number, 0), b"h2")
    (other,) = host.prober._hosts.values()
    assert other.round_trips_s == pytest.approx([0.1])


def test_a_question_that_is_sent_again_and_again_gets_few_answers(host: Host) -> None:
    first = later = 0
    for _ in range(1000):
        host.now += 0.001
        first += len(host.asked(OTHER, OLD))
    assert 64 <= first <= 64 + 1 / 0.03
    for _ in range(10_000):
        host.now += 0.001
        later += len(host.asked(OTHER, OLD))
    assert 300 <= later <= 340


def test_a_measurement_is_answered(host: Host) -> None:
    """One question to find all, twenty for round trips, and the trains'."""
    questions = [0.3, *[0.01] * 20, *[0.06, 0.1] * 6]
    answers = 0
    for measurement in range(10):
        for number, seconds in enumerate(questions):
            answers += len(host.asked(OTHER, 1000 + measurement, number))
            host.now += seconds
    assert answers == 10 * len(questions)


def test_a_train_that_comes_in_is_counted_on(host: Host) -> None:
    """An old question of another host does not take its place."""
    host.asked(THIRD, OLD)
    (answer,) = host.asked(OTHER, 5)
    assert (answer.count, host.train["nonce"]) == (0, 5), "none is coming in"
    host.train.update(first_ns=host.now_ns(), last_ns=host.now_ns(), count=9, tagged=4)
    host.now += 0.2
    (answer,) = host.asked(THIRD, OLD)
    assert (answer.nonce, answer.count, answer.last_ns) == (OLD, 0, 0)
    (answer,) = host.asked(OTHER, 5, 2)
    assert (answer.count, answer.tagged) == (9, 4)
    (answer,) = host.asked(OTHER, 6, 3)
    assert (answer.count, host.train["nonce"]) == (0, 6), "its own next one"
    host.train.update(last_ns=host.now_ns(), count=9)
    host.now += 0.6  # from a measurement's first question to its first train's
    host.asked(THIRD, OLD)
    assert host.train["nonce"] == OLD, "the other's last train has ended"


def test_a_host_that_joins_meanwhile_has_missed_the_trains_before(host: Host) -> None:
    """The table has a place for each train of each host."""
    question = host.measure()
    host.prober._trains += [Train(1e6, 9, 1e6)] * 2
    host.hears(THIRD, wire.Echo(question.nonce, 0, 0, 0, question.number, 0), b"h3")
    (other,) = host.prober._hosts.values()
    assert other.trains == [None, None]


class Ring:
    """A line on which there is always room."""

    def free(self) -> int:
        return 256

    def push(self, rows: Any, payload: Any) -> int:
        return len(rows)

    def flush(self) -> None: ...

    def pending(self) -> int:
        return 0


def test_a_busy_processor_is_no_slow_line(host: Host) -> None:
    """The agent has not run for half of the time: the rate at which it sends is that of the other half."""
    host.measure()
    a_frame = probe._LINE_BYTES * 8
    train = host.prober._send_train(Ring(), 1000.0 * a_frame, 1.0)  # type: ignore[arg-type]
    ended = []

    def whole() -> Iterator[float]:
        ended.append((yield from train))

    for step, _ in enumerate(whole()):
        host.now += 0.125 if step % 100 == 50 else 0.001
    sent, took, _ = ended[0]
    assert 400 < sent < 700 and sent / took == pytest.approx(1000, rel=0.02)
