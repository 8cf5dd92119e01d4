# SPDX-License-Identifier: Apache-2.0
"""A host that was not there at the start comes in the middle of the training (R20, docs/faults.md)."""

from __future__ import annotations

import pytest

from tests.netns.labs import until
from tests.netns.scenes import Drill, Stage


def test_a_new_host_is_admitted() -> None:
    """It gets a number, the files and a committed round's state, and is counted from then on."""
    with Drill(Stage(4, keyed=True, away={"h4"}), settings={"admit": True}) as drill:
        stage = drill.stage
        drill.begin()
        assert drill.counted("h1") == {1, 2, 3}
        stage.away.clear()
        stage.join("h4")
        drill.all_train(60.0)
        assert drill.number("h4") == 4
        drill.goes_on(*stage.names, rounds=20)
        assert drill.exact() > 20
        run = drill.end()
        assert run.members[3] == "h4" and set(run.members[:3]) == {"h1", "h2", "h3"}
        trained = {host: [row["round"] for row in run.training(host)] for host in run.members}
        assert min(trained["h4"]) > min(trained["h1"]) + 3 and len(trained["h4"]) > 20
        assert trained["h1"][-20:] == trained["h4"][-20:]


@pytest.mark.long
@pytest.mark.parametrize("keyed", [False, True])
def test_a_new_host_is_told_of_a_job_that_admits_nobody(keyed: bool) -> None:
    """Its log and its status name the job that runs. It takes part in the next job."""
    with Drill(Stage(3, keyed=keyed, away={"h3"})) as drill:
        stage = drill.stage
        drill.begin()
        job = drill.status("h1")["job"]
        stage.away.clear()
        stage.join("h3")
        stage.answered("h3")
        until(lambda: drill.status("h3")["other_job"] == job, "h3 knows of the job", 10.0)
        said = f"job {job} is under way and admits no more hosts: this one takes part in the next"
        assert stage.log("h3").count(said) == 1
        shown = stage.command("h3", "status").out
        assert f"other job  {job}: without this host, which takes part in the next" in shown
        refused = stage.command("h3", "cancel").only_error(4)
        assert refused.endswith(f"job {job} is: run `nicps cancel` on one of its hosts")
        drill.goes_on("h1", "h2", rounds=20)
        assert drill.status("h3")["state"] == "standby"
        drill.end("h1", "h2")
        until(lambda: not drill.status("h3")["other_job"], "h3 forgets the job", 30.0)
        drill.begin()
        assert drill.counted("h1") == {1, 2, 3}
        assert not drill.status("h3")["other_job"]
        drill.end()


@pytest.mark.long
def test_a_new_host_that_cannot_take_part() -> None:
    """No training program runs there: the host leaves the job to the others, and is not asked again."""
    with Drill(Stage(3, keyed=True, away={"h3"}), settings={"admit": True}) as drill:
        stage = drill.stage
        drill.begin()
        stage.away.clear()
        stage.join("h3", "--trainer", "false")
        drill.stands_by("h3", saying="the training program ended", job=False, timeout_s=60.0)
        view = drill.status("h1")["view"]
        drill.goes_on("h1", "h2", rounds=40)  # it has been called many times meanwhile
        assert drill.status("h1")["view"] == view, "\n".join(map(stage.log, stage.names))
        assert "out of the job until `nicps join` is run again" in drill.status("h3")["trouble"]
        assert drill.exact() > 40
        drill.end("h1", "h2")
