# SPDX-License-Identifier: Apache-2.0
"""DDP scripts whose next forward pass overlaps with their gradients (docs/pytorch.md), with real agents."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.netns.members import Network
from tests.netns.scripts import Script, Scripts

pytest.importorskip("torch")
PROGRAM = "tests.netns.overlap_program"


@pytest.fixture
def scripts(three: Network) -> Iterator[Scripts]:
    made = Scripts(three, PROGRAM)
    yield made
    made.close()


def finished(started: list[Script]) -> list[list[dict[str, Any]]]:
    """What the scripts have said between their first and their last line."""
    for script in started:
        assert script.ended() == {"done": True}, (script.host, script.lines[-2:], script.errors())
    return [script.lines[1:-1] for script in started]


def without(line: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != key}


def test_channels_change_no_bit(scripts: Scripts) -> None:
    """Weights and buffers after steps in a queue, and on channels; then with what need first makes of them."""
    said = finished(scripts.start("h1", "h2", "h3", what="bits", steps=12))
    whole = [[without(line, "own") for line in lines] for lines in said]
    assert whole[0] == whole[1] == whole[2], "all ranks have the same weights and plans"
    for queue, channels, measured in said:
        assert without(queue, "scope") == without(channels, "scope")
        assert [channel for _, channel in queue["plan"]] == [2, 1, 1, 0]
        assert queue["plan"][0][0] == "0.weight" and len(set(queue["digests"])) == 5
        assert queue["predicted"] is None and measured["predicted"] > 0
        assert measured["steps"] == 11 and measured["own"][1] < measured["own"][0]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_skip_a_step_in_which_one_has_infinity(scripts: Scripts, rank: int) -> None:
    """The loss scaler of each looks at the means, which are NaN at all of them."""
    said = finished(scripts.start("h1", "h2", "h3", what="scaled", steps=9, infinite=[rank, 4]))
    assert said[0] == said[1] == said[2], "all have the same weights after each step"
    for line in said[0]:
        assert line["skipped"] == [[4, 2.0**16, 2.0**15]] and line["finite"]
        assert len({*line["digests"]}) == 8, "all other steps are made"


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_in_the_middle_of_a_step(scripts: Scripts, rank: int) -> None:
    """The others go on: each part is the mean over those that were counted in it, the same at both."""
    started = scripts.start("h1", "h2", "h3", what="lossy", steps=16, dies=[rank, 7])
    codes = []
    for script in started:
        script.ended()
        codes.append(script.process.returncode)
    assert sorted(codes) == [-signal.SIGKILL, 0, 0]
    left = [script.lines for script, code in zip(started, codes, strict=True) if code == 0]
    assert left[0][1] == left[1][1]
    assert (left[0][1]["lost"], left[0][1]["steps"]) == ([rank], 15)
    assert left[0][1]["told"] == [[rank]]


@pytest.mark.long
def test_a_host_that_comes_back_goes_on_with_the_parts_of_the_others(scripts: Scripts) -> None:
    started = scripts.start("h1", "h2", "h3", what="elastic", steps=6, least=20)
    started[1].until(5)
    started[1].kill()
    started[0].until(10)
    (back,) = scripts.start("h2", what="elastic", steps=6, least=20)
    for script in (started[0], started[2], back):
        assert script.ended() == {"done": True}, script.errors()
    scripts.agree()
    first = back.lines[1]
    assert first["came"] and first["parts"] == started[0].lines[-2]["parts"]


@pytest.mark.long
def test_uneven_inputs(scripts: Scripts) -> None:
    """All ranks end as the first one has no more samples, with the same weights; without that they are refused."""
    said = finished(scripts.start("h1", "h2", "h3", what="uneven", steps=9, together=True))
    ended = {lines[0].pop("ended") for lines in said}
    assert ended == {
        "Rank 0 exhausted all inputs.",
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    }
    assert said[0] == said[1] == said[2] and said[0][0]["steps"] == 8
    said = finished(scripts.start("h1", "h2", "h3", what="uneven", steps=9, together=False))
    for lines in said:
        assert lines[0]["ended"].startswith("overlap is not possible with join(), in which ranks")
