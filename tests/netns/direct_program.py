# SPDX-License-Identifier: Apache-2.0
"""Small calls of a group, as fast as they go: `python -m tests.netns.direct_program SETTINGS`.

It prints the digest of all results up to the first loss, and behind it that of the others, and how many they are.
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import numpy as np
import orjson

from nicps.collective import Group


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def run(settings: dict[str, Any]) -> None:
    """Until all that are left agree that the time is up."""
    random = np.random.default_rng(5)
    with Group.form(settings["size"], timeout_s=60) as group:
        link = group._link
        assert link is not None
        say(formed=group.rank)
        digests = {len(group.lost): hashlib.sha256()}
        counts, directly, before = dict.fromkeys(digests, 0), 0, 0
        until = time.monotonic() + settings["seconds"]
        going = True
        while going:
            length = int(random.integers(1, settings.get("most", 1440)))
            vector = np.full(length, counts[max(counts)] + group.rank, np.float32)
            vector[0] = time.monotonic() < until
            total = group.all_reduce(vector).result()
            going = bool(total[0])
            lost = len(group.lost)
            digests.setdefault(lost, hashlib.sha256()).update(total.tobytes())
            counts[lost] = counts.setdefault(lost, 0) + 1
            since = link._directly[0].since if link._directly else 0
            directly, before = directly + max(0, since - before), since
        results = {str(k): [counts[k], each.hexdigest()] for k, each in digests.items()}
        say(results=results, directly=directly)


if __name__ == "__main__":
    run(orjson.loads(sys.argv[1]))
