# SPDX-License-Identifier: Apache-2.0
"""Groups with several channels: real agents, real kernels, against NumPy (docs/collective.md, "Channels")."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nicps.lab import Lab, LabSettings
from tests.netns.members import Network
from tests.netns.scripts import Script, Scripts
from tests.reaper import fresh_name

PROGRAM = "tests.netns.channels_program"


@pytest.fixture
def scripts(three: Network) -> Iterator[Scripts]:
    made = Scripts(three, PROGRAM, size=3)
    yield made
    made.close()


def finished(started: list[Script]) -> list[list[dict[str, Any]]]:
    """All that the programs have said, once all have closed their group."""
    for script in started:
        last = script.ended()
        assert last.get("closed"), (script.host, script.lines[-2:])
    return [script.lines for script in started]


def without(line: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in keys}


def test_sums_are_the_same_on_any_channels(scripts: Scripts) -> None:
    """Calls on several channels at once, in another order at each member; then the same ones on other channels."""
    started = scripts.start("h1", "h2", "h3", what="drawn", calls=18, urgencies=[0, 3])
    ended = finished(started)
    assert all(lines[0]["channels"] == 2 for lines in ended)
    found = [[line for line in lines if "plan" in line] for lines in ended]
    assert [line["plan"] for line in found[0]] == [2, 3, 1]
    alike = [[without(line, "residuals") for line in lines] for lines in found]
    assert alike[0] == alike[1] == alike[2], "all members have the same results"
    assert len(found[0][0]["digests"]) == 18
    for lines in found:
        first, *others = (without(line, "plan") for line in lines)
        assert others == [first, first], "on any channels"
    assert len({lines[0]["residuals"] for lines in found}) == 3


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_member_is_lost_between_rounds_of_two_channels(scripts: Scripts, rank: int) -> None:
    """The others go on, on both channels; each sum is over all, or over those that are left, and the same at both."""
    started = scripts.start(
        "h1", "h2", "h3", what="lossy", calls=30, dies=[rank, 12], urgencies=[0, 1]
    )
    for script in started:
        script.ended()
    codes = [script.process.returncode for script in started]
    assert sorted(codes) == [-signal.SIGKILL, 0, 0]
    left = [script.lines for script, code in zip(started, codes, strict=True) if code == 0]
    calls = [[line for line in lines if "call" in line] for lines in left]
    assert calls[0] == calls[1] and len(calls[0]) == 30
    for channel in (0, 1):
        whole = [line["whole"] for line in calls[0][channel::2]]
        assert whole == sorted(whole, reverse=True) and not whole[-1]
    assert calls[0][0]["whole"] and all(lines[-1]["lost"] == [rank] for lines in left)


def test_what_cannot_be_meant_is_named(scripts: Scripts) -> None:
    """Plans that differ are refused in one line at all members, and the group goes on with its channels."""
    ended = finished(scripts.start("h1", "h2", "h3", what="differing"))
    names = ended[0][0]["names"]
    asked = "; ".join(
        f"{names[k]} (rank {k}): plan of channels of urgency 0 (4,000 fragments), {1 + k} (4,000 fragments)"
        for k in range(3)
    )
    for lines in ended:
        differs = f"the members have called different things: {asked}"
        assert lines[1] == {"differs": differs, "channels": 1}
        assert lines[2] == {"total": [3.0] * 5}
        assert lines[3] == {"error": "there is no channel 2: the group has 2 channels"}


def test_a_late_member_comes_into_all_channels(scripts: Scripts) -> None:
    """A program is killed, and comes back into a group with two channels."""
    first = scripts.start("h1", "h2", "h3", what="admitting", urgencies=[0, 1], late=True)
    lost = first[1]
    while "sums" not in (lost.take() or {"sums": 0}):
        pass
    lost.kill()
    (back,) = scripts.start("h2", what="admitting", late=True)
    ended = finished([first[0], first[2], back])
    assert ended[2][0]["channels"] == 1, "a late program is alone at first"
    last = [lines[-2] for lines in ended]
    assert last[0] == last[1] == last[2]
    assert last[0]["channels"] == 2 and last[0]["sums"] == [3.0, 6.0]


@dataclass
class Narrow(Network):
    """Two hosts, and the rate of their cables."""

    rate_bps: int = 250_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lab = Lab(LabSettings(fresh_name(), self.hosts, rate_bps=self.rate_bps))


@pytest.mark.long
def test_urgent_sums_leave_the_share_that_the_agents_were_given() -> None:
    """Sums without a pause beside a large one: with a share of a hundredth far fewer are made.

    Between two rounds of the large one they may follow each other, so it is one round.
    """
    with Narrow(2, arguments=("--silence", "20"), rate_bps=50_000_000) as network:
        network.up()
        counts = []
        for share in ("0.9", "0.01"):
            for host in network.names:
                network.end(host, signal.SIGTERM)
                network.join(host, "--urgent-share", share)
            network.ready()
            scripts = Scripts(network, PROGRAM, size=2, what="restrained", large=2_800_000)
            try:
                started = scripts.start("h1", "h2", urgencies=[0, 5], rooms=[2_800_000, 9000])
                counts.append([lines[1]["count"] for lines in finished(started)])
            finally:
                scripts.close()
        assert counts[0][0] == counts[0][1] > 10 and counts[1][0] < counts[0][0] / 3, counts


def test_an_urgent_sum_gets_through_beside_a_large_one() -> None:
    """On a channel of its own it does not wait for the end of the other one; on the same channel it does."""
    with Narrow(2, arguments=("--silence", "20")) as network:
        network.up()
        scripts = Scripts(network, PROGRAM, size=2, what="beside", large=8_000_000, urgent=10)
        try:
            started = scripts.start("h1", "h2", urgencies=[0, 5], rooms=[1_000_000, 2000])
            for lines in finished(started):
                own, same = ([*zip(*line["took"], strict=True)] for line in lines[1:3])
                assert sum(own[1]) <= 2, "the large one has ended too early to be of use"
                assert statistics.median(own[0]) < max(same[0]) / 5, (own, same)
                assert all(same[1])
        finally:
            scripts.close()
