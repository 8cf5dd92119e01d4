# SPDX-License-Identifier: Apache-2.0
"""What a run comes to, from the records of all its hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from nicps.errors import JobFailed


def summarise(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The run's result from `folder/<name>/`: `agent.json`, `metrics.jsonl`, `final.json`.

    `weights_identical` is whether all hosts had the same weights (SHA-256) after every round that they took part in;
    one that has come back lacks those before. A host that was found to have others (R19) was struck off, and took the
    state again: what it had from that round on until then does not count, and is told as `differed`.

    Raises:
        JobFailed: a host's records are missing or cannot be read, or the kernels have added another number of
            fragments than the counted gradients hold.
    """
    agents: list[dict[str, Any]] = []
    metrics: list[list[dict[str, Any]]] = []
    for name in names:
        try:
            agents.append(orjson.loads((folder / name / "agent.json").read_bytes()))
            rows = (folder / name / "metrics.jsonl").read_bytes().splitlines()
            metrics.append([orjson.loads(row) for row in rows])
        except (OSError, orjson.JSONDecodeError) as error:
            raise JobFailed(f"the records of {name} are not whole: {error}") from None
    found = {
        (entry["name"], entry["round"], entry["view"])
        for agent in agents
        for entry in agent.get("differed", ())
    }
    hashes = [
        {
            row["round"]: row["weights_sha256"]
            for row in rows
            if not any(
                name == other and row["round"] >= round_ and row.get("view", 0) <= view
                for other, round_, view in found
            )
        }
        for name, rows in zip(names, metrics, strict=True)
    ]
    added = sum(agent["fragments_added"] for agent in agents)
    expected = sum(agent["fragments_expected"] for agent in agents)
    if added != expected:
        raise JobFailed(
            f"the kernels have added {added} fragments, the counted gradients hold {expected}"
        )
    final: dict[str, Any] = {}
    path = folder / names[0] / "final.json"
    if path.exists():
        final = orjson.loads(path.read_bytes())
    return {
        "hosts": len(names),
        "members": list(names),
        "rounds": max(agent["rounds"] for agent in agents),
        "test_accuracy": final.get("accuracy"),
        "weights_identical": _identical(hashes),
        "differed": [{"name": name, "round": round_} for name, round_, _ in sorted(found)],
        "weights_sha256": hashes[0][max(hashes[0])] if hashes[0] else None,
        "xdp_mode": ",".join(sorted({agent["xdp_mode"] for agent in agents})),
        "fragments_added": added,
        "fragments_sent_again": sum(agent["fragments_sent_again"] for agent in agents),
        "sums_asked_again": sum(agent["sums_asked_again"] for agent in agents),
        "token_turns": sum(agent["token_turns"] for agent in agents),
    }


def _identical(hashes: Sequence[dict[int, str]]) -> bool:
    """The first is the lead's; everybody was there for the last round."""
    common: dict[int, str] = {}
    for of_host in hashes:
        if any(common.setdefault(round_, digest) != digest for round_, digest in of_host.items()):
            return False
    return bool(hashes[0]) and all(h and max(h) == max(hashes[0]) for h in hashes)
