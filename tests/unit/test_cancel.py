# SPDX-License-Identifier: Apache-2.0
"""`nicps cancel`: the job ends on all hosts, from any of them, and the lead saves it first."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nicps import wire
from nicps.cli.cancel import announcement, outcome
from nicps.errors import Cancelled, NetworkProblem
from nicps.exchange import Exchange
from nicps.job import Life, LifeSettings
from nicps.job.actions import Action, CloseSubmission, NoteEvent, Publish
from nicps.job.lead import CANCEL_S
from nicps.job.plan import Plan
from nicps.session.messages import Error, LastJob, MemberStatus, Result, Status
from tests.rooms import MAC, NoKernel
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, idle, job, training
from tests.simulator.host import Host
from tests.simulator.lan import Lan
from tests.unit.test_top_cli import look

pytestmark = pytest.mark.unit


def end_of(lan: Lan, host: Host) -> Error:
    """What the submitter at that host hears in the end."""
    idle(lan)
    (end,) = [p.message for p in host.published if isinstance(p.message, Error | Result)]
    assert isinstance(end, Error) and isinstance(end.error, Cancelled)
    return end


@pytest.mark.parametrize("host", [0, 1, 4])
def test_the_job_is_saved_and_ends_everywhere(host: int) -> None:
    lan, _ = training()
    lan.at(TRAINING_S, lan.hosts[host].cancel)
    assert schedules.finish(lan).what == "stopped"
    assert lan.now < TRAINING_S + 1.0, "at the end of the batch"
    lead = lan.hosts[0]
    rounds, where = lead.checkpoint.trained, "runs/job1/checkpoint"
    saved = f"saved after {rounds} rounds of training in {where}"
    goes_on = "`nicps resume` goes on from there"
    assert rounds > 1
    assert end_of(lan, lead).message == f"cancelled on h{host + 1}; {saved}: {goes_on}"
    assert not lead.hooks, "it is no alarm"
    for other in lan.hosts:
        assert other.part is None and other.machine.roles.submission is None
        assert not other.machine.busy_with, "the next job can be submitted"


def test_the_leads_time_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of the run is drawn of it. It is no alarm."""
    noted: list[tuple[str, NoteEvent]] = []
    carry_out = Host._do

    def record(host: Host, action: Action) -> None:
        if isinstance(action, NoteEvent) and action.kind in ("alarm", "cancelled"):
            noted.append((host.machine.settings.name, action))
        carry_out(host, action)

    monkeypatch.setattr(Host, "_do", record)
    lan, _ = training(hosts=3)
    lan.at(TRAINING_S, lan.hosts[2].cancel)
    assert schedules.finish(lan).what == "stopped"
    ((host, event),) = noted
    assert (host, event.kind, event.values) == ("h1", "cancelled", {"why": "cancelled on h3"})


def test_a_frame_that_is_lost_is_sent_again() -> None:
    lan, _ = training()
    lan.lose[wire.FrameType.FAIL] = 5
    lan.at(TRAINING_S, lan.hosts[2].cancel)
    assert schedules.finish(lan).what == "stopped"
    assert lan.ended.startswith("cancelled on h3")


@pytest.mark.parametrize("exchange", [Exchange.STRIPES, Exchange.BROADCAST])
def test_a_member_that_has_not_heard_the_last_commit_has_that_round(exchange: Exchange) -> None:
    """Its residual would belong to a state before the one that is saved, and be dropped as the job is resumed."""
    plan = Plan("job", batch=30, width=16, alarm_below=0.0, exchange=exchange)
    lan, _ = job(hosts=3, plan=plan, rounds=30, compute_s=0.05)
    lead, last = lan.hosts[0], lan.hosts[2]
    hear, missed = last.take_frame, set[int]()

    def take_frame(source: bytes, data: bytes, key: bytes | None) -> None:
        frame, leads = wire.unpack(data), lead.machine.roles.lead
        ahead = isinstance(frame.body, wire.Token) and frame.header.round > last.node.open_round
        marks = isinstance(frame.body, wire.Want) and frame.header.flags & wire.Flag.COMPLETE
        commits = ahead or (marks and source == lead.mac)
        if commits and leads is not None and leads.course._alarm is not None:
            missed.add(frame.header.round)
        else:
            hear(source, data, key)

    last.take_frame = take_frame  # type: ignore[method-assign]
    lan.at(TRAINING_S, lan.hosts[1].cancel)
    assert schedules.finish(lan).what == "stopped"
    assert missed and last.committed == lead.checkpoint.last


@pytest.mark.parametrize("other", [1, 3])
def test_the_lead_is_lost_that_was_told(other: int) -> None:
    """The next one is told as well, or has cancelled the job itself, and saves what it has."""
    lan, _ = training()
    lan.at(TRAINING_S, lan.hosts[other].cancel)
    lan.at(TRAINING_S + 0.0005, lan.hosts[0].kill)
    lan.trouble(TRAINING_S + 0.1)
    assert schedules.finish(lan).what == "stopped"
    assert lan.ended.startswith(f"cancelled on h{other + 1}")
    assert lan.hosts[1].machine.roles.publisher.last_job is not None
    assert "saved after" in str(lan.hosts[1].machine.roles.publisher.last_job.error)


def test_a_lead_that_cancels_and_departs_has_it_cancelled_by_the_next() -> None:
    """Its training program is killed before the batch ends."""
    lan, _ = training()
    lead = lan.hosts[0]
    lan.at(TRAINING_S, lead.cancel)
    lan.at(TRAINING_S + 0.001, lead.kill_program)
    lan.trouble(TRAINING_S + 0.1)
    assert schedules.finish(lan).what == "stopped"
    assert lan.ended.startswith("cancelled on h1")


@pytest.mark.parametrize("at", [0.1, 0.705, 0.712])
def test_before_the_first_round_there_is_nothing_to_save(at: float) -> None:
    """The network forms, it is formed, the job is handed out."""
    lan, _ = job()
    lan.at(at, lan.hosts[0].cancel)
    assert schedules.finish(lan).what == "stopped"
    assert lan.now < 3.0
    assert end_of(lan, lan.hosts[0]).message == "cancelled on h1"


def test_a_batch_that_does_not_end() -> None:
    """The training program of a host that trains alone hangs: nobody else is held up, so it is left alone."""
    lan, _ = training(hosts=1)
    host = lan.hosts[0]
    lan.at(TRAINING_S, host.hang)
    lan.at(TRAINING_S + 5.0, host.cancel)
    lan.trouble(TRAINING_S + 5.0 + CANCEL_S)
    assert lan.run(lambda: bool(lan.ended), TRAINING_S + 10.0 + CANCEL_S)
    assert lan.now == pytest.approx(TRAINING_S + 5.0 + CANCEL_S, abs=1.0)
    why = "the batch has not ended for 60 s"
    assert end_of(lan, host).message == f"cancelled on h1, and the model could not be saved: {why}"


def test_a_job_that_fails_meanwhile_has_failed() -> None:
    """The reason is worth more than that somebody wanted its end."""
    lan, _ = training(hosts=3)
    host = lan.hosts[2]
    lan.lose[wire.FrameType.FAIL] = 1
    lan.at(TRAINING_S, host.cancel)
    lan.at(TRAINING_S + 0.01, host.break_program)
    assert schedules.finish(lan).what == "stopped"
    assert "error" in lan.ended


def test_without_a_majority() -> None:
    """The others cannot be asked. The user is told at once; what they cancel, once they are back, ends everywhere."""
    lan, _ = training(hosts=3)
    left, *others = lan.hosts
    for other in others:
        lan.at(TRAINING_S, other.pause)
    assert lan.run(lambda: bool(left.machine.roles.publisher.trouble), TRAINING_S + 10.0)
    with pytest.raises(NetworkProblem) as refusal:
        left.machine.cancel(left.clock())
    assert re.fullmatch(
        r"the job cannot be cancelled here: h2, h3 cannot be heard, and there is no majority without: standing by"
        r".*\. `nicps leave`, and `nicps join` again, give it up here",
        str(refusal.value),
    )
    for other in others:
        lan.at(lan.now + 0.1, other.resume)
    assert lan.run(lambda: not left.machine.roles.publisher.trouble, lan.now + 10.0)
    lan.at(lan.now + 0.1, left.cancel)
    assert schedules.finish(lan).what == "stopped"
    assert lan.ended.startswith("cancelled on h1")


def life() -> Life:
    return Life(MAC, LifeSettings("h1", "nicps"), NoKernel(), lambda: 1)  # type: ignore[arg-type]


def test_there_is_nothing_to_cancel() -> None:
    with pytest.raises(NetworkProblem, match=r"^no job is under way here$"):
        life().cancel(0.0)


def test_a_job_that_is_being_prepared() -> None:
    machine = life()
    number = machine.submit()
    actions = machine.cancel(0.0)
    assert CloseSubmission(number) in actions
    (told,) = [action for action in actions if isinstance(action, Publish)]
    assert told == Publish(Error("cancelled on h1", Cancelled.exit_code), number)
    assert not machine.busy_with


def test_a_host_that_stands_by_in_the_middle_of_it_cannot() -> None:
    lan, _ = training(hosts=3)
    host = lan.hosts[2]
    lan.at(TRAINING_S, host.kill_program)
    assert lan.run(lambda: bool(host.machine.roles.publisher.trouble), TRAINING_S + 1.0)
    with pytest.raises(NetworkProblem, match=r"is not in the job's network now.*on a host that is"):
        host.machine.cancel(host.clock())


# ---- the command


BEFORE = Status(
    *("nicps", "h2", "eth1"),
    keyed=False,
    **dict.fromkeys(("xdp_mode", "trouble", "switch", "other_job", "warning", "phase"), ""),
    state="member",
    **dict.fromkeys(("view", "round", "number"), 2),
    lead=1,
    members=(MemberStatus(1, "02:00:00:00:00:01", "h1", "train", is_self=False),),
    job="run-1",
    progress={},
    last_job=None,
    **dict.fromkeys(("token_turns", "fragments_sent", "frames_malformed"), 0),
    control_refused={},
    counters={},
)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (LastJob("run-1", "cancelled on h2; saved", {}), "job run-1: cancelled on h2; saved"),
        (LastJob("run-1", None, {}), "job run-1: it was done before it could be cancelled"),
        (None, "job run-1 has ended; h1 has what was saved"),
    ],
)
def test_the_command_says_what_has_become_of_it(last: LastJob | None, said: str) -> None:
    assert outcome(BEFORE, replace(BEFORE, state="standby", job=None, last_job=last)) == said


def test_of_a_script_there_is_no_model_to_save() -> None:
    run = look(1.0)
    assert run.activity is not None
    run = replace(run, activity=replace(run.activity, script=True))
    said = announcement(run), outcome(run, replace(run, state="standby", job=None))
    assert said[0] == "the scripts of run run are ended on all hosts"
    assert said[1].startswith("run run was cancelled; what its scripts have left is in")
    assert "batch" in announcement(BEFORE)


@pytest.mark.parametrize("told", [False, True])
def test_before_the_first_round_nothing_is_saved_anywhere(told: bool) -> None:
    """The round that was open has not been counted here meanwhile."""
    before, after = look(1.0, 7), look(2.0, 7)
    last = LastJob("run", "cancelled on h3", {}) if told else None
    after = replace(after, state="standby", job=None, last_job=last)
    nothing = "no round was whole yet: nothing is trained, and nothing is saved"
    how = "job run: cancelled on h3" if told else "job run has ended"
    assert outcome(before, after) == f"{how}; {nothing}"
    later = replace(look(2.0, 8), state="standby", job=None, last_job=last)
    for pair in ((before, later), (replace(before, progress={"trained_rounds": 1}), after)):
        assert nothing not in outcome(*pair)
