# SPDX-License-Identifier: Apache-2.0
"""What each exchange does with a closed list: what it sends, asks for, and takes for complete."""

from __future__ import annotations

from functools import partial

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import NotAdded, Phase, SendFragments, Timings, View
from nicps.protocol.exchange import BroadcastExchanger, Exchanger, SwitchExchanger, exchanger_of
from tests.listed import ROUND, members_of, token_of

FRAGMENTS = 600
W = wire.QUANTUM // 3  # the window of three members
VIEW = View(3, members_of(3), frozenset({1, 2, 3}), 1)
#: The list is open.
token = partial(token_of, len(VIEW.members), closed=False)


class Kernel:
    """What has arrived: fragments by sender, 0 for a switch's sums."""

    def __init__(self) -> None:
        self.got: dict[int, set[int]] = {}

    def take(self, sender: int, *indices: int) -> None:
        self.got.setdefault(sender, set()).update(indices)

    def count(self, round_: int, view: int, sender: int) -> int:
        return len(self.got.get(sender, ()))

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        have, ranges = self.got.get(sender, set()), list[tuple[int, int]]()
        for index in (i for i in range(fragments) if i not in have):
            if ranges and sum(ranges[-1]) == index:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
            else:
                ranges.append((index, 1))
        return ranges[:limit]

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        have = self.got.get(0, set())
        lacking = (index for index in range(first, end) if index not in have)
        found = (index for index in range(end - 1, first - 1, -1) if index in have)
        return next(lacking, end), next(found, first - 1) + 1

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        found = self.missing(round_, view, 0, end, end)
        cut = [(max(f, first), f + c - max(f, first)) for f, c in found if f + c > first]
        return cut[:limit]


def exchanger(kind: Exchange, number: int, kernel: Kernel, view: View = VIEW) -> Exchanger:
    phase = Phase(
        1,
        1,
        wire.PhaseKind.TRAIN,
        first_round=ROUND,
        fragments=FRAGMENTS,
        last_fragments=FRAGMENTS,
        width=16,
        shares=(4, 4, 4),
        exchange=kind,
    )
    part = exchanger_of(phase, view, number, kernel, Timings(), 0.0)
    part.open(ROUND)
    return part


def sent(actions: object) -> list[tuple[tuple[tuple[int, int], ...], bool]]:
    assert isinstance(actions, list)
    assert all(isinstance(action, SendFragments) for action in actions)
    return [(action.ranges, action.repair) for action in actions]


# ---- what is so for everybody


KINDS = (
    Exchange.BROADCAST,
    Exchange.STRIPES,
    Exchange.SWITCH,
    Exchange.LINUX_SWITCH,
    Exchange.SERVERS,
)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_is_found_by_its_name(kind: Exchange) -> None:
    assert Exchange.named(kind.name) is kind
    with pytest.raises(ValueError, match=f"{kind.name}(,|$)"):
        Exchange.named(kind.name.upper())


def test_a_lone_member_keeps_its_exchange_unless_it_needs_others() -> None:
    assert Exchange.STRIPES.among(1) is Exchange.STRIPES
    assert Exchange.SWITCH.among(1) is Exchange.BROADCAST
    assert Exchange.SWITCH.among(2) is Exchange.SWITCH


def test_a_lone_member_adds_for_itself() -> None:
    alone = View(4, VIEW.members, frozenset({2}), 2)
    for kind in (Exchange.BROADCAST, Exchange.SWITCH):
        assert isinstance(exchanger(kind, 2, Kernel(), alone), BroadcastExchanger)
        assert exchanger(kind, 2, Kernel(), alone).send_listed(token(2)) == []
    assert isinstance(exchanger(Exchange.SWITCH, 2, Kernel()), SwitchExchanger)


@pytest.mark.parametrize(
    ("kind", "counted", "streams"),
    [
        (Exchange.BROADCAST, (1, 2, 3), 2),
        (Exchange.BROADCAST, (1, 3), 2),
        (Exchange.BROADCAST, (2,), 0),
        (Exchange.SWITCH, (1, 2, 3), 1),
        (Exchange.SWITCH, (2,), 1),
        (Exchange.SWITCH, (), 0),
    ],
)
def test_how_many_streams_the_kernel_of_member_2_takes(
    kind: Exchange, counted: tuple[int, ...], streams: int
) -> None:
    assert kind.streams(counted, 2) == streams


@pytest.mark.parametrize("kind", [Exchange.BROADCAST, Exchange.SWITCH])
def test_the_keys_in_json_stay_as_they_were(kind: Exchange) -> None:
    assert Exchange.from_json(kind.to_json()) is kind
    assert kind.to_json() is (kind is Exchange.SWITCH)


@pytest.mark.parametrize("kind", [Exchange.BROADCAST, Exchange.SWITCH])
def test_a_token_is_delayed_while_fragments_are_queued(kind: Exchange) -> None:
    part, closed = exchanger(kind, 2, Kernel()), token(1, 2, closed=True)
    closed.ranges = [(2, 0, 4)]
    assert not part.delays_token
    actions = part.on_token(0.0, closed) or part.serve(0.0, closed)[1]
    assert len(actions) == 1 and part.delays_token
    part.on_sent()
    assert not part.delays_token


# ---- broadcast


def test_broadcast_sends_a_contribution_as_it_is_listed() -> None:
    part, listed = exchanger(Exchange.BROADCAST, 2, Kernel()), token(1, 2)
    listed.sent = FRAGMENTS
    assert sent(part.send_listed(listed)) == [(((0, FRAGMENTS),), False)]
    assert listed.sent == 2 * FRAGMENTS and part.own_sent == FRAGMENTS
    part.open(ROUND)
    assert part.own_sent == 0


def test_broadcast_asks_each_sender_for_what_has_not_come() -> None:
    kernel = Kernel()
    part, closed = exchanger(Exchange.BROADCAST, 2, kernel), token(1, 2, 3, closed=True)
    kernel.take(1, *range(FRAGMENTS))
    kernel.take(3, *range(10), *range(12, FRAGMENTS))
    assert not part.is_complete(closed)
    assert part.ask(0.0, closed) and closed.ranges == [(3, 10, 2)]
    assert not part.ask(0.0, closed), "it is in the token already"
    kernel.take(3, 10, 11)
    assert part.is_complete(closed)


def test_broadcast_repairs_what_is_its_own() -> None:
    part, closed = exchanger(Exchange.BROADCAST, 2, Kernel()), token(1, 2, closed=True)
    closed.ranges = [(2, 5, 3), (1, 0, 4), (2, FRAGMENTS - 1, 9), (2, FRAGMENTS, 1)]
    changed, actions = part.serve(0.0, closed)
    assert changed and sent(actions) == [(((5, 3), (FRAGMENTS - 1, 1)), True)]
    assert closed.ranges == [(1, 0, 4)]
    assert part.serve(0.0, closed) == (False, [])


# ---- the switch


def test_all_send_to_the_switch_once_the_list_is_closed() -> None:
    """Who closes it, behind the token, from which the switch learns the list; all others when they see it."""
    closer, other = (exchanger(Exchange.SWITCH, number, Kernel()) for number in (2, 1))
    state = token(1, 2)
    assert closer.send_listed(state) == [] and closer.serve(0.0, state) == (False, [])
    assert not closer.owns_ready(state) and closer.on_token(0.0, state) == []
    state.lines[0].ready = 4
    state.state = wire.TokenState.CLOSING
    assert closer.on_closed(0.0, state) == []
    assert closer.owns_ready(state) and state.lines[0].ready == 0
    window = ((0, W),)
    assert sent(closer.on_forwarded(0.0)) == [(window, False)] == sent(other.on_token(0.0, state))
    assert closer.on_forwarded(0.0) == [] == other.on_token(0.0, state)


def test_sums_open_the_window_without_the_token() -> None:
    kernel = Kernel()
    part = exchanger(Exchange.SWITCH, 2, kernel)
    part.on_token(0.0, token(1, 2, 3, closed=True))
    kernel.take(0, *range(10), *range(11, W))
    assert sent(part.advance(0.0)) == [(((W, 10),), False)], "up to a window ahead of the first gap"
    kernel.take(0, 10)
    assert sent(part.advance(0.0)) == [(((W + 10, W - 10),), False)]
    kernel.take(0, *range(FRAGMENTS - 1))
    while actions := part.advance(0.0):
        last = sent(actions)[-1][0][-1]
    assert sum(last) == FRAGMENTS, "and no further"


def test_all_members_together_have_no_more_than_a_quantum_on_their_way() -> None:
    for live in range(2, 65):
        numbers = range(1, live + 1)
        view = View(3, members_of(live), frozenset(numbers), 1)
        part = exchanger(Exchange.SWITCH, 2, Kernel(), view)
        (((first, count),), _), *more = sent(part.on_token(0.0, token_of(live, *numbers)))
        assert first == 0 and not more and 8 <= count <= wire.QUANTUM
        assert count * live <= wire.QUANTUM or count == 8


def test_members_outside_the_list_limit_the_window_by_what_all_have() -> None:
    """Nobody waits for their fragments: they may lack sums that all in the list have."""
    kernel, room = Kernel(), 2 * wire.QUANTUM
    part, state = exchanger(Exchange.SWITCH, 2, kernel), token(1, 2, closed=True)
    kernel.take(0, *range(room))
    end, actions = 0, part.on_token(0.0, state)
    while actions:
        ((((_, count),), _),) = sent(actions)
        end, actions = end + count, part.advance(0.0)
    assert end == room
    state.settled = 5
    assert sent(part.on_token(0.0, state)) == [(((room, 5),), False)]


def test_what_has_not_come_when_the_token_is_back_is_sent_again() -> None:
    kernel = Kernel()
    part, state = exchanger(Exchange.SWITCH, 2, kernel), token(1, 2, 3, closed=True)
    part.on_token(0.0, state)
    assert part.serve(0.0, state) == (True, []), "the others may not have sent it yet"
    kernel.take(0, 0, 1, 2, 4)
    changed, actions = part.serve(0.0, state)
    again = ((3, 1), (5, W - 5))
    assert changed and sent(actions) == [(again, True)]
    assert state.lines[1].ready == 3 and state.ranges == [(2, *one) for one in again]
    state.ranges = [(1, 0, 2), (1, W, 9)]
    kernel.take(0, *range(W))
    _, actions = part.serve(0.0, state)
    assert sent(actions) == [(((0, 2),), True)], "what another lacks, as far as it was sent"


def test_who_has_contributed_nothing_only_asks_the_switch() -> None:
    kernel = Kernel()
    part, state = exchanger(Exchange.SWITCH, 3, kernel), token(1, 2, closed=True)
    assert part.on_token(0.0, state) == []
    part.serve(0.0, state)
    _, actions = part.serve(0.0, state)
    (asking,) = actions
    assert isinstance(asking, SendFragments) and asking.only_asks and asking.repair


def test_a_member_is_complete_with_all_sums_and_the_lead_once_all_are() -> None:
    kernel = Kernel()
    kernel.take(0, *range(FRAGMENTS))
    member, lead = (exchanger(Exchange.SWITCH, number, kernel) for number in (2, 1))
    state = token(1, 2, 3, closed=True)

    def turns(part: Exchanger) -> None:
        for _ in range(FRAGMENTS // W + 1):
            part.on_token(0.0, state)
            part.serve(0.0, state)

    turns(member)
    turns(lead)
    assert member.is_complete(state) and not lead.is_complete(state)
    turns(exchanger(Exchange.SWITCH, 3, kernel))
    assert lead.is_complete(state)


def test_the_lead_finds_out_a_switch_that_makes_no_sums() -> None:
    timings = Timings()
    lead, member = (exchanger(Exchange.SWITCH, number, Kernel()) for number in (1, 2))
    state, found = token(1, 2, closed=True), list[NotAdded]()
    for turn in range(20):
        now = turn * timings.sums_s / 15
        for part in (lead, member):
            found += [a for a in part.serve(now, state)[1] if isinstance(a, NotAdded)]
    assert found == [NotAdded(ROUND, Exchange.SWITCH)], "once, and by the lead alone"


def test_a_dropped_round_is_not_fed() -> None:
    part, state = exchanger(Exchange.SWITCH, 2, Kernel()), token(1, 2, closed=True)
    part.on_dropped()
    assert part.on_token(0.0, state) == [] == part.advance(0.0)
    assert part.serve(0.0, state) == (False, [])
