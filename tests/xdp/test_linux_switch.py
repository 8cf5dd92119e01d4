# SPDX-License-Identifier: Apache-2.0
"""The real XDP program of a Linux switch against the model (tests/linux_switch.py): every place, sum and remainder.

The sequences are those of `tests/vectors/linux_switch`, and random ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps import wire
from nicps.wire import FrameType
from tests import switch_replay
from tests.linux_switch import SwitchModel, SwitchScene
from tests.model import DROP, Outcome
from tests.replay import load
from tests.stripes import NETWORK, signed
from tests.xdp.switch_target import SwitchTarget

SEEDS, CHUNK = 400, 100
#: How often a hundred sequences must come to what, at the least; about half of what was seen.
LEAST = {"gathered": 1000, "summed": 500, "carried": 400, "left_out": 150, "answered": 600}
LEAST |= {"drop": 4000, "redirect": 500, "tx": 600, "pass": 120}
LEAST |= {"duplicate": 1500, "malformed": 800, "round": 80, "view": 500, "disabled": 80}
LEAST |= {"truncated": 80, "stranger": 30, "shift": 25, "range": 10, "replayed": 30, "forged": 8}
LEAST |= {"OtherView": 400, "Differing": 20, "TooLong": 7}


@pytest.fixture(scope="module")
def target() -> Iterator[SwitchTarget]:
    made = SwitchTarget()
    yield made
    made.close()


@pytest.mark.parametrize("path", switch_replay.SEQUENCES, ids=lambda path: path.stem)
def test_sequences(target: SwitchTarget, path: Path) -> None:
    """Each step as the sequence says; the model ends as it says, and the program's maps are the model's."""
    sequence = load(path)
    model = switch_replay.model_of(sequence)
    target.begin(model)
    switch_replay.replay(sequence, model, target)
    target.same_state(model)


@pytest.mark.short("0", "100")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_sequences(target: SwitchTarget, first: int) -> None:
    """Each frame is treated as the model says; every sum, and every remainder, is the same bit for bit."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        scene = SwitchScene(seed)
        model = scene.model
        target.begin(model)
        for _ in range(8):
            target.enter(model)
            for at, frame in enumerate(scene.frames(16)):
                expected, found = model.run(frame), target.run(frame)
                assert found == expected, f"seed {seed}, frame {at}"
                reached.update(found.counters)
                reached[found.verdict] += 1
            places = [place for pair in model.places.values() for place in pair if place]
            reached["carried"] += sum(place.carried.any() and place.whole for place in places)
            reached.update(type(message).__name__ for message in model.messages)
            target.same_state(model)
            scene.go_on()
    rare = {name: reached[name] for name, least in LEAST.items() if reached[name] < least}
    assert not rare, reached


@pytest.mark.parametrize("kind", [FrameType.CONTRIBUTION, FrameType.ASK])
@pytest.mark.parametrize("channel", [1, 7])
def test_a_switch_has_one_channel(target: SwitchTarget, kind: FrameType, channel: int) -> None:
    """Fragments of another one would be added to those of the same number."""
    model = SwitchModel(frozenset({1, 2}), 3, 8, 5)
    target.begin(model)
    target.enter(model)
    flags = wire.channel_flags(channel)
    header = wire.Header(network=NETWORK, view=5, round=7, sender=1, flags=flags)
    body = wire.Contribution(0b11, 1, 3, 1, 8, -9, -9)
    frame = signed(1, kind, header, body, bytes(wire.PAYLOAD_BYTES), wire.SWITCH, b"")
    assert target.run(frame) == model.run(frame) == Outcome(DROP, ("mode",))
    target.same_state(model)
