# SPDX-License-Identifier: Apache-2.0
"""How a group forms, and rounds of any size, in the protocol's state machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.errors import WireError
from nicps.exchange import Exchange
from nicps.job.choice import Choice
from nicps.job.course import Course
from nicps.job.plan import Plan
from nicps.job.program import Program
from nicps.protocol import Group, Member, Phase, Send, SendFragments, Timings
from nicps.protocol.actions import Committed, Failed
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.control import Control
from nicps.protocol.exchange import exchanger_of
from nicps.protocol.formation import Formation
from nicps.protocol.signals import Formed, Steps
from nicps.protocol.view import with_joiners
from tests.ring_parts import START, TIMINGS, VIEW
from tests.rooms import NoKernel

pytestmark = pytest.mark.unit

GROUP = Group(7, 3)


def mac(k: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, k])


def frames(steps: Steps) -> list[wire.Frame]:
    return [step.frame for step in steps if isinstance(step, Send)]


class Lan:
    """Formations of hosts, by the last byte of their addresses; all frames reach all others."""

    def __init__(self, **groups: Group | None) -> None:
        self.hosts = {name: Formation(mac(k), name, Timings()) for k, name in enumerate(groups, 1)}
        for name, group in groups.items():
            self.hosts[name].waits = group
        self.formed: dict[str, list[str]] = {}

    def start(self, name: str, now: float = START) -> None:
        host = self.hosts[name]
        self._take(now, name, host.start(now, ord(name[-1]), 0, host.waits))

    def run(self, seconds: float, now: float = START) -> None:
        end = now + seconds
        while now < end:
            now += 0.05
            for name, host in self.hosts.items():
                self._take(now, name, host.tick(now))

    def _take(self, now: float, name: str, steps: Steps) -> None:
        for step in steps:
            if isinstance(step, Formed):
                self.formed[name] = [member.name for member in step.members]
        for frame in frames(steps):
            for other, host in self.hosts.items():
                if other != name:
                    self._deliver(now, name, other, host, frame)

    def _deliver(
        self, now: float, name: str, other: str, host: Formation, frame: wire.Frame
    ) -> None:
        source, body = self.hosts[name].mac, frame.body
        if isinstance(body, wire.Answer):
            host.on_answer(now, source, frame)
        elif isinstance(body, wire.Call) and host.on_call(now, source, body.ballot):
            answer = host.answer(body.nonce, 1, 0, wire.Stage.NOTHING)
            self._take(now, other, [answer])


def test_all_wait_and_one_list_has_them_all() -> None:
    """The lowest address wins, whoever has called first; it waits for as many as it was told."""
    lan = Lan(h1=None, h2=None, h3=None)
    for late in ("h3", "h2", "h1"):
        assert not lan.formed
        lan.run(3.0)
        lan.hosts[late].waits = GROUP
        lan.start(late)
    lan.run(0.3)
    assert sorted(lan.formed) == ["h1"] and sorted(lan.formed["h1"]) == ["h1", "h2", "h3"]
    assert lan.hosts["h2"].yields and lan.hosts["h3"].yields


@pytest.mark.parametrize(("group", "told"), [(GROUP, "formed the"), (None, "submit again")])
def test_another_host_that_forms_first(group: Group | None, told: str) -> None:
    """A program that waits for its group goes on waiting, and a job must be submitted again."""
    host = Formation(mac(2), "h2", Timings())
    host.start(START, 1, 0, group)
    (failed,) = host.lose(mac(1))
    assert isinstance(failed, Failed) and told in failed.reason and host.lose(mac(1)) == []
    assert ("submit" in failed.reason) == (group is None)
    assert failed.reason.startswith("02:00:00:00:00:01 ")


def test_a_host_that_forms_first_is_named_if_it_has_answered() -> None:
    lan = Lan(h1=None, h2=None)
    lan.start("h2")
    lan.run(0.1)
    (failed,) = lan.hosts["h2"].lose(mac(1))
    assert isinstance(failed, Failed) and failed.reason.startswith("h1 started a job")


def test_hosts_without_the_group_are_not_in_it() -> None:
    """One has no program, another's waits for another group."""
    lan = Lan(h1=replace(GROUP, size=2), h2=None, h3=Group(9, 2), h4=replace(GROUP, size=2))
    lan.start("h1")
    lan.run(2.0)
    assert lan.formed == {"h1": ["h1", "h4"]}


def test_a_group_of_all_hosts_takes_who_answers() -> None:
    lan = Lan(h1=Group(7, 0), h2=None, h3=None)
    lan.start("h1")
    lan.run(2.0)
    assert lan.formed == {"h1": ["h1", "h2", "h3"]}


def test_hosts_of_one_name_are_told_apart() -> None:
    """A name is cut to 14 bytes, so long ones are soon alike."""
    lan = Lan(h1=Group(7, 0), h2=None, h3=None, h4=None, h5=None)
    for host, name in (("h2", "h1"), ("h3", "h1-4"), ("h4", "h1"), ("h5", "trains-with-me-2")):
        lan.hosts[host].name = name
    lan.start("h1")
    lan.run(2.0)
    assert lan.formed == {"h1": ["h1", "h1-2", "h1-4", "m020000000004", "trains-with-me"]}
    members = tuple(Member(k, mac(k), "trains-with-" + "me"[k - 1 :]) for k in (1, 2))
    joiner = Member(0, mac(9), "trains-with-me")
    listed, numbers = with_joiners(members, [joiner])
    assert [m.name for m in listed] == ["trains-with-me", "trains-with-e", "trains-with-3"]
    assert numbers == {3}


def test_a_list_of_another_host_is_welcome_to_a_group_that_waits() -> None:
    """Also of one that has closed it before this host, with the lower address, has begun to call."""
    lan = Lan(h1=Group(7, 0), h2=Group(7, 0))
    lan.start("h1")
    assert lan.hosts["h1"].yields and not lan.hosts["h2"].yields


def test_a_job_goes_before_a_group_that_waits() -> None:
    """The group's host answers the job's call though its own address is lower, and is in its list."""
    lan = Lan(h1=GROUP, h2=None)
    lan.start("h1")
    lan.start("h2")
    lan.run(2.0)
    assert lan.formed == {"h2": ["h2", "h1"]}
    assert lan.hosts["h1"].yields


# ---- sized rounds


def sized(**values: object) -> Phase:
    phase = Phase(
        1,
        1,
        wire.PhaseKind.TRAIN,
        first_round=1,
        fragments=100,
        last_fragments=100,
        width=32,
        shares=(1, 1, 1),
        quorum=(1 << 31) - 1,
        exchange=Exchange.STRIPES,
        sized=True,
    )
    return replace(phase, **values)  # type: ignore[arg-type]


def test_a_sized_phase_travels() -> None:
    phase = sized()
    decision = wire.Decision(1, 1, wire.PhaseKind.TRAIN)
    assert Phase.unpack(decision, phase.pack(), 3) == phase
    plain = replace(phase, sized=False)
    assert b"sized" not in plain.pack() and Phase.unpack(decision, plain.pack(), 3) == plain


@pytest.mark.parametrize(
    "values", [{"exchange": Exchange.BROADCAST}, {"fragments": wire.MOST_SIZED + 1}]
)
def test_what_cannot_be_sized(values: dict[str, object]) -> None:
    with pytest.raises(WireError, match="sizes of their own"):
        sized(**values).check(3)


class Kernel(NoKernel):
    """All lanes are converted. `here`: sums that have come."""

    here = 0

    def count(self, round_: int, view: int, sender: int) -> int:
        return self.here

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        return max(first, min(self.here, end)), max(first, min(self.here, end))

    def missing_sums(self, *_: int) -> list[tuple[int, int]]:
        return []

    def next_to_send(self, round_: int, aggregator: int) -> int:
        return 0

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        return end - first


class Members:
    """The controls of three members, in a sized phase; those without a share offer nothing."""

    def __init__(self, **values: object) -> None:
        self.kernel = Kernel()
        phase = sized(**values)
        self.controls = [
            Control(
                phase,
                VIEW,
                k,
                exchanger_of(phase, VIEW, k, self.kernel, TIMINGS, START),
                Carried.at_the_start(phase),
            )
            for k in (1, 2, 3)
        ]
        for control in self.controls:
            control.token = self.controls[0].create()
            control.go_on(saves=False)
        self.actions: list[object] = []

    def offer(self, *samples: int) -> None:
        """Each member's, which all hear."""
        for control, each in zip(self.controls, samples, strict=False):
            assert control.offer(Offer(control.round, each, 0, conversion=1))
            assert control.broadcast_offer()
            for other in self.controls:
                other.offers.hear(control.round, control.number, each, 0)
        for control in self.controls:
            self.actions += control.close_offered(START)

    def mark(self) -> list[Committed]:
        for control in reversed(self.controls):  # the lead marks itself last
            if control.mark():
                for other in self.controls:
                    other.hear_mark(control.number, wire.Mark.COMPLETE)
        found = []
        for control in self.controls:
            if control.all_marked:
                found += [a for a in control.commit_marked() if isinstance(a, Committed)]
        return found


def test_rounds_have_the_size_that_is_offered() -> None:
    """One of 7 fragments, then one of 90: so many are sent, and so many sums are waited for."""
    members = Members()
    for fragments in (7, 90):
        members.kernel.here = 0
        members.actions.clear()
        members.offer(*[wire.sized_samples(fragments, 5)] * 3)
        sent = [a for a in members.actions if isinstance(a, SendFragments)]
        assert sent and all(a.striped and a.striped.fragments == fragments for a in sent)
        assert max(first + count for a in sent for first, count in a.ranges) <= fragments
        members.kernel.here = fragments - 1
        assert members.mark() == []
        members.kernel.here = fragments
        commits = members.mark()
        assert [set(c.counted.values()) for c in commits] == [
            {wire.sized_samples(fragments, 5)}
        ] * 3
        for control in members.controls:
            control.go_on(saves=False)
            control.read(commits[0].round, 0)


def test_a_member_without_a_share_waits_for_as_many_sums_as_the_others() -> None:
    """It has offered nothing. Lanes of 8 bits have another unit than those of the phase's width."""
    members, mine = Members(shares=(1, 1, 0)), wire.sized_samples(7, 5, 8)
    members.offer(mine, mine)
    assert {c.token.unit for c in members.controls if c.token is not None} == {-wire.MAX_SHIFT[8]}
    members.kernel.here = 6
    assert members.mark() == []
    members.kernel.here = 7
    assert [commit.counted for commit in members.mark()] == [{1: mine, 2: mine}] * 3


@pytest.mark.parametrize("others", [wire.sized_samples(8, 5), wire.sized_samples(7, 6)])
def test_offers_that_differ_are_committed_without_a_sum(others: int) -> None:
    """In size, or in what is called: nothing is sent, and the commit tells all members what each has offered."""
    members, mine = Members(), wire.sized_samples(7, 5)
    members.offer(mine, others, mine)
    assert not [a for a in members.actions if isinstance(a, SendFragments)]
    commits = members.mark()
    assert [c.counted for c in commits] == [{1: mine, 2: others, 3: mine}] * 3


def test_no_list_is_closed_without_a_member_however_large_the_samples_are() -> None:
    members = Members()
    token = members.controls[0].token
    assert token is not None
    for line in token.lines[:2]:
        line.samples, line.marks = (1 << 31) - 1, wire.Mark.CONTRIBUTED
    assert not token.quorum_reached(sized())
    assert token.quorum_reached(replace(sized(), sized=False))
    token.lines[2].marks = wire.Mark.CONTRIBUTED
    assert token.quorum_reached(sized())


# ---- the job


def test_a_group_has_a_plan_of_its_own() -> None:
    settings = {"batch": 1, "lane": "i32", "exchange": "stripes"}
    plan = Plan.of("g", {**settings, "group": {"name": "x", "size": 3}}, Exchange.STRIPES)
    phase = plan.training(VIEW, 5, VIEW.live, 8000, -40, Exchange.STRIPES)
    assert phase.sized and phase.shares == (1, 1, 1) and phase.quorum == (1 << 31) - 1
    assert not phase.feedback
    plain = Plan.of("g", settings, Exchange.STRIPES)
    assert not plain.training(VIEW, 5, VIEW.live, 8000, -40, Exchange.STRIPES).sized


@pytest.mark.parametrize("asked", ["auto", "switch", "stripes"])
def test_a_group_takes_no_linux_switch(asked: str) -> None:
    """One that is ready: a job takes it, unless the user has named another exchange."""

    class Switch:
        heard = True

        def find_lack(self, fragments: int, width: int) -> str:
            return ""

    class Node:
        view, learners, switch = VIEW, frozenset[int](), Switch()

    def choice(settings: dict[str, object]) -> Choice:
        plan = Plan.of("g", settings, Exchange.STRIPES, believes_switch=True)
        return Choice(plan, Node())  # type: ignore[arg-type]

    settings = {"batch": 1, "lane": "i32", "exchange": asked}
    if asked != "stripes":
        assert choice(settings).make(8000, frozenset()) == Exchange.LINUX_SWITCH
    group = choice({**settings, "group": {"name": "x", "size": 3}})
    assert group.make(8000, frozenset()) == Exchange.STRIPES
    assert not group.improves(sized(), 8000)
    with pytest.raises(WireError, match="sizes of their own"):
        replace(sized(), exchange=Exchange.LINUX_SWITCH).check(len(VIEW.members))


def test_a_group_ends_without_anything_that_is_saved_or_collected() -> None:
    class Node:
        view, live, learners, leads = VIEW, VIEW.live, frozenset[int](), True
        open_round, phase_in_force = 4, sized()
        highest_round, between_steps = 4, True

    plan = Plan("g", 1, 32, exchange=Exchange.STRIPES, group=True)
    course = Course(plan, Node())  # type: ignore[arg-type]
    (stop,) = course.round_judged(3, "end")
    assert stop.phase.kind is wire.PhaseKind.STOP and stop.phase.settings["ok"]  # type: ignore[union-attr]
    fails = Course(plan, Node()).exchange_fails(Exchange.STRIPES)  # type: ignore[arg-type]
    assert "which a group needs" in fails[0].phase.settings["message"]  # type: ignore[union-attr]


def test_a_member_of_a_group_may_be_silent() -> None:
    """But not while others wait for what it has begun to convert, nor before it is there."""
    program = Program(1, 60.0, START, patient=True)
    assert program.silent_at(awaited=False) == START + 300
    program.attached = program.holds_state = True
    program.give_duty(START, "work")
    assert program.silent_at(awaited=False) == float("inf")
    assert program.silent_at(awaited=True) == START + 3
