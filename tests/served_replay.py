# SPDX-License-Identifier: Apache-2.0
"""Runs the sequences of `tests/vectors/servers` against the model, and the XDP program beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from tests.model import Outcome
from tests.replay import run_steps, view_key
from tests.servers import Home, Stored
from tests.servers_model import ServersModel
from tests.stripes import LANES, NETWORK, mac_of

SEQUENCES = sorted((Path(__file__).parent / "vectors" / "servers").glob("*.json"))
I64 = NDArray[np.int64]


class Target(Protocol):
    """The program, which follows the model's configuration."""

    def enter(self, model: ServersModel) -> None:
        """The model's view, rounds and version are in force."""

    def run(self, frame: bytes) -> Outcome:
        """Give it one frame."""


def model_of(sequence: Mapping[str, Any]) -> ServersModel:
    """The model of a sequence's host as it is at the start."""
    config = sequence["config"]
    assert config["network"] == NETWORK
    macs = [bytes.fromhex(text.replace(":", "")) for text in sequence["members"]]
    live = frozenset(number for number, mac in enumerate(macs, 1) if any(mac))
    assert all(macs[number - 1] == mac_of(number) for number in live)
    model = ServersModel(
        config["number"],
        live,
        tuple(config["servers"]),
        config["width"],
        config["room"],
        config["view"],
        (config["round"], config["round_high"]),
        config["settled"],
        by_staleness=bool(config["staleness"]),
        passes=frozenset(config["passes"]),
        averages=bool(config["averages"]),
        key=view_key(sequence),
        version=tuple(config["version"]),
    )
    for local, parameters in lanes_of(model, sequence["parameters"]).items():
        model.homes[local] = Home(parameters, np.zeros_like(parameters))
    if config["store"]:
        model.store = {place: Stored() for place in range(model.room)}
        model.taken = dict.fromkeys(range(model.fragments), 0)
    return model


def lanes_of(model: ServersModel, entries: Iterable[Mapping[str, Any]]) -> dict[int, I64]:
    """The parameters of the model's part, by place in it; what is not named is 0."""
    part = model.part(model.number)
    lanes = {local: np.zeros(LANES[model.width], np.int64) for local in range(len(part))}
    for entry in entries:
        put(lanes[entry["fragment"] - part.start], entry)
    return lanes


def put(lanes: I64, entry: Mapping[str, Any]) -> None:
    """Values from a lane on."""
    lanes[entry["lane"] : entry["lane"] + len(entry["values"])] = entry["values"]


def configure(model: ServersModel, changes: Mapping[str, Any]) -> None:
    """What the agent writes between two frames."""
    assert not (model.key and "view" in changes), "another view has another key"
    model.view = changes.get("view", model.view)
    first, last = model.rounds
    model.rounds = changes.get("round", first), changes.get("round_high", last)
    model.settled = changes.get("settled", model.settled)
    model.version = tuple(changes.get("version", model.version))


def check_end(model: ServersModel, end: Mapping[str, Any]) -> None:
    """The state is what the sequence says of the end."""
    for local, expected in lanes_of(model, end["parameters"]).items():
        found = model.homes[local].parameters
        differ = np.flatnonzero(found != expected)
        assert not len(differ), [(local, at, found[at], expected[at]) for at in differ[:8].tolist()]
    assert list(model.version) == end["version"]
    assert model.full == (0 if end["full"] is None else end["full"] + 1)
    start = model.part(model.number).start
    assert {
        (start + local, worker): number
        for local, home in model.homes.items()
        for worker, number in home.last.items()
    } == {(e["fragment"], e["worker"]): e["number"] for e in end["numbers"]}
    assert {place: s for place, s in model.store.items() if s.tag} == stored(end["store"])
    assert {index: number for index, number in model.taken.items() if number} == {
        e["fragment"]: e["number"] for e in end["taken"]
    }
    assert model.answered == {
        e["server"]: (e["number"] << 32 | e["staleness"], e["round"] << 32 | e["version"])
        for e in end["answered"]
    }
    assert model.believed == {
        (e["channel"], e["sender"]): (e["highest"], e["answers"]) for e in end["windows"]
    }


def stored(entries: Iterable[Mapping[str, Any]]) -> dict[int, Stored]:
    """The parameters at a worker, by place."""
    found = {}
    for entry in entries:
        lanes = np.zeros(LANES[32], np.int64)
        for run in entry["lanes"]:
            put(lanes, run)
        rest = entry["round"] << 32 | entry["version"]
        payload = lanes.astype(">i4").tobytes()
        assert len(payload) == wire.PAYLOAD_BYTES
        found[entry["fragment"]] = Stored(entry["number"], rest, entry["exponent"], payload)
    return found


def replay(sequence: Mapping[str, Any], model: ServersModel, target: Target | None = None) -> None:
    """Check every step, and the end at the model; `target` has begun as the model."""
    runs = {"model": model.run} | ({"program": target.run} if target is not None else {})

    def change(changes: Mapping[str, Any]) -> None:
        configure(model, changes)
        if target is not None:
            target.enter(model)

    run_steps(sequence, runs, change)
    check_end(model, sequence["end"])
