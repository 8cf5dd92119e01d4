# SPDX-License-Identifier: Apache-2.0
"""The result of a run, from the records of all its hosts.

Training programs have written most of these. So only the values that the result needs are kept of them, and the records
can be no longer than a run of so many rounds leaves them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nicps.agent.metrics import METRICS, read_metrics
from nicps.agent.records import read_object
from nicps.errors import JobFailed
from nicps.session.metrics import MetricsRow

_MOST_BYTES = 1 << 20  # of a file that holds one object
_DIGEST_BYTES = 16


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
    for name in names:
        own = {(round_, view) for other, round_, view in found if other == name}
        weights = _weights(folder / name / METRICS, name, last_round, own)
        first = first or weights
        identical = identical and weights.last_round == first.last_round and first.agrees(weights)
    assert first is not None
    final: dict[str, Any] = {}
    path = folder / names[0] / "final.json"
    if os.path.lexists(path):
        final = _object(path, names[0])
    accuracy = final.get("accuracy")
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
    }


@dataclass(slots=True)
class _Weights:
    """The weights that a host has recorded: a digest of its hash a round (rounds, 2), zeros for none; the last one
    whole.
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
        here, there = self.digests.any(axis=1), other.digests.any(axis=1)
        differ = (self.digests != other.digests).any(axis=1)
        if (here & there & differ).any():
            return False
        np.copyto(self.digests, other.digests, where=(there & ~here).reshape(-1, 1))
        return True


def _weights(
    path: Path, name: str, last_round: int, differed: Collection[tuple[int, int]]
) -> _Weights:
    """The weights of a host, without rounds from the one in which it differed on, in views up to that one."""
    digests = bytearray(_DIGEST_BYTES * (last_round + 1))
    weights = _Weights(np.frombuffer(digests, np.uint64).reshape(-1, 2))
    for row in _rows(path, name, last_round):
        round_, text = row.round, row.weights_sha256
        if round_ > last_round:  # it went on without the others (`--go-on-alone`)
            weights.apart = True
            continue
        if any(round_ >= first and row.view <= view for first, view in differed):
            continue
        at = _DIGEST_BYTES * round_
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
        digests[at : at + _DIGEST_BYTES] = digest
        if round_ >= weights.last_round:
            weights.last_round, weights.last = round_, text
    return weights


def _rows(path: Path, name: str, last_round: int) -> Iterator[MetricsRow]:
    try:
        yield from read_metrics(path, last_round)
    except JobFailed as error:
        raise _not_whole(name, str(error)) from None


def _object(path: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(path, _MOST_BYTES)
    except (OSError, orjson.JSONDecodeError, JobFailed) as error:
        raise _not_whole(name, str(error)) from None


def _not_whole(name: str, why: str) -> JobFailed:
    return JobFailed(f"the records of {name} are not whole: {why}")
