# SPDX-License-Identifier: Apache-2.0
"""Hosts train together: the same weights everywhere after every round, and sums that are exact (R6, R8 to R15)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import reference
from tests.netns.labs import leftovers, nicps
from tests.netns.members import DIGITS, Network, Run, tiny_job
from tests.reaper import fresh_name

ROUNDS = 6
LANES = {"i32": 360, "i16": 720, "i8": 1440}  # numbers in a fragment

# 300,000 parameters; gradients that grow so far that the members must ask for a larger unit on the way.
WIDE = """
settings = Settings(batch=64, rounds=4, quorum=1.0, test_every=1000, save_gradients=True)

def model():
    return nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 4))

calls = 0

def loss(model, batch):
    global calls
    calls += model.training
    return cross_entropy(model(batch["x"]), batch["y"].long()) * (1e9 if calls > 20 else 1.0)

def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.001)
"""


@pytest.fixture(scope="module")
def lossy() -> Iterator[Network]:
    """Four hosts; every switch port loses 2 % in each direction."""
    with Network(4, loss=0.02) as made:
        made.up()
        yield made


class Runs:
    """The digits on four hosts, once for each lane and LAN."""

    def __init__(self, clean: Network, lossy: Network) -> None:
        self._networks = {"clean": clean, "lossy": lossy}
        self._runs: dict[tuple[str, str], Run] = {}

    def get(self, lan: str, lane: str) -> Run:
        """The run, made if it was not yet."""
        if (lan, lane) not in self._runs:
            network = self._networks[lan]
            network.ready()
            settings = {"rounds": ROUNDS, "quorum": 1.0, "test_every": 4, "save_gradients": True}
            self._runs[lan, lane] = network.train(DIGITS, lane=lane, **settings)
        return self._runs[lan, lane]


@pytest.fixture(scope="module")
def runs(session_network: Network, lossy: Network) -> Runs:
    return Runs(session_network, lossy)


@pytest.fixture(
    params=[
        "lossy i32",
        pytest.param("lossy i8", marks=pytest.mark.long),
        pytest.param("clean i16", marks=pytest.mark.long),
        pytest.param("lossy i16", marks=pytest.mark.long),
    ]
)
def lan_and_lane(request: pytest.FixtureRequest) -> list[str]:
    return str(request.param).split()


@pytest.fixture
def lane(lan_and_lane: list[str]) -> str:
    return lan_and_lane[1]


@pytest.fixture
def run(lan_and_lane: list[str], runs: Runs) -> Run:
    return runs.get(*lan_and_lane)


def same_weights(run: Run) -> list[str]:
    """All hosts' weights after every round, which must be the same."""
    of_first = [(row["round"], row["weights_sha256"]) for row in run.metrics(run.members[0])]
    for host in run.members[1:]:
        assert [(row["round"], row["weights_sha256"]) for row in run.metrics(host)] == of_first
    assert run.result["weights_identical"] is True
    return [sha256 for _, sha256 in of_first]


def fragments_expected(run: Run, host: str, per_gradient: int) -> int:
    """What the kernel must have added there: all counted gradients but its own, and the test rounds' counts."""
    number = str(run.members.index(host) + 1)
    expected = 0
    for row in run.metrics(host):
        if row["phase"] == "train":
            expected += len(set(row["counted"]) - {number}) * per_gradient
        else:
            expected += len(run.members) - 1
    return expected


def test_all_hosts_hold_the_same_weights_after_every_round(run: Run) -> None:
    assert sorted(run.members) == ["h1", "h2", "h3", "h4"]
    weights = same_weights(run)
    assert len(weights) == ROUNDS + 2  # a test in between and one at the end
    assert len(set(weights)) == ROUNDS  # every training round changes them, a test does not
    assert [row["phase"] for row in run.metrics("h1")].count("test") == 2
    assert run.result["rounds"] == ROUNDS
    assert run.result["weights_sha256"] == weights[-1]


def test_sums_equal_the_reference_bit_for_bit(run: Run, lane: str) -> None:
    rounds = run.gradients()
    assert len(rounds) == ROUNDS
    assert all(len(saved) == 4 for saved in rounds.values())
    assert reference.check(int(lane[1:]), rounds) == 4 * ROUNDS


def test_the_kernels_have_added_every_fragment_once(run: Run, lane: str) -> None:
    lanes = len(next(iter(run.gradients().values()))[1]["vector"])
    per_gradient = -(-lanes // LANES[lane])
    added = {host: run.facts(host)["fragments_added"] for host in run.members}
    assert added == {host: fragments_expected(run, host, per_gradient) for host in run.members}
    assert run.result["fragments_added"] == sum(added.values())


@pytest.mark.long
def test_losses_change_nothing_but_the_time(runs: Runs, lossy: Network) -> None:
    clean_run, lossy_run = runs.get("clean", "i16"), runs.get("lossy", "i16")
    assert same_weights(lossy_run) == same_weights(clean_run)
    dropped = [
        port.to_host.dropped + port.from_host.dropped for port in lossy.lab.counters().values()
    ]
    assert all(dropped)
    assert clean_run.result["fragments_sent_again"] == 0
    assert lossy_run.result["test_accuracy"] == clean_run.result["test_accuracy"]


def test_hosts_test_their_own_part(runs: Runs) -> None:
    run = runs.get("clean", "i16")
    for host in run.members:
        tests = [row for row in run.metrics(host) if row["phase"] == "test"]
        assert [row["succeeded"] + row["failed"] for row in tests] == [359, 359]
        assert tests[-1]["accuracy"] == run.result["test_accuracy"]


def test_a_larger_unit_and_losses(lossy: Network, open_path: Path) -> None:
    lossy.ready()
    run = lossy.train(tiny_job(open_path, WIDE), lane="i16")
    same_weights(run)
    rounds = run.gradients()
    assert reference.check(16, rounds) == 16
    units = [int(saved[1]["unit"]) for _, saved in sorted(rounds.items())]
    assert units[0] < units[-1]
    skipped = [round_ for round_, saved in rounds.items() if not len(saved[1]["counted"])]
    assert len(skipped) == 1
    assert run.result["fragments_sent_again"] > 0
    assert run.result["rounds"] == 5


def test_one_host_alone_trains_too(open_path: Path) -> None:
    name = fresh_name()
    arguments = ["--hosts", "1", "--lab", name, "--runs", str(open_path / "runs"), "--json"]
    arguments += ["--set", "rounds=24", "--set", "save_gradients=true"]
    done = nicps("lab", "run", str(DIGITS), *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["hosts"], result["data"], result["xdp_mode"]) == (1, "digits", "native")
    assert (result["rounds"], result["fragments_added"]) == (24, 0)
    assert result["weights_identical"] is True
    assert 0.5 < result["test_accuracy"] <= 1
    assert Path(result["report"]).is_file()
    run = Run(result, [], {"h1": open_path / "runs"})
    assert reference.check(16, run.gradients()) == 24
    assert leftovers(name) == {}
