# SPDX-License-Identifier: Apache-2.0
"""Lightning, Accelerate and the Trainer of Transformers over the backend, on three hosts: their examples; and what else
they do, where gradients are averaged part by part (docs/priorities.md).
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.netns.members import Network
from tests.netns.scripts import Scripts

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "docs/examples/trainers"


@pytest.fixture(params=["lightning", "accelerate", "transformers"])
def trainer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'nicps[trainers]'")
    return name


@pytest.mark.parametrize("options", [[], ["--overlap"]], ids=["plain", "overlap"])
def test_an_example_trains_the_same_weights_everywhere(
    three: Network, trainer: str, options: list[str]
) -> None:
    command = [sys.executable, str(EXAMPLES / f"with_{trainer}.py"), *options]
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
        assert ("Figures(steps=" in out) is bool(options) and "(steps=0," not in out
    assert ranks == {0, 1, 2} and len(weights) == 1
    three.all_stand_by()


@pytest.mark.timeout(900)  # ten or twelve trainings
def test_what_trainers_do_leaves_the_weights_as_they_are_without_overlap(
    three: Network, trainer: str
) -> None:
    """Clipping, accumulation, bfloat16, checkpoints, steps by hand: the same at all hosts, and nearly those of DDP."""
    scripts = Scripts(three, "tests.netns.trainers_program")
    try:
        started = scripts.start(*three.names, trainer=trainer)
        for script in started:
            assert script.ended() == {"done": True}, script.errors()
        for lines in zip(*(script.lines[:-1] for script in started), strict=True):
            what = lines[0]["what"]
            assert len({(each["what"], each["digest"]) for each in lines}) == 1, what
            for line in lines:
                assert line["moved"] > 0.005 and line["off"] < 1e-3 * line["moved"], line
                assert line["steps"] > 5, line
                # The Trainer of Transformers reads the norm of gradients in each step.
                assert line["waits"] is (what == "clip" or trainer == "transformers"), line
    finally:
        scripts.close()
