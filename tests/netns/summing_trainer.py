# SPDX-License-Identifier: Apache-2.0
"""The program of docs/jobs.md ("Sums alone") as it stands there, keeping what it offers and sums (`recording`).

python -P summing_trainer.py FOLDER
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np

import nicps.client
from nicps.client import F32
from tests.netns.recording import Recording

ROOT = Path(__file__).resolve().parents[2]


def example() -> str:
    """The Python block of that section."""
    section = (ROOT / "docs" / "jobs.md").read_text().split("\n## Sums alone\n")[1]
    found = re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def vectors(seed: int) -> object:
    """A function that gives the next one."""
    random = np.random.default_rng(seed)

    def vector() -> F32:
        return random.standard_normal(1000, np.float32)

    return vector


if __name__ == "__main__":
    Recording.folder = Path(sys.argv[1])
    nicps.client.Session = Recording  # type: ignore[misc]
    exec(example(), {"vector": vectors(os.getpid())})
    Path("out", "metrics.jsonl").write_text('{"round": 1, "weights_sha256": ""}\n')
