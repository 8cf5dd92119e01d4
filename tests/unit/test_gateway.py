# SPDX-License-Identifier: Apache-2.0
"""The gateway's messages, against a session without a network."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps import gateway, gradient_json
from nicps.gateway import run
from nicps.session.channel import Channel
from tests.fake_session import FakeNetwork, FakeSession

PARAMETERS = [{"name": "w", "shape": [2, 2]}, {"name": "b", "shape": [2]}]
MODEL = [{**entry, "kind": "parameter", "dtype": "float32"} for entry in PARAMETERS]
SETTINGS = {"batch": 8, "quorum": 1.0}


class Program:
    """A training program's end of the connection; it waits 10 s for an answer at most."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(10.0)

    def send(self, body: bytes) -> None:
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def receive(self) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self.socket.recv(4, socket.MSG_WAITALL))
        message = json.loads(self.socket.recv(length, socket.MSG_WAITALL))
        assert isinstance(message, dict)
        return message

    def ask(self, op: Any, **values: Any) -> dict[str, Any]:
        self.send(json.dumps({"op": op, **values}).encode())
        return self.receive()

    def ready(self) -> None:
        assert self.ask("ready", parameters=PARAMETERS, digest="d") == {"op": "ok"}


class Setting:
    """Two members: `program` is one of them through a gateway, `other` a session of the test's."""

    def __init__(self, number: int, model: Any) -> None:
        self.network = FakeNetwork(2, 8)
        self.session = self.network.session(number, SETTINGS)
        self.session.workdir = "/work"
        self.other: FakeSession = self.network.session(3 - number, SETTINGS)
        ours, theirs = socket.socketpair()
        self.program = Program(theirs)
        self._ours = Channel(ours)
        self.thread = threading.Thread(target=lambda: run(self._ours, self.session, model))  # type: ignore[arg-type]
        self.thread.start()
        self._aside: list[threading.Thread] = []
        self.welcome = self.program.receive()

    def aside(self, work: Callable[[], object]) -> None:
        """Do that in a thread, which ends before the test does."""
        self._aside.append(threading.Thread(target=work))
        self._aside[-1].start()

    def close(self) -> None:
        for thread in self._aside:
            thread.join(10.0)
            assert not thread.is_alive()
        self.other.fail("the test is over")
        self.program.socket.close()
        self.thread.join(10.0)
        self._ours.close()
        assert not self.thread.is_alive()

    def both_ready(self) -> None:
        """Both members are ready, and in the first phase."""
        other = threading.Thread(target=lambda: self.other.ready(6, "d"))
        other.start()
        self.program.ready()
        other.join(10.0)
        assert self.other.next_phase().kind == "train"
        answer = self.program.ask("next")
        begun = {"op": "phase", "kind": "train", "first_round": 1, "number": 1, "shares": [4, 4]}
        lead = self.session.number == 1
        assert answer == begun | {"view": 1, "live": [1, 2], "lead": lead}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Setting]]:
    monkeypatch.setattr(gateway, "GRACE_S", 0.0)
    made: list[Setting] = []

    def build(number: int = 2, model: Any = MODEL) -> Setting:
        made.append(Setting(number, model))
        return made[-1]

    yield build
    for setting in made:
        setting.close()


def gradient(samples: int = 4, **changes: Any) -> dict[str, Any]:
    """Six different numbers, `changes` in the second parameter."""
    named = {"w": np.float32([[1, 2], [3, 0.1]]), "b": np.float32([-0.0, 1e-45])}
    document: dict[str, Any] = json.loads(gradient_json.dumps(named, samples))
    document["parameters"][1].update(changes)
    return document


def test_every_message_is_documented(make: Callable[..., Setting], checkout: Path) -> None:
    text = (checkout / "docs" / "socket.md").read_text()
    setting = make()
    known = setting.program.ask("?")["message"].partition("; the gateway knows ")[2].split(", ")
    assert len(known) == 14
    for op in known:
        assert f"\n| `{op}` | | |" in text


def test_welcome(make: Callable[..., Setting]) -> None:
    assert make().welcome == {
        "op": "welcome",
        "version": 1,
        "number": 2,
        "members": 2,
        "name": "h2",
        "view": 1,
        "lead": False,
        "settings": SETTINGS,
        "workdir": "/work",
    }


def test_a_whole_job(make: Callable[..., Setting]) -> None:
    """Node 1 without PyTorch: a round, a test, a round without it, the end."""
    setting = make(1)
    program, other = setting.program, setting.other
    setting.both_ready()
    state = program.ask("progress", round=1, samples=2)
    assert state == {"op": "state", "round": 1, "need": None, "closed": False}
    other.progress(1, 4)
    assert program.ask("progress", round=1, samples=3)["need"] == 4
    assert program.ask("contribute", round=1, gradient=gradient()) == {"op": "ok"}
    other.contribute(1, np.float32([1, 1, 1, 1, 0, 0]), 4)
    commit = program.ask("wait", round=1)
    assert commit["samples"] == 8
    assert commit["counted"] == {"1": 4, "2": 4}
    shapes = {"w": (2, 2), "b": (2,)}
    total, samples = gradient_json.read(commit["gradient"], shapes)
    assert samples == 8
    assert total["w"].tolist() == [[2, 3], [4, float(np.float32(0.1) + np.float32(1))]]
    assert total["b"].view(np.uint32).tolist() == [0, 1]
    assert (commit["view"], commit["live"], commit["lead"]) == (1, [1, 2], True)
    assert program.ask("applied", round=1, digest="abc") == {"op": "ok"}
    assert setting.network.digests == {1: {1: "abc"}}

    assert program.ask("report", values={"loss": 0.5}) == {"op": "ok"}
    assert setting.session.reports == [{"loss": 0.5}]
    assert program.ask("alive") == {"op": "ok"}
    assert setting.session.signs_of_life == 1
    assert "checkpoint" not in commit
    assert program.ask("decide", round=1, what="test", checkpoint=True) == {"op": "ok"}
    assert setting.network.saves, "it asks for one after the next training round"
    assert program.ask("next")["kind"] == "test"
    assert other.next_phase().kind == "test"
    setting.aside(lambda: other.tally(2, 5, 1))
    tally = program.ask("tally", round=2, succeeded=3, failed=2)
    assert tally.items() >= {"op": "tallied", "round": 2, "succeeded": 8, "failed": 3}.items()
    program.ask("decide", round=2, what="end")
    assert program.ask("next")["kind"] == "end"
    program.socket.close()
    setting.thread.join(10.0)
    assert setting.session.failure is None


def test_the_phase_ends_before_the_round_is_committed(make: Callable[..., Setting]) -> None:
    setting = make(2)
    setting.both_ready()
    program = setting.program
    program.ask("contribute", round=1, gradient=gradient())
    setting.other.decide(1, "test")
    assert program.ask("progress", round=1, samples=4)["closed"]
    assert program.ask("wait", round=1) == {"op": "discarded", "round": 1}
    assert program.ask("next")["kind"] == "test"
    setting.aside(lambda: setting.other.decide(2, "continue"))
    tally = program.ask("tally", round=2, succeeded=3, failed=2)
    assert tally == {"op": "discarded", "round": 2}
    assert program.ask("next")["kind"] == "train"


def test_a_lead_that_dies_leaves_the_decision_to_the_next(make: Callable[..., Setting]) -> None:
    """R22: every member says what should come next; whoever is the lead then is heard."""
    setting = make(2)
    setting.both_ready()
    program, network = setting.program, setting.network
    program.ask("contribute", round=1, gradient=gradient())
    setting.other.contribute(1, np.ones(6, np.float32), 4)
    program.ask("wait", round=1)
    program.ask("applied", round=1, digest="")
    assert program.ask("decide", round=1, what="test") == {"op": "ok"}
    assert network.decisions == []
    with network.changed:
        network.evict(1)
    assert network.decisions == [(1, "test")]
    answer = program.ask("next")
    assert (answer["kind"], answer["lead"], answer["live"]) == ("test", True, [2])
    assert answer["shares"] == [0, 1]


def test_state_is_saved_and_loaded(make: Callable[..., Setting], tmp_path: Path) -> None:
    setting = make(2)
    setting.both_ready()
    program, network = setting.program, setting.network
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        network.sessions[number].workdir = str(tmp_path / str(number))
    with network.changed:
        network.evict(2)
        network.give_state(2)
    (tmp_path / "1" / "state.npz").write_bytes(b"state")
    phase = setting.other.next_phase()
    setting.other.saved(phase.number, 7, "d7")
    answer = program.ask("next")
    assert answer["kind"] == "load"
    assert (tmp_path / "2" / "state.npz").read_bytes() == b"state"
    assert program.ask("loaded", number=answer["number"], digest="d7") == {"op": "ok"}
    assert program.ask("next")["live"] == [1, 2]
    with network.changed:
        network.evict(1)
        network.give_state(1)
    answer = program.ask("next")
    assert answer["kind"] == "save"
    (tmp_path / "2" / "state.npz").write_bytes(b"state 2")
    assert program.ask("saved", number=answer["number"], round=7, digest="d7") == {"op": "ok"}
    assert (tmp_path / "1" / "state.npz").read_bytes() == b"state 2"
    assert program.ask("checkpoint", round=7) == {"op": "ok"}
    assert network.checkpoints == [(2, 7)]


def test_a_sum_must_be_applied(make: Callable[..., Setting]) -> None:
    setting = make(2)
    setting.both_ready()
    setting.program.ask("contribute", round=1, gradient=gradient())
    setting.other.contribute(1, np.ones(6, np.float32), 4)
    setting.program.ask("wait", round=1)
    answer = setting.program.ask("progress", round=2, samples=1)
    refused(setting, answer, "'progress' comes before round 1 is 'applied'")


WRONG_READY = [
    ({}, 'ready: "parameters" is missing; it must be a list of objects'),
    ({"parameters": PARAMETERS}, 'ready: "digest" is missing; it must be a text of at most 128'),
    ({"digest": "d" * 129, "parameters": PARAMETERS}, '"digest" has 129 characters, not at most'),
    ({"digest": "d", "parameters": 3}, '"parameters" is 3, not a list'),
    ({"digest": "d", "parameters": [3]}, '"parameters", entry 1 is 3, not an object'),
    ({"digest": "d", "parameters": []}, "there are no parameters"),
    (
        {"digest": "d", "parameters": [{"name": "w", "shape": [-1]}]},
        '"shape", entry 1 is -1, not a',
    ),
    ({"digest": "d", "parameters": PARAMETERS[:1] * 2}, "parameter 'w' is there twice"),
    ({"digest": "d", "parameters": PARAMETERS[:1]}, "parameter 'b' is missing"),
    ({"digest": "d", "parameters": PARAMETERS[::-1]}, "parameter 'b' is out of order"),
    ({"digest": "d", "parameters": [{"name": "w", "shape": [4]}]}, "'w': shape is [4], the model"),
    ({"digest": "d", "parameters": [{"name": "x", "shape": [4]}]}, "'x': the model handed out has"),
]


@pytest.mark.parametrize(("message", "reason"), WRONG_READY, ids=range(len(WRONG_READY)))
def test_ready_refused(make: Callable[..., Setting], message: Any, reason: str) -> None:
    setting = make()
    refused(setting, setting.program.ask("ready", **message), reason)


def test_a_job_with_rank_has_no_place_for_a_program_that_speaks_json(
    make: Callable[..., Setting],
) -> None:
    setting = make()
    setting.session.settings["rank"] = 2
    answer = setting.program.ask("ready", digest="d", parameters=PARAMETERS)
    refused(setting, answer, "a step of this job takes several rounds (rank or bucket_mb), and one")


def test_a_job_with_servers_has_no_place_for_a_program_that_speaks_json(
    make: Callable[..., Setting],
) -> None:
    setting = make()
    setting.session.settings["system"] = "S"
    answer = setting.program.ask("ready", digest="d", parameters=PARAMETERS)
    refused(setting, answer, "this job has parameter servers (system=S)")


def refused(setting: Setting, answer: dict[str, Any], reason: str) -> None:
    """Both sides have been told, in one line."""
    assert answer["op"] == "error"
    assert answer["exit_code"] == 5
    assert reason in answer["message"]
    assert "\n" not in answer["message"]
    setting.thread.join(10.0)
    assert setting.session.failure == answer["message"]


WRONG = [
    ({"op": "dance"}, "the gateway knows no 'dance'; the gateway knows ready, next"),
    ({"op": ["next"]}, '"op" is a list, not a text'),
    ({"op": "ready", "digest": "d", "parameters": PARAMETERS}, "'ready' comes twice"),
    ({"op": "progress", "round": 2, "samples": 1}, "round 2 is not open, round 1 is"),
    ({"op": "progress", "round": True, "samples": 1}, '"round" is True, not a whole number'),
    ({"op": "progress", "round": 1, "samples": 5}, "not a whole number from 0 to 4"),
    ({"op": "tally", "round": 1, "succeeded": 1, "failed": 0}, "a phase of kind 'test', but the"),
    ({"op": "applied", "round": 1, "digest": ""}, "applied: there is no sum to be applied"),
    ({"op": "saved", "number": 1, "round": 0, "digest": ""}, "a phase of kind 'save'; 1 is none"),
    ({"op": "loaded", "number": 1, "digest": ""}, "'loaded' answers a phase of kind 'load'; 1 is"),
    ({"op": "checkpoint", "round": -1}, '"round" is -1, not a whole number from 0'),
    (
        {"op": "decide", "round": 1, "what": "stop"},
        '"what" is \'stop\', not "continue", "test" or "end"',
    ),
    ({"op": "report", "values": 1}, '"values" is 1, not an object'),
    ({"op": "fail", "message": "no\nmore"}, "no more"),
    (
        {"op": "contribute", "round": 1, "gradient": {}},
        'round 1: the gradient is refused: this is no gradient: "fo',
    ),
    ({"op": "contribute", "round": 1, "gradient": gradient(5)}, "over 5 samples; this member's sh"),
]
MISFITS = [
    ({"name": "x"}, "refused: parameter 'x': the model has none of that name"),
    ({"shape": [3]}, "refused: parameter 'b': shape is [3], the model's is [2]"),
    ({"dtype": "float64"}, "refused: parameter 'b': dtype is 'float64'"),
    ({"values": [1]}, "refused: parameter 'b': 1 values"),
    ({"values": [1, 1e39]}, "refused: parameter 'b': value 1 is inf, not finite"),
]
WRONG += [
    ({"op": "contribute", "round": 1, "gradient": gradient(**changes)}, reason)
    for changes, reason in MISFITS
]


@pytest.mark.parametrize(("message", "reason"), WRONG, ids=range(len(WRONG)))
def test_refused_in_a_round(make: Callable[..., Setting], message: Any, reason: str) -> None:
    setting = make()
    setting.both_ready()
    refused(setting, setting.program.ask(**message), reason)


def test_a_second_gradient(make: Callable[..., Setting]) -> None:
    setting = make()
    setting.both_ready()
    setting.program.ask("contribute", round=1, gradient=gradient())
    answer = setting.program.ask("contribute", round=1, gradient=gradient())
    refused(setting, answer, "round 1: a second gradient")


def test_before_ready(make: Callable[..., Setting]) -> None:
    setting = make()
    refused(setting, setting.program.ask("next"), "'next' comes before 'ready'")


@pytest.mark.parametrize("body", [b"{", b"[]", b""], ids=["cut off", "no object", "empty"])
def test_no_json(make: Callable[..., Setting], body: bytes) -> None:
    setting = make()
    setting.program.send(body)
    assert "sent no JSON" in setting.program.receive()["message"]
    setting.thread.join(10.0)
    assert str(setting.session.failure).startswith("the training program has left: ")


def test_too_long(make: Callable[..., Setting]) -> None:
    setting = make()
    setting.program.socket.sendall(b"\xff" * 8)
    assert "4294967295 bytes is larger" in setting.program.receive()["message"]


def test_the_program_goes(make: Callable[..., Setting]) -> None:
    setting = make()
    setting.program.socket.close()
    setting.thread.join(10.0)
    assert str(setting.session.failure).startswith("the training program has left: ")


def test_the_job_is_stopped(make: Callable[..., Setting]) -> None:
    setting = make()
    setting.both_ready()
    setting.program.ask("contribute", round=1, gradient=gradient())
    setting.other.fail("h1 is tired")
    answer = setting.program.ask("wait", round=1)
    assert answer == {"op": "error", "message": "h1 is tired", "exit_code": 5}
