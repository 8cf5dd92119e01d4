# SPDX-License-Identifier: Apache-2.0
"""What ended a process, in words."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nicps.agent.crash import describe_end, name_log
from nicps.agent.process import Child, User
from nicps.job import plan as phases
from nicps.job.course import Course
from nicps.job.orders import Decide, RebuildView
from nicps.job.plan import Found, Plan
from nicps.protocol import View
from tests.netns.labs import until
from tests.parts import MEMBERS, FakeNode

ERROR = "trainer: error: KeyError: 'lable' (job.py:41, in loss())"


@pytest.mark.parametrize(
    ("code", "last_line", "said"),
    [
        (3, "", "exit status 3 in round 7, and it said nothing"),
        (0, "", "exit status 0 in round 7, and it said nothing"),
        (None, "", "exit status unknown in round 7, and it said nothing"),
        (3, "out of paper", "out of paper (exit status 3 in round 7)"),
        (1, ERROR, "KeyError: 'lable' (job.py:41, in loss())"),
        (-11, "", "SIGSEGV has ended it in round 7"),
        (-9, "trainer: warning: slow", "SIGKILL has ended it in round 7 (trainer: warning: slow)"),
        (-9, ERROR, "SIGKILL has ended it in round 7 (KeyError: 'lable' (job.py:41, in loss()))"),
        (-40, "", "signal 40 has ended it in round 7"),
    ],
)
def test_status_or_signal_and_last_words(code: int | None, last_line: str, said: str) -> None:
    assert describe_end(code, last_line, " in round 7") == said


def test_the_last_words_are_its_own(tmp_path: Path) -> None:
    """Programs that are started again share a log."""
    log = tmp_path / "trainer.log"
    log.write_text("the one before was unhappy\n")
    user = User("me", os.getuid(), os.getgid())
    child = Child([sys.executable, "-c", "raise SystemExit(3)"], user, tmp_path, log, {}, (), True)
    until(lambda: child.reap() is not None, "its end")
    assert child.last_line() == "exit status 3, and it said nothing"


def test_what_other_hosts_are_told_is_cut() -> None:
    """What only this host's user reads is whole, such as an error of a job's preparation that says what to do."""
    log, why = Path("/runs/job/prepare.log"), "no " * 99 + "define branches(model)"
    told = name_log(why, log)
    assert len(told) < 320 and told.endswith(f" ...; its log: {log}")
    assert name_log("short", log) == f"short; its log: {log}"
    assert name_log(why, log, 600) == f"{why}; its log: {log}"


CRASH = "h1: the training program ended: SIGSEGV has ended it in round 7"


@pytest.mark.parametrize(("crash", "said"), [(CRASH, f"{CRASH}; "), ("", "")])
def test_a_lead_that_lost_the_state_in_a_crash_says_so(crash: str, said: str) -> None:
    """At every host, say: who is left has come back from its own crash, and that is the job's error."""
    view = View(3, MEMBERS, frozenset({1}), 1)
    spot = FakeNode(view=view, learners=frozenset({1}))
    found = Found(able=False, trained=True, finishing=False, crash=crash)
    course = Course(Plan("job", 8, 16, alarm_below=0.0), spot, found)
    (stop,) = (o.phase for o in course.view_installed(view) if isinstance(o, Decide))
    assert stop.settings["message"] == f"{said}nobody is left who has the model's state"


def test_a_lead_that_has_no_state_leaves_the_job_to_a_member_that_has() -> None:
    """It had promised the view before it heard that the job is over, and was put into it afterwards."""
    view = View(3, MEMBERS, frozenset({1, 2}), 1)
    found = Found(able=False, trained=False, finishing=False)
    for learners in (frozenset({1}), frozenset({1, 2})):
        spot = FakeNode(view=view, learners=learners)
        orders = Course(Plan("", 1, 8), spot, found).view_installed(view)
        assert (RebuildView(()) in orders) is (learners == {1})
        assert any(isinstance(order, Decide) for order in orders) is (learners == {1, 2})


def test_a_host_that_leads_once_the_job_has_ended_there_ends_it_for_the_others() -> None:
    """With the words of the lead that has stopped it."""
    view = View(3, MEMBERS, frozenset({1, 2}), 1)
    stop = phases.stop("cancelled on h3", alarm=True, cancelled=True)
    found = Found(able=False, trained=False, finishing=False, stop=stop)
    spot = FakeNode(view=view, learners=frozenset({1}))
    course = Course(Plan("", 1, 8), spot, found)
    assert [o for o in course.view_installed(view) if isinstance(o, Decide)] == [Decide(stop)]
    assert course.stopping
