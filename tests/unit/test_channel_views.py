# SPDX-License-Identifier: Apache-2.0
"""Views, decisions and reports of members that have several channels (docs/channels.md, "Views")."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.errors import WireError
from nicps.exchange import Exchange
from nicps.protocol import Committed, NoProgress, Timings
from nicps.protocol.actions import Send
from nicps.protocol.deciding import Decisions
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.progress import Progress, Standstill
from nicps.protocol.rings import Rings
from nicps.protocol.signals import Chosen, Lacking, Steps
from nicps.protocol.standing import Place, Standing
from nicps.protocol.step import Step
from nicps.protocol.view import Successor
from nicps.protocol.view_change import ViewChange
from tests.channelled import PLANS, Kernel, Members, phase_of
from tests.ring_parts import START, TIMINGS, VIEW
from tests.rooms import NoKernel

pytestmark = pytest.mark.unit

Rounds = tuple[tuple[int, bool], ...]


def frames(steps: Steps) -> list[wire.Frame]:
    return [wire.unpack(step.frame.pack()) for step in steps if isinstance(step, Send)]


def change_of(number: int) -> ViewChange:
    seed = lambda: bytes([number] * 16)  # noqa: E731
    return ViewChange(VIEW, number, number, TIMINGS, AdaptiveTimeout(TIMINGS), seed)


def place_of(members: Members, number: int, rounds: Rounds) -> Place:
    (round_, complete), *others = rounds
    ring = members[number].ring
    return Place(Standing(1, round_, complete, 1, others=tuple(others)), {1: ring})


def chosen(mine: Rounds, theirs: Rounds) -> Successor:
    """Member 1 proposes to go on without 3; 1 and 2 stand so in the three channels."""
    members = Members()
    first, second = change_of(1), change_of(2)
    one, two = place_of(members, 1, mine), place_of(members, 2, theirs)
    now = START
    (proposal,) = frames(first.suspect(now, one, 3))
    steps = second.on_view(now, two, VIEW.members[0].mac, 1, proposal)
    (promise,) = frames(steps)
    assert isinstance(promise.body, wire.Vote) and promise.body.standings == 2
    now += 5.0
    found = first.on_vote(now, one, 2, promise)
    (accept,) = frames(found) or frames(first.tick(now, one))
    assert isinstance(accept.body, wire.View) and accept.body.channels == 2
    (vote,) = frames(second.on_view(now, two, VIEW.members[0].mac, 1, accept))
    assert isinstance(vote.body, wire.Vote) and vote.body.channels == 2
    (done,) = [s for s in first.on_vote(now, one, 2, vote) if isinstance(s, Chosen)]
    assert Successor.of(accept) == done.successor == Successor.of(vote)
    return done.successor


def test_the_value_has_the_round_of_each_channel() -> None:
    """Channel by channel: the highest that is open, or the next if all survivors have that whole."""
    found = chosen(((3, True), (4, False), (2, True)), ((3, True), (5, True), (2, False)))
    assert found.rounds == (4, 5, 2)


def test_all_survivors_have_it_whole() -> None:
    found = chosen(((3, False), (5, True), (2, True)), ((3, False), (5, True), (2, True)))
    assert found.rounds == (3, 6, 3)


def test_a_member_that_was_not_in_the_phase_yet_is_at_its_beginning() -> None:
    standing = Standing(1, 5, True, 1, others=((6, True),))
    assert standing.places(1, (1, 1)) == ((5, True), (6, True))
    assert standing.places(2, (9, 9)) == ((9, False), (9, False))
    assert standing.places(1, (1, 1, 1)) == ((1, False),) * 3


@pytest.mark.parametrize("channels", [(2,), (1, 3), (1, 1), (2, 1), tuple(range(1, 9))])
def test_standings_of_other_channels_are_refused(channels: tuple[int, ...]) -> None:
    standings = tuple(wire.Standing.at(channel, 7) for channel in channels)
    body = wire.Vote(1, 2, 1, 3, 1, bytes(6), 1, 0, standings=len(standings))
    frame = wire.Frame(VIEW.header(2, 3), body, ((), (), (), standings))
    change, members = change_of(1), Members()
    place = place_of(members, 1, ((1, False), (1, False), (1, False)))
    change.suspect(START, place, 3)
    with pytest.raises(WireError):
        change.on_vote(START, place, 2, wire.unpack(frame.pack()))
    assert 2 not in change.nonces, "nothing has changed"


def test_a_list_in_force_says_where_the_job_goes_on_in_each_channel() -> None:
    value = Successor(VIEW.members, VIEW.live, 1, 3, 4, 70_000, 0, bytes(16), (70_001, 3))
    items = value.items()
    body = wire.View(
        0, 1, 2, 1, 1, 2, len(items[1]), len(items[0]), wire.ViewStep.INSTALL, channels=2
    )
    frame = wire.unpack(wire.Frame(wire.Header(), body, items).pack())
    assert Successor.of(frame) == value
    assert value.rounds == (70_000, 70_001, 3)


# ---- decisions


def host_of(number: int) -> LocalHost:
    member = VIEW.members[number - 1]
    return LocalHost(member.mac, member.name, NodeState.MEMBER, VIEW, number)


def decisions_of(members: Members, number: int) -> tuple[Decisions, Rings]:
    host, timeout = host_of(number), AdaptiveTimeout(TIMINGS)
    rings = Rings(host, Kernel(), TIMINGS, timeout)  # type: ignore[arg-type]
    rings.current = members[number].ring
    return Decisions(host, rings, TIMINGS, timeout), rings


def test_a_decision_waits_until_the_leads_rounds_are_reached_on_all_channels() -> None:
    members = Members()
    members.begin()
    for channel in (0, 1):
        for _ in range(members.phase.rounds_per_step(channel)):
            members.offer(channel)
            members.read(channel, members[1].ring.rounds[channel] - 1)
    members.offer(2, 3)
    members.lost = lambda sender, to, frame: (
        to in (2, 3) and bool(frame.header.flags & wire.Flag.COMPLETE)
    )
    members.offer(2, 1, 2)
    lead, others = decisions_of(members, 1), decisions_of(members, 3)
    # Member 3 has all of the round, but not the marks of the others.
    assert members[3].ring.rounds == (3, 4, 1) and members[3].ring.completes[2]
    members.take(1, members[1].ring.on_want(START, mark_of(members, 2)))
    members.take(1, members[1].ring.on_want(START, mark_of(members, 3)))
    assert members[1].ring.rounds == (3, 4, 2)
    later = phase_of(first_round=lead[1].highest_round + 1)
    (decision,) = frames(lead[0].decide(START, later))
    assert b'"open":[4,2]' in decision.tail
    assert later.first_round == 5
    steps = others[0].hear(decision)
    commits = [step for step in steps if isinstance(step, Committed)]
    assert [(commit.channel, commit.round) for commit in commits] == [(2, 1)]
    assert others[0].take_turn() is not None


@pytest.mark.parametrize("in_force", [True, False])
def test_a_member_that_has_missed_the_first_token_does_not_drop_the_phase(in_force: bool) -> None:
    """It is in force at the lead: the token comes again. If the lead has decided otherwise before, none comes."""
    members = Members()
    parts = lead, member = decisions_of(members, 1), decisions_of(members, 3)
    for _, rings in parts:
        rings.current = None
    (decision,) = frames(lead[0].decide(START, phase_of(first_round=5)))
    member[0].hear(decision)
    for decisions, _ in parts:
        phase = decisions.take_turn()
        assert phase is not None
        decisions.prepared(START, phase, b"")
    if in_force:
        lead[1].enter_coming()
    (later,) = frames(lead[0].decide(START, phase_of(first_round=6)))
    member[0].hear(later)
    waits = member[0].take_turn() is None
    assert waits is in_force
    if in_force:
        assert list(member[1].by_phase()) == [1], (
            "a view that it proposes has the unit of this phase"
        )
        member[1].enter_coming()
        phase = member[0].take_turn()
        assert phase is not None and phase.number == 2


def mark_of(members: Members, number: int) -> wire.Frame:
    """What that member has said of channel 2."""
    flags = wire.Flag.COMPLETE | wire.channel_flags(2)
    return wire.Frame(VIEW.header(number, 1, flags), wire.Want(0, 0), ((),))


def test_a_member_that_lacks_a_round_of_a_channel_is_not_prepared() -> None:
    members = Members()
    members.begin()
    members.offer(0)
    decisions, rings = decisions_of(members, 3)
    phase = replace(phase_of(first_round=9, number=2, generation=2), opened=(2, 1))
    body = wire.Decision(2, 2, phase.kind)
    frame = wire.Frame(VIEW.header(1, 2), body, tail=phase.pack())
    decisions.hear(frame)
    assert rings.opened == (1, 1)
    assert decisions.take_turn() is None, "round 1 of channel 1 is committed at the lead"


def test_a_host_whose_kernel_has_no_channels_refuses_the_decision() -> None:
    host, timeout = host_of(3), AdaptiveTimeout(TIMINGS)
    rings = Rings(host, NoKernel(), TIMINGS, timeout)  # type: ignore[arg-type]
    decisions = Decisions(host, rings, TIMINGS, timeout)
    phase = phase_of(number=2, generation=2)
    frame = wire.Frame(VIEW.header(1, 2), wire.Decision(2, 2, phase.kind), tail=phase.pack())
    with pytest.raises(WireError, match="has channels"):
        decisions.hear(frame)
    assert decisions.highest == 0 and not decisions.waits
    plain = replace(phase, channels=())
    decisions.hear(replace(frame, tail=plain.pack()))
    assert decisions.highest == 2


def test_the_kernel_takes_frames_of_the_phase_in_force_and_of_the_one_to_come() -> None:
    """By channel, also where one of the two has more of them."""
    members = Members()
    members.begin()
    members.offer(0)
    members.offer(1)
    _, rings = decisions_of(members, 2)
    assert (rings.highest_round, rings.opened) == (2, (2, 1))
    wider = (*PLANS, PLANS[2])
    rings.prepare(START, phase_of(first_round=9, number=2, generation=2, channels=wider))
    state = rings.kernel
    assert state is not None
    rounds = [(of.round, of.round_low, of.round_high) for of in state.channels]
    assert rounds == [(2, 2, 9), (1, 1, 9), (9, 9, 9)]
    assert rings.of_round(9) is rings.coming
    rings.close()
    assert rings.highest_round == 2


# ---- R16


def standstill() -> Standstill:
    return Standstill(host_of(2), Timings(silence_most_s=3.0))


def commit_of(channel: int, round_: int) -> Committed:
    exchange = Exchange.STRIPES
    return Committed(phase_of(), round_, {1: 4}, 0, 0, exchange, VIEW.number, (1,), channel=channel)


def verdicts(found: list[NoProgress]) -> list[int]:
    return [one.evicted for one in found if one.evicted]


def test_a_verdict_adds_up_what_members_lack_over_all_channels() -> None:
    """Channel 0 alone would name member 1, and channel 1 alone member 3."""
    watch = standstill()
    named = []
    for now in (0.0, 1.1, 2.2):
        for of in (
            Lacking(5, 1, {3: 4}, 0),
            Lacking(7, 2, {3: 4}, 1),
            Lacking(7, 1, {3: 4}, 1),
        ):
            named += verdicts(watch.hear(now, of, frozenset()))
    assert set(named) == {3}


def test_reports_of_a_round_that_is_committed_are_forgotten_and_ignored() -> None:
    watch = standstill()
    assert watch.hear(0.0, Lacking(7, 1, {3: 4}, 1), frozenset())
    watch.note_counted(commit_of(1, 7))
    assert watch.hear(0.5, Lacking(7, 1, {3: 4}, 1), frozenset()) == [], "it is committed here"
    (first,) = watch.hear(0.6, Lacking(8, 1, {3: 4}, 1), frozenset())
    assert not first.evicted and first.channel == 1
    assert "round 8 of channel 1" in first.explain(VIEW)
    assert watch.hear(0.7, Lacking(8, 1, {3: 4}, 1), frozenset()) == [], "it begins anew"


def test_a_commit_of_one_channel_says_nothing_of_another() -> None:
    watch = standstill()
    assert watch.hear(0.0, Lacking(7, 1, {3: 4}, 1), frozenset())
    watch.note_counted(commit_of(0, 7))
    found = watch.hear(1.1, Lacking(7, 1, {3: 4}, 1), frozenset())
    assert verdicts(found)


def test_time_behind_what_is_more_urgent_counts_a_tenth() -> None:
    def reports_at(*, behind: bool) -> float:
        progress, now = Progress(TIMINGS), 0.0
        progress.behind = behind
        progress.note(now, 1, 40)
        while now < 100.0:
            now += 0.1
            progress.note(now, 1, 40)
            if progress.take_report(now):
                return now
        return now

    limit = TIMINGS.silence_most_s
    assert reports_at(behind=False) == pytest.approx(limit, abs=0.3)
    assert reports_at(behind=True) == pytest.approx(10 * limit, rel=0.05)


# ---- steps


def test_a_member_is_in_the_lowest_step_of_its_open_rounds() -> None:
    step = Step(phase_of(), VIEW, 1, (1, 1, 1), None)
    for channel in (2, 1, 1, 1, 0):
        step.note_committed(channel, {1: 4})
        assert step.current == 0 and step.under_way and not step.undecided
    assert step.listed == {1: 4}, "of the first round of channel 0 only"
    step.saves = True
    step.note_committed(0, {1: 4})
    assert (step.current, step.listed, step.undecided, step.saves) == (1, None, True, False)
    assert not step.under_way and step.has_begun(2, 2) and not step.has_begun(2, 3)


def test_only_a_lead_is_undecided() -> None:
    step = Step(phase_of(), VIEW, 2, (2, 3, 2), None)
    step.note_committed(0, {1: 4})
    assert not step.undecided
    step.note_committed(1, {1: 4})
    assert step.current == 1 and not step.undecided


def test_a_list_of_a_step_that_is_not_under_way_is_of_no_use() -> None:
    listed = {1: 4, 2: 4}
    assert Step(phase_of(), VIEW, 1, (1, 1, 1), listed).listed is None
    assert Step(phase_of(), VIEW, 1, (1, 2, 1), listed).listed == listed
    assert Step(phase_of(), VIEW, 1, (3, 4, 3), listed).listed == listed
