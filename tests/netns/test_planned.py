# SPDX-License-Identifier: Apache-2.0
"""Jobs whose steps have a plan, on two channels (docs/channels.md): real agents, and a program that only offers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.collective.feedback import Compressed
from nicps.errors import Cancelled
from nicps.wire import FrameType
from tests.collectives import make
from tests.netns.labs import ROOT, until
from tests.netns.members import Keeping, Network, tiny_job
from tests.netns.planned_program import REPLANNED, SIZES, drawn

PROGRAM = ROOT / "tests" / "netns" / "planned_program.py"
PLACES = [(channel, place) for channel, sizes in enumerate(SIZES) for place in range(len(sizes))]
SETTINGS = {"priorities": 2, "exchange": "stripes", "batch": 12, "quorum": 1.0}


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Keeping]:
    """No host is taken for silent that is not, however busy the machine is: its program could not come back."""
    silence = getattr(request, "param", "20")
    with Keeping(3, program=PROGRAM, arguments=("--silence", silence)) as made:
        made.up()
        yield made


def parts_of(path: Path) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, list[int]]]:
    """Each part's mean, what rounding has left over, and the members counted in it."""
    found, at = {}, 0
    with np.load(path) as kept:
        vector, residual = kept["vector"], kept["residual"]
        for channel, place in PLACES:
            here = slice(at, at + SIZES[channel][place])
            counted = kept[f"counted_{channel}_{place}"].tolist()
            found[channel, place] = vector[here], residual[here], counted
            at = here.stop
    return found


class Reference:
    """What the members' kernels and programs should come to, step by step."""

    def __init__(self, width: int, batch: int = 12) -> None:
        self.width, self.batch = width, batch
        self.residuals: dict[tuple[int, int, int], np.ndarray] = {}

    def check(self, step: int, path: dict[int, Path]) -> dict[tuple[int, int], list[int]]:
        """Check each member's means and residuals against the reference, bit for bit; the members counted, by part."""
        kept = {number: parts_of(each) for number, each in path.items()}
        counted = {}
        for channel, place in PLACES:
            who = kept[min(kept)][channel, place][2]
            vectors = [drawn(number, step - 1, channel, place) for number in who]
            zero = np.zeros(SIZES[channel][place], np.float32)
            errors = [
                self.residuals.setdefault((number, channel, place), zero.copy()) for number in who
            ]
            pairs = zip(vectors, errors, strict=True)
            rounds = [Compressed(v, e, self.width, mean=False) for v, e in pairs]
            made = make(rounds)  # type: ignore[arg-type]
            for rank, each in enumerate(rounds):
                each.settle(made.outcome(rank))
            mean = vectors[0] / np.float32(self.batch * len(who) // 3)
            for number, parts in kept.items():
                vector, residual, also = parts[channel, place]
                at = (step, number, channel, place)
                assert also == who, at
                assert (vector.view(np.uint32) == mean.view(np.uint32)).all(), at
                mine = self.residuals[number, channel, place]
                assert (residual.view(np.uint32) == mine.view(np.uint32)).all(), at
            counted[channel, place] = who
        return counted


@pytest.mark.short("i8")
@pytest.mark.parametrize("lane", ["i8", "i32"])
def test_sums_of_both_channels(network: Keeping, lane: str) -> None:
    """Each part's sum is that of the reference at all members, and so is what rounding has left over."""
    run = network.train(tiny_job(network.folder), **SETTINGS, rounds=12, lane=lane)
    assert run.result["rounds"] == 12 and run.result["weights_identical"]
    reference = Reference(int(lane[1:]))
    for step in range(1, 13):
        paths = {number: network.kept / f"{number}-{step}.npz" for number in (1, 2, 3)}
        counted = reference.check(step, paths)
        assert set(map(tuple, counted.values())) == {(1, 2, 3)}


@pytest.mark.long
def test_another_plan(network: Keeping) -> None:
    """The lead's program decides on it: from the next step on the same parts go out on three channels."""
    (network.kept / "plan").touch()
    run = network.train(tiny_job(network.folder), **SETTINGS, rounds=8, lane="i16")
    assert run.result["rounds"] == 8 and run.result["weights_identical"]
    reference = Reference(16)
    for step in range(1, 9):
        paths = {number: network.kept / f"{number}-{step}.npz" for number in (1, 2, 3)}
        assert set(map(tuple, reference.check(step, paths).values())) == {(1, 2, 3)}
    rows = [row["round"] for row in run.metrics("h1")]
    # Channel 0 has three rounds a step, then two; the phase begins above the highest round of all channels.
    assert {after - before for before, after in pairwise(rows[:REPLANNED])} == {3}
    assert {after - before for before, after in pairwise(rows[REPLANNED:8])} == {2}
    assert rows[REPLANNED] > rows[REPLANNED - 1] + 2


def checked(network: Keeping, steps: int) -> None:
    """All members are counted in all parts of these steps, with the reference's means and residuals."""
    reference = Reference(8)
    for step in range(1, steps + 1):
        paths = {number: network.kept / f"{number}-{step}.npz" for number in (1, 2, 3)}
        assert set(map(tuple, reference.check(step, paths).values())) == {(1, 2, 3)}, step


@pytest.mark.long
def test_tokens_are_lost_while_rounds_of_both_channels_are_open(network: Keeping) -> None:
    """Only channel 0 has a token: what the others wait for are offers and marks."""
    (network.kept / "hold").write_text("h2 1.1 3")
    settings = {**SETTINGS, "lane": "i8", "rounds": 8}

    def views() -> list[int]:
        return [network.status(host)["view"] for host in network.names]  # type: ignore[index]

    with closing(network.submit("h1", tiny_job(network.folder), **settings)) as channel:
        until((network.kept / "held").exists, "h2 has a part to offer on each channel")
        before = views()
        for host in network.names:
            network.lab.lose_next(host, FrameType.TOKEN, 5)
        faults = network.lab.faults
        until(lambda: not any(each.lose_left for each in faults().values()), "all are lost")
        (network.kept / "hold").unlink()
        until((network.kept / "1-6.npz").exists, "training goes on")
        assert views() == before
        run = network.finished(channel)
    assert run.result["rounds"] == 8 and run.result["weights_identical"]
    checked(network, 8)


@pytest.mark.long
def test_a_job_is_cancelled_between_two_commits_of_a_step(network: Keeping) -> None:
    """The step goes on to its end with all members, and then the state after it is saved."""
    (network.kept / "hold").write_text("h2 0.2 3")
    settings = {**SETTINGS, "lane": "i8", "rounds": 8}
    with closing(network.submit("h1", tiny_job(network.folder), **settings)) as channel:
        until((network.kept / "held").exists, "h2 has offered all but one part")
        job = network.status("h1")["job"]  # type: ignore[index]
        command = network.start("h3", "cancel")
        until(lambda: "h3 cancels the job" in network.log("h1"), "the lead has heard of it")
        (network.kept / "hold").unlink()
        with pytest.raises(
            Cancelled, match="cancelled on h3; saved after 4 rounds of training in "
        ):
            network.finished(channel)
    assert network.finish(command).code == 0
    assert (network.place("h1", "runs") / job / "checkpoint" / "checkpoint.npz").exists()
    checked(network, 4)
    assert not (network.kept / "1-5.npz").exists()


def result_of(network: Network) -> dict[str, Any]:
    """Of the job, wherever it has ended well; all logs of agents and programs if it does not."""

    def found() -> list[Path]:
        runs = (network.place(host, "runs") for host in network.names)
        stopped = [host for host in network.names if "job stopped: " in network.log(host)]
        assert not stopped, stopped
        return [path for run in runs for path in run.glob("*/result.json")]

    try:
        result = json.loads(until(found, "the result")[0].read_text())
    except AssertionError as error:
        logs = [network.log(host) for host in network.names]
        logs += [path.read_text() for path in network.folder.glob("**/trainer.log")]
        raise AssertionError("\n".join([str(error), *logs])) from None
    assert isinstance(result, dict)
    return result


@pytest.mark.short("h3-")
@pytest.mark.parametrize("network", ["3"], indirect=True, ids=[""])
@pytest.mark.parametrize("lost", ["h3", "h1"])
def test_a_host_is_lost_between_two_commits_of_a_step(network: Keeping, lost: str) -> None:
    """Another member, or the lead. Its gradient is in the parts that were committed, and in no other."""
    steps, held = 8, network.kept / "held"
    (network.kept / "hold").write_text("h2 0.2 3")  # the last part that it offers
    settings = {**SETTINGS, "lane": "i8", "rounds": steps}
    with closing(network.submit("h1", tiny_job(network.folder), **settings)):
        until(held.exists, "h2 has offered all but one part")
        status = network.status("h2")
        assert status is not None
        numbers = {member["name"]: member["number"] for member in status["members"]}
        network.end(lost, signal.SIGKILL)

        def is_gone() -> bool:
            status = network.status("h2")
            assert status is not None
            states = {member["name"]: member["state"] for member in status["members"]}
            return states[lost] == "left"

        until(is_gone, f"the others go on without {lost}")
        (network.kept / "hold").unlink()
        result = result_of(network)
    assert result["rounds"] == steps and result["weights_identical"]
    reference, rest = Reference(8), {*numbers.values()} - {numbers[lost]}
    for step in range(1, steps + 1):
        there = {*numbers.values()} if step <= 3 else rest
        paths = {number: network.kept / f"{number}-{step}.npz" for number in there}
        counted = reference.check(step, paths)
        before, after = (1, 2, 3) if step <= 4 else tuple(sorted(rest)), tuple(sorted(rest))
        assert {tuple(who) for at, who in counted.items() if at != (0, 2)} == {before}, step
        assert tuple(counted[0, 2]) == (before if step < 4 else after), step
