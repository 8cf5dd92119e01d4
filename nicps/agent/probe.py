# SPDX-License-Identifier: Apache-2.0
"""Measurements of the LAN between the hosts that stand by (`nicps doctor --network`): loss, round trips and rate.

The host that measures asks all others by PROBE frames, and they answer with ECHO frames. An answer has the counts of a
train: frames as long as fragments, sent at a steady rate. The XDP program counts trains, so no agent has to read each
frame, and so the frames carry no tag: a stranger could spoil a figure, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from nicps import wire
from nicps.agent.peer import Peer
from nicps.auth import nonce
from nicps.dataplane import DataPlane, tags
from nicps.dataplane.txring import TxRing
from nicps.errors import NetworkProblem, NicpsError
from nicps.job import Life
from nicps.protocol.view import safe_name
from nicps.session.messages import Probe, ProbedHost, RoundTrips, TagsSeen, Train, TrainSeen

#: While a measurement is under way the agent calls `tick` at least this often.
STEP_S = 0.001
#: Bits per second on the line; the last train goes as fast as this host can send.
RATES_BPS: tuple[float | None, ...] = (3e6, 30e6, 100e6, 300e6, 1e9, None)

_QUESTIONS = 20
_FIND_S = 0.3  # until all hosts have been heard of
_WAIT_S = 0.1  # for the answers to one question
_TRIES = 5
_TAGGED_BPS = 30e6  # of the train with tags
_LINE_BYTES = 1526  # of a train's frame, with preamble, checksum and gap
_BATCH, _BATCHES = 256, 4  # frames for one system call, and those for one step
_CATCH_UP_S = 0.005  # a late agent does not send more than this at once
_SLOWER = 0.8  # of the rate asked for: faster trains would not be faster on the line
_BUSY_S = 0.1  # between two answers while a job is under way
_COMING_NS = 300_000_000  # since a train's last frame; another host's first one begins no sooner
_MOST_ANSWERS, _ANSWER_EVERY_S = 64, 0.03  # so many in a row, then one every 0.03 s


@dataclass(slots=True)
class _Host:
    """The results for another host; `echoes` by the question's number."""

    name: str
    round_trips_s: list[float] = field(default_factory=list)
    echoes: dict[int, wire.Echo] = field(default_factory=dict)
    trains: list[TrainSeen | None] = field(default_factory=list)
    tags: TagsSeen | None = None


class Prober:
    """Answers the questions of other hosts, and measures on a command.

    Args:
        send: tags a control frame, and sends it.
    """

    def __init__(
        self, life: Life, dataplane: DataPlane, destination: bytes, send: Callable[[bytes], None]
    ) -> None:
        self._life, self._dataplane = life, dataplane
        self._destination, self._send_frame = destination, send
        self._peer: Peer | None = None  # the peer that asked for the measurement
        self._script: Iterator[float] | None = None
        self._next = 0.0
        self._nonce = 0
        self._timing = False  # answers count as round trips
        self._asked: dict[int, tuple[int, float]] = {}  # question -> nonce, when
        self._hosts: dict[bytes, _Host] = {}
        self._trains: list[Train] = []
        self._tagged = 0  # frames of the train with tags
        self._answered_busy = 0.0
        self._counts_for = b""  # the host whose train this one counts
        self._answered = 0.0  # when the answers given so far are paid off

    @property
    def running(self) -> bool:
        """Whether this host measures."""
        return self._script is not None

    def start(self, peer: Peer, seconds: float) -> None:
        """Measure, with trains of that length, and post the result to `peer`.

        Raises:
            NetworkProblem: a job, or another measurement, is under way.
        """
        if self._life.busy_with:
            raise NetworkProblem("a job is under way: measure after its end (`nicps status`)")
        if self.running:
            raise NetworkProblem("a measurement is under way here already: wait for its end")
        self._dataplane.check_interface()
        self._peer, self._hosts, self._asked, self._trains = peer, {}, {}, []
        self._next, self._timing, self._tagged = 0.0, False, 0
        self._script = self._measure(seconds)

    def forget(self, peer: Peer) -> None:
        """The peer has gone: end the measurement."""
        if peer is self._peer:
            self._peer = self._script = None

    def tick(self) -> None:
        """Take the next step of the measurement, if it is due."""
        if self._script is None or time.monotonic() < self._next:
            return
        try:
            if self._life.busy_with:
                raise NetworkProblem("a job has begun: measure after its end")
            self._next = next(self._script)
        except StopIteration:
            self._done(lambda peer: peer.post(self._result()))
        except NicpsError as error:
            self._stop(error)

    def take_frame(self, source: bytes, data: bytes) -> None:
        """A PROBE or ECHO frame that came up.

        Raises:
            WireError: it is malformed.
        """
        frame = wire.unpack(data)
        node = self._life.node
        if frame.header.network != node.network or source == node.mac:
            return
        if isinstance(frame.body, wire.Probe):
            self._on_question(source, frame.body)
        elif isinstance(frame.body, wire.Echo):
            self._on_answer(source, frame.body, frame.tail)

    def _stop(self, reason: NicpsError) -> None:
        self._done(lambda peer: peer.refuse(reason))

    def _done(self, tell: Callable[[Peer], None]) -> None:
        peer, self._peer, self._script = self._peer, None, None
        if peer is not None:
            tell(peer)

    # ---- the others' questions

    def _on_question(self, source: bytes, probe: wire.Probe) -> None:
        """Answer a question. Anybody can send an old one again, so it ends no measurement, and answers are few."""
        now, has_job = time.monotonic(), bool(self._life.busy_with)
        if has_job and now < self._answered_busy + _BUSY_S:
            return
        if self._answered > now + (_MOST_ANSWERS - 1) * _ANSWER_EVERY_S:
            return
        self._answered_busy = now
        self._answered = max(self._answered, now) + _ANSWER_EVERY_S
        first_ns, last_ns, count, tagged = self._counted(source, probe.nonce)
        busy = int(has_job or self.running)
        counts = min(count, 2**32 - 1), probe.number, busy
        body = wire.Echo(probe.nonce, first_ns, last_ns, *counts, tagged=min(tagged, 2**32 - 1))
        self._send(body, self._life.node.name.encode())

    def _counted(self, source: bytes, nonce: int) -> tuple[int, int, int, int]:
        """Times of a train's first and last frame, the number of frames, and of those with a tag; the train is counted
        from now on.

        If another host's train is coming in, this one is not counted in its place.
        """
        dataplane = self._dataplane
        train = dataplane.maps.train
        coming = time.monotonic_ns() < int(train["last_ns"]) + _COMING_NS
        if coming and int(train["nonce"]) != nonce and source != self._counts_for:
            return 0, 0, 0, 0
        self._counts_for = source
        train = dataplane.maps.expect(nonce)
        first_ns, last_ns, count, tagged = (
            int(train[name]) for name in ("first_ns", "last_ns", "count", "tagged")
        )
        return first_ns, last_ns, count, tagged

    # ---- our own

    def _on_answer(self, source: bytes, echo: wire.Echo, name: bytes) -> None:
        nonce, asked_at = self._asked.get(echo.number, (0, 0.0))
        if self._script is None or nonce != echo.nonce:
            return
        host = self._hosts.get(source)
        if host is None:
            host = _Host(safe_name(name.decode(errors="replace"), source))
            host.trains += [None] * len(self._trains)  # that host had not been heard yet
            self._hosts[source] = host
        if echo.busy:  # the host is busy now: the nonce is ours
            self._stop(
                NetworkProblem(
                    f"{host.name} measures at the same moment, or has a job under way: try again later"
                )
            )
            return
        if self._timing and echo.number not in host.echoes:
            host.round_trips_s.append(time.monotonic() - asked_at)
        host.echoes[echo.number] = echo

    def _measure(self, seconds: float) -> Iterator[float]:
        """The whole measurement, as a series of times to wait for."""
        self._nonce = nonce()
        self._ask()
        yield time.monotonic() + _FIND_S
        if not self._hosts:
            raise NetworkProblem(
                "no other host answers: run `nicps join` on it, with the same --network (and --key)"
            )
        self._timing = True
        for _ in range(_QUESTIONS):
            self._ask()
            yield time.monotonic() + max(0.01, 0.002 * len(self._hosts))
        yield time.monotonic() + _WAIT_S
        self._timing = False  # answers from now on wait behind trains
        for rate in RATES_BPS:
            yield from self._train(rate, seconds)
            offered = self._trains[-1].offered_bps
            if rate is not None and offered < _SLOWER * rate:
                break
        yield from self._tagged_train(seconds)

    def _ask(self) -> int:
        """Ask all hosts one question; return its number."""
        number = len(self._asked) + 1
        self._asked[number] = self._nonce, time.monotonic()
        self._send(wire.Probe(self._nonce, number, wire.ProbeStep.ASK))
        return number

    def _answers(self) -> Iterator[float]:
        """Ask until all have answered, or some do not answer."""
        first = len(self._asked) + 1
        for _ in range(_TRIES):
            self._ask()
            until = time.monotonic() + _WAIT_S
            while time.monotonic() < until:
                if all(max(host.echoes, default=0) >= first for host in self._hosts.values()):
                    return
                yield 0.0

    def _train(self, rate_bps: float | None, seconds: float) -> Iterator[float]:
        sent, took, told = yield from self._send_train(self._dataplane.tx, rate_bps, seconds)
        self._trains.append(Train(rate_bps, sent, sent * 8 * _LINE_BYTES / took))
        for mac, host in self._hosts.items():
            host.trains.append(_seen(told[mac]) if mac in told else None)

    def _tagged_train(self, seconds: float) -> Iterator[float]:
        """One with 802.1p tags of all priorities: some switches drop such frames, others take the tags off."""
        ring = self._dataplane.open_ring(0, tagged=True)
        try:
            ring.set_tags(*range(tags.PRIORITIES))
            self._tagged, _, told = yield from self._send_train(ring, _TAGGED_BPS, seconds)
        finally:
            ring.close()
        for mac, echo in told.items():
            self._hosts[mac].tags = TagsSeen(echo.count, echo.tagged)

    def _send_train(
        self, tx: TxRing, rate_bps: float | None, seconds: float
    ) -> Generator[float, None, tuple[int, float, dict[bytes, wire.Echo]]]:
        """Send a train; the number of its frames, how long it took, and by host what has come of it."""
        self._nonce = nonce()
        ready = len(self._asked)
        yield from self._answers()
        rows, numbers = self._frames()
        payload = np.zeros((_BATCH, wire.PAYLOAD_BYTES), np.uint8)
        per_second = (rate_bps or float("inf")) / (8 * _LINE_BYTES)
        began = last = time.monotonic()
        sent, owed, late = 0, 0.0, 0.0
        while last < began + seconds:
            now = time.monotonic()
            owed = min(owed + (now - last) * per_second, max(1.0, _CATCH_UP_S * per_second))
            late, last = late + max(0.0, now - last - _CATCH_UP_S), now
            for _ in range(_BATCHES):
                count = min(int(min(owed, _BATCH)), tx.free())
                if not count:
                    break
                numbers[:count] = np.arange(sent + 1, sent + 1 + count)
                taken = tx.push(rows[:count], payload[:count])
                tx.flush()
                sent, owed = sent + taken, owed - taken
            yield 0.0
        while tx.pending() and time.monotonic() < last + seconds + 1:
            tx.flush()
            yield 0.0
        # What a busy processor has held up is no fault of the line.
        took = time.monotonic() - began - (late if rate_bps else 0.0)
        asked = len(self._asked)
        yield from self._answers()
        told = {}
        for mac, host in self._hosts.items():
            counts = any(ready < number <= asked for number in host.echoes)
            last_answer = max(host.echoes, default=0)
            if counts and last_answer > asked:
                told[mac] = host.echoes[last_answer]
        return sent, took, told

    def _frames(self) -> tuple[Any, Any]:
        """Headers of a batch, (k, 48) bytes, and a view of the numbers in them."""
        body = wire.Probe(self._nonce, 0, wire.ProbeStep.TRAIN)
        frame = wire.pack(self._header(), body, tail=bytes(wire.PAYLOAD_BYTES))
        head = np.frombuffer(frame[: wire.FRAGMENT_HEADER_BYTES], np.uint8)
        rows = np.tile(head, (_BATCH, 1))
        layout = wire.Layout.of(wire.Probe)
        at = wire.HEADER_BYTES + layout.offsets[layout.names.index("number")]
        return rows, rows[:, at : at + 4].view(">u4")[:, 0]

    def _header(self) -> wire.Header:
        return wire.Header(network=self._life.node.network)

    def _send(self, body: wire.Probe | wire.Echo, tail: bytes = b"") -> None:
        self._send_frame(wire.pack(self._header(), body, tail=tail))

    def _result(self) -> Probe:
        return Probe(
            self._life.node.name,
            self._dataplane.iface,
            wire.mac_text(self._destination),
            _QUESTIONS,
            tuple(self._trains),
            tuple(
                ProbedHost(
                    host.name,
                    wire.mac_text(mac),
                    len(host.round_trips_s),
                    _spread(host.round_trips_s),
                    tuple(host.trains),
                    host.tags,
                )
                for mac, host in sorted(self._hosts.items(), key=lambda found: found[1].name)
            ),
            self._tagged,
        )


def _seen(echo: wire.Echo) -> TrainSeen:
    """The result of a train, and its rate (bits per second on the line)."""
    took_ns = echo.last_ns - echo.first_ns
    rate_bps = 8e9 * _LINE_BYTES * (echo.count - 1) / took_ns if took_ns > 0 else 0.0
    return TrainSeen(echo.count, rate_bps)


def _spread(seconds: list[float]) -> RoundTrips | None:
    """Minimum, median and maximum in microseconds; None if there are no values."""
    if not seconds:
        return None
    return RoundTrips(1e6 * min(seconds), 1e6 * median(seconds), 1e6 * max(seconds))
