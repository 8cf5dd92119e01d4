# SPDX-License-Identifier: Apache-2.0
"""Runs the sequences of `tests/vectors/sequences` against what behaves like the XDP program."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from tests.model import BANKS, Config, Outcome, XdpModel
from tests.vectors import encode

SEQUENCES = sorted((Path(__file__).parent / "vectors" / "sequences").glob("*.json"))


@dataclass
class State:
    """The maps in one form for all; what was never written is left out.

    progress: (bank, sender) -> (view, round, count); slots: (bank, fragment) -> (view, round,
    members seen); accumulators: int64 (2, blocks, 1440); ring: (generation, hop) seen, the same of
    the last token bounced, and how many were; windows: sender -> highest number of fragments, of tokens,
    of repeats.
    """

    progress: dict[tuple[int, int], tuple[int, int, int]]
    slots: dict[tuple[int, int], tuple[int, int, tuple[int, ...]]]
    accumulators: NDArray[np.int64]
    ring: tuple[tuple[int, int], tuple[int, int], int]
    windows: dict[int, tuple[int, int, int]]


class Target(Protocol):
    """The model, or the program itself."""

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Write into the configuration."""

    def enter(self, view: int) -> None:
        """Be in that view, of which no token has been seen."""

    def run(self, frame: bytes) -> Outcome:
        """Give it one frame."""

    def peek(self, frame: bytes) -> Outcome:
        """What it would make of a frame; everything is as before."""

    def state(self) -> State:
        """What the maps hold."""


def halves(value: int) -> tuple[int, int]:
    """View and round of a tag, generation and hop of a token."""
    return value >> 32, value & 0xFFFFFFFF


def bits(mask: int) -> tuple[int, ...]:
    """Numbers of the members whose bits are set: member k has bit k - 1."""
    return tuple(number for number in range(1, 65) if mask >> number - 1 & 1)


class ModelTarget:
    """The Python model."""

    def __init__(self, config: Mapping[str, Any], members: list[bytes], key: bytes = b"") -> None:
        self.model = XdpModel(Config(**config), members, key)

    def configure(self, changes: Mapping[str, Any]) -> None:
        self.model.configure(changes)

    def enter(self, view: int) -> None:
        self.model.configure({"view": view})
        self.model.seen = 0

    def run(self, frame: bytes) -> Outcome:
        return self.model.run(frame)

    def peek(self, frame: bytes) -> Outcome:
        return deepcopy(self.model).run(frame)

    def state(self) -> State:
        model = self.model
        return State(
            {at: (*halves(tag), count) for at, (tag, count) in model.progress.items()},
            {at: (*halves(s.tag), bits(s.seen)) for at, s in model.slots.items() if s.seen},
            model.accumulators,
            (halves(model.seen), halves(model.bounced), model.bounces),
            {
                sender: (w.highest, w.token, w.repeat)
                for sender, w in model.windows.items()
                if w.highest or w.token
            },
        )


@dataclass
class Both:
    """Two of which each must do as the other does."""

    one: Target
    other: Target

    def configure(self, changes: Mapping[str, Any]) -> None:
        self.one.configure(changes)
        self.other.configure(changes)

    def enter(self, view: int) -> None:
        self.one.enter(view)
        self.other.enter(view)

    def run(self, frame: bytes) -> Outcome:
        outcome = self.one.run(frame)
        assert outcome == self.other.run(frame), frame.hex()
        return outcome

    def peek(self, frame: bytes) -> Outcome:
        outcome = self.one.peek(frame)
        assert outcome == self.other.peek(frame), frame.hex()
        return outcome

    def state(self) -> State:
        state = self.one.state()
        compare(state, self.other.state())
        return state


def load(path: Path) -> dict[str, Any]:
    """One sequence."""
    sequence: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return sequence


def member_macs(sequence: Mapping[str, Any]) -> list[bytes]:
    """The members' addresses, that of member 1 first."""
    return [bytes.fromhex(text.replace(":", "")) for text in sequence["members"]]


def view_key(sequence: Mapping[str, Any]) -> bytes:
    """The view's key; empty on a trusted LAN."""
    return bytes.fromhex(sequence.get("key", ""))


def expected_state(sequence: Mapping[str, Any]) -> State:
    """What a sequence says of the end."""
    end = sequence["end"]
    accumulators = np.zeros((BANKS, sequence["config"]["blocks"], wire.BLOCK_LANES), np.int64)
    for entry in end["accumulators"]:
        block = accumulators[entry["bank"], entry["block"]]
        place = block.view(np.uint8)[entry["byte"] :] if "byte" in entry else block[entry["lane"] :]
        place[: len(entry["values"])] = entry["values"]
    ring = end["ring"]
    return State(
        {
            (e["round"] & 1, e["sender"]): (e["view"], e["round"], e["count"])
            for e in end["progress"]
        },
        {
            (e["round"] & 1, e["fragment"]): (e["view"], e["round"], tuple(e["seen"]))
            for e in end["slots"]
        },
        accumulators,
        (tuple(ring["seen"]), tuple(ring["bounced"]), ring["bounces"]),
        {e["sender"]: (e["highest"], e["token"], e["repeat"]) for e in end["windows"]},
    )


def compare(found: State, expected: State) -> None:
    """Both states are the same."""
    assert found.progress == expected.progress
    assert found.slots == expected.slots
    differ = np.argwhere(found.accumulators != expected.accumulators)
    assert not len(differ), [
        (*at, int(found.accumulators[*at]), int(expected.accumulators[*at])) for at in differ[:8]
    ]
    assert found.ring == expected.ring
    assert found.windows == expected.windows


def check_step(outcome: Outcome, step: Mapping[str, Any], where: str) -> None:
    """The outcome is what the step says."""
    assert outcome.verdict == step["verdict"], where
    assert sorted(outcome.counters) == sorted(step["counters"]), where
    if "heard" in step:
        assert outcome.heard == step["heard"], where
    if step["verdict"] == "tx":
        assert outcome.out is not None, where
        assert outcome.out.hex() == encode.from_text(step["out"]).hex(), where


def run_steps(
    sequence: Mapping[str, Any],
    runs: Mapping[str, Callable[[bytes], Outcome]],
    configure: Callable[[Mapping[str, Any]], None],
    check: Callable[[Outcome, Mapping[str, Any], str], None] = check_step,
) -> None:
    """Give each of a sequence's frames to all of `runs`, which are named, and check what comes of it.

    Args:
        configure: makes the changes between two frames.
    """
    for number, step in enumerate(sequence["steps"], 1):
        where = f"{sequence['name']}, step {number}: {step['say']}"
        if "config" in step:
            configure(step["config"])
            continue
        frame = encode.from_text(step["frame"])
        for name, run in runs.items():
            check(run(frame), step, f"{name}: {where}")


def replay(sequence: Mapping[str, Any], target: Target) -> None:
    """Run a sequence and check every step and the end."""
    run_steps(sequence, {type(target).__name__: target.run}, target.configure)
    compare(target.state(), expected_state(sequence))
