# SPDX-License-Identifier: Apache-2.0
"""What an agent reports of the rounds of each channel: times for the time line, and whom a round waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nicps import wire
from nicps.agent.flows import FlowWatch
from nicps.job.contribution import Contribution
from nicps.protocol import Phase
from nicps.protocol.plan import ChannelPlan
from nicps.session.activity import ChannelActivity
from tests.channelled import Members, phase_of
from tests.ring_parts import START, VIEW, node_of

pytestmark = pytest.mark.unit


class Notes:
    """A time line."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def note(self, kind: str, started: float, ended: float, round_: int, **more: Any) -> None:
        row = {"t0": started - START, "t1": ended - START, "kind": kind, "round": round_, **more}
        self.rows.append(row)


class Watched:
    """Three members, and the watch of member 2. Time passes between their offers."""

    def __init__(self, quorum: int = 12, phase: Phase | None = None) -> None:
        self.members, self.notes = Members(phase or phase_of(quorum)), Notes()
        node = node_of(2, self.members[2].ring)
        self.watch = FlowWatch(node, self.notes)  # type: ignore[arg-type]
        self.own = [Contribution() for _ in range(wire.MAX_CHANNELS)]
        self.members.lost = self._tap
        self.told = 0
        self.members.begin()

    def _tap(self, sender: int, to: int, frame: wire.Frame) -> bool:
        if sender == 2:
            self.watch.note_sent(self.members.now, frame)
        elif to == 2:
            self.watch.hear(self.members.now, VIEW.members[sender - 1].mac, frame.pack())
        return False

    def offer(self, channel: int, number: int, at: float) -> None:
        """That member offers, so many seconds after the start."""
        self.members.now = START + at
        if number == 2:
            round_ = self.members[2].ring.rounds[channel]
            self.own[channel].begin(self.members.now, round_)
        self.members.offer(channel, number)
        self.tell()

    def tell(self) -> None:
        """Rounds are committed at member 2."""
        commits = self.members[2].commits
        for commit in commits[self.told :]:
            self.watch.note_commit(self.members.now, commit, self.own[commit.channel])
        self.told = len(commits)

    def of(self, channel: int) -> ChannelActivity:
        return self.watch.activity()[channel]


def test_a_row_a_channel_and_step_says_whose_offer_was_last() -> None:
    """Moments are milliseconds from the row's beginning: offered here, by all, all sums here, committed."""
    watched = Watched()
    watched.offer(0, 2, 0.0)
    watched.offer(0, 1, 0.002)
    watched.offer(0, 3, 0.005)  # place 0 of 2
    for number, at in ((1, 0.006), (3, 0.007), (2, 0.009)):
        watched.offer(2, number, at)
    assert [(row["round"], row.get("channel", 0)) for row in watched.notes.rows] == [(1, 2)]
    watched.members.read(0, 1)
    for number, at in ((3, 0.010), (2, 0.012), (1, 0.015)):
        watched.offer(0, number, at)
    urgent, bulk = watched.notes.rows
    assert urgent["urgency"] == urgent["channel"] == 2 and "channel" not in bulk
    assert urgent["kind"] == bulk["kind"] == "rounds"
    (moments,) = urgent["rounds"]
    assert moments[:5] == [0.0, 0.0, 0.0, 0.0, 2], "this host was the last one to offer"
    assert bulk["t0"] == 0.0 and bulk["t1"] == pytest.approx(0.015)
    first, second = bulk["rounds"]
    assert first[:2] == [0.0, pytest.approx(5.0)] and first[4] == 3
    assert second[:2] == [pytest.approx(12.0), pytest.approx(15.0)] and second[4] == 1
    assert second[2] == second[3] == pytest.approx(15.0)


def test_whose_sums_were_last_and_when_the_own_ones_were_here() -> None:
    """The lead marks itself last, so it is named where nobody else was later than this host."""
    watched = Watched()
    watched.offer(0, 1, 0.0)
    watched.members[3].kernel.lacks.add(2)
    for number in (1, 2, 3):
        watched.offer(2, number, 0.001)
    watched.watch.note_sums(START + 0.0005, 2, 1)
    watched.watch.note_sums(START + 0.0009, 2, 1)
    watched.offer(0, 2, 0.002)
    watched.offer(0, 3, 0.003)
    assert not watched.notes.rows, "member 3 lacks sums of channel 2"
    watched.members[3].kernel.lacks.clear()
    watched.members.now = START + 0.007
    watched.members.take(3, watched.members[3].ring.advance(START + 0.007))
    watched.tell()
    (moments,) = watched.notes.rows[-1]["rounds"]
    assert moments[2:4] == [0.0, pytest.approx(6.5)] and moments[5] == 3
    assert watched.watch._rows[0].rounds[0][5] == 1, "of channel 0 all had what they needed at once"


def test_a_round_whose_list_came_with_the_token() -> None:
    """Nobody has broadcast an offer: when the list was known this host's sending says."""
    watched = Watched(quorum=4)
    own = watched.own[0]
    own.begin(START, 1)
    own.note_sent(1, START + 0.25, START + 0.3)
    watched.members.offer(2, 2)
    watched.members.offer(0, 2)
    commits = [commit for commit in watched.members[2].commits if commit.channel == 0]
    assert commits and 2 in commits[0].counted
    watched.members.now = START + 1.0
    watched.watch.note_commit(START + 1.0, commits[0], own)
    assert not watched.notes.rows, "the step is not whole"
    place = watched.watch._rows[0].rounds[0]
    assert place[:2] == [START, START + 0.25] and place[4] is None


def test_what_was_offered_ahead_counts_as_offered_when_the_round_before_was_committed() -> None:
    watched = Watched()
    watched.own[0].begin(START + 0.1, 2)
    for number in (1, 2, 3):
        watched.offer(0, number, 0.2)
    watched.members.read(0, 1)
    for number in (1, 3, 2):
        watched.members.now = START + 0.3
        watched.members.offer(0, number)
    watched.tell()
    (row,) = [row for row in watched.notes.rows if "channel" not in row]
    assert row["rounds"][1][0] == row["rounds"][0][3] == 0.0, "milliseconds since the first offer"


def test_where_an_offer_has_taken_the_marks_place_sums_were_here_by_the_commit() -> None:
    """A round is marked, committed and offered to in one turn: only the offer to the next one is sent."""
    watched = Watched(quorum=4)
    watched.own[0].begin(START, 1)
    watched.members.offer(2, 2)
    watched.members.offer(0, 2)
    commits = [commit for commit in watched.members[2].commits if commit.channel == 0]
    watched.watch.enter_view()  # forgets what was heard
    watched.watch.note_commit(START + 1.0, commits[0], watched.own[0])
    assert watched.watch._rows[0].rounds[0][2] == START + 1.0


def test_who_is_waited_for_on_each_channel() -> None:
    watched = Watched()
    assert [each.awaits for each in watched.watch.activity()] == [(), (), ()], "all compute"
    watched.offer(1, 1, 0.0)
    assert watched.of(1).awaits == (2, 3) and watched.of(1).state == "open"
    watched.offer(1, 2, 0.1)
    assert watched.of(1).awaits == (3,) and watched.of(1).state == "offered"
    assert watched.of(0).awaits == watched.of(2).awaits == ()
    watched.members[1].kernel.lacks.add(1)  # sums of channel 1 do not come to member 1
    for number in (1, 2, 3):
        watched.offer(0, number, 0.2)
    watched.offer(1, 3, 0.3)
    assert watched.of(1).awaits == (1,) and watched.of(1).state == "marked"
    watched.members[2].kernel.lacks.add(2)
    for number in (1, 2, 3):
        watched.offer(2, number, 0.4)
    assert watched.of(2).awaits == (2,), (
        "the lead, member 1, marks itself last, and is not waited for"
    )
    assert watched.of(2).state == "sums"


def test_on_channel_0_the_token_tells_too() -> None:
    watched = Watched()
    token = watched.members[2].ring.token
    assert token is not None
    token.lines[0].marks |= wire.Mark.CONTRIBUTED
    watched.offer(0, 2, 0.1)
    assert watched.of(0).awaits == (3,) and watched.of(1).awaits == ()


def test_a_channel_whose_step_is_done_waits_for_nobody() -> None:
    watched = Watched()
    for channel in (2, 0):
        for number in (1, 2, 3):
            watched.offer(channel, number, 0.1)
    done = watched.of(2)
    assert (done.round, done.step, done.state, done.awaits) == (2, 0, "done", ())
    assert (watched.of(0).place, watched.of(0).places, watched.of(0).round) == (1, 2, 2)


def test_what_is_committed_is_counted_by_channel() -> None:
    watched = Watched()
    for channel in (2, 0):
        for number in (1, 2, 3):
            watched.offer(channel, number, 0.1)
    assert [watched.of(c).rounds for c in range(3)] == [1, 0, 1]
    assert [watched.of(c).bytes for c in range(3)] == [8 * 1440, 0, 2 * 1440]
    assert [watched.of(c).urgency for c in range(3)] == [0, 1, 2]


def test_frames_of_others_and_of_other_rounds_are_not_noted() -> None:
    """What a stranger sends takes no memory."""
    watched = Watched()
    watch, view = watched.watch, VIEW
    flags = wire.channel_flags(1) | wire.Flag.OFFERED

    def hear(round_: int, source: bytes = VIEW.members[0].mac, **changes: int) -> int:
        header = {"round": round_, "sender": 1, "view": view.number, "flags": flags, **changes}
        whole = wire.Header(type=wire.FrameType.WANT, network=1, **header)
        watch.hear(START, source, wire.Frame(whole, wire.Want(4, 0, 0), ((),)).pack())
        return len(watch._heard)

    assert hear(5) == hear(1, source=b"strang") == hear(1, view=7) == hear(1, sender=9) == 0
    assert hear(1, flags=wire.channel_flags(5) | wire.Flag.OFFERED) == 0
    watch.hear(START, b"", b"")
    assert hear(1) == 1 and hear(2) == 2
    watch.enter_view()
    assert not watch._heard and watched.of(1).awaits == ()


def test_without_channels_there_is_nothing_to_say() -> None:
    watch = FlowWatch(node_of(2, None), Notes())  # type: ignore[arg-type]
    assert watch.activity() == () and watch.awaited(0) == frozenset()


def of_a_group() -> Watched:
    """A group with two channels."""
    plans = ChannelPlan(0, 8), ChannelPlan(1, 8)
    return Watched(phase=phase_of(sized=True, channels=plans))


def group_round(
    members: Members, round_: int, committed: Callable[[], None] = lambda: None
) -> None:
    """A round on channel 1; `committed` is called before it is read."""
    members.offer(1, samples=wire.sized_samples(8, 1, 16))
    committed()
    members.read(1, round_)
    members.take(1, members[1].ring.go_on(members.now, saves=False, channel=1))


def test_what_was_heard_of_a_groups_rounds_does_not_grow() -> None:
    """Also where nobody tells the watch of their commits."""
    watched = of_a_group()
    members = watched.members
    for round_ in range(1, 21):
        group_round(members, round_)
    assert members.rounds() == {(1, 21)}
    assert {known for _, known in watched.watch._heard} <= {19, 20, 21, 22}


def test_a_groups_rounds_are_counted_and_not_noted() -> None:
    """A script's group may last for weeks, and has no report."""
    watched = of_a_group()
    for round_ in range(1, 4):
        group_round(watched.members, round_, watched.tell)
    activity = watched.of(1)
    assert (activity.rounds, activity.bytes) == (3, 3 * 8 * wire.PAYLOAD_BYTES)
    assert watched.of(0).rounds == 0 and not watched.notes.rows and not watched.watch._rows
