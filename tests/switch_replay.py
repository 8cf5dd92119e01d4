# SPDX-License-Identifier: Apache-2.0
"""Runs the sequences of `tests/vectors/linux_switch` against the model, and the XDP program beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nicps import wire
from nicps.dataplane.switch import Differing, Message, OtherView, TooLong, Version
from tests.linux_switch import Place, SwitchModel
from tests.model import Outcome
from tests.replay import bits, run_steps, view_key
from tests.striped_replay import check, check_windows, lanes_of, live_members, numbers_of, tag_of

SEQUENCES = sorted((Path(__file__).parent / "vectors" / "linux_switch").glob("*.json"))


class Target(Protocol):
    """The program, which follows the model's configuration."""

    def enter(self, model: SwitchModel) -> None:
        """The model's view is in force."""

    def run(self, frame: bytes) -> Outcome:
        """Give it one frame."""


def model_of(sequence: Mapping[str, Any]) -> SwitchModel:
    """The model of a sequence's switch as it is at the start."""
    config, live = sequence["config"], live_members(sequence)
    return SwitchModel(
        live,
        config["room"],
        config["width"],
        config["view"],
        bool(config["enabled"]),
        view_key(sequence),
    )


def check_end(model: SwitchModel, end: Mapping[str, Any]) -> None:
    """The state is what the sequence says of the end."""
    places = {
        (index, place.tag): place
        for index, pair in model.places.items()
        for place in pair
        if place is not None
    }
    expected = {(row["index"], tag_of(row)): row for row in end["places"]}
    assert places.keys() == expected.keys()
    for at, row in expected.items():
        check_place(places[at], row, model.width)
    check_windows(model.windows, end)
    assert model.messages == [message_of(row) for row in end["messages"]]


def check_place(place: Place, row: Mapping[str, Any], width: int) -> None:
    """It is what the sequence says."""
    where = f"fragment {row['index']}, round {row['round']}"
    assert place.version == version_of(row), where
    assert bits(place.seen) == tuple(row["seen"]), where
    assert (place.total == numbers_of(row["units"], width)).all(), where
    assert place.whole == ("sum" in row), where
    if place.whole:
        exponent = row["sum"]["exponent"]
        assert place.exponent == exponent, where
        finite = exponent != wire.NOT_FINITE
        assert not finite or place.lanes == lanes_of(row["sum"]["lanes"], width), where


def version_of(row: Mapping[str, Any]) -> Version:
    """What contributions say of their sum."""
    names = ("members", "fragments", "unit", "number", "behind")
    return Version(*(row[name] for name in names))


def message_of(row: Mapping[str, Any]) -> Message:
    """A message to the control process."""
    if row["kind"] == "size":
        return TooLong(row["fragments"])
    if row["kind"] == "view":
        return OtherView(row["view"])
    assert row["kind"] == "differs"
    who = {name: row[name] for name in ("view", "round", "index", "sender")}
    return Differing(**who, first=version_of(row["first"]), refused=version_of(row["refused"]))


def replay(sequence: Mapping[str, Any], model: SwitchModel, target: Target | None = None) -> None:
    """Check every step, and the end at the model; `target` has begun as the model."""
    runs = {"model": model.run} | ({"program": target.run} if target is not None else {})

    def change(changes: Mapping[str, Any]) -> None:
        assert changes.keys() == {"view"} and not model.key
        model.view = changes["view"]
        if target is not None:
            target.enter(model)

    run_steps(sequence, runs, change, check)
    check_end(model, sequence["end"])
