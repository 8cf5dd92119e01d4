# SPDX-License-Identifier: Apache-2.0
"""The vectors against the definition, scapy and the models of the XDP program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nicps import wire
from nicps.errors import WireError
from nicps.wiretable import STRUCTS, snake
from tests import replay, scapy_layers, served_replay, striped_replay, switch_replay
from tests.vectors import encode, make

pytestmark = pytest.mark.unit

CLASSES = {snake(cls): cls for cls in STRUCTS}
VECTORS = json.loads((make.HERE / "frames.json").read_text("utf-8"))
FRAMES: list[dict[str, Any]] = VECTORS["frames"]


def data_of(vector: dict[str, Any]) -> bytes:
    return bytes.fromhex("".join(p["hex"] for p in vector["parts"])) + encode.from_text(
        vector["tail"]
    )


def frame_of(vector: dict[str, Any]) -> wire.Frame:
    def one(part: dict[str, Any]) -> Any:
        cls = CLASSES[part["struct"]]
        wires = dict(zip(wire.Layout.of(cls).names, wire.Layout.of(cls).wires, strict=True))
        values = {
            name: bytes.fromhex(value).ljust(wires[name].size, b"\0")
            if isinstance(value, str)
            else value
            for name, value in part["fields"].items()
        }
        return cls(**values)

    header, body, *rest = (one(part) for part in vector["parts"])
    groups = wire.FORMATS[wire.FrameType(header.type)][1]
    items = tuple(tuple(item for item in rest if type(item) is cls) for cls, _ in groups)
    return wire.Frame(header, body, items, encode.from_text(vector["tail"]))


def test_files_are_those_that_the_scenarios_make() -> None:
    assert make.drifted() == []


def test_every_type_has_a_vector() -> None:
    assert {frame_of(v).type for v in FRAMES} == set(wire.FrameType)


@pytest.mark.parametrize("vector", FRAMES, ids=lambda v: v["name"])
def test_pack_and_unpack(vector: dict[str, Any]) -> None:
    data, frame = data_of(vector), frame_of(vector)
    assert wire.pack(frame.header, frame.body, *frame.items, tail=frame.tail).hex() == data.hex()
    assert wire.unpack(data) == frame
    assert wire.unpack(data + bytes(7)) == frame  # Ethernet pads short frames


@pytest.mark.parametrize("vector", FRAMES, ids=lambda v: v["name"])
def test_scapy_builds_and_dissects_the_same(vector: dict[str, Any]) -> None:
    source = bytes.fromhex("020000000002")
    data = wire.ethernet(source, data_of(vector))
    assert bytes(scapy_layers.build(source, frame_of(vector))).hex() == data.hex()
    assert scapy_layers.dissect(data) == (source, frame_of(vector))
    assert scapy_layers.dissect(data + bytes(7)) == (source, frame_of(vector))


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda v: v["name"])
def test_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        wire.unpack(bytes.fromhex(vector["hex"]))


@pytest.mark.parametrize("path", replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences_against_the_model(path: Path) -> None:
    sequence = replay.load(path)
    macs, key = replay.member_macs(sequence), replay.view_key(sequence)
    target = replay.ModelTarget(sequence["config"], macs, key)
    replay.replay(sequence, target)


@pytest.mark.parametrize("path", served_replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences_of_servers_against_the_model(path: Path) -> None:
    sequence = replay.load(path)
    served_replay.replay(sequence, served_replay.model_of(sequence))


def test_sequences_of_servers_have_every_outcome() -> None:
    """But for two processors at once (`busy`), and for a host whose agent has not begun (`disabled`)."""
    sequences = [replay.load(path) for path in served_replay.SEQUENCES]
    steps = [step for sequence in sequences for step in sequence["steps"] if "frame" in step]
    assert {counter for step in steps for counter in step["counters"]} == {
        *("pushed", "pulled", "gathered", "summed", "stored", "acknowledged", "passed_on"),
        *("duplicate", "refused", "full", "malformed", "shift", "range", "round", "view"),
        *("stranger", "echo", "astray", "truncated", "type", "mode", "forged", "replayed"),
    }
    answers = [
        wire.unpack(encode.from_text(step["out"])[14:]).body for step in steps if "out" in step
    ]
    reasons = {answer.reason for answer in answers if isinstance(answer, wire.Taken)}
    assert reasons == set(wire.Refusal)


@pytest.mark.parametrize("path", striped_replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences_of_stripes_against_the_model(path: Path) -> None:
    sequence = replay.load(path)
    striped_replay.replay(sequence, striped_replay.model_of(sequence))


@pytest.mark.parametrize("path", switch_replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences_of_a_linux_switch_against_the_model(path: Path) -> None:
    sequence = replay.load(path)
    switch_replay.replay(sequence, switch_replay.model_of(sequence))


def outcomes(paths: list[Path]) -> set[str]:
    """The verdicts and counters that these sequences have."""
    steps = [step for path in paths for step in replay.load(path)["steps"] if "frame" in step]
    return {name for step in steps for name in (step["verdict"], *step["counters"])}


#: Of a host and of a Linux switch, but for two processors at once (`busy`).
ROUNDED = {
    *("drop", "pass", "tx", "gathered", "summed", "answered", "duplicate", "malformed", "shift"),
    *("range", "round", "view", "stranger", "truncated", "mode", "forged", "replayed"),
}


def test_sequences_of_stripes_have_every_outcome() -> None:
    """But for a host whose agent has not begun (`disabled`), and numbers that are used up (`spent`)."""
    found = {"stored", "clocked", "control", "unready", "astray", "echo"}
    assert outcomes(striped_replay.SEQUENCES) == ROUNDED | found


def test_sequences_of_a_linux_switch_have_every_outcome() -> None:
    assert outcomes(switch_replay.SEQUENCES) == ROUNDED | {"redirect", "left_out", "disabled"}


@pytest.mark.parametrize("room", [striped_replay, switch_replay], ids=["stripes", "switch"])
def test_sums_are_made_of_lanes_of_each_width(room: Any) -> None:
    sequences = [replay.load(path) for path in room.SEQUENCES]
    assert {
        (sequence["config"]["width"], "key" in sequence)
        for sequence in sequences
        if any("summed" in step.get("counters", ()) for step in sequence["steps"])
    } == {(8, False), (16, False), (32, False), (8, True)}


def test_lanes_that_are_not_finite_are_not_compared() -> None:
    """They have no meaning, and another data plane may send others."""
    path = next(path for path in striped_replay.SEQUENCES if path.stem == "not-finite")
    sequence = replay.load(path)
    [step] = [step for step in sequence["steps"] if step["say"] == "so the sum is not"]
    frame = encode.from_text(step["out"])
    assert striped_replay.meaningful(frame[:-1] + b"\1") == striped_replay.meaningful(frame)
    finite = frame[:67] + b"\0" + frame[68:-1] + b"\1"
    assert striped_replay.meaningful(finite) == finite


def test_text_form_of_bytes() -> None:
    data = b"\1" + bytes(15) + b"\2" + bytes(16) + b"\3" + bytes(40)
    assert encode.to_text(data, 1) == f"01 {'00' * 15}02 00x16 03 00x40"
    assert encode.from_text(encode.to_text(data, 1)) == data
