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
    one that has come back lacks those before.

    Raises:
        JobFailed: a host's records are missing or cannot be read, or the kernels have added another number of
            fragments than the counted gradients hold.
    """
    agents: list[dict[str, Any]] = []
    hashes: list[dict[int, str]] = []
    for name in names:
        try:
            agents.append(orjson.loads((folder / name / "agent.json").read_bytes()))
            rows = (folder / name / "metrics.jsonl").read_bytes().splitlines()
            hashes.append(dict(_hash_of(row) for row in rows))
        except (OSError, orjson.JSONDecodeError) as error:
            raise JobFailed(f"the records of {name} are not whole: {error}") from None
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
        "weights_sha256": hashes[0][max(hashes[0])] if hashes[0] else None,
        "xdp_mode": ",".join(sorted({agent["xdp_mode"] for agent in agents})),
        "fragments_added": added,
        "fragments_sent_again": sum(agent["fragments_sent_again"] for agent in agents),
        "token_turns": sum(agent["token_turns"] for agent in agents),
    }


def _identical(hashes: Sequence[dict[int, str]]) -> bool:
    """The first is the lead's; everybody was there for the last round."""
    common: dict[int, str] = {}
    for of_host in hashes:
        if any(common.setdefault(round_, digest) != digest for round_, digest in of_host.items()):
            return False
    return bool(hashes[0]) and all(h and max(h) == max(hashes[0]) for h in hashes)


def _hash_of(row: bytes) -> tuple[int, str]:
    values = orjson.loads(row)
    return values["round"], values["weights_sha256"]
