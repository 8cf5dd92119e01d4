# SPDX-License-Identifier: Apache-2.0
"""Lightning, Accelerate and the Trainer of Transformers over the backend: their examples on three hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.netns.members import Network

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "docs/examples/trainers"


@pytest.mark.parametrize("trainer", ["lightning", "accelerate", "transformers"])
def test_an_example_trains_the_same_weights_everywhere(three: Network, trainer: str) -> None:
    if find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed: pip install 'nicps[trainers]'")
    command = [sys.executable, str(EXAMPLES / f"with_{trainer}.py")]
    started = [
        three.run(host, command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for host in three.names
    ]
    weights, ranks = set(), set()
    for process in started:
        try:
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
        assert process.returncode == 0, err
        found = re.search(r"^rank (\d): accuracy (0\.\d+), weights (\w+)$", out, re.MULTILINE)
        assert found is not None, out
        ranks.add(int(found[1]))
        weights.add(found[3])
        assert float(found[2]) > 0.9
    assert ranks == {0, 1, 2} and len(weights) == 1
    three.all_stand_by()
