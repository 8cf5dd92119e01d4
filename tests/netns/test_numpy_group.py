# SPDX-License-Identifier: Apache-2.0
"""docs/examples/mlp/numpy_group.py: NumPy alone on `nicps.collective`, started by `nicps run`."""

from __future__ import annotations

import re
import signal

import pytest

from tests.netns.labs import ROOT
from tests.netns.members import Ended, Network
from tests.netns.test_run import lines_of, no_run

EXAMPLE = ROOT / "docs" / "examples" / "mlp" / "numpy_group.py"
LAST = re.compile(r"rank (\d) of 3: (\d+\.\d+)%, weights (\w{16})(, without .*)?")


def last_lines(ended: Ended) -> dict[str, tuple[int, float, str, str]]:
    """Each host's rank, accuracy in percent, digest of the weights, and list of lost ranks."""
    found = {}
    for host, lines in lines_of(ended.out).items():
        if match := LAST.fullmatch(lines[-1]):
            found[host] = int(match[1]), float(match[2]), match[3], match[4] or ""
    return found


@pytest.mark.long
def test_it_learns_the_same_weights_on_all_hosts(three: Network) -> None:
    ended = three.command("h2", "run", str(EXAMPLE), "--epochs", "6", timeout_s=120)
    assert ended.code == 0, ended.err
    said = last_lines(ended)
    assert sorted(said) == three.names and {line[0] for line in said.values()} == {0, 1, 2}
    assert len({line[1:] for line in said.values()}) == 1
    assert all(accuracy > 92 and not lost for _, accuracy, _, lost in said.values())
    no_run(three)


@pytest.mark.long
def test_a_host_is_lost_and_the_others_train_on(three: Network) -> None:
    child = three.start("h1", "run", str(EXAMPLE), "--epochs", "25", "--lane", "i16")
    three.in_training("h3", 20)
    three.end("h3", signal.SIGKILL)
    ended = three.finish(child, 150)
    assert ended.code == 5 and "h3 was lost" in ended.err
    said = last_lines(ended)
    assert sorted(said) == ["h1", "h2"] and len({line[2] for line in said.values()}) == 1
    assert all(line[3] == ", without h3" and line[1] > 92 for line in said.values())
    three.ready()
    no_run(three)
