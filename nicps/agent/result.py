# SPDX-License-Identifier: Apache-2.0
"""The result of a run, from the records of all its hosts.

Training programs have written most of these. So only the values that the result needs are kept of them, and the records
can be no longer than a run of so many rounds leaves them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nicps import wire
from nicps.agent.metrics import METRICS, pushes_of, read_metrics
from nicps.agent.records import read_object
from nicps.agent.waits import find_slow, read_waited
from nicps.errors import JobFailed
from nicps.session.metrics import MetricsRow

_MOST_BYTES = 1 << 20  # of a file that holds one object
_DIGEST_BYTES = 16
#: A frame with 360 parameters, and all its headers.
_HELD_BYTES = wire.ETHERNET_BYTES + wire.PUSH_HEADER_BYTES + wire.PAYLOAD_BYTES


def summarise(folder: Path, names: Sequence[str], last_round: int) -> dict[str, Any]:
    """Compute the run's result from `folder/<name>/`: `agent.json`, `metrics.jsonl`, `final.json`.

    `rounds` are those of this run, `trained_rounds` also those of the run that it goes on from.
    `weights_identical` is whether all hosts had the same weights (SHA-256) after every round that they took part in; a
    host that has come back lacks the rounds before. A host whose digest differed (R19) was evicted, and took the state
    again: its weights from that round on until then do not count, and the result lists it as `differed`.

    Takes 64 bytes of memory a round, and some microseconds a row: not for the loop.

    Args:
        last_round: the run's last one.

    Raises:
        JobFailed: a host's records are missing, too long or cannot be read, or the kernels have added another number of
            fragments than the counted gradients hold.
    """
    agents = [_object(folder / name / "agent.json", name) for name in names]
    found = {
        (entry["name"], entry["round"], entry["view"])
        for agent in agents
        for entry in agent.get("differed", ())
    }
    added = sum(agent["fragments_added"] for agent in agents)
    expected = sum(agent["fragments_expected"] for agent in agents)
    if added != expected:
        raise JobFailed(
            f"the kernels have added {added} fragments, the counted gradients hold {expected}"
        )
    first: _Weights | None = None
    identical = True
    for name, agent in zip(names, agents, strict=True):
        own = {(round_, view) for other, round_, view in found if other == name}
        rows = _rows(folder / name / METRICS, name, last_round, pushes_of(agent))
        weights = _weights(rows, last_round, own)
        first = first or weights
        same_end = weights.last_round == first.last_round
        identical = identical and same_end and first.agrees(weights)
        if same_end and first.last is None:
            first.last = weights.last  # large models are not hashed everywhere after each round
    assert first is not None
    final = _final(folder, names[0])
    accuracy = final.get("accuracy")
    served = [agent["served"] for agent in agents if "served" in agent]
    others = (_final(folder, name) for name in names[1:] if served)
    stepped = (each for each in chain((final,), others) if each.get("step_seconds") is not None)
    return {
        "hosts": len(names),
        "members": list(names),
        "rounds": max(agent["rounds"] for agent in agents),
        "trained_rounds": max(agent["rounds"] + agent["rounds_before"] for agent in agents),
        "test_accuracy": accuracy if isinstance(accuracy, int | float) else None,
        "weights_identical": identical and first.last_round >= 0,
        "differed": [{"name": name, "round": round_} for name, round_, _ in sorted(found)],
        "weights_sha256": first.last,
        "xdp_mode": ",".join(sorted({agent["xdp_mode"] for agent in agents})),
        "fragments_added": added,
        "fragments_sent_again": sum(agent["fragments_sent_again"] for agent in agents),
        "sums_asked_again": sum(agent["sums_asked_again"] for agent in agents),
        "token_turns": sum(agent["token_turns"] for agent in agents),
        "exchanges": max(agents, key=lambda agent: agent["rounds"]).get("exchanges", {}),
        "slow": _slow(agents, names),
        **_steps(next(stepped, final)),  # of a worker, where the first one only serves
        **_served(served),
    }


def _slow(agents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The hosts that training waited for much longer than for the others; the name of a Linux switch is None."""
    waited = read_waited(agent["waited"] for agent in agents if "waited" in agent)
    return [
        {"name": slow.host, "part": round(slow.part, 3), "what": slow.what.value}
        for slow in find_slow(waited, names)
    ]


def _steps(final: Mapping[str, Any]) -> dict[str, Any]:
    """Of a training step, by the training program of a member that makes some: channels, its median time, how long of
    it that program waited for the exchange, and how long it should take with the plan of its channels.
    """
    channels = final.get("channels", 1)
    seconds = {
        name: final.get(name) for name in ("step_seconds", "wait_seconds", "predicted_seconds")
    }
    return {
        "channels": channels if isinstance(channels, int) else 1,
        **{name: each if isinstance(each, int | float) else None for name, each in seconds.items()},
    }


def _served(agents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What parameter servers have done (S2, S4); nothing but the name of the system where there were none.

    An agent's facts have under `served`: `system`; `pushes`, those of its own training program; `synchronisations`
    that it has seen; `staleness`, as how many values, their sum and the largest, of its pushes at all servers. What it
    has read in its kernel may be missing: `versions`, of the first server's part, if it was that; `pulled` and
    `passed_on`, the frames with parameters that it has sent as a server, and as a partner (B3).
    """
    if not agents:
        return {"system": "R"}
    count, total, most = (
        [agent["staleness"][at] for agent in agents if agent["staleness"][0]] for at in range(3)
    )
    given = {}
    if agents[0]["system"] == "B":
        for name, key in (("server_bytes_out", "pulled"), ("partner_bytes", "passed_on")):
            given[name] = _HELD_BYTES * sum(agent.get(key, 0) for agent in agents)
    return {
        "system": agents[0]["system"],
        "versions": max(agent.get("versions", 0) for agent in agents),
        "staleness_mean": sum(total) / sum(count) if count else None,
        "staleness_max": max(most, default=None),
        "forced_synchronisations": max(agent["synchronisations"] for agent in agents),
        **given,
    }


@dataclass(slots=True)
class _Weights:
    """What a host has recorded of its weights: of each round a digest of their hash, and one of its state's digest,
    (2, rounds, 2), zeros for none; and the hash of the last one whole, if it was computed.
    """

    digests: NDArray[np.uint64]
    last_round: int = -1
    last: str | None = None
    apart: bool = False  # it has rounds that the run has not

    def agrees(self, other: _Weights) -> bool:
        """Whether both had the same in all rounds that both took part in; afterwards this object has the rounds of
        both.
        """
        if self.apart or other.apart:
            return False
        here, there = self.digests.any(axis=2), other.digests.any(axis=2)
        differ = (self.digests != other.digests).any(axis=2)
        if (here & there & differ).any():
            return False
        np.copyto(self.digests, other.digests, where=np.expand_dims(there & ~here, 2))
        return True


def _weights(
    rows: Iterable[MetricsRow], last_round: int, differed: Collection[tuple[int, int]]
) -> _Weights:
    """The weights of a host, without rounds from the one in which it differed on, in views up to that one."""
    digests = np.zeros((2, last_round + 1, _DIGEST_BYTES // 8), np.uint64)
    weights = _Weights(digests)
    for row in rows:
        round_, hash_ = row.round, row.weights_sha256
        if not (hash_ or row.digest):
            continue
        if round_ > last_round:  # it went on without the others (`--go-on-alone`)
            weights.apart = True
            continue
        if any(round_ >= first and row.view <= view for first, view in differed):
            continue
        for kind, text in enumerate((hash_, row.digest)):
            digests[kind, round_] = 0
            if text:
                digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
                digests[kind, round_] = np.frombuffer(digest, np.uint64)
        if round_ >= weights.last_round:
            weights.last_round, weights.last = round_, hash_ or None
    return weights


def _rows(path: Path, name: str, last_round: int, pushes: int) -> Iterator[MetricsRow]:
    try:
        yield from read_metrics(path, last_round, pushes)
    except JobFailed as error:
        raise _not_whole(name, str(error)) from None


def _final(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name / "final.json"
    return _object(path, name) if os.path.lexists(path) else {}


def _object(path: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(path, _MOST_BYTES)
    except (OSError, orjson.JSONDecodeError, JobFailed) as error:
        raise _not_whole(name, str(error)) from None


def _not_whole(name: str, why: str) -> JobFailed:
    return JobFailed(f"the records of {name} are not whole: {why}")
