# SPDX-License-Identifier: Apache-2.0
"""Node 1, which has submitted the job, is killed in each phase (docs/faults.md).

Before all hosts have the job none can go on: all stand by, with one line that gives the reason. From then on another
host leads, and the job ends well without the first one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.netns.members import Run
from tests.netns.scenes import Drill, Stage

#: At 100 Mbit/s this model's hand-out takes more than a second.
LARGE = """
def model():
    return nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, {width}), nn.ReLU(), nn.Linear({width}, 4))
"""

SLOW_TEST = """
def before_test():
    time.sleep(1.0)
"""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(4, keyed=True, rate_bps=100_000_000) as made:
        made.up()
        yield made


def begun(stage: Stage, more: str = "", hooks: str = "", **settings: int) -> Drill:
    """A job submitted on h1."""
    stage.ready()
    drill = Drill(stage, more, hooks, settings)
    drill.submit("h1")
    return drill


def killed(drill: Drill, when: Callable[[], Any], what: str) -> list[str]:
    """h1 is killed as soon as a condition holds; the logs of the others up to then are forgotten."""
    stage = drill.stage
    drill.until(when, what, 60.0)
    stage.end("h1", signal.SIGKILL)  # with its process group
    drill.close()
    return ["h2", "h3", "h4"]


def phase_of(stage: Stage, host: str) -> str:
    status = stage.status(host)
    return str(status["phase"]) if status is not None else ""


def ended_well(drill: Drill, hosts: list[str], job_id: str) -> Run:
    """The job has ended at these, led by one of them."""
    stage = drill.stage

    def results() -> dict[str, Any]:
        found = [stage.status(host) for host in hosts]
        lasts = [s["last_job"] for s in found if s is not None]
        ours = [last for last in lasts if last.get("job_id") == job_id]
        return dict(ours[0]) if ours else {}

    last = drill.until(results, "the job's end", 60.0)
    assert last["error"] is None
    result = last["result"]
    assert result["weights_identical"] is True
    stage.all_stand_by(*hosts)
    for host in hosts:
        stage.work_is_clear(host)
    return Run(result, [], {host: stage.place(host, "runs") for host in stage.names})


def test_while_it_calls(stage: Stage) -> None:
    """No host has more than a call: nothing has begun."""
    drill = begun(stage)
    forming = lambda: (stage.status("h1") or {}).get("state") == "forming"  # noqa: E731
    rest = killed(drill, forming, "h1 calls")
    stage.all_stand_by(*rest)
    for host in rest:
        stage.work_is_clear(host)


def test_while_it_hands_out(stage: Stage) -> None:
    """No member that is left has the whole job: it stops, and all users are told the reason."""
    drill = begun(stage, LARGE.format(width=1024))
    said = {host: len(stage.log(host)) for host in stage.names}
    rest = killed(drill, lambda: phase_of(stage, "h1") == "handout", "a hand-out")
    stage.all_stand_by(*rest)
    for host in rest:
        stage.work_is_clear(host)
        lines = [x for x in stage.log(host)[said[host] :].splitlines() if "stopped" in x]
        assert len(lines) == 1
        assert lines[0].endswith("job stopped: nobody is left who has the whole job")


@pytest.mark.long
def test_while_programs_start(stage: Stage) -> None:
    """All have the job, and none trains yet."""
    drill = begun(stage, rounds=20)

    def has_job(host: str) -> bool:
        return bool([*stage.place(host, "work").glob("*/trainer.log")])

    others = ["h2", "h3", "h4"]
    job_ids = lambda: {(stage.status(host) or {}).get("job") for host in others}  # noqa: E731
    rest = killed(drill, lambda: all(map(has_job, others)), "all start their programs")
    (job_id,) = job_ids()
    run = ended_well(drill, rest, str(job_id))
    assert run.result["rounds"] == 20
    drill.exact()


def test_while_training(stage: Stage) -> None:
    drill = begun(stage)
    rest = killed(drill, lambda: drill.last("h2") > 5, "training")
    drill.goes_on(*rest)
    drill.job_id = str(drill.status("h2")["job"])
    drill.end(*rest)


@pytest.mark.long
def test_while_testing(stage: Stage) -> None:
    drill = begun(stage, hooks=SLOW_TEST, rounds=5, test_every=3)
    rest = killed(drill, lambda: phase_of(stage, "h2") == "test", "a test")
    run = ended_well(drill, rest, str(drill.status("h2")["job"]))
    assert run.result["rounds"] == 5 and run.result["test_accuracy"] is not None
    drill.exact()


def last_round(drill: Drill, rounds: int) -> bool:
    """The last round has been applied at a host: its end is being decided."""
    return any(
        len([*drill.stage.records(h).glob("[0-9]*.sum.npz")]) >= rounds for h in ("h2", "h3")
    )


@pytest.mark.long
def test_while_it_decides_the_end(stage: Stage) -> None:
    drill = begun(stage, rounds=20)
    drill.until(lambda: drill.last("h2"), "training", 60.0)
    job_id = str(drill.status("h2")["job"])
    rest = killed(drill, lambda: last_round(drill, 20), "the last round")
    run = ended_well(drill, rest, job_id)
    assert run.result["rounds"] == 20
    drill.exact()


@pytest.mark.parametrize("what", [pytest.param("saving", marks=pytest.mark.long), "collecting"])
def test_while_it_ends(stage: Stage, what: str) -> None:
    """The end is agreed on: models are saved, then records collected. The next lead collects anew."""
    for _ in range(5):
        drill = begun(stage, rounds=20)
        drill.until(partial(drill.last, "h2"), "training", 60.0)
        job_id = str(drill.status("h2")["job"])
        kept = stage.place("h2" if what == "saving" else "h1", "runs") / job_id
        wanted = ["h2"] if what == "saving" else ["h3", "h4"]
        rest = killed(drill, partial(any_of, kept, wanted), what)
        if not drill.until(partial(outcome, stage, rest, job_id), "what came of it")["over"]:
            break
    run = ended_well(drill, rest, job_id)
    assert run.result["rounds"] == 20
    assert sorted(run.members) == rest
    drill.exact()


def any_of(folder: Path, names: list[str]) -> bool:
    return any((folder / name).exists() for name in names)


def outcome(stage: Stage, hosts: list[str], job_id: str) -> dict[str, bool]:
    """Whether the lead had ended the job before it was killed, once that is known."""
    texts = [stage.log(host).partition(f"job {job_id}")[2] for host in hosts]
    if any("this host leads the job from now on" in text for text in texts):
        return {"over": False}
    return {"over": True} if all("job done, standing by" in text for text in texts) else {}
