# SPDX-License-Identifier: Apache-2.0
"""Parameter servers in the real XDP program against the model (tests/servers_model.py): every parameter bit for bit.

The sequences are those of `tests/vectors/servers`, and random ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nicps import wire
from nicps.wire import FrameType, Refusal
from tests import served_replay
from tests.model import DROP, Outcome
from tests.replay import load
from tests.servers import signed
from tests.servers_model import ServersModel
from tests.servers_scene import Scene
from tests.stripes import MACS, NETWORK
from tests.xdp.served import Target

SEEDS, CHUNK = 400, 100
#: What a chunk must have come to, at least.
LEAST = {"pushed": 500, "pulled": 500, "gathered": 200, "summed": 50, "stored": 150}
LEAST |= {"acknowledged": 150, "passed_on": 30, "duplicate": 500, "range": 500, "stranger": 300}
LEAST |= {"round": 300, "malformed": 300, "shift": 50, "full": 5, "view": 100, "astray": 20}
LEAST |= {"truncated": 20, "replayed": 20, "forged": 10, "echo": 20, "type": 5, "settled": 20}
LEAST |= {"HELD": 500, "NONE": 200, "SYNCHRONISING": 200, "NOT_YET": 50, "ABSENT": 50, "FULL": 5}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


@pytest.mark.parametrize("path", served_replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences(target: Target, path: Path) -> None:
    """Each step as the sequence says; the model ends as it says, and the program's maps are the model's."""
    sequence = load(path)
    model = served_replay.model_of(sequence)
    target.begin(model)
    served_replay.replay(sequence, model, target)
    target.same_state(model)


def answer(found: Outcome) -> str:
    """The answer: parameters, or the reason of a short frame; empty: none."""
    if found.out is None:
        return ""
    frame = wire.unpack(found.out[wire.ETHERNET_BYTES :])
    if isinstance(frame.body, wire.Taken):
        return Refusal(frame.body.reason).name
    return frame.type.name


@pytest.mark.short("0", "100")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_sequences(target: Target, first: int) -> None:
    """Each frame is treated as the model says; maps and messages are the same."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        scene = Scene(seed)
        model = scene.model
        target.begin(model)
        for _ in range(5):
            target.enter(model)
            for at, frame in enumerate(scene.frames(25)):
                expected, found = model.run(frame), target.run(frame)
                assert found == expected, f"seed {seed}, frame {at}"
                reached.update([*found.counters, answer(found)])
            target.same_state(model)
            if scene.go_on():
                target.begin_phase(model)
        reached["settled"] += model.settles
    assert {name: reached[name] for name in LEAST if reached[name] < LEAST[name]} == {}, reached


MODEL = ServersModel(1, frozenset({1, 2, 3}), (1, 2), 32, 4, 5, (7, 8), version=(7, 0))


def pull(sender: int = 3, round_: int = 7, index: int = 0) -> bytes:
    header = wire.Header(network=NETWORK, view=5, round=round_, sender=sender)
    body = wire.Pull(0, 1, index, 4, 0, 32, 0)
    return signed(sender, header, body, bytes(wire.PAYLOAD_BYTES), MACS[0], b"")


def test_a_phase_without_servers_takes_nothing_of_theirs(target: Target) -> None:
    """As hand-outs and tests between two phases of training."""
    model = replace(MODEL, servers=())
    target.begin(model)
    assert target.run(pull()) == model.run(pull()) == Outcome(DROP, ("mode",))


@pytest.mark.parametrize("kind", [FrameType.SUM, FrameType.ASK, FrameType.LACKING])
def test_frames_of_stripes_are_not_taken(target: Target, kind: FrameType) -> None:
    target.begin(MODEL)
    header = wire.Header(network=NETWORK, view=5, round=7, sender=3)
    body = wire.FORMATS[kind][0](0b111, 0, 4, 1, 32, -20, 0, 0)  # type: ignore[call-arg]
    frame = signed(3, header, body, bytes(wire.PAYLOAD_BYTES), MACS[0], b"")
    assert target.run(frame) == Outcome(DROP, ("type",))


def test_an_interface_may_have_padded_the_frame(target: Target) -> None:
    """The short answer is cut behind its body all the same."""
    model = replace(MODEL, homes={})
    target.begin(model)
    frame = pull(round_=8)
    run = target.give(frame + bytes(4))
    expected = model.run(frame)
    assert expected.out is not None and run.frame == expected.out
    assert len(run.frame) == wire.ETHERNET_BYTES + wire.PUSH_HEADER_BYTES == 70
