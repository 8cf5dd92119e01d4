# SPDX-License-Identifier: Apache-2.0
"""Jobs with parameter servers (docs/servers.md): real agents and kernels, and the faults of faults.md."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps.errors import JobFailed
from nicps.session.channel import Channel
from tests.netns.labs import leftovers, nicps, until
from tests.netns.members import DIGITS, LIGHT, Network, Run, tiny_job
from tests.netns.stage import Stage
from tests.reaper import fresh_name

#: 5,100 numbers: 15 fragments of 32 bits, 8 of 16, 4 of 8.
WIDER = "\ndef model():\n    return nn.Sequential(nn.Linear(16, 300))\n"
SYSTEM = {"system": "S", "exchange": "auto", "batch": 48, "quorum": 1.0}


@pytest.fixture(scope="module")
def four() -> Iterator[Network]:
    with Network(4, program=LIGHT) as made:
        made.up()
        yield made


@pytest.fixture(scope="module")
def job(four: Network) -> Path:
    return tiny_job(four.folder, WIDER)


class Counters:
    """What the agents' kernels have counted since."""

    def __init__(self, network: Network) -> None:
        self._network, self._before = network, self._now(network)

    @staticmethod
    def _now(network: Network) -> dict[str, dict[str, int]]:
        return {host: (network.status(host) or {})["counters"] for host in network.names}

    def of(self, name: str) -> dict[str, int]:
        """By host, where there are any."""
        now = self._now(self._network)
        found = {host: now[host][name] - self._before[host][name] for host in now}
        return {host: count for host, count in found.items() if count}


def checked(run: Run) -> dict[int, str]:
    """Hashes of the weights by trained rounds: the same at all hosts that have told them."""
    assert run.result["weights_identical"]
    assert run.result["system"] == "S"
    found: dict[int, str] = {}
    for host in run.members:
        for row in run.training(host):
            first = found.setdefault(row["round"], row["weights_sha256"])
            assert row["weights_sha256"] == first, (host, row["round"])
    assert found
    facts = [run.facts(host) for host in run.members]
    assert sum(f["fragments_added"] for f in facts) == sum(f["fragments_expected"] for f in facts)
    return found


@pytest.mark.short("i16")
@pytest.mark.parametrize("lane", ["i32", "i16", "i8"])
def test_each_step_is_a_synchronisation(four: Network, job: Path, lane: str) -> None:
    """T = 1 is plain synchronous training: no step is pushed by itself."""
    counters = Counters(four)
    run = four.train(job, rounds=6, lane=lane, sync_every=1, **SYSTEM)
    assert len(checked(run)) == 6
    assert list(counters.of("pulled")) == ["h1"] and not counters.of("pushed")
    assert run.result["forced_synchronisations"] == 6 and run.result["staleness_max"] in (0, None)


def test_steps_are_pushed_between_synchronisations(four: Network, job: Path) -> None:
    """T = 6 with three workers of which one is slow: its steps are staler than the others'."""
    slow = {"microbatch_seconds": 0.002, "slow.h4": 4.0}
    run = four.train(job, rounds=20, sync_every=6, test_every=20, **slow, **SYSTEM)
    checked(run)
    pushes = [row for host in run.members for row in run.metrics(host) if row["phase"] == "push"]
    assert {max(row["staleness"]) for row in pushes} > {1, 2}
    assert min(min(row["staleness"]) for row in pushes) >= 1
    assert run.result["staleness_max"] >= 3 and run.result["staleness_mean"] > 1


def test_no_synchronisation_but_tests(four: Network, job: Path) -> None:
    """T = 0: rounds end where tests are due, and change nothing."""
    run = four.train(job, rounds=12, sync_every=0, test_every=4, **SYSTEM)
    checked(run)
    assert run.result["forced_synchronisations"] == 0


@pytest.mark.parametrize("lane", ["i32", "i16"])
def test_two_servers_share_the_parameters(four: Network, lane: str) -> None:
    """Pushes and pulls, within a tenth; the answers to a push bring parameters only with the widest lanes."""
    job = tiny_job(
        four.folder, "\ndef model():\n    return nn.Sequential(nn.Linear(16, 1000))\n", "two"
    )
    counters, of = Counters(four), {"servers": "h2,h4", "sync_every": 12, "lane": lane}
    run = four.train(job, rounds=24, test_every=12, **of, **SYSTEM)
    checked(run)
    shares = [counters.of(name) for name in ("pushed", "pulled")]
    for share in shares:
        assert sorted(share) == ["h2", "h4"]
        assert max(share.values()) <= 1.1 * min(share.values())
    pushed, pulled = (sum(share.values()) for share in shares)
    assert (pushed > pulled) is (lane == "i32")


def test_a_run_is_resumed_without_a_server_that_it_names(four: Network, job: Path) -> None:
    """The run's settings go along. The error says how to choose other servers, and that goes on from the run."""
    of = {"servers": "h2,h3", "sync_every": 6, "test_every": 12}
    run = four.train(job, rounds=12, **of, **SYSTEM)
    folder = four.place("h1", "runs") / run.result["job_id"]
    again = ("resume", str(folder), "--set", "rounds=24", "--wait", "--json")
    four.leave("h3")
    try:
        said = four.command("h1", *again).error(5)
        assert said.startswith("servers: h3 is no member of this job: --set servers=N, or names")
        done = four.command("h1", *again, "--set", "servers=h4,h2")
    finally:
        four.join("h3")
        four.ready()
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert sorted(result["members"]) == ["h1", "h2", "h4"] and result["weights_identical"]
    assert result["settings"]["servers"] == "h4,h2"
    assert result["trained_rounds"] == run.result["rounds"] + result["rounds"] < 24


#: Only the first host, which leads and trains, finds the end near.
ENDS = """
def done(state):
    with open("/sys/class/net/eth1/address") as file:
        return int(file.read().strip()[-2:], 16) == 1 and state.round >= 6
"""


@pytest.mark.long
def test_a_test_that_servers_do_not_expect(four: Network) -> None:
    """R14: the lead's word counts. Both servers pull as the test comes, which takes longer than it takes to begin."""
    large = "\ndef model():\n    return nn.Sequential(nn.Linear(16, 200_000))\n"
    job = tiny_job(four.folder, large, "unexpected", hooks=ENDS)
    run = four.train(job, rounds=200, test_every=200, servers="h2,h3", sync_every=6, **SYSTEM)
    assert run.result["weights_identical"] and run.result["trained_rounds"] < 20
    assert not run.training("h2") and not run.training("h3")
    tested = [row for host in run.members for row in run.metrics(host) if row["phase"] == "test"]
    assert len(tested) == 4 and len({row["weights_sha256"] for row in tested}) == 1


@pytest.fixture
def lossy() -> Iterator[Network]:
    with Network(3, loss=0.02, program=LIGHT) as made:
        made.up()
        yield made


def test_two_percent_of_all_frames_are_lost(lossy: Network) -> None:
    run = lossy.train(
        tiny_job(lossy.folder, WIDER), rounds=20, sync_every=4, test_every=10, **SYSTEM
    )
    checked(run)
    assert run.result["fragments_sent_again"] > 0


@pytest.fixture
def keyed() -> Iterator[Stage]:
    with Stage(3, keyed=True, program=LIGHT) as made:
        made.up()
        yield made


@pytest.mark.long
def test_with_a_key(keyed: Stage) -> None:
    """Steps, questions, answers and contributions are signed and numbered: none is refused."""
    counters, of = Counters(keyed), {"sync_every": 4, "test_every": 10}
    run = keyed.train(tiny_job(keyed.folder, WIDER), rounds=20, **of, **SYSTEM)
    checked(run)
    assert counters.of("pushed") and counters.of("acknowledged")
    assert not counters.of("forged") and not counters.of("replayed")


@pytest.fixture
def with_torch() -> Iterator[Stage]:
    with Stage(3, rate_bps=100_000_000, program=None) as made:
        made.up()
        yield made


@pytest.mark.long
@pytest.mark.parametrize("priorities", [None, 4])
def test_steps_are_computed_while_parameters_arrive(
    with_torch: Stage, priorities: int | None
) -> None:
    """By PyTorch's program, after a push; 91,724 numbers. A row's computing has the next step's then."""
    layers = "nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 284), nn.ReLU(), nn.Linear(284, 4)"
    job = tiny_job(with_torch.folder, f"\ndef model():\n    return nn.Sequential({layers})\n")
    of = {"sync_every": 8, "test_every": 24, "micro_batches": 1, "priorities": priorities}
    run = with_torch.train(job, rounds=24, **of, **SYSTEM)
    checked(run)
    assert run.result["channels"] == (priorities or 1)
    pushes = [row for host in run.members for row in run.metrics(host) if row["phase"] == "push"]
    ahead = [row["seconds_compute"] - (row["t_offer"] - row["t_start"]) for row in pushes]
    assert len(pushes) >= 24
    # Where a program gets no processor for a moment, all parameters are there before it can begin.
    assert sum(seconds > 0.0 for seconds in ahead) > len(ahead) / 2


#: Its parameters grow by 300,000 a step; the loss stays finite.
GROWING = """
def loss(model, batch):
    return 0.0 * cross_entropy(model(batch["x"]), batch["y"].long()) - 3e5 * model[2].bias.sum()

def optimizer(parameters):
    return torch.optim.SGD([*parameters], lr=1.0)
"""


@pytest.mark.long
def test_a_parameter_that_grows_too_large_ends_the_job(with_torch: Stage) -> None:
    """Nothing wraps at the server: all hosts are told which parameter it is."""
    job = tiny_job(with_torch.folder, GROWING, "growing")
    of = {"sync_every": 8, "test_every": 24, "micro_batches": 1}
    with pytest.raises(JobFailed, match=r"2\.bias") as failed:
        with_torch.train(job, rounds=240, **of, **SYSTEM)
    assert "servers" in str(failed.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "hosts", "settings", "least"),
    [
        ("digits", 4, {"system": "S", "sync_every": 16}, 0.9),
        ("branches", 5, {"system": "B"}, 0.9),
        ("text", 3, {"system": "S", "sync_every": 8, "rounds": 24, "test_every": 12}, 0.2),
    ],
)
def test_jobs_that_ship_train_as_they_are(
    open_path: Path, job: str, hosts: int, settings: dict[str, Any], least: float
) -> None:
    """By `nicps lab run` and PyTorch, without a change, on the digits and on text."""
    name, without_data = fresh_name(), {**os.environ}
    without_data.pop("NICPS_DATA", None)
    where = ["--hosts", str(hosts), "--lab", name, "--runs", str(open_path / "runs"), "--json"]
    asked = [f"--set={key}={value}" for key, value in settings.items()]
    command = "lab", "run", str(DIGITS.parent / job), *where, *asked
    done = nicps(*command, env=without_data, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["system"] == settings["system"] and result["weights_identical"] is True
    assert result["test_accuracy"] >= least and result["forced_synchronisations"] > 0
    assert result["versions"] >= result["forced_synchronisations"]
    assert leftovers(name) == {}


class Slow:
    """A job that goes on for long enough to be disturbed."""

    def __init__(self, network: Network, job: Path, **settings: Any) -> None:
        more = {"rounds": 60, "sync_every": 6, "test_every": 60, "microbatch_seconds": 0.002}
        self.channel: Channel = network.submit("h1", job, **{**SYSTEM, **more, **settings})
        network.in_training()


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 6])
def test_a_worker_is_killed_and_comes_back(four: Network, job: Path, every: int) -> None:
    """The others go on without it; it takes the state of a commit, and pulls."""
    slow = Slow(four, job, sync_every=every, rounds=120, test_every=120)
    four.end("h3", signal.SIGKILL)
    until(lambda: len((four.status("h1") or {})["members"]) == 4, "a list")
    four.join("h3")
    until(lambda: (four.status("h3") or {}).get("phase") == "train", "h3 trains again")
    run = four.finished(slow.channel)
    checked(run)
    slow.channel.close()
    four.ready()


@pytest.mark.short("6-h1")
@pytest.mark.parametrize(("every", "servers"), [(1, "h2"), (6, "h2"), (6, "h1"), (6, "h2,h3")])
def test_a_server_is_killed(four: Network, job: Path, every: int, servers: str) -> None:
    """A worker serves in its place, with the state of the last commit. h1 has submitted the job, and leads it."""
    slow = Slow(four, job, servers=servers, sync_every=every, rounds=120, test_every=120)
    killed = servers[:2]
    four.end(killed, signal.SIGKILL)
    said = f"{killed} served parameters, and left: "
    until(lambda: any(said in four.log(host) for host in four.names), "said at the lead")
    if killed != "h1":
        checked(four.finished(slow.channel))
    else:
        until(lambda: "job done, standing by" in four.log("h4"), "the job's end")
    slow.channel.close()
    four.ready()


#: All but the first host find the end near.
OTHERS = ENDS.replace("== 1", "!= 1")


@pytest.mark.long
def test_a_new_lead_judges_otherwise(four: Network) -> None:
    """R14: workers have pushed since. So its word counts after the next synchronisation, for the servers too."""
    job = tiny_job(four.folder, WIDER, "otherwise", hooks=OTHERS)
    slow = Slow(four, job, servers="h3,h4", sync_every=200, rounds=2000, test_every=2000)
    four.end("h1", signal.SIGKILL)

    others = "h2", "h3", "h4"

    def result() -> dict[str, Any]:
        lasts = [(four.status(host) or {}).get("last_job", {}) for host in others]
        return next((dict(last["result"]) for last in lasts if last.get("result")), {})

    places = {host: four.place(host, "runs") for host in four.names}
    run = Run(until(result, "the new lead's result"), [], places)
    # On a busy machine another host may have led, and ended the job, before the first one was killed.
    assert run.result["weights_identical"] and set(run.members).issuperset(others)
    tested = [row for host in others for row in run.metrics(host) if row["phase"] == "test"]
    assert len(tested) == 3 and len({row["weights_sha256"] for row in tested}) == 1
    slow.channel.close()
    four.ready()


@pytest.fixture
def two() -> Iterator[Network]:
    with Network(2, program=LIGHT) as made:
        made.up()
        yield made


def test_the_only_server_of_two_hosts_is_killed(two: Network) -> None:
    """Nobody would be left to train: the job is saved, and stopped. Of two hosts the first may go on alone."""
    slow = Slow(two, tiny_job(two.folder, WIDER), servers="h2")
    two.end("h2", signal.SIGKILL)
    until(lambda: two.stands_by("h1"), "the job is stopped")
    log = two.log("h1")
    assert "h2 served parameters, and left: too few hosts are left to serve and to train" in log
    assert "saved after" in log
    slow.channel.close()
