# SPDX-License-Identifier: Apache-2.0
"""Who is told how a job ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nicps import wire
from nicps.agent.agent import Agent
from nicps.agent.endings import Endings
from nicps.agent.submission import Submission
from nicps.agent.views import Views
from nicps.protocol import Phase, PhaseAgreed
from nicps.session.fields import Message
from nicps.session.messages import LastJob

pytestmark = pytest.mark.unit


class Host:
    """An agent with submitters; `told` is what each has heard."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.control = SimpleNamespace(peers=[], post=self._post)
        self.log = self.end_job = lambda *_: None
        self.submission: Any = None
        self.conductor: Any = None
        self.job: Any = None
        self.last_job: LastJob | None = None
        self.node = SimpleNamespace(busy=True, name="h1")

    def submits(self, name: str) -> None:
        self.control.peers.append(SimpleNamespace(name=name, watches=True, watches_all=False))

    def publish(self, *arguments: Any) -> None:
        Agent.publish(self, *arguments)  # type: ignore[arg-type]

    def _post(self, peer: Any, message: Message) -> None:
        self.told.append((peer.name, message.op))


def test_who_submits_the_next_job_is_not_told_of_the_last_ones_end() -> None:
    """The report takes a second or two, in which the host takes another job."""
    host = Host()
    host.job = SimpleNamespace(entry="trainer", handout=SimpleNamespace(collected=[]))
    host.submits("first")
    reports: list[Any] = []
    conductor = SimpleNamespace(
        job_id="1",
        result=lambda names, about, then: then({}, ""),
        report=lambda entry, then: reports.append(then),
    )
    phase = SimpleNamespace(settings={"ok": True})
    Endings(host).lead_over(conductor, phase)  # type: ignore[arg-type]
    host.submits("second")
    reports.pop()()
    assert host.told == [("first", "result")]
    assert [peer.watches for peer in host.control.peers] == [False, True]


@pytest.mark.parametrize("saved", [True, False])
def test_after_an_alarm_all_are_told_where_the_model_is(saved: bool) -> None:
    """The submitter, the log, `nicps status` and the hook; at the other hosts, who has it."""
    lead: Any = Host()
    heard: list[str] = []
    lead.log = heard.append
    lead.publish = lambda message, waiting: heard.append(message.message)
    endings = Endings(lead)
    endings.run_hook = heard.append  # type: ignore[method-assign]
    conductor: Any = SimpleNamespace(job_id="1", saved="saved after 42 rounds in /runs/1")
    settings = {"ok": False, "message": "h2 left", "alarm": True, "saved": saved}
    endings.lead_over(conductor, SimpleNamespace(settings=settings))  # type: ignore[arg-type]
    where = "; saved after 42 rounds in /runs/1: `nicps resume` goes on from there" if saved else ""
    assert heard == [f"job stopped: h2 left{where}", *[f"h2 left{where}"] * 2]
    assert lead.last_job.error == f"h2 left{where}"

    other: Any = Host()
    other.endings, other.log = Endings(other), heard.append
    other.settings = SimpleNamespace(alarm_hook="")
    other.node.view = SimpleNamespace(lead=1)
    other.node.members = [SimpleNamespace(name="h1")]
    Agent._over(other, Phase(3, 1, wire.PhaseKind.STOP, settings=settings))
    where = "; it was saved where it was led: `nicps resume` goes on from there" if saved else ""
    assert heard[3:] == [f"job stopped: h2 left{where}"]


@pytest.mark.parametrize(
    ("ending", "told"), [(wire.Ending.DONE, "result"), (wire.Ending.ENDED, "error")]
)
def test_who_was_not_heard_at_the_end_is_told_all_the_same(ending: wire.Ending, told: str) -> None:
    host = Host()
    host.submission = SimpleNamespace(job_id="1", close=lambda: None)
    host.submits("first")
    Endings(host).unheard(ending, "h2")  # type: ignore[arg-type]
    assert host.told == [("first", told)]
    assert host.submission is None and not host.node.busy
    assert "h2" in str(host.last_job), "who knows more"


def test_who_was_not_heard_after_a_crash_is_told_of_that() -> None:
    """At every host, say: the one that submitted has only its own crash to go by."""
    host = Host()
    host.submission = SimpleNamespace(job_id="1", close=lambda: None)
    Endings(host).unheard(wire.Ending.ENDED, "h2", "h1: the training program ended: SIGSEGV")  # type: ignore[arg-type]
    said = "the job was stopped while this host was not heard; h2 led it"
    assert host.last_job.error == f"h1: the training program ended: SIGSEGV; {said}"


@pytest.mark.parametrize(("ended", "code"), [(1, 5), (2, 2), (-9, 5)])
def test_a_setting_that_makes_no_sense_is_wrong_use(ended: int, code: int) -> None:
    """The preparation ends with 2 for it; what else it ends with is the job's failure."""
    host: Any = Host()
    host.endings = Endings(host)
    codes: list[int] = []
    host.publish = lambda message: codes.append(message.exit_code)
    submission = Submission.__new__(Submission)
    submission.agent, submission.job_id = host, ""
    child = SimpleNamespace(reported_error=lambda: "setting batch is 0")
    submission._child = child  # type: ignore[assignment]
    submission.close = lambda: None  # type: ignore[method-assign]
    host.submission = submission
    submission._is_prepared(ended)
    assert codes == [code]


def test_who_departs_while_it_stops_the_job_hears_of_the_end_too() -> None:
    """Its own program is killed while the others acknowledge its STOP."""
    host: Any = Host()
    host.submission = SimpleNamespace(job_id="1", close=lambda: None)
    host.submits("first")
    host.job, host.endings = object(), Endings(host)
    host.node.view = SimpleNamespace(lead=1)
    host.node.members = [SimpleNamespace(name="h1")]
    host._over = lambda stop: Agent._over(host, stop)
    stop = Phase(3, 1, wire.PhaseKind.STOP, settings={"ok": False, "message": "no disk"})
    Agent._agreed(host, PhaseAgreed(stop, {}))
    assert host.told == [("first", "error")] and host.submission is None


@pytest.mark.parametrize(("live", "leads"), [({1}, True), ({1, 2}, False)])
def test_who_departs_leads_only_itself(live: set[int], leads: bool) -> None:
    """Where nobody else is left, the job ends, and somebody must say so."""
    agent: Any = SimpleNamespace(conductor="leads", now=0.0, log=lambda _: None, act=lambda _: None)
    agent.job = None
    agent.node = SimpleNamespace(view=SimpleNamespace(live=live), leave=lambda *_: [])
    Views(agent).depart("the training program was killed")
    assert bool(agent.conductor) is leads
