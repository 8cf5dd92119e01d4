# SPDX-License-Identifier: Apache-2.0
"""Runs the sequences of `tests/vectors/stripes` against the model, and the XDP program beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nicps import wire
from nicps.dataplane.doorbell import Bell
from tests.model import Outcome
from tests.replay import bits, check_step, halves, member_macs, run_steps, view_key
from tests.stripes import GROUP, I64, LANES, NATIVE, NETWORK, Window, mac_of
from tests.stripes_model import Own, StripesModel
from tests.vectors import encode

SEQUENCES = sorted((Path(__file__).parent / "vectors" / "stripes").glob("*.json"))
_BODY = wire.ETHERNET_BYTES + wire.HEADER_BYTES
_EXPONENT = _BODY + 21
_PAYLOAD = wire.ETHERNET_BYTES + wire.CONTRIBUTION_HEADER_BYTES


class Target(Protocol):
    """The program, which follows the model's configuration."""

    def enter(self, model: StripesModel) -> None:
        """The model's view and rounds are in force."""

    def write_own(self, model: StripesModel) -> None:
        """The model's own lanes are those of the training program."""

    def run(self, frame: bytes) -> Outcome:
        """Give it one frame."""


def live_members(sequence: Mapping[str, Any]) -> frozenset[int]:
    """Numbers of a sequence's members."""
    macs = member_macs(sequence)
    live = frozenset(number for number, mac in enumerate(macs, 1) if any(mac))
    assert all(macs[number - 1] == mac_of(number) for number in live)
    config = sequence["config"]
    assert config["network"] == NETWORK
    assert bytes.fromhex(config["everybody"].replace(":", "")) == GROUP
    return live


def model_of(sequence: Mapping[str, Any]) -> StripesModel:
    """The model of a sequence's host as it is at the start."""
    config, live = sequence["config"], live_members(sequence)
    model = StripesModel(
        config["number"],
        live,
        ({}, {}),
        (config["width"], config["width_next"]),
        config["room"],
        config["blocks"],
        config["view"],
        (config["round"], config["round_high"]),
        view_key(sequence),
        clock=config["clock"],
        switch=bool(config["switch"]),
    )
    configure(model, config)
    return model


def configure(model: StripesModel, changes: Mapping[str, Any]) -> None:
    """What the agent and the training program write between two frames, or at the start."""
    model.view = changes.get("view", model.view)
    low, high = model.rounds
    model.rounds = changes.get("round", low), changes.get("round_high", high)
    width, later = model.width
    model.width = changes.get("width", width), changes.get("width_next", later)
    ranks = [_ranks(model.live, changes.get(f"aggregators{name}")) for name in ("", "_next")]
    model.ranks = ranks[0] or model.ranks[0], ranks[1] or model.ranks[1]
    model.offered = list(changes.get("offered", model.offered))
    if "rest" in changes:
        even, odd = changes["rest"]
        model.rest = [(even[0], even[1]), (odd[0], odd[1])]
    for entry in changes.get("own", ()):
        lanes = lanes_of(entry["lanes"], model.width[(model.rounds[0] & 1) != entry["bank"]])
        own = Own(entry["conversion"], entry["exponent"], lanes)
        model.own[entry["bank"], entry["fragment"]] = own
    for entry in changes.get("sent", ()):
        at = entry["bank"], entry["aggregator"]
        model.sent[at] = entry["round"], entry["next"]
        model.swallow[at] = entry["swallow"]


def _ranks(live: frozenset[int], aggregators: list[int] | None) -> dict[int, int] | None:
    if aggregators is None:
        return None
    ranks = {number: rank for rank, number in enumerate(aggregators, 1)}
    return dict.fromkeys(live, 0) | ranks


def numbers_of(runs: Iterable[Mapping[str, Any]], width: int) -> I64:
    """A fragment's; what is not named is 0."""
    numbers = np.zeros(LANES[width], np.int64)
    for run in runs:
        numbers[run["lane"] : run["lane"] + len(run["values"])] = run["values"]
    return numbers


def lanes_of(runs: Iterable[Mapping[str, Any]], width: int) -> bytes:
    """The same as they are in a frame."""
    return numbers_of(runs, width).astype(NATIVE[width]).tobytes()


def tag_of(row: Mapping[str, Any]) -> int:
    """Of its view and round."""
    return int(row["view"]) << 32 | int(row["round"])


def check_end(model: StripesModel, end: Mapping[str, Any]) -> None:
    """The state is what the sequence says of the end."""
    assert {
        (bank, index): (s.tag, s.exponent, s.rest) for (bank, index), s in model.sums.items()
    } == {
        (e["round"] & 1, e["fragment"]): (tag_of(e), e["exponent"], tag_of(e) * e["made"])
        for e in end["sums"]
    }
    for e in end["sums"]:
        width = model.width[e["round"] > model.rounds[0]]
        lanes = model.sums[e["round"] & 1, e["fragment"]].lanes
        finite = e["exponent"] != wire.NOT_FINITE
        assert not finite or lanes == lanes_of(e["lanes"], width), e["fragment"]
    places = {(p.tag, p.index): p for p in model.gathers.values()}
    assert {at: bits(place.seen) for at, place in places.items()} == {
        (tag_of(e), e["fragment"]): tuple(e["seen"]) for e in end["places"]
    }
    for e in end["places"]:
        place = places[tag_of(e), e["fragment"]]
        assert (place.total == numbers_of(e["units"], place.width)).all(), e["fragment"]
    assert {bank: both for bank, both in model.count.items() if all(both)} == {
        e["round"] & 1: (tag_of(e), e["count"]) for e in end["counts"]
    }
    found = [(*at, *model.sent[at], model.swallow[at]) for at in model.sent]
    assert sorted(found) == sorted(tuple(e.values()) for e in end["sent"])
    check_windows(model.windows, end)
    assert [message_of(bell) for bell in model.bells] == end["messages"]


def check_windows(windows: Mapping[int, Window], end: Mapping[str, Any]) -> None:
    """Those that have seen a frame are what the sequence says."""
    assert {
        sender: (w.highest, w.answers) for sender, w in windows.items() if w.highest or w.answers
    } == {e["sender"]: (e["highest"], e["answers"]) for e in end["windows"]}


def message_of(bell: Bell) -> dict[str, int]:
    """A message to the agent as a sequence has it."""
    view, round_ = halves(bell.tag)
    message = {"view": view, "round": round_, "fragments": bell.fragments}
    if bell.count:
        return message | {"count": bell.count}
    return message | {"members": bell.members, "unit": bell.unit}


def meaningful(frame: bytes) -> bytes:
    """Without the lanes, and the tag, of a fragment that is not finite."""
    if len(frame) < _PAYLOAD or frame[_EXPONENT] != wire.NOT_FINITE:
        return frame
    tag = wire.ETHERNET_BYTES + 24
    return frame[:tag] + bytes(8) + frame[tag + 8 : _PAYLOAD] + bytes(wire.PAYLOAD_BYTES)


def check(outcome: Outcome, step: Mapping[str, Any], where: str) -> None:
    """The outcome is what the step says; lanes that are not finite have no meaning."""
    found = meaningful(outcome.out) if outcome.out is not None else None
    expected = meaningful(encode.from_text(step["out"])) if "out" in step else None
    assert found == expected, where
    check_step(replace(outcome, out=found), {**step, "out": encode.to_text(found or b"")}, where)


def replay(sequence: Mapping[str, Any], model: StripesModel, target: Target | None = None) -> None:
    """Check every step, and the end at the model; `target` has begun as the model."""
    runs = {"model": model.run} | ({"program": target.run} if target is not None else {})

    def write() -> None:
        if target is not None:
            target.write_own(model)

    def change(changes: Mapping[str, Any]) -> None:
        assert not (model.key and "view" in changes), "another view has another key"
        configure(model, changes)
        if target is not None:
            target.enter(model)
        write()

    write()
    run_steps(sequence, runs, change, check)
    check_end(model, sequence["end"])
