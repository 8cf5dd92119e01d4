# SPDX-License-Identifier: Apache-2.0
"""The residuals of a job that is resumed go on: every host keeps its own, beside the checkpoint.

Then the weights are those of a job that was never stopped, bit for bit, unless a Linux switch has added: what rounding
has left over of its last sum is lost. Members are numbered in the order of their answers, so two hosts have the same
numbers every time.
"""

from __future__ import annotations

import json
import signal
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import striped_rounds
from tests.netns.labs import until
from tests.netns.members import LIGHT, Ended, Network, Run, tiny_job
from tests.netns.switched_stage import SwitchedStage
from tests.netns.test_leaving import ends_well

HALF, ROUNDS = 6, 12
#: 5,100 numbers, four fragments of 8 bits.
WIDER = "\ndef model():\n    return nn.Sequential(nn.Linear(16, 300))\n"
SETTINGS = {"quorum": 1.0, "lane": "i8", "batch": 16}
SLOW = {**SETTINGS, "microbatch_seconds": 0.005}
EXCHANGES = ("stripes", "broadcast")

Weights = dict[int, str]  # hashes by the number of trained rounds


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    # Of two hosts the first may go on when the other is silent, and that one comes back without its residual. So
    # no host is taken for silent here, however busy the machine is.
    with Network(2, program=LIGHT, arguments=("--silence", "20")) as made:
        made.up()
        yield made


@pytest.fixture(scope="module")
def job(two: Network) -> Path:
    return tiny_job(two.folder, WIDER)


@pytest.fixture(scope="module")
def through(two: Network, job: Path) -> dict[str, Weights]:
    """By exchange, of a job that went through."""
    found = {}
    for exchange in EXCHANGES:
        found[exchange] = weights(two.train(job, exchange=exchange, rounds=ROUNDS, **SETTINGS))
        assert sorted(found[exchange]) == [*range(1, ROUNDS + 1)]
    return found


def weights(run: Run) -> Weights:
    """The same at both hosts, which were counted in every round."""
    for host in run.places:
        assert all(set(row["counted"]) == {"1", "2"} for row in run.training(host)), host
    one, other = (
        {row["trained_rounds"]: row["weights_sha256"] for row in run.training(host)}
        for host in run.places
    )
    assert one == other
    return one


def half(two: Network, job: Path, exchange: str) -> str:
    """The name of a run that has ended half-way."""
    run = two.train(job, exchange=exchange, rounds=HALF, **SETTINGS)
    name = str(run.result["job_id"])
    for host in two.names:
        assert kept(two, name, host).stat().st_size > 4 * 5100
    return name


def kept(two: Network, run: str, host: str) -> Path:
    """The residual of that host."""
    return two.place(host, "runs") / run / "checkpoint" / f"{host}.residual.npz"


def resumed(two: Network, run: str, trained: int = HALF, rounds: int = ROUNDS) -> Weights:
    """The weights after so many rounds in all, of which so many had been trained."""
    folder = two.place("h1", "runs") / run
    more = ("--set", f"rounds={rounds}", "--wait", "--json")
    done: Ended = two.command("h1", "resume", str(folder), *more)
    result = ends_well(done, set(two.names), rounds=rounds - trained)
    return weights(Run(result, [], {host: two.place(host, "runs") for host in two.names}))


@pytest.mark.short("stripes")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_resumed_job_has_the_same_bits(
    two: Network, job: Path, through: dict[str, Weights], exchange: str
) -> None:
    found = resumed(two, half(two, job, exchange))
    assert found == {at: through[exchange][at] for at in range(HALF + 1, ROUNDS + 1)}


@pytest.mark.short("damaged")
@pytest.mark.parametrize("how", ["missing", "damaged", "of another state"])
def test_without_its_residual_a_host_begins_at_zero(
    two: Network, job: Path, through: dict[str, Weights], how: str
) -> None:
    """It reports this, and all train on alike; but the weights are not those of a job without a stop."""
    run = half(two, job, "stripes")
    path = kept(two, run, "h2")
    if how == "missing":
        path.unlink()
    elif how == "damaged":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        former = two.train(job, exchange="stripes", rounds=HALF - 1, **SETTINGS)
        path.write_bytes(kept(two, str(former.result["job_id"]), "h2").read_bytes())
    said = len(two.log("h2"))
    found = resumed(two, run)
    due = {at: through["stripes"][at] for at in range(HALF + 1, ROUNDS + 1)}
    assert found.keys() == due.keys() and found[ROUNDS] != due[ROUNDS]
    lines = [line for line in two.log("h2")[said:].splitlines() if "begin at zero" in line]
    assert len(lines) == 1
    word = {"missing": "No such file", "damaged": "damaged", "of another state": "another state"}
    assert word[how] in lines[0]


@pytest.mark.long
def test_a_cancelled_job_is_resumed_with_the_same_bits(two: Network, job: Path) -> None:
    """Its hosts write their residuals as it ends, though no checkpoint was due."""
    with closing(two.submit("h1", job, exchange="stripes", rounds=100_000, **SLOW)):
        two.in_training("h1")
        run = two.status("h1")["job"]  # type: ignore[index]
        assert two.command("h2", "cancel").code == 0
        two.all_stand_by()
        for host in two.names:
            until(kept(two, run, host).exists, f"the residual of {host}")
            two.work_is_clear(host)
    goes_on_alike(two, job, run, "stripes")


@pytest.mark.long
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_killed_hosts_go_on_from_a_checkpoint_in_the_middle(two: Network, exchange: str) -> None:
    """All write their residuals of the same round: the lead's training program names it before it is committed."""
    hold = two.folder / "hold"
    waits = f"def before_batch():\n    while os.path.exists({str(hold)!r}): time.sleep(0.01)\n"
    job = tiny_job(two.folder, WIDER, "held", waits)
    two.ready()
    often = {"checkpoint_s": 0.001, "test_every": 100_000, **SLOW}
    with closing(two.submit("h1", job, exchange=exchange, rounds=100_000, **often)):
        two.in_training("h1", rounds=6)
        run = two.status("h1")["job"]  # type: ignore[index]
        try:
            hold.touch()

            def written() -> bool:
                last = two.status("h1")["round"] - 1  # type: ignore[index]
                if not all(head(kept(two, run, host))["round"] == last for host in two.names):
                    return False
                lead = kept(two, run, "h1")  # which it writes before the checkpoint
                saved = lead.with_name("checkpoint.npz").stat().st_mtime_ns
                return saved > lead.stat().st_mtime_ns

            until(written, "the last round's checkpoint and residuals")
            states = {head(kept(two, run, host))["state"] for host in two.names}
            for host in two.names:
                two.end(host, signal.SIGKILL)
        finally:
            hold.unlink()
    assert len(states) == 1
    two.ready()
    goes_on_alike(two, job, run, exchange)


@pytest.mark.long
@pytest.mark.xdp
def test_with_a_linux_switch_the_members_residuals_go_on() -> None:
    """Every sum, bit for bit, as if it were one job whose switch has begun anew: the remainder of the last round before
    the resumption is in no later sum.
    """
    with SwitchedStage(2, arguments=("--silence", "20")) as stage:
        stage.up()
        job = tiny_job(stage.folder, WIDER)
        run = half(stage, job, "switch")
        first, before = stage.offers_and_sums(), stage.boots()
        stage.clear()
        resumed(stage, run)
        second, boots = stage.offers_and_sums(), stage.boots()
        assert not any("begin at zero" in stage.log(host) for host in stage.names)
        boots = {view: boot + (view not in before) for view, boot in boots.items()}
        rounds = [*sorted(first.items()), *sorted(second.items())]
        rounds = [(at, both) for at, both in rounds if both[1]]  # one may have been begun
        assert len(rounds) == ROUNDS
        for own in (own for _, both in rounds for saved in both for own in saved.values()):
            own["life"] = np.array("one")
        exchanges = {str(own["exchange"]) for _, (_, sums) in rounds for own in sums.values()}
        assert exchanges == {"linux-switch"}
        joined = {at: both for at, (_, both) in enumerate(rounds, 1)}
        assert striped_rounds.check(8, joined, boots) == 2 * ROUNDS


def head(path: Path) -> dict[str, Any]:
    """The fields of a residual's file about itself; empty if there is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = json.loads(archive.read("residual.json"))
    except FileNotFoundError:
        return {"round": 0}
    assert isinstance(found, dict)
    return found


def goes_on_alike(two: Network, job: Path, run: str, exchange: str) -> None:
    """Resumed, it has the bits of a job that was not stopped."""
    checkpoint = two.place("h1", "runs") / run / "checkpoint" / "checkpoint.npz"
    with np.load(checkpoint) as saved:
        trained = json.loads(saved["state.json"])["progress"]["round"]
    said = {host: len(two.log(host)) for host in two.names}
    found = resumed(two, run, trained, trained + 3)
    for host in two.names:
        log = two.log(host)[said[host] :]
        assert "begin at zero" not in log, (host, trained, head(kept(two, run, host)), log)
    straight = weights(two.train(job, exchange=exchange, rounds=trained + 3, **SETTINGS))
    assert found == {at: straight[at] for at in range(trained + 1, trained + 4)}
