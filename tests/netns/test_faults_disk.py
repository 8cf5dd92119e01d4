# SPDX-License-Identifier: Apache-2.0
"""Disks that fill up while a job trains (docs/faults.md)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.errors import Alarm, JobFailed
from nicps.session.commands import await_result
from tests.netns.labs import until
from tests.netns.scenes import Drill, Stage

#: A checkpoint all the time.
OFTEN = (
    "settings = Settings(batch=160, test_every=10**9, microbatch_seconds=0.005, checkpoint_s=0.2)\n"
)

SMALL = 'mount -t tmpfs -o size=2m none "$1" && mount -t tmpfs -o size=2m none "$2" && shift 2 && exec "$@"'


class SmallDisks(Stage):
    """Working and results folders are small disks of their own, which go with the agent."""

    def join(self, host: str, *arguments: str, **options: object) -> None:  # type: ignore[override]
        places = [str(self.place(host, what)) for what in ("work", "runs")]
        wrap = ["unshare", "--mount", "sh", "-c", SMALL, "sh", *places]
        super().join(host, *arguments, wrap=wrap)

    def path(self, host: str, what: str) -> Path:
        """The folder as the agent there sees it."""
        root = Path(f"/proc/{self.agents[host].process.pid}/root")
        return root / self.place(host, what).relative_to("/")

    @contextlib.contextmanager
    def full(self, host: str, what: str) -> Iterator[None]:
        """Full to the last byte."""
        filler = self.path(host, what) / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(filler).f_bavail == 0
        try:
            yield
        finally:
            filler.unlink()


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(SmallDisks(3, keyed=True), OFTEN) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Drill:
    """Three hosts that train."""
    made.ready()
    return made


@pytest.fixture
def stage(made: Drill) -> SmallDisks:
    assert isinstance(made.stage, SmallDisks)
    return made.stage


@pytest.mark.long
def test_the_leads_results_folder_is_full(drill: Drill, stage: SmallDisks) -> None:
    """No checkpoint can be written: the last one stays, a warning is given, and the training goes on."""
    lead = drill.lead()
    kept = stage.path(lead, "runs") / drill.job_id / "checkpoint" / "checkpoint.npz"
    until(kept.is_file, "a checkpoint")
    with stage.full(lead, "runs"):
        drill.until(
            lambda: "no checkpoint in" in stage.log(lead) and "No space left" in stage.log(lead),
            "a warning",
        )
        before = kept.read_bytes()
        drill.goes_on(*stage.names, rounds=10)
        assert kept.read_bytes() == before
    drill.until(lambda: kept.read_bytes() != before, "a checkpoint again")
    drill.exact()
    assert [path.name for path in kept.parent.glob(".*")] == []


@pytest.mark.short("the lead")
@pytest.mark.parametrize("whose", ["a member", "the lead"])
def test_a_working_folder_is_full(drill: Drill, stage: SmallDisks, whose: str) -> None:
    """A host that cannot write its records ends the job: all stand by, and one line names the host of that disk."""
    lead = drill.lead()
    host = lead if whose == "the lead" else next(h for h in stage.names if h != lead)
    with stage.full(host, "work"):
        drill.until(
            lambda: drill.status(lead)["last_job"].get("job_id") == drill.job_id, "the end", 60.0
        )
        error = drill.status(lead)["last_job"]["error"]
    assert "No space left on device" in error and len(error.splitlines()) == 1
    assert host == lead or error.startswith(f"{host}: ")
    stage.all_stand_by()
    drill.exact()


def test_an_alarm_that_cannot_save(drill: Drill, stage: SmallDisks) -> None:
    """R22: a job that was not saved is not reported as saved, and the former checkpoint stays."""
    drill.settings = {"alarm_below": 1.0}
    stage.end("h1", signal.SIGKILL)  # and with it the job without that setting
    drill.begin()
    assert drill.channel is not None
    kept = stage.path("h1", "runs") / drill.job_id / "checkpoint" / "checkpoint.npz"
    until(kept.is_file, "a checkpoint")
    try:
        with stage.full("h1", "runs"):
            before = kept.read_bytes()
            stage.end("h3", signal.SIGKILL)
            with pytest.raises(JobFailed) as failed:
                await_result(drill.channel, timeout_s=60.0)
            assert kept.read_bytes() == before
    finally:
        drill.settings = {}
    assert str(failed.value).startswith("h3 left: 2 of 3 members remain")
    assert "the model could not be saved: No space left on device" in str(failed.value)
    assert failed.value.exit_code == JobFailed.exit_code != Alarm.exit_code
    assert drill.status("h1")["last_job"]["error"] == str(failed.value)


def test_and_then_all_is_well(drill: Drill) -> None:
    drill.end()
