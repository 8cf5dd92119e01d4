# SPDX-License-Identifier: Apache-2.0
"""System B (docs/servers.md): workers that give each other half of the parameters, with real agents and kernels.

h1 serves. Each scene is compared with plain synchronous training, which has the same server and no partners.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import partners
from nicps.session.channel import Channel
from tests.netns.labs import until
from tests.netns.members import Network, Run, tiny_job
from tests.netns.stage import Stage

#: Six branches with BatchNorm and dropout, and a layer behind them: 23,604 numbers, in sets that differ by 3 %.
BRANCHED = """
class Branches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ways = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Dropout(0.1)) for _ in range(6)
        )
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        return self.last(sum(way(x) for way in self.ways))

def model():
    return Branches({width})
"""
ROUNDS = 20
SYSTEM = {"system": "B", "exchange": "auto", "batch": 48, "quorum": 1.0, "rounds": ROUNDS}
SYSTEM |= {"test_every": ROUNDS, "micro_batches": 1, "checkpoint_s": 0.0}
#: No host is taken for silent, however busy the machine is: without it a round comes to other weights.
PATIENT = ("--silence", "20")


def branched(folder: Path, width: int = 200) -> Path:
    return tiny_job(folder, BRANCHED.replace("{width}", str(width)), "branched")


def weights(run: Run) -> dict[int, str]:
    """Hashes by trained rounds: the same at all workers."""
    assert run.result["system"] == "B" and run.result["weights_identical"]
    found: dict[int, str] = {}
    for host in run.members:
        for row in run.training(host):
            assert found.setdefault(row["round"], row["weights_sha256"]) == row["weights_sha256"]
    assert run.result["fragments_added"] > 0
    return found


def lists(run: Run) -> set[tuple[str, ...]]:
    """Members by number that were counted in a round, of all rounds."""
    return {tuple(row["counted"]) for host in run.members for row in run.training(host)}


def both(network: Network, job: Path, **settings: Any) -> tuple[Run, Run]:
    """Training with partners, and without: the same bits after each round, and all that servers have not sent is what
    partners have.
    """
    with_, without = (
        network.train(job, **{**SYSTEM, **settings}, partners=partners)
        for partners in (True, False)
    )
    assert len(lists(with_) | lists(without)) == 1, "no worker has missed a round"
    assert weights(with_) == weights(without) and len(weights(with_)) == ROUNDS
    assert without.result["partner_bytes"] == 0
    assert with_.result["partner_bytes"] > 0
    return with_, without


def part(runs: tuple[Run, Run]) -> float:
    """Of the bytes that the servers send without partners, those that they send with them."""
    with_, without = (run.result["server_bytes_out"] for run in runs)
    return float(with_ / without)


@pytest.mark.parametrize(
    ("workers", "most"),
    [
        pytest.param(2, 0.55),
        pytest.param(3, 0.60, marks=pytest.mark.long),
        pytest.param(4, 0.55, marks=pytest.mark.long),
        pytest.param(5, 0.60, marks=pytest.mark.long),
    ],
)
def test_half_of_the_parameters_come_from_partners(workers: int, most: float) -> None:
    """B3: of a group of three the server gives three halves, too."""
    with Stage(1 + workers, arguments=PATIENT, program=None) as network:
        network.up()
        assert part(both(network, branched(network.folder), lane="i32")) <= most


@pytest.mark.long
def test_two_servers_and_narrow_lanes() -> None:
    """A set goes over the border of the servers' parts; a fragment of 8-bit lanes is four of parameters.

    The lead, h1, pulls the other server's part after each commit: 2.5 of 4.5 times the parameters are 0.556.
    """
    with Stage(6, arguments=PATIENT, program=None) as network:
        network.up()
        runs = both(network, branched(network.folder), servers="2", lane="i8", micro_batches=2)
        assert part(runs) <= 0.58


@pytest.mark.long
def test_with_a_key() -> None:
    """Questions and answers between workers are signed and numbered: none is refused."""
    with Stage(3, keyed=True, arguments=PATIENT, program=None) as network:
        network.up()
        assert part(both(network, branched(network.folder))) <= 0.55
        for host in network.names:
            counters = (network.status(host) or {})["counters"]
            assert not counters["forged"] and not counters["replayed"]


@pytest.mark.long
def test_two_percent_of_all_frames_are_lost() -> None:
    """Questions that are lost are sent again, to the partner as to the server."""
    with Stage(3, loss=0.02, arguments=PATIENT, program=None) as network:
        network.up()
        assert part(both(network, branched(network.folder))) <= 0.70


@pytest.fixture
def slow() -> Iterator[Stage]:
    """0.5 million parameters, 1.9 MB, at 100 Mbit/s: a pull takes 0.15 s."""
    with Stage(4, rate_bps=100_000_000, program=None) as network:
        network.up()
        yield network


def counted(network: Network, host: str, name: str) -> int:
    """Frames that the kernel there has counted."""
    return int((network.status(host) or {})["counters"][name])


def given(network: Network, host: str) -> int:
    """Frames with parameters that a worker has passed on."""
    return counted(network, host, "passed_on")


def begun(network: Network, job: Path, rounds: int, **settings: Any) -> Channel:
    """A job that goes on for so many rounds."""
    return network.submit(
        "h1", job, **{**SYSTEM, "rounds": rounds, "test_every": rounds, **settings}
    )


def giver(network: Network, workers: Sequence[str]) -> str:
    """A worker that gives its set to a partner now, in the job's first pull.

    Members are numbered as they answer, so any two of three workers may be those that give.
    """
    until(
        lambda: max(given(network, host) for host in workers) > 100, "a worker gives its set", 60.0
    )
    return max(workers, key=lambda host: given(network, host))


@pytest.mark.long
def test_a_partner_is_killed_while_it_gives_its_set(slow: Stage) -> None:
    """The servers are asked for the rest of that pull. The next view deals out groups anew: three are two then."""
    channel = begun(slow, branched(slow.folder, 4_000), 8)
    workers = ["h2", "h3", "h4"]
    killed = giver(slow, workers)
    slow.end(killed, signal.SIGKILL)
    left = [host for host in workers if host != killed]
    before = [given(slow, host) for host in left]
    run = slow.finished(channel)
    channel.close()
    assert len(weights(run)) == 8
    assert all(given(slow, h) > b for h, b in zip(left, before, strict=True)), "they are a pair"


@pytest.fixture
def pair() -> Iterator[Stage]:
    """As `slow`, with two workers."""
    with Stage(3, rate_bps=100_000_000, program=None) as network:
        network.up()
        yield network


@pytest.mark.long
def test_the_partner_of_a_pair_is_killed(pair: Stage) -> None:
    """The other one is alone then: the server gives it all, the rest of that pull and what comes later."""
    channel = begun(pair, branched(pair.folder, 4_000), 6)
    killed = giver(pair, ["h2", "h3"])
    pair.end(killed, signal.SIGKILL)
    run = pair.finished(channel)
    channel.close()
    assert len(weights(run)) == 6 and killed not in run.members


class InPull:
    """A job of a server, h2, and three workers, and a moment in the middle of a pull."""

    PULLS = 3  # whole ones of each worker

    def __init__(self, network: Stage, rounds: int) -> None:
        self.network = network
        self.channel = begun(network, branched(network.folder, 4_000), rounds, servers="h2")
        sent: list[int] = []

        def pulls() -> bool:
            sent.append(counted(network, "h2", "pulled"))
            status = network.status("h1") or {}
            return status.get("round", 0) > self.PULLS and sent[-1] > sent[-2] > sent[0]

        until(pulls, "a pull is under way", 90.0)

    def ended(self, rounds: int) -> Run:
        """The run, which must end well after so many rounds, with the same weights at all hosts after each."""
        run = self.network.finished(self.channel)
        self.channel.close()
        assert weights(run) and run.result["trained_rounds"] == rounds
        assert any("h2 served parameters, and left: " in self.network.log(h) for h in run.members)
        return run


@pytest.mark.long
def test_the_server_is_killed_in_mid_pull(slow: Stage) -> None:
    """A worker serves in its place, with what it has of the last commit that any of them has pulled."""
    scene = InPull(slow, 10)
    slow.end("h2", signal.SIGKILL)
    assert "h2" not in scene.ended(10).members


def stopped_and_back(network: Stage, host: str) -> None:
    """It stands still until the others go on without it, and is back in training then."""
    others = [name for name in network.names if name != host]
    network.lab.pause(host)
    try:
        until(lambda: network.live(others[0]) == {*others}, "a view without it", 30.0)
        network.in_training(others[0])
    finally:
        network.lab.resume(host)
    until(lambda: network.live(others[0]) == {*network.names}, "it is back", 30.0)
    network.in_training(host)


@pytest.mark.long
def test_the_server_is_stopped_in_mid_pull_and_comes_back(slow: Stage) -> None:
    """Its kernel answers until the others go on without it. It comes back as a worker, and has their weights."""
    scene = InPull(slow, 20)
    stopped_and_back(slow, "h2")
    run = scene.ended(20)
    assert "h2" in run.members and run.training("h2")[-1]["own_samples"] > 0


@pytest.mark.long
def test_the_partner_of_a_pair_is_stopped_and_comes_back(pair: Stage) -> None:
    """The server gives the other one all parameters meanwhile; back, it gives its set again."""
    channel = begun(pair, branched(pair.folder, 4_000), 20)
    stopped = giver(pair, ["h2", "h3"])
    stopped_and_back(pair, stopped)
    before = given(pair, stopped)
    run = pair.finished(channel)
    channel.close()
    assert len(weights(run)) == 20 and stopped in run.members
    assert given(pair, stopped) > before


@pytest.mark.long
def test_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways have the same bits, and the bytes are counted at the server's port, acknowledgements among them."""
    command = "--workers 2 --rounds 12 --params 100000 --json"
    assert partners.main(command.split()) == 0
    with_, without = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert with_["weights"] == without["weights"] and with_["params"] == 99_840
    assert with_["partner_bytes"] > 0 and not without["partner_bytes"]
    assert with_["server_bytes"] < 0.7 * without["server_bytes"]
    assert without["server_bytes"] > 2 * 4 * with_["params"]
