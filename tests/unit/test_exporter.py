# SPDX-License-Identifier: Apache-2.0
"""Metrics over HTTP (`nicps join --metrics`): the address, the answers, and clients that mean no good."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nicps import cli
from nicps.agent import exporter
from nicps.agent.exporter import Exporter, split_address
from nicps.agent.families import FAMILIES, ROUND_SECONDS, StatusCollector
from nicps.errors import EnvironmentProblem, UsageProblem
from nicps.session.messages import Status
from tests.unit.test_top_cli import channel, look


class FakeLoop:
    """Watches one descriptor, in a thread, as the agent's loop does."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[], None]] = {}
        self.ends = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.ends:
            for fd in select.select(list(self.handlers), [], [], 0.01)[0]:
                self.handlers[fd]()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        self.ends = True
        self.thread.join()
        self.handlers.pop(fd, None)


@pytest.fixture
def served() -> Iterator[tuple[Exporter, list[Status]]]:
    """An exporter that gives the last of these statuses."""
    statuses = [look(10.0, 100)]
    loop = FakeLoop()
    made = Exporter("127.0.0.1:0", loop.watch, loop.unwatch)
    made.serve(lambda: statuses[-1])
    yield made, statuses
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("Thread") and not t.daemon]


def fetch(of: Exporter, timeout_s: float = 20.0) -> str:
    with urllib.request.urlopen(of.url, timeout=timeout_s) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("127.0.0.1:9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_an_address(address: str, where: tuple[str, int]) -> None:
    assert split_address(address) == where


@pytest.mark.parametrize(
    "address", ["9400", "host", "host:", "::1:9400", ":65536", "a b:1", "host:-1", "[::1]", ":1\n"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageProblem, match=r"--metrics takes \[HOST\]:PORT"):
        split_address(address)


def test_an_address_that_is_taken_or_not_here() -> None:
    loop = FakeLoop()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for wrong, why in (
            (address, "Address already in use"),
            ("192.0.2.1:9400", "Cannot assign"),
            ("no-such-host.invalid:9400", "cannot serve metrics at no-such-host.invalid:9400: "),
        ):
            with pytest.raises(EnvironmentProblem, match=why):
                Exporter(wrong, loop.watch, loop.unwatch)
    loop.unwatch(0)


def test_the_command_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nicps.agent.agent.need_root", lambda: None)
    folders = ["--work", str(tmp_path), "--runs", str(tmp_path / "runs"), "--user", "root"]
    assert cli.main(["join", "--iface", "none", *folders, "--metrics", "9400"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("nicps: error: --metrics takes") and text.count("\n") == 1


def test_every_figure_has_its_name_and_its_help(served: tuple[Exporter, list[Status]]) -> None:
    of, statuses = served
    told = {"loss": 0.25, "accuracy": 0.5, "epoch": 1.5, "trained_rounds": 99}
    told |= {"step_seconds": 0.5, "wait_seconds": 0.1, "predicted_seconds": 0.4}
    last = replace(look(10.0, 100), progress=told, control_refused={"forged": 3})
    assert last.activity is not None
    channels = channel(0, 70), channel(1, 90, 3)
    statuses.append(replace(last, activity=replace(last.activity, channels=channels)))
    text = fetch(of)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    names = {family.name.removesuffix("_total") for family in FAMILIES} | {ROUND_SECONDS}
    assert families.keys() == names
    assert all(family.documentation for family in families.values())
    values = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
    assert values["nicps_rounds_total",] == 100
    assert values["nicps_training_loss",] == 0.25
    assert values["nicps_member_samples_total", "h3", "3"] == 2000
    assert values["nicps_control_refused_total", "forged"] == 3
    assert values["nicps_channel_rounds_total", "0"] == 70
    assert values["nicps_channel_bytes_total", "1"] == 90_000
    assert (
        values["nicps_channel_urgency", "1"] == 1 and values["nicps_channel_open_round", "0"] == 17
    )
    waited = {key[1:]: value for key, value in values.items() if "channel_member_awaited" in key[0]}
    assert len(waited) == 6 and [key for key, value in waited.items() if value] == [
        ("1", "h3", "3")
    ]
    assert values["nicps_training_step_predicted_seconds",] == 0.4
    assert values["nicps_xdp_frames_total", "malformed"] == 7
    assert values["nicps_interface_bytes_total", "received"] == 100_000_000
    assert values["nicps_round_seconds_count",] == 100
    assert values["nicps_round_seconds_bucket", "1.0"] == 100
    assert values["nicps_round_seconds_sum",] == pytest.approx(10.0)


def test_what_is_not_there_is_not_exported() -> None:
    """No job: a program's last figures are no longer its. An interface that has gone has none."""
    of = look(1.0, 1)
    assert of.activity is not None
    gone = replace(of.activity, traffic=None)
    told = {"loss": float("nan"), "accuracy": True, "epoch": "3"}
    for status in (replace(of, job=None, progress={"loss": 1.0}), replace(of, progress=told)):
        collected = StatusCollector(replace(status, activity=gone)).collect()
        names = {metric.name for metric in collected}
        assert "nicps_rounds" in names
        assert not {n for n in names if re.match("nicps_(training|interface)_", n)}


def test_many_ask_and_the_loop_is_asked_seldom(served: tuple[Exporter, list[Status]]) -> None:
    of, _ = served
    asked = []
    status = of._status
    assert status is not None
    of._status = lambda: asked.append(1) or status()  # type: ignore[func-returns-value]
    began = time.monotonic()
    for _ in range(20):
        fetch(of)
    assert len(asked) <= 1 + (time.monotonic() - began) / exporter._FRESH_S


def test_a_loop_that_does_not_answer(
    served: tuple[Exporter, list[Status]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, _ = served
    monkeypatch.setattr(exporter, "_ANSWER_S", 0.05)
    monkeypatch.setattr(of, "_asked", exporter.queue.SimpleQueue())
    monkeypatch.setattr(of, "_make_status", lambda: None)
    of._watch(of._bell, lambda: None)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        fetch(of)


def test_clients_that_never_come_to_an_end(
    served: tuple[Exporter, list[Status]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say a byte now and then. More of them than there is room for are let go, and all of them in the end."""
    of, _ = served
    monkeypatch.setattr(exporter, "_REQUEST_S", 0.5)
    host, port = of.url.removeprefix("http://").removesuffix("/metrics").split(":")
    others = threading.active_count()
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection((host, int(port)), 20.0))
            for _ in range(2 * exporter._MOST_CLIENTS)
        ]
        ended: set[int] = set()
        deadline = time.monotonic() + 20
        while len(ended) < len(slow):
            assert time.monotonic() < deadline, ended
            assert threading.active_count() - others <= exporter._MOST_CLIENTS
            for n, client in enumerate(slow):
                with contextlib.suppress(TimeoutError):
                    try:
                        client.settimeout(0.001)
                        client.send(b"G")
                        if not client.recv(1):
                            ended.add(n)
                    except OSError as error:
                        if not isinstance(error, TimeoutError):
                            ended.add(n)
        assert "nicps_rounds_total 100.0" in fetch(of)


@pytest.mark.parametrize(
    "request_line",
    [
        b"\x00\xff" * 200,
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request(served: tuple[Exporter, list[Status]], request_line: bytes) -> None:
    of, _ = served
    host, port = of.url.removeprefix("http://").removesuffix("/metrics").split(":")
    answer = b""
    with (
        contextlib.suppress(OSError),  # it may be cut off before it has said all
        socket.create_connection((host, int(port)), 20.0) as client,
    ):
        client.sendall(request_line)
        client.shutdown(socket.SHUT_WR)
        answer = client.recv(1 << 16)
    assert not answer or b" 4" in answer.splitlines()[0] or b"<p>Error code: 4" in answer
    assert "nicps_rounds_total 100.0" in fetch(of)
