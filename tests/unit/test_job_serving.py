# SPDX-License-Identifier: Apache-2.0
"""Which members serve, who takes a server's place, and what a host needs for its part (docs/servers.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.choice import Choice
from nicps.job.orders import PublishEvent
from nicps.job.plan import Plan
from nicps.job.serving import Asked, Room, announce, keeps_part, replace_servers, second_begins
from nicps.protocol import Phase, View
from nicps.protocol.serving import Serving
from nicps.session.served_form import Serves
from tests.listed import members_of


def view(*live: int, members: int = 5) -> View:
    return View(1, members_of(members), frozenset(live), min(live))


ALL = (1, 2, 3, 4, 5)


# ---- who serves first


def test_how_many() -> None:
    assert Asked.of({}).choose(view(*ALL)) == (1,)
    assert Asked.of({"servers": "2"}).choose(view(*ALL)) == (1, 2)
    assert Asked.of({"servers": 4}).choose(view(*ALL)) == (1, 2, 3, 4)
    assert Asked.of({"servers": "2"}).choose(view(2, 4, 5)) == (2, 4), "1 has gone"
    assert Asked.of({"servers": 5, "servers_train": True}).choose(view(*ALL)) == ALL


def test_which_hosts() -> None:
    assert Asked.of({"servers": "h4, h2"}).choose(view(*ALL)) == (4, 2), (
        "by rank, as they are named"
    )
    assert Asked.of({"servers": "h3"}).choose(view(*ALL)) == (3,)


def test_a_worker_without_a_partner_is_said_once() -> None:
    class Node:
        view = view(1, 2, 3)

    plan = Plan("j", 8, 32, exchange=Exchange.SERVERS, servers=Asked(1, ()), every=1, sets=4)
    choice = Choice(plan, Node())  # type: ignore[arg-type]

    def said(*counted: int) -> list[str]:
        _, orders = choice.choose_servers(counted, 8)
        return [order.values["message"] for order in orders if isinstance(order, PublishEvent)]

    (one,) = said(1, 2)
    assert one.startswith("system=B: one worker trains, which has no partner")
    assert said(1, 2) == said(1, 2, 3) == []
    assert said(1, 3) == [one]
    choice = Choice(replace(plan, sets=0), Node())  # type: ignore[arg-type]
    assert said(1, 2) == [], "it has asked for no partners"


def test_what_was_read_as_another_server_was_lost_says_nothing() -> None:
    class Node:
        view = view(1, 2, 3, 4)

    choice = Choice(Plan("j", 8, 32, exchange=Exchange.SERVERS, servers=Asked(1, ())), Node())  # type: ignore[arg-type]

    def servers(*counted: int) -> tuple[int, ...]:
        serving, _ = choice.choose_servers(counted, 8)
        assert serving is not None
        return serving.servers

    assert servers(1, 2, 3, 4) == (1,)
    choice.reads = {2: 9, 3: 9, 4: 8}
    assert servers(2, 3, 4) == (3,)
    assert servers(2, 4) == (4,), "in a test, say: both have read the last round"


NOBODY = "is no member of this job: --set servers=N, or names out of"
WRONG = [
    ("0", ALL, "servers=0: a job has 1 to 64 servers"),
    ("-1", ALL, "servers=-1: a job has 1 to 64 servers"),
    ("65", ALL, "servers=65: a job has 1 to 64 servers"),
    ("", ALL, "servers=: name how many servers there are, or hosts separated by commas"),
    ("h1,,h2", ALL, "servers=h1,,h2: name how many servers there are, or hosts separated by"),
    ("h1,h2,h1", ALL, "servers=h1,h2,h1: h1 is named twice"),
    ("h1,h9", ALL, f"servers: h9 {NOBODY} h1, h2, h3, h4, h5"),
    ("h1,h2", (2, 3), f"servers: h1 {NOBODY} h2, h3"),
    ("5", ALL, "servers=5: that and one worker are 6 hosts, and there are 5: name fewer"),
    ("1", (3,), "servers=1: that and one worker are 2 hosts, and there are 1: name fewer"),
    ("h3", (3,), "servers=h3: that and one worker are 2 hosts, and there are 1: name fewer"),
]


@pytest.mark.parametrize(("setting", "live", "said"), WRONG)
def test_what_is_refused(setting: str, live: tuple[int, ...], said: str) -> None:
    with pytest.raises(JobFailed) as error:
        Asked.of({"servers": setting}).choose(view(*live))
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_too_few_hosts_where_servers_train() -> None:
    with pytest.raises(JobFailed, match=r"^servers=3: that needs 3, and there are 2: name fewer"):
        Asked.of({"servers": 3, "servers_train": True}).choose(view(1, 2))


# ---- who takes a server's place


def test_workers_take_the_ranks_of_servers_that_have_gone() -> None:
    """The highest numbers; a worker stays."""
    whole = view(1, 2, 3, 4, 5)
    assert replace_servers((2, 1), (1, 2, 3), whole) == (2, 1)
    assert replace_servers((2, 1), (1, 3, 4, 5), whole) == (5, 1)
    assert replace_servers((2, 1), (3, 4, 5), whole) == (5, 4)
    assert replace_servers((1,), (3, 4), whole) == (4,)
    with pytest.raises(JobFailed, match=r"^h1 served parameters, and left: too few hosts"):
        replace_servers((1,), (4,), whole)
    with pytest.raises(JobFailed, match=r"^h1, h2 served parameters"):
        replace_servers((2, 1), (3, 4), whole)


def test_who_has_read_the_newest_round_takes_a_servers_place() -> None:
    """Its program has the parameters of that commit; the highest number decides among several. A server has no say."""
    whole = view(1, 2, 3, 4, 5)
    assert replace_servers((1,), (2, 3, 4, 5), whole, {2: 8, 3: 9, 4: 9, 5: 8}) == (4,)
    assert replace_servers((2, 1), (3, 4, 5), whole, {3: 9, 4: 8, 5: 8}) == (3, 5)
    assert replace_servers((2, 1), (1, 3, 4), whole, {1: 9, 3: 8, 4: 7}) == (3, 1)
    assert replace_servers((1,), (2, 3), whole, {2: 9, 3: 8}) == (2,), "though it leads"


def test_servers_that_train_are_fewer_in_the_end() -> None:
    """A host that does not serve yet takes a rank; where there is none, those that are left have all parts."""
    whole = view(1, 2, 3, 4, 5)
    assert replace_servers((2, 1), (1, 3, 4), whole, train=True) == (4, 1)
    assert replace_servers((2, 1, 3), (3, 4), whole, train=True) == (4, 3)
    assert replace_servers((2, 1), (1,), whole, train=True) == (1,)
    assert replace_servers((1,), (4,), whole, train=True) == (4,)


def test_of_servers_that_train_those_that_are_behind_fill_no_part() -> None:
    """The others train on from the newest round, so no part may be of the one before."""
    whole = view(1, 2, 3, 4, 5)
    reads = {1: 9, 3: 8, 4: 9, 5: 9}
    assert replace_servers((2, 1), (1, 3, 4, 5), whole, reads, train=True) == (5, 1)
    assert replace_servers((2, 1), (1, 3), whole, reads, train=True) == (1,)
    assert replace_servers((2, 1, 3), (1, 3), whole, reads, train=True) == (1,)
    assert replace_servers((2, 3), (3, 4), whole, reads, train=True) == (4, 3), "what 3 has stays"
    assert replace_servers((2, 5, 3), (3, 4), whole, reads, train=True) == (4,)
    assert replace_servers((2, 1), (1, 3), whole, {1: 8, 3: 9}, train=True) == (3, 1)


# ---- what a host needs

PHASE = Phase(
    1,
    1,
    wire.PhaseKind.TRAIN,
    first_round=7,
    fragments=101,
    last_fragments=101,
    width=16,
    shares=(0, 4, 4, 0, 0),
    quorum=8,
    exchange=Exchange.SERVERS,
    serving=Serving((1, 4), 64, sets=9),
)
LANES = 101 * 720 - 5


def serves(**how: object) -> Phase:
    assert PHASE.serving is not None
    return replace(PHASE, serving=replace(PHASE.serving, **how))  # type: ignore[arg-type]


def test_room() -> None:
    assert Room.of(PHASE, 1) == Room(0, 0, 50, 202, 101, True)
    assert Room.of(PHASE, 4) == Room(1, 50, 51, 202, 101, True)
    assert Room.of(PHASE, 2) == Room(-1, 0, 0, 202, 101, True), "a worker"
    assert Room.of(serves(every=0), 4).averages is False
    alone = serves(servers=(4,))
    assert Room.of(alone, 4) == Room(0, 0, 101, 0, 0, True), "it pulls nothing"
    assert Room.of(serves(servers=(2,)), 2) == Room(0, 0, 101, 202, 101, True), "it trains, too"


def test_the_lanes_of_a_part() -> None:
    assert Room.of(PHASE, 1).lanes(16, LANES) == range(50 * 720)
    assert Room.of(PHASE, 4).lanes(16, LANES) == range(50 * 720, LANES)
    assert not Room.of(PHASE, 2).lanes(16, LANES)


def test_what_stays_in_the_maps() -> None:
    assert keeps_part(PHASE, PHASE, 1, ()) and keeps_part(PHASE, PHASE, 4, {1})
    assert not keeps_part(PHASE, PHASE, 1, {1}), "it has missed rounds"
    assert not keeps_part(None, PHASE, 1, ())
    assert not keeps_part(PHASE, PHASE, 2, ()), "it has none"
    assert not keeps_part(PHASE, serves(servers=(5, 1)), 1, ()), "it is another part"
    assert not keeps_part(PHASE, serves(servers=(1,)), 1, ()), "its part is larger"
    assert keeps_part(PHASE, serves(servers=(1, 5)), 1, ())
    assert not keeps_part(PHASE, serves(servers=(1, 5)), 5, ())
    assert not keeps_part(PHASE, replace(PHASE, fragments=102), 1, ())
    assert not keeps_part(PHASE, replace(PHASE, width=8), 1, ())
    assert not keeps_part(serves(every=0), PHASE, 1, ()), "there is no place for averages"
    assert keeps_part(PHASE, serves(every=0), 1, ())


def test_what_a_program_is_told() -> None:
    told = announce(PHASE, 4, LANES, new=True, fills=True)
    assert told == Serves((1, 4), 64, 9, 202, 101, 36_000, LANES - 36_000)
    assert announce(PHASE, 4, LANES, new=False, fills=False) == Serves((1, 4), 64, 9)
    worker = Serves((1, 4), 64, 9, 202, 101, own_set=1)
    assert announce(PHASE, 2, LANES, new=True, fills=True) == worker
    assert announce(PHASE, 3, LANES, new=False, fills=False).own_set == 2


def test_where_the_second_set_begins() -> None:
    """In fragments of parameters; that in which both meet belongs to the first (B1)."""
    job = {"system": "B", "servers": 1}
    assert second_begins(job, (720, 400)) == 2 and second_begins(job, (721, 400)) == 3
    assert second_begins({**job, "partners": False}, (720, 400)) == 0
    assert second_begins({"system": "S"}, ()) == 0


def test_the_lead_decides_on_sets() -> None:
    """Whichever leads: prepared.json is at all."""
    settings = {"system": "B", "servers": 1, "sync_every": 1, "batch": 8}
    plan = Plan.of("job", settings, Exchange.SERVERS, sets=(721, 400))
    assert (plan.sets, plan.every) == (3, 1)
